"""The differentiable core: statistics forward, recomputed tiles backward; one rank's slice of the vocabulary, or all.

What is kept between the two is `[T]`-sized, next to `hidden` and `weight` themselves. A gradient known only in
backward cannot be folded into forward, and logits kept are the `[T, V]` matrix: so each tile's product is computed once
more, four products in all instead of three.

Shape legend: T tokens, V (slice of the) vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.portable.logprob_statistics import LogprobGradient, Statistics, merge_ranks
from penstock.kernels.portable.logprob_tiles import (
    Wanted,
    tile_gradients,
    tile_shape,
    tile_statistics,
)


@dataclass(frozen=True)
class Settings:
    """What is not a tensor.

    Attributes:
        scale: 1 / temperature.
        max_logits: Elements of a tile.
        group: Ranks whose slices make up the vocabulary; None: there is one slice.
    """

    scale: float
    max_logits: int
    group: ProcessGroup | None = None


def scores(hidden: Tensor, weight: Tensor, targets: Tensor, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs and entropies, `[T]` each, differentiable in `hidden` and `weight`; and `[T] bool`, is most likely.

    Args:
        hidden: `[T, H]`.
        weight: `[V, H]` of the same dtype.
        targets: `[T] int64` row of `weight`; outside of 0 … V − 1 where another rank has it.
        settings: See there.
    """
    with torch.autocast(hidden.device.type, enabled=False):  # it would round products that are to stay in float32
        results: tuple[Tensor, Tensor, Tensor] = _Scores.apply(hidden, weight, targets, settings)
    return results


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: Settings) -> tuple[Tensor, ...]:
        statistics = _statistics(hidden, weight, targets, settings)
        if settings.group is not None:
            statistics = merge_ranks(statistics, settings.group)
        entropies = statistics.entropy()
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, statistics.maximum, statistics.total.log(), entropies)
        is_most_likely = statistics.target >= statistics.maximum  # both are of the same product, bit for bit
        ctx.mark_non_differentiable(is_most_likely)
        return statistics.logprob(), entropies, is_most_likely

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, maximum, log_total, entropies = ctx.saved_tensors
        settings: Settings = ctx.settings
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None
        gradient = LogprobGradient(
            torch.zeros_like(entropies) if grad_logprob is None else grad_logprob.contiguous(),
            None if grad_entropy is None else grad_entropy.contiguous(),
            maximum,
            log_total,
            entropies,
        )
        wanted = Wanted(hidden=ctx.needs_input_grad[0], weight=ctx.needs_input_grad[1])
        shape = tile_shape(hidden.device, settings.max_logits)
        with torch.autocast(hidden.device.type, enabled=False):
            grad_hidden, grad_weight = tile_gradients(hidden, weight, targets, gradient, settings.scale, shape, wanted)
        if grad_hidden is not None and settings.group is not None:
            all_reduce(grad_hidden, ReduceOp.SUM, settings.group)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, None, None


def _statistics(hidden: Tensor, weight: Tensor, targets: Tensor, settings: Settings) -> Statistics:
    if runs_on_triton(hidden):
        from penstock.kernels.gpu.logprob_forward import can_fuse, fused_statistics

        if can_fuse(hidden, weight):
            return fused_statistics(hidden, weight, targets, settings.scale)
    shape = tile_shape(hidden.device, settings.max_logits)
    return tile_statistics(hidden, weight, targets, settings.scale, shape)
