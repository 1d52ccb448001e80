"""What a row of logits is reduced to, and how the statistics of its parts are merged: the online softmax.

    m = max_v x_v;   s = Σ_v exp(x_v − m);   u = Σ_v exp(x_v − m) · (x_v − m)
    log Σ_v exp x_v = m + ln s;   entropy = ln s − u / s

Parts are slices of the vocabulary: tiles, splits of a kernel, or ranks. Moving a part from its maximum m to a greater
one m' costs two multiplications: s' = s e^{m − m'};  u' = (u + s (m − m')) e^{m − m'}. Source: arXiv 1805.02867.

Shape legend: T tokens, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

LOWEST = -3.0e38
"""Stands for −∞ as the maximum of nothing: times zero it is zero, while −∞ gives NaN."""


class Statistics(NamedTuple):
    """Of T rows of logits, or of P parts of each: `[T]` or `[P, T]`, float32 (float64 for float64 logits).

    Attributes:
        maximum: m.
        total: s.
        weighted: u.
        target: The target's logit; 0 in every part of the vocabulary that does not hold it.
    """

    maximum: Tensor
    total: Tensor
    weighted: Tensor
    target: Tensor

    def logprob(self) -> Tensor:
        return (self.target - self.maximum) - self.total.log()  # m + ln s would round away what logits near m differ by

    def entropy(self) -> Tensor:
        return self.total.log() - self.weighted / self.total


@dataclass(frozen=True)
class LogprobGradient:
    """Gradients of the loss in the results, and what of the forward pass they are combined with: `[T]` each.

    Attributes:
        logprob: g, float32.
        entropy: e, float32; None if the entropies carry no gradient.
        maximum: m of the whole vocabulary, float32.
        log_total: ln s of the whole vocabulary, float32.
        entropies: η, float32.
    """

    logprob: Tensor
    entropy: Tensor | None
    maximum: Tensor
    log_total: Tensor
    entropies: Tensor

    def of(self, block: slice) -> LogprobGradient:
        entropy = None if self.entropy is None else self.entropy[block]
        rows = (each[block] for each in (self.maximum, self.log_total, self.entropies))
        return LogprobGradient(self.logprob[block], entropy, *rows)


def empty_statistics(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Statistics:
    """Of no logits at all: the neutral element of merging."""
    maximum = torch.full((num_tokens,), LOWEST, dtype=dtype, device=device)
    total, weighted, target = (torch.zeros_like(maximum) for _ in range(3))
    return Statistics(maximum, total, weighted, target)


def merge_parts(parts: Statistics) -> Statistics:
    """`[P, T]` statistics of P disjoint parts of the vocabulary -> `[T]` of the whole."""
    maximum = parts.maximum.amax(0)
    total, weighted = _moved(parts, maximum)
    return Statistics(maximum, total.sum(0), weighted.sum(0), parts.target.sum(0))


def merge_ranks(local: Statistics, group: ProcessGroup) -> Statistics:
    """The same over the ranks of `group`, each with its own slice: two collectives of `[T]` and `[3, T]`."""
    maximum = local.maximum.clone()
    all_reduce(maximum, ReduceOp.MAX, group)
    sums = torch.stack([*_moved(local, maximum), local.target])
    all_reduce(sums, ReduceOp.SUM, group)
    return Statistics(maximum, *sums.unbind())


def _moved(parts: Statistics, maximum: Tensor) -> tuple[Tensor, Tensor]:
    """Total and weighted sum relative to another maximum."""
    shift = parts.maximum - maximum
    factor = shift.exp()
    return parts.total * factor, (parts.weighted + parts.total * shift) * factor
