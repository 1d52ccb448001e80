"""The K most likely tokens of each position, over tiles of the vocabulary: nothing wider than a tile is held.

Shape legend: T tokens, V vocabulary, H hidden, K best tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.portable.logprob_tiles import logits_tile, tile_shape


class TopTokens(NamedTuple):
    """Of each position, the most likely first.

    Attributes:
        logprobs: `[T, K] float32`.
        ids: `[T, K] int64`.
    """

    logprobs: Tensor
    ids: Tensor


def top_tokens(hidden: Tensor, weight: Tensor, num_top: int, scale: float, max_logits: int) -> TopTokens:
    """Those of `scale · hidden weightᵀ`.

    Args:
        hidden: `[T, H]`.
        weight: `[V, H]` of the same dtype.
        num_top: K, at most V.
        scale: Multiplies the logits.
        max_logits: Most elements of a tile.
    """
    shape = tile_shape(hidden.device, max_logits)
    found = []
    for rows in hidden.split(shape.num_tokens):
        best: Tensor | None = None
        for first_word in range(0, len(weight), shape.num_words):
            words = weight[first_word : first_word + shape.num_words]
            logits = logits_tile(rows, words, scale)
            found_here, columns = _top(logits, min(num_top, len(words)))
            log_sum = logits.logsumexp(1)
            if best is None:
                best, ids, total = found_here, columns, log_sum
                continue
            candidates = torch.cat([best, found_here], 1)
            best, places = _top(candidates, min(num_top, candidates.shape[1]))
            ids = torch.cat([ids, columns + first_word], 1).gather(1, places)
            total = torch.logaddexp(total, log_sum)
        assert best is not None, "a head has rows"
        found.append((best - total[:, None], ids))
    return TopTokens(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def top_of_logits(logits: Tensor, num_top: int) -> TopTokens:
    """Those of `[T, V]` logits."""
    values, ids = _top(logits, num_top)
    return TopTokens(values - logits.logsumexp(1, keepdim=True), ids)


def _top(values: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """`max` promises the first of equals, `topk` does not."""
    if num_top == 1:
        greatest, place = values.max(1, keepdim=True)
        return greatest, place
    greatest, place = values.topk(num_top, 1)
    return greatest, place
