"""Checks that all ranks train the same policy on comparable parts of a batch, using per-rank values before reduction.

If the weights of a rank silently diverge, its gradients belong to a different policy, but their sum looks normal. Every
replica therefore sums the bits of its weights at the start of a batch, and equal policies have equal sums. ZeRO-3 keeps
no replicas. ZeRO never exposes unreduced parameter gradients, but every backend has the gradient at the logprobs, whose
norm is the rank's share of the signal.

Shape legend: R ranks that compute on different tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.trainer.backends.base import Backend

_EXACT = 1 << 50
"""Below 2^53, so that a fingerprint is exact as a float64."""


@dataclass(slots=True)
class RankShare:
    """Values of one rank over the updates of a batch."""

    fingerprint: int
    """Fingerprint of its weights at the start; 0 if they are partitioned."""
    squared_signal: Tensor
    """Σ (∂loss/∂logprob)², on the device."""
    loss: float = 0.0
    """Σ weight · term."""
    token_weight: float = 0.0
    """Σ weight."""

    @classmethod
    def at_start(cls, backend: Backend) -> RankShare:
        """Create the share of a rank before its batch."""
        held: list[Tensor] = []
        if not backend.training_sharding().is_partitioned:
            with backend.adapters.off():  # adapters are summed separately from the base weights
                held = [*backend.local_weights().values(), *backend.adapters.parameters()]
        return cls(fingerprint(held), torch.zeros((), dtype=torch.float64, device=backend.device))

    def add(self, loss: float, token_weight: float) -> None:
        """Add the values of one update."""
        self.loss += loss
        self.token_weight += token_weight

    def watch(self, target: Tensor) -> None:
        """Add the gradient at these logprobs during backward."""

        def add(gradient: Tensor) -> None:
            self.squared_signal += gradient.double().square().sum()

        if target.requires_grad:
            target.register_hook(add)


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Sum of all weights' bits as integers, modulo 2^50: independent of the order, and changed by any flipped bit."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        total += int(flat.view(torch.int32 if flat.element_size() == 4 else torch.int16).sum(dtype=torch.int64))
    return total % _EXACT


def agreement(share: RankShare, backend: Backend) -> dict[str, float]:
    """Dispersion over the ranks. Collective."""
    size = backend.data_parallel_size * backend.sequence_parallel_size
    mine = np.zeros((size, 4))
    place = backend.data_parallel_rank * backend.sequence_parallel_size + backend.sequence_parallel_rank
    mine[place] = share.fingerprint, share.loss, share.token_weight, float(share.squared_signal) ** 0.5
    fingerprints, losses, weights, signals = backend.all_reduce(mine, "sum").T
    has_tokens = weights > 0
    means = losses[has_tokens] / weights[has_tokens]
    found = {
        "rank/loss_spread": float(means.std()) if len(means) else 0.0,
        "rank/signal_spread": float(signals.std() / signals.mean()) if signals.mean() > 0 else 0.0,
    }
    if not backend.training_sharding().is_partitioned:
        found["rank/desynchronised"] = float(np.sum(fingerprints != fingerprints[0]))
    return found
