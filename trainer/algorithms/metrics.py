"""Token metrics as sums and maxima, so that ranks and micro-batches add up to the exact global value.

Shape legend: T loss tokens of one micro-batch. The behavior weights measured here are those between the policy at the
start of the step and the one that sampled. They are not truncated, because truncated ones would hide the outliers, and
are logged with every correction. If a batch is several optimizer steps, only tokens whose logprob at the start of the
batch is known are measured, each once: those of the first update, or, after a forward at the start, of the first epoch.
Tokens of another policy are measured separately: they tell nothing about the engines or about staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.trainer.algorithms.kl import k3
from penstock.trainer.algorithms.tokens import LossTerms, clamped_exp
from penstock.trainer.batches.collate import MicroBatch

OF_ANOTHER_POLICY = -1
"""In place of a staleness: the token was sampled by another policy of the run."""
STALENESS_BUCKETS = ("other_policy", "0", "1", "2_3", "4_plus")
SUMS = (
    "tokens", "measured_tokens", "loss", "entropy", "weight", "weight_squared", "masked", "clipped_low", "clipped_high",
    "abs_log_ratio", "kl_k3", "reference_kl", "teacher_kl", "token_weight", "kept_token_weight",
)  # fmt: skip
"""Sums over all tokens of a step."""
BY_STALENESS = ("tokens", "weight", "masked", "weight_squared", "abs_log_ratio", "kl_k3")
"""Sums over the tokens of each bucket of staleness."""
MAXIMA = ("weight", "abs_log_ratio")
"""Maxima over all tokens, followed by the largest weight of each bucket of staleness."""
OF_SEQUENCES = ("left_of_sequences", "units", "left_units")
"""Sums of a step: the token weights times what is left of their sequences; the unit shares; these times the same."""
_BUCKET_ENDS = (OF_ANOTHER_POLICY, 0, 1, 3)
"""Largest staleness, versions, of each bucket but the last."""


class TokenMetrics:
    """Accumulates one step's token statistics on the device; one reduction over ranks at the end.

    Attributes:
        bucket_ends: `[4] int64`, largest staleness of each bucket but the last; the first is of other policies.
    """

    def __init__(self, device: torch.device, of_loss: Sequence[str] = (), *, has_reference: bool = True) -> None:
        """Start at 0.

        Args:
            device: That of the tokens.
            of_loss: Names of what the loss measures of each token.
            has_reference: Whether the divergence from a reference and a teacher is measured.
        """
        self._has_reference = has_reference
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(MAXIMA) + len(STALENESS_BUCKETS), dtype=torch.float64, device=device)
        self._by_staleness = torch.zeros(len(STALENESS_BUCKETS), len(BY_STALENESS), dtype=torch.float64, device=device)
        self._of_sequences = torch.zeros(len(OF_SEQUENCES), dtype=torch.float64, device=device)
        self._of_loss = {name: torch.zeros((), dtype=torch.float64, device=device) for name in of_loss}
        self.bucket_ends = torch.tensor(_BUCKET_ENDS, device=device)

    @torch.no_grad()
    def add(
        self,
        loss: Tensor,
        target: Tensor,
        start: Tensor | None,
        entropies: Tensor,
        micro_batch: MicroBatch,
        terms: LossTerms,
    ) -> None:
        """Add one micro-batch.

        Args:
            loss: The scalar Σ weight · term.
            target: `[T]` logprobs under the current policy.
            start: `[T]` logprobs at the start of the batch; None: no longer known, or already measured.
            entropies: `[T]` of the policy, nats.
            micro_batch: The recorded logprobs of the tokens, their staleness and their weights.
            terms: Which of them were rejected or clipped.
        """
        behavior, reference, staleness = (
            micro_batch.behavior_logprobs,
            micro_batch.reference_logprobs,
            micro_batch.staleness,
        )
        others = (reference, reference if micro_batch.teacher_logprobs is None else micro_batch.teacher_logprobs)
        token_weights, is_masked = micro_batch.token_weights.double(), terms.is_masked
        log_ratio = (behavior[:0] if start is None else start - behavior).double()
        weights, is_own = clamped_exp(log_ratio), (staleness[: len(log_ratio)] != OF_ANOTHER_POLICY).double()
        weight, distance = weights * is_own, log_ratio.abs() * is_own
        sums = (
            torch.tensor(float(len(target)), device=loss.device),
            is_own.sum(),
            loss,
            entropies.double().sum(),
            weight.sum(),
            weight.square().sum(),
            is_masked.sum(),
            terms.is_clipped_low.sum(),
            terms.is_clipped_high.sum(),
            distance.sum(),
            ((weights - log_ratio - 1.0) * is_own).sum(),
            *(k3(target, other).double().sum() if self._has_reference else is_masked.new_zeros(()) for other in others),
            token_weights.sum(),
            (token_weights * terms.left).sum(),
        )
        self._sums += torch.stack([value.detach().double() for value in sums])
        left, units = terms.left_of_sequences.double(), token_weights * terms.unit_shares.double()
        self._of_sequences += torch.stack([(token_weights * left).sum(), units.sum(), (units * left).sum()])
        for name, values in terms.measured.items():
            self._of_loss[name] += values.detach().double().sum()
        if len(weights):
            buckets, k3_of = torch.bucketize(staleness, self.bucket_ends), weights - log_ratio - 1.0
            ones, squares = torch.ones_like(weights), weights.square()
            per_token = (ones, weights, is_masked.double(), squares, log_ratio.abs(), k3_of)
            self._by_staleness.index_add_(0, buckets, torch.stack(per_token, dim=1))
            self._maxima[: len(MAXIMA)] = torch.maximum(
                self._maxima[: len(MAXIMA)], torch.stack([weight.max(), distance.max()])
            )
            self._maxima[len(MAXIMA) :].scatter_reduce_(0, buckets, weights, "amax")

    def local(self) -> tuple[float, float]:
        """(Σ weight · term, Σ weight) of this rank."""
        return float(self._sums[SUMS.index("loss")]), float(self._sums[SUMS.index("token_weight")])

    def reduce(
        self, all_reduce: Callable[[NDArray[np.float64], Literal["sum", "max"]], NDArray[np.float64]]
    ) -> TokenSums:
        """Reduce over ranks (a collective); `all_reduce` is `(values, "sum" | "max")` -> the reduction over ranks."""
        parts = [self._sums, self._of_sequences, self._by_staleness.flatten(), *self._of_loss.values()]
        mine = torch.cat([part.reshape(-1) for part in parts]).cpu().numpy()
        ends = np.cumsum([part.numel() for part in parts[:3]])
        sums, of_sequences, by_staleness, of_loss = np.split(all_reduce(mine, "sum"), ends)
        maxima = all_reduce(self._maxima.cpu().numpy(), "max")
        by_staleness = by_staleness.reshape(len(STALENESS_BUCKETS), len(BY_STALENESS))
        return TokenSums(sums, maxima, by_staleness, of_sequences, dict(zip(self._of_loss, of_loss, strict=True)))


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums and maxima over all ranks, of one optimizer step or of several added up."""

    sums: NDArray[np.float64]
    maxima: NDArray[np.float64]
    by_staleness: NDArray[np.float64]
    of_sequences: NDArray[np.float64]
    of_loss: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(
            self.sums + other.sums,
            np.maximum(self.maxima, other.maxima),
            self.by_staleness + other.by_staleness,
            self.of_sequences + other.of_sequences,
            {name: total + other.of_loss[name] for name, total in self.of_loss.items()},
        )

    @property
    def loss(self) -> float:
        """Σ weight · term."""
        return float(self.sums[SUMS.index("loss")])

    @property
    def kept_share(self) -> float:
        """Share of the batch that the corrections left (`LossTerms.left`); 1 if there are no tokens.

            (Σ a f_i v_it / Σ a f_i) · (Σ a u f_i / Σ a u)

        a is the token weight of the aggregation, f_i what is left of sequence i, v_it of its token t, u its unit share.
        Where the aggregation is a mean over tokens, u is 1, and this is the mean of f v over tokens. Where it sums over
        the tokens of a sequence, the sequence is what counts once: the second factor is the mean of f over sequences,
        and only the first one, of corrections of single tokens, is over tokens.
        """
        total, kept = (float(self.sums[SUMS.index(name)]) for name in ("token_weight", "kept_token_weight"))
        left_of_sequences, units, left_units = self.of_sequences.tolist()
        if not kept:
            return 0.0 if total else 1.0
        return (kept / left_of_sequences) * (left_units / units)

    def metrics(self) -> dict[str, float]:
        """By name: means over tokens, largest values, and by staleness; those of no tokens are left out."""
        sums = dict(zip(SUMS, self.sums.tolist(), strict=True))
        maxima = dict(zip(MAXIMA, self.maxima[: len(MAXIMA)].tolist(), strict=True))
        metrics = {"loss/policy": sums["loss"]}
        if tokens := sums["tokens"]:
            metrics |= {
                "loss/entropy": sums["entropy"] / tokens,
                "loss/reference_kl": sums["reference_kl"] / tokens,
                "loss/teacher_kl": sums["teacher_kl"] / tokens,
                "ratio/masked_share": sums["masked"] / tokens,
                "ratio/policy_clip_share": (sums["clipped_low"] + sums["clipped_high"]) / tokens,
                "ratio/policy_clip_low_share": sums["clipped_low"] / tokens,
                "ratio/policy_clip_high_share": sums["clipped_high"] / tokens,
            }
            metrics |= {f"loss/measured/{name}": float(total) / tokens for name, total in self.of_loss.items()}
        if measured := sums["measured_tokens"]:
            metrics |= {
                "ratio/behavior_mean": sums["weight"] / measured,
                "ratio/behavior_max": maxima["weight"],
                "ratio/effective_sample_size": sums["weight"] ** 2 / max(measured * sums["weight_squared"], 1e-300),
                "mismatch/abs_logprob_mean": sums["abs_log_ratio"] / measured,
                "mismatch/abs_logprob_max": maxima["abs_log_ratio"],
                "mismatch/kl_k3": sums["kl_k3"] / measured,
            }
        return metrics | _by_staleness(self.by_staleness, self.maxima[len(MAXIMA) :])


def _by_staleness(sums: NDArray[np.float64], greatest: NDArray[np.float64]) -> dict[str, float]:
    """Metrics of the behavior weights, for each bucket of staleness that holds tokens."""
    metrics = {}
    for bucket, row, weight_max in zip(STALENESS_BUCKETS, sums.tolist(), greatest.tolist(), strict=True):
        of = dict(zip(BY_STALENESS, row, strict=True))
        if tokens := of["tokens"]:
            metrics[f"ratio/staleness_tokens/{bucket}"] = tokens
            metrics[f"ratio/staleness_behavior_mean/{bucket}"] = of["weight"] / tokens
            metrics[f"ratio/staleness_behavior_max/{bucket}"] = weight_max
            metrics[f"ratio/staleness_masked_share/{bucket}"] = of["masked"] / tokens
            effective = of["weight"] ** 2 / max(tokens * of["weight_squared"], 1e-300)
            metrics[f"ratio/staleness_effective_sample_size/{bucket}"] = effective
            metrics[f"mismatch/staleness_abs_logprob_mean/{bucket}"] = of["abs_log_ratio"] / tokens
            metrics[f"mismatch/staleness_kl_k3/{bucket}"] = of["kl_k3"] / tokens
    return metrics
