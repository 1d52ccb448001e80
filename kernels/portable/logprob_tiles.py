"""Logits tile by tile: what one tile adds to the statistics, and what it adds to the gradients.

A tile is `[t, v]` logits of some tokens and some of the vocabulary, and nothing wider ever exists. The vocabulary is
the outer loop: a block of the head's weight is read once, and its gradient is complete before the next block begins, so
it is accumulated in float32 and written once, whatever its dtype. Matrix products are the vendor library's (MKL,
cuBLAS; docs/adr/0009-kernels.md); on CPU a tile stays in cache between them.

With upstream gradients g of the logprob and e of the entropy η, and log-probabilities ℓ of a row with target y:

    ∂/∂x_v = g · 1[v = y] − p_v · (g + e · (ℓ_v + η)),   p_v = exp ℓ_v

Shape legend: T tokens, V (slice of the) vocabulary, H hidden; t, v the extents of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.portable.logprob_statistics import LogprobGradient, Statistics, empty_statistics


@dataclass(frozen=True)
class TileShape:
    """Extents of a tile."""

    num_tokens: int
    num_words: int


CPU_TILE = TileShape(num_tokens=512, num_words=1024)
"""2 MiB in float32: with a scratch tile of the same size it stays in the second-level cache of one core."""
GPU_TILE = TileShape(num_tokens=16384, num_words=8192)
"""512 MiB in float32: fewer read-modify-write passes over the `[T, H]` gradient, at 1/19 of a `[T, 152k]` matrix."""


def tile_shape(device: torch.device, max_logits: int) -> TileShape:
    """The device's tile, made smaller until it holds no more than `max_logits` elements."""
    preferred = CPU_TILE if device.type == "cpu" else GPU_TILE
    num_tokens = min(preferred.num_tokens, max(1, max_logits // min(preferred.num_words, 64)))
    return TileShape(num_tokens, min(preferred.num_words, max(1, max_logits // num_tokens)))


def tile_statistics(hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, shape: TileShape) -> Statistics:
    """Reduce `scale · hidden weightᵀ` to its row statistics.

    Args:
        hidden: `[T, H]`.
        weight: `[V, H]`, of the same dtype.
        targets: `[T] int64` row of `weight`; outside of 0 … V − 1 where another rank has it.
        scale: Multiplies the logits: 1 / temperature.
        shape: Extents of a tile.

    Returns:
        `[T]` statistics.
    """
    result = empty_statistics(len(hidden), compute_dtype(hidden), hidden.device)
    for first_word, words in _blocks(weight, shape.num_words):
        for first_token, rows in _blocks(hidden, shape.num_tokens):
            block = slice(first_token, first_token + len(rows))
            logits = logits_tile(rows, words, scale)
            _absorb(logits, targets[block] - first_word, Statistics(*(each[block] for each in result)))
    return result


def _absorb(logits: Tensor, columns: Tensor, rows: Statistics) -> None:
    """Add a tile to the statistics of its rows, in place; the tile is used up."""
    place = columns.clamp(0, logits.shape[1] - 1)[:, None]
    is_here = columns == place[:, 0]
    rows.target.add_(logits.gather(1, place)[:, 0].masked_fill_(~is_here, 0.0))
    maximum = torch.maximum(rows.maximum, logits.amax(1))
    shift = rows.maximum - maximum
    factor = shift.exp()
    logits.sub_(maximum[:, None])
    exponentials = logits.exp()
    rows.weighted.add_(rows.total * shift).mul_(factor).add_(logits.mul_(exponentials).sum(1))
    rows.total.mul_(factor).add_(exponentials.sum(1))
    rows.maximum.copy_(maximum)


@dataclass(frozen=True)
class Wanted:
    """Which gradients to compute."""

    hidden: bool
    weight: bool


def tile_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    upstream: LogprobGradient,
    scale: float,
    shape: TileShape,
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute every tile again and turn it into gradients of `hidden` and `weight`.

    Arguments as for `tile_statistics`.

    Returns:
        `[T, H]` float32, of this slice of the vocabulary only, and `[V, H]` in the weight's dtype; None if unwanted.
    """
    dtype = compute_dtype(hidden)
    grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if wanted.hidden else None
    grad_weight = torch.empty_like(weight) if wanted.weight else None
    for first_word, words in _blocks(weight, shape.num_words):
        grad_words = torch.zeros(words.shape, dtype=dtype, device=words.device) if wanted.weight else None
        for first_token, rows in _blocks(hidden, shape.num_tokens):
            block = slice(first_token, first_token + len(rows))
            gradient = _tile_gradient(rows, words, targets[block] - first_word, upstream.of(block), scale)
            if grad_hidden is not None:
                _add_product(grad_hidden[block], gradient, words, scale)
            if grad_words is not None:
                _add_product(grad_words, gradient.T, rows, scale)
        if grad_weight is not None and grad_words is not None:
            grad_weight[first_word : first_word + len(words)] = grad_words
    return grad_hidden, grad_weight


def _tile_gradient(rows: Tensor, words: Tensor, columns: Tensor, upstream: LogprobGradient, scale: float) -> Tensor:
    """Gradient in the scaled logits of one tile, `[t, v]`; on a GPU in the dtype of the products that follow."""
    if runs_on_triton(rows):
        from penstock.kernels.gpu.logprob_backward import logits_gradient

        return logits_gradient(_product(rows, words), columns, upstream, scale, rows.dtype)
    return gradient_of_tile(logits_tile(rows, words, scale), columns, upstream)


def gradient_of_tile(logits: Tensor, columns: Tensor, upstream: LogprobGradient) -> Tensor:
    """The formula above, in place.

    Args:
        logits: `[t, v]`, scaled.
        columns: `[t] int64`, each row's target in this tile; outside of 0 … v − 1 where it is in another.
        upstream: Of these tokens.
    """
    distance = logits.sub_(upstream.maximum[:, None])
    share = upstream.log_total.neg().exp()  # 1 / s, multiplied into `[t]` factors and not into the tile
    if upstream.entropy is None:
        gradient = distance.exp_().mul_((-upstream.logprob * share)[:, None])
    else:
        exponentials = distance.exp()
        offset = upstream.logprob + upstream.entropy * (upstream.entropies - upstream.log_total)
        slope = -upstream.entropy * share
        gradient = distance.mul_(slope[:, None]).sub_((offset * share)[:, None]).mul_(exponentials)
    place = columns.clamp(0, logits.shape[1] - 1)[:, None]
    is_here = columns[:, None] == place
    return gradient.scatter_add_(1, place, upstream.logprob[:, None] * is_here)


def logits_tile(rows: Tensor, words: Tensor, scale: float) -> Tensor:
    """`scale · rows wordsᵀ`, `[t, v]`, accumulated and kept in float32."""
    if rows.dtype == compute_dtype(rows):
        empty = rows.new_empty((len(rows), len(words)))
        return torch.addmm(empty, rows, words.T, beta=0.0, alpha=scale, out=empty)
    return _product(rows, words).mul_(scale)


def _product(rows: Tensor, words: Tensor) -> Tensor:
    """`rows wordsᵀ` in float32. cuBLAS does not round what it accumulates; on CPU the operands are widened."""
    if rows.dtype == compute_dtype(rows):
        return torch.mm(rows, words.T)
    if rows.device.type == "cuda":
        return torch.mm(rows, words.T, out_dtype=torch.float32)
    return torch.mm(rows.float(), words.float().T)


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """`total += scale · left @ right`, in float32."""
    if left.dtype == right.dtype == total.dtype:
        total.addmm_(left, right, alpha=scale)
    elif right.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=torch.float32, alpha=scale, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype), alpha=scale)


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """float32, or float64 for float64."""
    return torch.promote_types(hidden.dtype, torch.float32)


def _blocks(matrix: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for first in range(0, len(matrix), size):
        yield first, matrix[first : first + size]
