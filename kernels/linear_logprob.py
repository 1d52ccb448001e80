"""Target logprobs and entropies straight from hidden states, never holding a whole `[T, V]` matrix.

    ℓ = log_softmax(head(h) / temperature);   logprob_t = ℓ[t, y_t];   entropy_t = −Σ_v exp(ℓ_tv) · ℓ_tv

On a GPU forward is one Triton kernel and backward cuBLAS products around another; on CPU both are cache-sized tiles
(docs/concepts/kernels.md). Memory beyond the gradients themselves is a tile and a few `[T]` vectors, whatever T and V.

Logits of a plain head are accumulated and kept in float32 whatever the operands, as `Float32Head` gives them to a
sampler; another module gives them in a precision of its own.

A head that is an `nn.Linear` without bias is called once, with the computation above in place of its product: hooks
around the module, with which ZeRO-3 gathers and releases its weight, run once forward and once backward, and not per
chunk. Any other module (with a bias, an adapter, a tensor-parallel product) is called for one chunk of tokens at a
time, and again in backward.

Shape legend: T tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from penstock.dataflow.errors import ShapeError
from penstock.kernels.float32_head import Float32Head
from penstock.kernels.portable.logprob import Settings, logprobs_and_entropies

MAX_LOGITS = 1 << 27
"""Logits held at once (elements; 512 MiB in float32) at most. A CPU's tiles are far smaller, for its caches' sake."""
MAX_OPAQUE_LOGITS = 1 << 25
"""The same for heads that can only be called (128 MiB in float32, a few times over while a chunk is worked on)."""


class LinearLogprobs(NamedTuple):
    """What one pass over the logits says about each target.

    Attributes:
        logprobs: `[T] float32`, natural log; carries gradient.
        entropies: `[T] float32`, nats; carries gradient.
        is_most_likely: `[T] bool`, no other token's logit is greater.
    """

    logprobs: Tensor
    entropies: Tensor
    is_most_likely: Tensor


class VocabularyShard(NamedTuple):
    """A slice of the head: the tokens `start` ≤ id < `stop`, and the ranks that hold the slices."""

    start: int
    stop: int
    group: ProcessGroup


def linear_logprobs(
    hidden: Tensor,
    head: nn.Module | Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    max_logits: int = MAX_LOGITS,
) -> LinearLogprobs:
    """Compute the logprob of each target and the entropy of each distribution, in float32.

    Differentiable in `hidden` and `head` through both results; every tile is recomputed in backward.

    Args:
        hidden: `[T, H]`, last hidden states, float32, bfloat16 or float16 (float64 is computed in float64).
        head: The output projection: a module (called, so that ZeRO-3 hooks gather its weight) or its weight `[V, H]`.
        targets: `[T] int64`, the token each hidden state is to predict.
        temperature: Divides the logits; > 0.
        max_logits: Most elements of a tile of logits.

    Raises:
        ShapeError: If shapes or dtypes do not fit each other.
    """
    if isinstance(head, nn.Module) and not _is_plain(head):
        return _chunked_scores(hidden, head, targets, temperature, min(max_logits, MAX_OPAQUE_LOGITS))
    return _scores(hidden, head, targets, Settings(1.0 / temperature, max_logits))


def vocabulary_parallel_logprobs(
    hidden: Tensor,
    head: nn.Module | Tensor,
    targets: Tensor,
    part: VocabularyShard,
    *,
    temperature: float = 1.0,
    max_logits: int = MAX_LOGITS,
) -> LinearLogprobs:
    """Compute the same where each rank of a group holds a slice of the head; all get all results.

    Two collectives of `[T]` and `[3, T]` forward, one of `[T, H]` (float32) backward. The gradient of `hidden` is that
    of the whole vocabulary on every rank: the loss is one, computed by each of them, and not a sum over ranks.

    Args:
        hidden: `[T, H]`, equal on all ranks.
        head: This rank's rows, `[V', H]`; or a module without bias that has them as its `weight`, called once with
            the computation in place of its own, and of any collective of its own.
        targets: `[T] int64`, tokens of the whole vocabulary, equal on all ranks.
        part: Which rows, and who has the others; V' may differ between ranks.
        temperature: Divides the logits; > 0.
        max_logits: Most elements of a tile of logits.

    Raises:
        ShapeError: If shapes or dtypes do not fit each other.
    """
    return _scores(hidden, head, targets - part.start, Settings(1.0 / temperature, max_logits, part.group))


def _scores(hidden: Tensor, head: nn.Module | Tensor, targets: Tensor, settings: Settings) -> LinearLogprobs:
    """By the weight of `head`; if it is a module, as its forward, in between the hooks that make its weight whole."""

    def compute(rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        if rows.shape[:1] != targets.shape or rows.shape[1:] != weight.shape[1:] or rows.dtype != weight.dtype:
            raise ShapeError(
                f"linear_logprob: hidden is {list(rows.shape)} {rows.dtype}, the head's weight {list(weight.shape)} "
                f"{weight.dtype} and targets {list(targets.shape)}. They must be [T, H], [V, H] and [T], the first two "
                "of one dtype: cast one of them, or select as many hidden states as there are targets."
            )
        return logprobs_and_entropies(rows, weight, targets, settings)

    if isinstance(head, Tensor):
        return LinearLogprobs(*compute(hidden, head))
    vars(head)["forward"] = lambda rows: compute(rows, cast("Tensor", head.weight))  # shadows the class's for one call
    try:
        return LinearLogprobs(*head(hidden))
    finally:
        del vars(head)["forward"]


def _is_plain(head: nn.Module) -> bool:
    """True if calling `head` is `hidden weightᵀ` and nothing else, but for hooks and for where it is rounded."""
    return (
        isinstance(head, nn.Linear)
        and type(head).forward in (nn.Linear.forward, Float32Head.forward)
        and "forward" not in vars(head)
        and head.bias is None
    )


def _chunked_scores(
    hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float, max_logits: int
) -> LinearLogprobs:
    """For heads that can only be called: chunks of tokens, each recomputed in backward if there are several."""
    size = max(1, max_logits // cast("int", head.out_features))
    is_recomputed = hidden.shape[0] > size and torch.is_grad_enabled()
    chunks = []
    for rows, wanted in zip(hidden.split(size), targets.split(size), strict=True):
        if is_recomputed:
            chunks.append(checkpoint(_scores_by_call, rows, head, wanted, temperature, use_reentrant=False))
        else:
            chunks.append(_scores_by_call(rows, head, wanted, temperature))
    return LinearLogprobs(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _scores_by_call(hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float) -> tuple[Tensor, ...]:
    logits = cast("Tensor", head(hidden)).float()
    log_probabilities = (logits if temperature == 1.0 else logits / temperature).log_softmax(-1)
    logprobs = log_probabilities.gather(-1, targets[:, None])[:, 0]
    entropies = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return logprobs, entropies, logprobs.detach() == log_probabilities.detach().amax(-1)
