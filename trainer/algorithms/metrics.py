"""Token metrics as sums and maxima, so that ranks and micro-batches add up to the exact global value.

Shape legend: T loss tokens of one micro-batch. The behavior weights measured here are untruncated and logged with every
correction: metrics after truncation hide what the truncation was for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.trainer.algorithms.kl import k3
from penstock.trainer.algorithms.policy_loss import clamped_exp

_SUMS = (
    "tokens",
    "loss",
    "entropy",
    "weight",
    "weight_squared",
    "masked",
    "clipped",
    "abs_log_ratio",
    "kl_k3",
    "reference_kl",
)
_MAXIMA = ("weight", "abs_log_ratio")


class TokenMetrics:
    """Accumulates one step's token statistics on the device; one reduction over ranks at the end."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(
        self,
        loss: Tensor,
        proximal: Tensor,
        behavior: Tensor,
        reference: Tensor,
        entropies: Tensor,
        is_masked: Tensor,
        is_clipped: Tensor,
    ) -> None:
        """Add one micro-batch.

        Args:
            loss: Scalar: Σ weight · term of this micro-batch.
            proximal: `[T]` logprobs at step start.
            behavior: `[T]` logprobs recorded by the engine.
            reference: `[T]` logprobs of the reference policy; anything if there is none.
            entropies: `[T]` of the target policy, nats.
            is_masked: `[T] bool`, rejected by the correction.
            is_clipped: `[T] bool`, gradient taken away by the clip.
        """
        log_ratio = proximal - behavior
        weight = clamped_exp(log_ratio)
        distance = log_ratio.abs()
        sums = (
            torch.tensor(float(len(proximal)), device=loss.device),
            loss,
            entropies.sum(),
            weight.sum(),
            weight.square().sum(),
            is_masked.sum(),
            is_clipped.sum(),
            distance.sum(),
            (weight - log_ratio - 1.0).sum(),
            k3(proximal, reference).sum(),
        )
        self._sums += torch.stack([value.detach().double() for value in sums])
        if len(proximal):
            maxima = torch.stack([weight.max(), distance.max()]).double()
            self._maxima = torch.maximum(self._maxima, maxima)

    def reduce(
        self, all_reduce: Callable[[NDArray[np.float64], Literal["sum", "max"]], NDArray[np.float64]]
    ) -> dict[str, float]:
        """Reduce over ranks (a collective) and name the results.

        Args:
            all_reduce: `(values, "sum" | "max")` -> the reduction over ranks.
        """
        sums = dict(zip(_SUMS, all_reduce(self._sums.cpu().numpy(), "sum").tolist(), strict=True))
        maxima = dict(zip(_MAXIMA, all_reduce(self._maxima.cpu().numpy(), "max").tolist(), strict=True))
        tokens = max(sums["tokens"], 1.0)
        return {
            "loss/policy": sums["loss"],
            "loss/entropy": sums["entropy"] / tokens,
            "loss/reference_kl": sums["reference_kl"] / tokens,
            "ratio/behavior_mean": sums["weight"] / tokens,
            "ratio/behavior_max": maxima["weight"],
            "ratio/masked_share": sums["masked"] / tokens,
            "ratio/policy_clip_share": sums["clipped"] / tokens,
            "ratio/effective_sample_size": sums["weight"] ** 2 / max(tokens * sums["weight_squared"], 1e-300),
            "mismatch/abs_logprob_mean": sums["abs_log_ratio"] / tokens,
            "mismatch/abs_logprob_max": maxima["abs_log_ratio"],
            "mismatch/kl_k3": sums["kl_k3"] / tokens,
        }
