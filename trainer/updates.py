"""What the optimizer steps of one batch did, and what is said of them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.algorithms.metrics import TokenMetrics, TokenSums
from penstock.trainer.backend import OptimizerResult
from penstock.trainer.config import OptimizerConfig
from penstock.trainer.rank_agreement import RankShare


def learning_rate(optimizer: OptimizerConfig, num_steps: int) -> float:
    """Rate of the next optimizer step; `num_steps` were taken before.

    Linear from lr / warmup_steps at the first step to lr; then constant, or along a half cosine to
    final_lr_ratio · lr, which step `decay_steps` has and all after it.
    """
    step, warmup, decay = num_steps + 1, optimizer.warmup_steps, optimizer.decay_steps
    if step < warmup:
        return optimizer.lr * step / warmup
    if not decay:
        return optimizer.lr
    progress = min(1.0, (step - warmup) / (decay - warmup))
    final = optimizer.final_lr_ratio
    return optimizer.lr * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)


@dataclass(slots=True)
class OpenUpdate:
    """What one update has gathered while its gradient grows.

    Attributes:
        metrics: Sums over all micro-batches so far.
        share: What this rank has of the batch.
        normaliser: Σ over parts of what their gradients are still to be divided by; 0 if they are divided already.
        payloads: Groups of the parts before the last, for the statistics of the batch.
        busy_s: Wall seconds spent on those.
        is_first: The policy is still that of the start of the batch.
        is_first_epoch: Every token of it is trained for the first time.
        has_gradient: There was something to learn from, so there is a gradient to step along.
    """

    metrics: TokenMetrics
    share: RankShare
    is_first: bool = True
    is_first_epoch: bool = True
    has_gradient: bool = False
    normaliser: float = 0.0
    payloads: list[GroupPayload] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    packing_efficiencies: list[float] = field(default_factory=list)
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step, equal on all ranks.

    Attributes:
        loss: Σ weight · term over its normaliser.
        lr: Learning rate.
        micro_batches: Of this rank, per part.
        is_silent: There was nothing to learn from, so no step was taken.
    """

    sums: TokenSums
    loss: float
    lr: float
    result: OptimizerResult
    micro_batches: Sequence[int]
    packing_efficiencies: Sequence[float]
    is_silent: bool = False

    @property
    def changed_nothing(self) -> bool:
        """The policy is as it was."""
        return self.is_silent or self.result.is_skipped


def summary(updates: Sequence[Update]) -> dict[str, float]:
    """Metrics of a batch: token means over all its updates, means of loss and norm; those skipped are left out.

    If all were skipped, they are what is shown.
    """
    shown = [one for one in updates if not one.result.is_skipped] or updates
    sums = shown[0].sums
    for one in shown[1:]:
        sums = sums + one.sums
    counts = [count for one in updates for count in one.micro_batches]
    efficiencies = [share for one in updates for share in one.packing_efficiencies]
    norms = [one.result.grad_norm for one in shown]
    return sums.metrics() | {
        "loss/policy": math.fsum(one.loss for one in shown) / len(shown),
        "loss/grad_norm": sum(norms) / len(norms),
        "loss/lr": updates[-1].lr,
        "trainer/num_micro_batches": float(sum(counts)),
        "trainer/batch_parts": float(len(updates[0].micro_batches)),
        "trainer/updates": float(len(updates)),
        "trainer/skipped_updates": float(sum(one.result.is_skipped for one in updates)),
        "trainer/silent_updates": float(sum(one.is_silent for one in updates)),
        "trainer/packing_efficiency": float(np.average(efficiencies, weights=counts)),
    }
