"""Do the ranks train the same policy, and equal parts of a batch? What each of them saw, before anything was reduced.

A rank whose weights have silently left the others' gives gradients of another policy, and the sum of all looks normal.
So every replica sums up the bits of its weights at the start of a batch: equal policies have equal sums. ZeRO-3 keeps
no replicas. Gradients of parameters exist unreduced nowhere under ZeRO; what does, on every backend, is the gradient at
the logprobs, whose norm is a rank's share of the signal.

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
    """Of one rank, over the updates of a batch.

    Attributes:
        fingerprint: Of its weights at the start; 0 if they are partitioned.
        loss: Σ weight · term.
        token_weight: Σ weight.
        squared_signal: Σ (∂loss/∂logprob)², on the device.
    """

    fingerprint: int
    squared_signal: Tensor
    loss: float = 0.0
    token_weight: float = 0.0

    @classmethod
    def at_start(cls, backend: Backend) -> RankShare:
        """Of a rank that has its weights and no batch yet."""
        held: list[Tensor] = []
        if num_shares(backend) > 1 and not backend.training_sharding().is_partitioned:
            with backend.adapters.off():  # adapters apart from what they are added to
                held = [*backend.local_weights().values(), *backend.adapters.parameters()]
        return cls(fingerprint(held), torch.zeros((), dtype=torch.float64, device=backend.device))

    def add(self, loss: float, token_weight: float) -> None:
        """One update's."""
        self.loss += loss
        self.token_weight += token_weight

    def watch(self, target: Tensor) -> None:
        """Add the gradient that will arrive at these logprobs."""

        def add(gradient: Tensor) -> None:
            self.squared_signal += gradient.double().square().sum()

        if target.requires_grad:
            target.register_hook(add)


def num_shares(backend: Backend) -> int:
    """R."""
    return backend.data_parallel_size * backend.sequence_parallel_size


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Sum of the bits of all weights, as integers, modulo 2^50: whatever the order, and one flipped bit changes it."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        total += int(flat.view(torch.int32 if flat.element_size() == 4 else torch.int16).sum(dtype=torch.int64))
    return total % _EXACT


def agreement(share: RankShare, backend: Backend) -> dict[str, float]:
    """Dispersion over the ranks; nothing if there is one. Collective."""
    size = num_shares(backend)
    if size == 1:
        return {}
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
