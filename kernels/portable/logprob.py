"""Tiled logprobs and entropies from hidden states in torch; backward recomputes the tiles.

Forward reduces each row of logits to statistics, which are merged by the online softmax (arXiv 1805.02867):

    m = max_v x_v;   s = Σ_v exp(x_v − m);   u = Σ_v exp(x_v − m) · (x_v − m)
    log Σ_v exp x_v = m + ln s;   entropy = ln s − u / s

Partial statistics belong to slices of the vocabulary: tiles, splits of a kernel, or ranks. Rescaling them from their
maximum m to a larger one m' costs two multiplications: s' = s e^{m − m'};  u' = (u + s (m − m')) e^{m − m'}.

With upstream gradients g of the logprob and e of the entropy η, and log-probabilities ℓ of a row with target y:

    ∂/∂x_v = g · 1[v = y] − p_v · (g + e · (ℓ_v + η)),   p_v = exp ℓ_v

A tile holds `[t, v]` logits of a block of tokens and a block of the vocabulary; no larger logits tensor is ever
allocated. The vocabulary is the outer loop: each block of the head's weight is read once, and its gradient is complete
before the next block starts, so it is accumulated in float32 and written once in the dtype of the weight. Matrix
products are those of the vendor library (MKL, cuBLAS; docs/adr/0009-kernels.md). On CPU a tile stays in cache between
them.

Only `[T]`-sized tensors are saved for backward, besides `hidden` and `weight`. The upstream gradient is unknown in
forward, and saving the logits would mean saving the `[T, V]` matrix. Each tile's product is therefore recomputed: four
products in total instead of three.

Shape legend: T tokens, V (slice of the) vocabulary, H hidden, P slices; t, v the extents of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

LOWEST = -3.0e38
"""Maximum of an empty set. Finite, because 0 · LOWEST is 0 while 0 · −∞ is NaN."""


class Statistics(NamedTuple):
    """Softmax statistics of T rows of logits, or P slices of each: `[T]` or `[P, T]`, float32 (float64 for float64)."""

    maximum: Tensor
    """m."""
    total: Tensor
    """s."""
    weighted: Tensor
    """u."""
    target: Tensor
    """The target's logit; 0 in every slice of the vocabulary that does not contain the target."""

    def logprob(self) -> Tensor:
        # Not target − (m + ln s): the sum would round away the differences of logits near m.
        return (self.target - self.maximum) - self.total.log()

    def entropy(self) -> Tensor:
        return self.total.log() - self.weighted / self.total


@dataclass(frozen=True)
class LogprobGradient:
    """Upstream gradients, and the forward results that backward combines them with: `[T]` each."""

    logprob: Tensor
    """g, float32."""
    entropy: Tensor | None
    """e, float32; None if the entropies carry no gradient."""
    maximum: Tensor
    """m of the whole vocabulary, float32."""
    log_total: Tensor
    """ln s of the whole vocabulary, float32."""
    entropies: Tensor
    """η, float32."""

    def of(self, block: slice) -> LogprobGradient:
        """The same of a block of tokens."""
        entropy = None if self.entropy is None else self.entropy[block]
        rest = (column[block] for column in (self.maximum, self.log_total, self.entropies))
        return LogprobGradient(self.logprob[block], entropy, *rest)


def empty_statistics(num_tokens: int, dtype: torch.dtype, device: torch.device) -> Statistics:
    """Statistics of no logits: the neutral element of merging."""
    maximum = torch.full((num_tokens,), LOWEST, dtype=dtype, device=device)
    total, weighted, target = (torch.zeros_like(maximum) for _ in range(3))
    return Statistics(maximum, total, weighted, target)


def merge_statistics(parts: Statistics) -> Statistics:
    """Merge `[P, T]` statistics of P disjoint slices of the vocabulary into `[T]` statistics of all of it."""
    maximum = parts.maximum.amax(0)
    total, weighted = _rescaled(parts, maximum)
    return Statistics(maximum, total.sum(0), weighted.sum(0), parts.target.sum(0))


def merge_ranks(local: Statistics, group: ProcessGroup) -> Statistics:
    """Merge the statistics of the ranks of `group`, each with its own slice: two collectives of `[T]` and `[3, T]`."""
    maximum = local.maximum.clone()
    all_reduce(maximum, ReduceOp.MAX, group)
    sums = torch.stack([*_rescaled(local, maximum), local.target])
    all_reduce(sums, ReduceOp.SUM, group)
    return Statistics(maximum, *sums.unbind())


def _rescaled(parts: Statistics, maximum: Tensor) -> tuple[Tensor, Tensor]:
    """Rescale the total and the weighted sum to another maximum."""
    shift = parts.maximum - maximum
    factor = shift.exp()
    return parts.total * factor, (parts.weighted + parts.total * shift) * factor


@dataclass(frozen=True)
class TileShape:
    """Extents of a tile."""

    num_tokens: int
    vocab_size: int


CPU_TILE = TileShape(num_tokens=512, vocab_size=1024)
"""2 MiB in float32: together with a scratch tile of the same size it fits into the L2 cache of one core."""
GPU_TILE = TileShape(num_tokens=16384, vocab_size=8192)
"""512 MiB in float32: fewer read-modify-write passes over the `[T, H]` gradient, at 1/19 of a `[T, 152k]` matrix."""


def tile_shape(device: torch.device, max_logits: int) -> TileShape:
    """The preferred tile of the device, reduced to at most `max_logits` elements."""
    preferred = CPU_TILE if device.type == "cpu" else GPU_TILE
    num_tokens = min(preferred.num_tokens, max(1, max_logits // min(preferred.vocab_size, 64)))
    return TileShape(num_tokens, min(preferred.vocab_size, max(1, max_logits // num_tokens)))


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
    for vocab_start, words in _blocks(weight, shape.vocab_size):
        for token_start, rows in _blocks(hidden, shape.num_tokens):
            block = slice(token_start, token_start + len(rows))
            # Views: the in-place updates below write to `result`.
            logits, part = logits_tile(rows, words, scale), Statistics(*(statistic[block] for statistic in result))
            columns = targets[block] - vocab_start
            index = columns.clamp(0, logits.shape[1] - 1)[:, None]
            is_in_tile = columns == index[:, 0]
            part.target.add_(logits.gather(1, index)[:, 0].masked_fill_(~is_in_tile, 0.0))
            maximum = torch.maximum(part.maximum, logits.amax(1))
            shift = part.maximum - maximum
            factor = shift.exp()
            logits.sub_(maximum[:, None])
            exponentials = logits.exp()
            part.weighted.add_(part.total * shift).mul_(factor).add_(logits.mul_(exponentials).sum(1))
            part.total.mul_(factor).add_(exponentials.sum(1))
            part.maximum.copy_(maximum)
    return result


GradientOfTile = Callable[[Tensor, Tensor, Tensor, LogprobGradient, float], Tensor]
"""Of rows `[t, H]`, words `[v, H]`, columns `[t]`, upstream gradients and scale -> `[t, v]`; see `gradient_of_tile`."""


def tile_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    upstream: LogprobGradient,
    scale: float,
    shape: TileShape,
    gradient_of: GradientOfTile,
    *,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Recompute every tile and accumulate the gradients of `hidden` and `weight`.

    Arguments as for `tile_statistics`; `gradient_of` computes the gradient in the scaled logits of each tile.

    Returns:
        `[T, H]` float32, of this slice of the vocabulary only, and `[V, H]` in the weight's dtype; None if unwanted.
    """
    dtype = compute_dtype(hidden)
    grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if wants_hidden else None
    grad_weight = torch.empty_like(weight) if wants_weight else None
    for vocab_start, words in _blocks(weight, shape.vocab_size):
        grad_words = torch.zeros(words.shape, dtype=dtype, device=words.device) if wants_weight else None
        for token_start, rows in _blocks(hidden, shape.num_tokens):
            block = slice(token_start, token_start + len(rows))
            gradient = gradient_of(rows, words, targets[block] - vocab_start, upstream.of(block), scale)
            if grad_hidden is not None:
                _add_product(grad_hidden[block], gradient, words, scale)
            if grad_words is not None:
                _add_product(grad_words, gradient.T, rows, scale)
        if grad_weight is not None and grad_words is not None:
            grad_weight[vocab_start : vocab_start + len(words)] = grad_words
    return grad_hidden, grad_weight


def gradient_of_tile(logits: Tensor, columns: Tensor, upstream: LogprobGradient) -> Tensor:
    """Compute the gradient in the scaled logits of one tile, `[t, v]`, by the formula above, in place.

    Args:
        logits: `[t, v]`, scaled.
        columns: `[t] int64`, each row's target in this tile; outside of 0 … v − 1 if it is in another tile.
        upstream: Upstream gradients of these tokens.
    """
    distance = logits.sub_(upstream.maximum[:, None])
    # 1 / s is multiplied into the `[t]` factors, which is cheaper than into the tile.
    share = upstream.log_total.neg().exp()
    if upstream.entropy is None:
        gradient = distance.exp_().mul_((-upstream.logprob * share)[:, None])
    else:
        exponentials = distance.exp()
        offset = upstream.logprob + upstream.entropy * (upstream.entropies - upstream.log_total)
        slope = -upstream.entropy * share
        gradient = distance.mul_(slope[:, None]).sub_((offset * share)[:, None]).mul_(exponentials)
    index = columns.clamp(0, logits.shape[1] - 1)[:, None]
    is_in_tile = columns[:, None] == index
    return gradient.scatter_add_(1, index, upstream.logprob[:, None] * is_in_tile)


def logits_tile(rows: Tensor, words: Tensor, scale: float) -> Tensor:
    """`scale · rows wordsᵀ`, `[t, v]`, accumulated and kept in float32."""
    if rows.dtype == compute_dtype(rows):
        empty = rows.new_empty((len(rows), len(words)))
        return torch.addmm(empty, rows, words.T, beta=0.0, alpha=scale, out=empty)
    return product(rows, words).mul_(scale)


def product(rows: Tensor, words: Tensor) -> Tensor:
    """`rows wordsᵀ` in float32: cuBLAS returns its float32 accumulator; on CPU the operands are converted first."""
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
    """Data type of the computation: float32, or float64 for float64 operands."""
    return torch.promote_types(hidden.dtype, torch.float32)


def _blocks(matrix: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    for first in range(0, len(matrix), size):
        yield first, matrix[first : first + size]
