"""Target logprobs and entropies when every rank of a tensor-parallel group computes the logits of its own tokens only.

With m = max over the whole vocabulary, z_v = logit_v / temperature − m and S = Σ_v exp(z_v), summed over ranks:

    logprob_t = z_t,y − log S;   entropy_t = log S − (1/S) · Σ_v exp(z_tv) · z_tv

So three numbers per token and a maximum travel, never logits (Megatron-LM, arXiv:1909.08053, section 3). All ranks
score the same tokens and go on with the same results: backward of each sum passes the gradient to every rank as it is.

Shape legend: T tokens, P tokens of the vocabulary on this rank, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint

from penstock.kernels.linear_logprob import MAX_OPAQUE_LOGITS


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The tokens whose logits this rank computes: `start` ≤ id < `stop`.

    Attributes:
        group: The ranks that hold the other parts, in the order of the ids.
    """

    start: int
    stop: int
    group: Any


def vocabulary_parallel_logprob(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    part: VocabularyPart,
    *,
    temperature: float = 1.0,
    max_logits: int = MAX_OPAQUE_LOGITS,
) -> tuple[Tensor, Tensor]:
    """`linear_logprob` of a head whose rows are split over ranks. Collective, forward and backward.

    Args:
        hidden: `[T, H]`, last hidden states, the same on every rank of the group.
        head: Gives this rank's logits `[T, P]`; its backward sums the gradient of `hidden` over the group.
        targets: `[T] int64`, ids of the whole vocabulary, the same on every rank.
        part: Which rows this rank has.
        temperature: Divides the logits; > 0.
        max_logits: Elements of `[chunk, P]` held at once on one rank; above it chunks are recomputed in backward.

    Returns:
        `[T] float32` logprobs and `[T] float32` entropies over the whole vocabulary, natural log, equal on all ranks.
    """
    chunk_tokens = _chunk_tokens(part, max_logits)
    if hidden.shape[0] <= chunk_tokens:
        return _scores(hidden, head, targets, part, temperature)
    logprobs, entropies = [], []
    for rows, wanted in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            logprob, entropy = checkpoint(_scores, rows, head, wanted, part, temperature, use_reentrant=False)
        else:
            logprob, entropy = _scores(rows, head, wanted, part, temperature)
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)


@torch.no_grad()
def vocabulary_parallel_argmax(
    hidden: Tensor, head: nn.Module, part: VocabularyPart, *, max_logits: int = MAX_OPAQUE_LOGITS
) -> Tensor:
    """Most likely token of each position over the whole vocabulary, `[T] int64`; ties go to the smaller id."""
    chunks = hidden.split(_chunk_tokens(part, max_logits))
    highest, ids = zip(*((logits.max(-1)) for logits in (head(rows).float() for rows in chunks)), strict=True)
    mine, local_id = torch.cat(highest), torch.cat(ids) + part.start
    best = _maximum(mine, part.group)
    beyond = torch.iinfo(local_id.dtype).max
    candidates = torch.where(mine == best, local_id, beyond)
    distributed.all_reduce(candidates, op=distributed.ReduceOp.MIN, group=part.group)
    return candidates


def _scores(
    hidden: Tensor, head: nn.Module, targets: Tensor, part: VocabularyPart, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = cast("Tensor", head(hidden)).float()
    if temperature != 1.0:
        logits = logits / temperature
    shifted = logits - _maximum(logits.detach().amax(-1), part.group)[:, None]
    is_here = (targets >= part.start) & (targets < part.stop)
    index = torch.where(is_here, targets - part.start, 0)
    of_target = shifted.gather(-1, index[:, None])[:, 0].masked_fill(~is_here, 0.0)
    weights = shifted.exp()
    sums = torch.stack([of_target, weights.sum(-1), (weights * shifted).sum(-1)])
    target, normaliser, weighted = _SumOverRanks.apply(sums, part.group)
    log_normaliser = normaliser.log()
    return target - log_normaliser, log_normaliser - weighted / normaliser


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks whose results are used in the same way by all: each rank's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        del ctx
        total = values.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradients[0], None


def _maximum(values: Tensor, group: Any) -> Tensor:
    highest = values.clone()
    distributed.all_reduce(highest, op=distributed.ReduceOp.MAX, group=group)
    return highest


def _chunk_tokens(part: VocabularyPart, max_logits: int) -> int:
    return max(1, max_logits // (part.stop - part.start))
