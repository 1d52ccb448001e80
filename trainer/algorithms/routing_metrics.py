"""How the recorded experts of the trained tokens differ from those that the routers would choose now, and their load.

Shape legend: K loss tokens of one micro-batch, M layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.expert_choice import ExpertChoice
from penstock.trainer.algorithms.metrics import STALENESS_BUCKETS, TokenMetrics
from penstock.trainer.batches.collate import MicroBatch

_KNOWN, _UNKNOWN, _DIFFERING = range(3)


class RoutingMetrics:
    """Accumulates one step's sums over loss tokens and layers on the device."""

    def __init__(self, experts: ExpertChoice, device: torch.device) -> None:
        self._experts = experts
        num_layers = len(experts.routers)
        self._by_staleness = torch.zeros(len(STALENESS_BUCKETS), 3, dtype=torch.float64, device=device)
        self._load = torch.zeros(num_layers, experts.num_experts, dtype=torch.float64, device=device)
        self._balance = torch.zeros(2, dtype=torch.float64, device=device)  # loss tokens, and the loss of each of them

    @torch.no_grad()
    def add(self, micro_batch: MicroBatch, metrics: TokenMetrics) -> None:
        """Add one micro-batch, right after its forward pass."""
        inputs, num_layers, num_experts = micro_batch.inputs, *self._load.shape
        if not micro_batch.num_tokens:
            return
        buckets = torch.bucketize(micro_batch.staleness, metrics.bucket_ends)
        if inputs.routes is None:
            unknown = torch.full_like(buckets, num_layers, dtype=torch.float64)
            self._by_staleness[:, _UNKNOWN].index_add_(0, buckets, unknown)
            return
        routes = inputs.routes[inputs.target_index].long()  # [K, M, k]
        differs = torch.stack(self._experts.differs, dim=1)[inputs.target_index].sum(1)
        known = (routes[..., 0] >= 0).sum(1)
        self._by_staleness.index_add_(0, buckets, torch.stack([known, num_layers - known, differs], 1).double())
        of_layer = routes + num_experts * torch.arange(num_layers, device=routes.device)[:, None]
        counts = torch.bincount(of_layer[routes >= 0], minlength=self._load.numel())
        self._load += counts.view_as(self._load)

    def balance_loss(self, micro_batch: MicroBatch) -> Tensor:
        """That of the newest pass, over its loss tokens."""
        loss = self._experts.balance_loss(micro_batch.inputs.target_index)
        self._balance += micro_batch.num_tokens * torch.stack([torch.ones_like(loss), loss]).detach().double()
        return loss

    def reduce(
        self, all_reduce: Callable[[NDArray[np.float64], Literal["sum", "max"]], NDArray[np.float64]]
    ) -> RoutingSums:
        """The sums over all ranks (a collective)."""
        mine = torch.cat([self._balance, self._by_staleness.flatten(), self._load.flatten()]).cpu().numpy()
        balance, by_staleness, load = np.split(all_reduce(mine, "sum"), [2, 2 + self._by_staleness.numel()])
        return RoutingSums(by_staleness.reshape(self._by_staleness.shape), load.reshape(self._load.shape), balance)


@dataclass(frozen=True, slots=True)
class RoutingSums:
    """Sums over all ranks, of one optimizer step or of several added up."""

    by_staleness: NDArray[np.float64]
    """`[buckets, 3]`, tokens × layers whose experts are known, are not, and differ."""
    load: NDArray[np.float64]
    """`[M, E]`, tokens that an expert was recorded for."""
    balance: NDArray[np.float64]
    """`[2]`, loss tokens, and the balance loss times these; 0 if it is not used."""

    def __add__(self, other: RoutingSums) -> RoutingSums:
        return RoutingSums(self.by_staleness + other.by_staleness, self.load + other.load, self.balance + other.balance)

    def metrics(self) -> dict[str, float]:
        """By name; without recorded experts only that there are none."""
        known, unknown, differing = self.by_staleness.sum(0)
        found = {"routing/unknown_share": float(unknown / max(known + unknown, 1.0))}
        if self.balance[0]:
            found["routing/balance_loss"] = float(self.balance[1] / self.balance[0])
        if not known:
            return found
        for bucket, row in zip(STALENESS_BUCKETS, self.by_staleness, strict=True):
            if row[_KNOWN]:
                found[f"routing/staleness_differing_share/{bucket}"] = float(row[_DIFFERING] / row[_KNOWN])
        return found | {
            "routing/differing_share": float(differing / known),
            "routing/max_load": float((self.load.max(1) / self.load.mean(1)).mean()),
            "routing/idle_experts_share": float((self.load == 0).mean()),
        }
