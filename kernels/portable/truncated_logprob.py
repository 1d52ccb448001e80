"""Logprobs over the support of a truncated distribution: products with a few rows of the head per token.

With top-k, top-p or min-p the sampler draws token y from a support S of at most K tokens, renormalised. Over the same S

    logprob = x_y − log Σ_{s ∈ S} exp x_s;   entropy = −Σ_{s ∈ S} p_s log p_s,   p = softmax of x over S

so the rest of the vocabulary is not needed: M = Σ_t |S_t| products of length H instead of T · V. They are gathered in
chunks, and again in backward; besides ids and `[T, K]` logits nothing is kept. The gradient of the head is summed in
float32 over the U ≤ M rows that occur, and written once in the dtype of the weight.

Shape legend: T tokens, K the largest support, M kept tokens in all, V (slice of the) vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from penstock.kernels.portable.logprob import compute_dtype

PADDING = -1
"""In the place of an id behind the end of a support."""
_CPU_CHUNK = 1 << 19
"""Elements of one gathered chunk: 2 MiB in float32, which stay in the cache of one core."""
_GPU_CHUNK = 1 << 25
"""Also in platform/cluster/memory.py."""


def truncated_logprobs_and_entropies(
    hidden: Tensor, weight: Tensor, support: Tensor, scale: float, group: ProcessGroup | None, first_row: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute logprobs and entropies, `[T]` each, and whether the target is the most likely of its support, `[T] bool`.

    Differentiable in `hidden` and `weight`.

    Args:
        hidden: `[T, H]`.
        weight: `[V, H]` of the same dtype: of the tokens `first_row` ≤ id < `first_row` + V.
        support: `[T, K] int64`, the target first, then the other ids, then `PADDING`.
        scale: Multiplies the logits: 1 / temperature.
        group: Its ranks hold the other rows; None if there are none.
        first_row: The first token that this rank holds.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        logits = _GatheredLogits.apply(hidden, weight, support, group, first_row)
    return scores_in_support(logits * scale, support)


def scores_in_support(logits: Tensor, support: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three results of `truncated_logprobs_and_entropies` from the scaled logits of the support, `[T, K]`."""
    is_padding = support == PADDING
    log_probabilities = logits.masked_fill(is_padding, -torch.inf).log_softmax(-1)
    # exp(−∞) · 0 instead of exp(−∞) · −∞.
    entropies = -(log_probabilities.exp() * log_probabilities.masked_fill(is_padding, 0.0)).sum(-1)
    logprobs = log_probabilities[:, 0]
    return logprobs, entropies, logprobs.detach() == log_probabilities.detach().amax(-1)


class _GatheredLogits(torch.autograd.Function):
    """`hidden_t · weight_s` of every token t and every s in its support, `[T, K]`; 0 in the place of padding."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, support: Tensor, group: ProcessGroup | None, first_row: int
    ) -> Tensor:
        rows = support - first_row
        tokens, places = ((support != PADDING) & (rows >= 0) & (rows < len(weight))).nonzero(as_tuple=True)
        rows = rows[tokens, places]
        dtype = compute_dtype(hidden)
        products = torch.empty(len(rows), dtype=dtype, device=hidden.device)
        for chunk in _chunks(rows, hidden):
            products[chunk] = (hidden[tokens[chunk]].to(dtype) * weight[rows[chunk]].to(dtype)).sum(-1)
        logits = torch.zeros(support.shape, dtype=dtype, device=hidden.device)
        logits[tokens, places] = products
        if group is not None:
            all_reduce(logits, ReduceOp.SUM, group)  # each logit comes from one rank
        ctx.group = group
        ctx.save_for_backward(hidden, weight, tokens, places, rows)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, tokens, places, rows = ctx.saved_tensors
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        dtype = compute_dtype(hidden)
        gradient = grad_logits[tokens, places].to(dtype)[:, None]
        grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        used, of_used = rows.unique(return_inverse=True)
        grad_used = torch.zeros(len(used), weight.shape[1], dtype=dtype, device=weight.device)
        for chunk in _chunks(rows, hidden):
            if wants_hidden:
                grad_hidden.index_add_(0, tokens[chunk], gradient[chunk] * weight[rows[chunk]])
            if wants_weight:
                grad_used.index_add_(0, of_used[chunk], gradient[chunk] * hidden[tokens[chunk]])
        grad_weight = None
        if wants_weight:
            grad_weight = torch.zeros_like(weight)
            grad_weight[used] = grad_used.to(weight.dtype)
        if wants_hidden and ctx.group is not None:
            all_reduce(grad_hidden, ReduceOp.SUM, ctx.group)
        return grad_hidden.to(hidden.dtype) if wants_hidden else None, grad_weight, None, None, None


def _chunks(rows: Tensor, hidden: Tensor) -> Iterator[slice]:
    """Slices of the M kept tokens whose gathered rows fit a chunk."""
    elements = _CPU_CHUNK if hidden.device.type == "cpu" else _GPU_CHUNK
    size = max(1, elements // hidden.shape[1])
    for start in range(0, len(rows), size):
        yield slice(start, start + size)
