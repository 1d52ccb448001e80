"""Target logprobs and entropies from hidden states, without materializing the `[T, V]` logits.

    ℓ = log_softmax(head(h) / temperature);   logprob_t = ℓ[t, y_t];   entropy_t = −Σ_v exp(ℓ_tv) · ℓ_tv

On a GPU, forward is one Triton kernel, and backward is a second one between cuBLAS products. On CPU, both use
cache-sized tiles (docs/concepts/kernels.md). Memory beyond the gradients is one tile and a few `[T]` vectors, for any T
and V.

Logits of a plain head are accumulated and kept in float32 for any dtype of the operands, like those of `Float32Head` in
a sampler. Other modules determine the precision of their logits themselves.

A head that is an `nn.Linear` without bias is called once, with the computation above in place of its matrix product.
Hooks of the module, with which ZeRO-3 gathers and releases its weight, therefore run once in forward and once in
backward instead of once per chunk. Any other module (with a bias, an adapter, a tensor-parallel product) is called for
one chunk of tokens at a time, and again in backward.

With `alternatives`, the distribution is the one that a truncated sampler draws from, over a few tokens per position
(kernels/portable/truncated_logprob.py, docs/concepts/truncated-sampling.md).

Shape legend: T tokens, V vocabulary, H hidden, A alternatives of a token at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.utils.checkpoint import checkpoint

from penstock.dataflow.errors import ShapeError
from penstock.kernels.float32_head import Float32Head
from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.portable.logprob import (
    LogprobGradient,
    Statistics,
    gradient_of_tile,
    logits_tile,
    merge_ranks,
    product,
    tile_gradients,
    tile_shape,
    tile_statistics,
)
from penstock.kernels.portable.truncated_logprob import scores_in_support, truncated_logprobs_and_entropies

MAX_LOGITS = 1 << 27
"""Maximum number of logits in memory (elements; 512 MiB in float32). Tiles on CPU are far smaller, to fit its cache."""
MAX_OPAQUE_LOGITS = 1 << 25
"""The same for heads that can only be called (128 MiB in float32, of which a chunk needs several copies)."""


class LinearLogprobs(NamedTuple):
    """Result of one pass over the logits, per target."""

    logprobs: Tensor
    """`[T] float32`, natural log; carries gradient."""
    entropies: Tensor
    """`[T] float32`, nats; carries gradient."""
    is_most_likely: Tensor
    """`[T] bool`, whether no other token has a larger logit."""


class VocabularyShard(NamedTuple):
    """One rank's slice of the head, the tokens `start` ≤ id < `stop`, and the process group that holds all slices."""

    start: int
    stop: int
    group: ProcessGroup


@dataclass(frozen=True)
class Settings:
    """Non-tensor arguments."""

    scale: float
    """1 / temperature."""
    max_logits: int
    """Maximum number of elements of a tile."""
    group: ProcessGroup | None = None
    """Process group of the ranks that hold the vocabulary's slices; None if the vocabulary is not sharded."""


def linear_logprobs(
    hidden: Tensor,
    head: nn.Module | Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    alternatives: Tensor | None = None,
    part: VocabularyShard | None = None,
    max_logits: int = MAX_LOGITS,
) -> LinearLogprobs:
    """Compute the logprob of each target and the entropy of each distribution, in float32.

    Differentiable in `hidden` and `head` through both results; every tile is recomputed in backward.

    With `part` the head is sharded over the ranks of a group, and every rank gets the full result. Forward uses two
    collectives of `[T]` and `[3, T]` (with alternatives one of `[T, 1 + A]`), backward one of `[T, H]` float32. The
    gradient of `hidden` is that of the whole vocabulary on every rank: all ranks compute the same loss, which is not
    summed over ranks. `hidden`, `targets` and `alternatives` are equal on all of them.

    Args:
        hidden: `[T, H]`, last hidden states, float32, bfloat16 or float16 (float64 is computed in float64).
        head: The output projection: a module (called, so that ZeRO-3 hooks gather its weight) or its weight `[V, H]`.
        targets: `[T] int64`, the token that each hidden state predicts.
        temperature: Divides the logits; > 0.
        alternatives: `[T, A] int64`, the other ids that each target was sampled from, then −1; the distribution is
            renormalised over target and alternatives. None: over the whole vocabulary.
        part: The rows of the whole vocabulary that `head` has on this rank, whose number may differ between ranks. A
            module is then called once, with this computation in place of its own forward, including any collective in
            it, and has no bias. None: `head` has all rows.
        max_logits: Maximum number of elements of a tile of logits.

    Raises:
        ShapeError: If shapes or dtypes do not match.
    """
    support = None if alternatives is None else torch.cat([targets[:, None], alternatives], dim=1)
    if part is not None:
        return _scores(hidden, head, targets, support, Settings(1.0 / temperature, max_logits, part.group), part.start)
    if isinstance(head, nn.Module) and not _is_plain(head):
        return _chunked_scores(hidden, head, targets, support, temperature, min(max_logits, MAX_OPAQUE_LOGITS))
    return _scores(hidden, head, targets, support, Settings(1.0 / temperature, max_logits))


def _scores(
    hidden: Tensor,
    head: nn.Module | Tensor,
    targets: Tensor,
    support: Tensor | None,
    settings: Settings,
    first_row: int = 0,
) -> LinearLogprobs:
    """Compute from the weight of `head`. For a module this runs as its forward, inside the hooks that gather it."""

    def compute(rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if rows.shape[:1] != targets.shape or rows.shape[1:] != weight.shape[1:] or rows.dtype != weight.dtype:
            raise ShapeError(
                f"linear_logprob: hidden is {list(rows.shape)} {rows.dtype}, the head's weight {list(weight.shape)} "
                f"{weight.dtype} and targets {list(targets.shape)}. They must be [T, H], [V, H] and [T], the first two "
                "of one dtype: cast one of them, or select as many hidden states as there are targets."
            )
        if support is not None:
            return truncated_logprobs_and_entropies(rows, weight, support, settings.scale, settings.group, first_row)
        # Autocast would round products that must stay in float32.
        with torch.autocast(rows.device.type, enabled=False):
            results: tuple[Tensor, ...] = _LinearLogprob.apply(rows, weight, targets - first_row, settings)
        return results

    if isinstance(head, Tensor):
        return LinearLogprobs(*compute(hidden, head))
    # An instance attribute shadows the forward of the class for this one call.
    vars(head)["forward"] = lambda rows: compute(rows, cast("Tensor", head.weight))
    try:
        return LinearLogprobs(*head(hidden))
    finally:
        del vars(head)["forward"]


class _LinearLogprob(torch.autograd.Function):
    """Logprobs and entropies, `[T]` each, and whether the target is the most likely token, `[T] bool`.

    Of hidden states `[T, H]`, weight `[V, H]` of the same dtype, and targets `[T] int64`: each a row of the weight;
    outside of 0 … V − 1 if another rank holds it.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: Settings) -> tuple[Tensor, ...]:
        statistics = _statistics(hidden, weight, targets, settings)
        if settings.group is not None:
            statistics = merge_ranks(statistics, settings.group)
        entropies = statistics.entropy()
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, statistics.maximum, statistics.total.log(), entropies)
        # Both logits come from the same matrix product, so they are bitwise comparable.
        is_most_likely = statistics.target >= statistics.maximum
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
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        shape = tile_shape(hidden.device, settings.max_logits)
        with torch.autocast(hidden.device.type, enabled=False):
            grad_hidden, grad_weight = tile_gradients(
                hidden,
                weight,
                targets,
                gradient,
                settings.scale,
                shape,
                _gradient_of_tile,
                wants_hidden=wants_hidden,
                wants_weight=wants_weight,
            )
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


def _gradient_of_tile(rows: Tensor, words: Tensor, columns: Tensor, upstream: LogprobGradient, scale: float) -> Tensor:
    if runs_on_triton(rows):
        from penstock.kernels.gpu.logprob_backward import logits_gradient

        return logits_gradient(product(rows, words), columns, upstream, scale, rows.dtype)
    return gradient_of_tile(logits_tile(rows, words, scale), columns, upstream)


def _is_plain(head: nn.Module) -> bool:
    """Whether calling `head` computes exactly `hidden weightᵀ`, apart from hooks and rounding."""
    return (
        isinstance(head, nn.Linear)
        and type(head).forward in (nn.Linear.forward, Float32Head.forward)
        and "forward" not in vars(head)
        and head.bias is None
    )


def _chunked_scores(
    hidden: Tensor, head: nn.Module, targets: Tensor, support: Tensor | None, temperature: float, max_logits: int
) -> LinearLogprobs:
    """Compute chunk by chunk for heads that can only be called; several chunks are recomputed in backward."""
    size = max(1, max_logits // cast("int", head.out_features))
    is_recomputed = hidden.shape[0] > size and torch.is_grad_enabled()
    chunks = []
    by_call, wanted = (_scores_by_call, targets) if support is None else (_truncated_scores_by_call, support)
    for rows, ids in zip(hidden.split(size), wanted.split(size), strict=True):
        if is_recomputed:
            chunks.append(checkpoint(by_call, rows, head, ids, temperature, use_reentrant=False))
        else:
            chunks.append(by_call(rows, head, ids, temperature))
    return LinearLogprobs(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _scores_by_call(hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float) -> tuple[Tensor, ...]:
    logits = cast("Tensor", head(hidden)).float()
    log_probabilities = (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)
    logprobs = log_probabilities.gather(-1, targets[:, None])[:, 0]
    entropies = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return logprobs, entropies, logprobs.detach() == log_probabilities.detach().amax(-1)


def _truncated_scores_by_call(
    hidden: Tensor, head: nn.Module, support: Tensor, temperature: float
) -> tuple[Tensor, ...]:
    logits = cast("Tensor", head(hidden)).float().gather(-1, support.clamp(min=0))
    return scores_in_support(logits / temperature, support)
