"""Target logprobs and entropies straight from hidden states, never holding a whole `[T, V]` matrix.

    ℓ = log_softmax(head(h) / temperature);   logprob_t = ℓ[t, y_t];   entropy_t = −Σ_v exp(ℓ_tv) · ℓ_tv

Shape legend: T tokens, V vocabulary, H hidden. This is the torch version, for CPU and as the reference of the
Triton kernel, which will be dispatched from `linear_logprob` for tensors on an accelerator.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 1 << 25
"""Logits held at once (elements; 128 MiB in float32). Above it tokens are chunked, and recomputed in backward."""


def linear_logprob(
    hidden: Tensor, head: nn.Module | Tensor, targets: Tensor, *, temperature: float = 1.0, max_logits: int = MAX_LOGITS
) -> tuple[Tensor, Tensor]:
    """Compute the logprob of each target and the entropy of each distribution, in float32.

    Differentiable in `hidden` and `head` through both results. If T·V ≤ `max_logits` one chunk is computed and kept
    for backward; otherwise every chunk is recomputed in backward, so that peak extra memory is one chunk.

    Args:
        hidden: `[T, H]`, last hidden states, float32 or bfloat16.
        head: The output projection: a module (called, so that ZeRO-3 hooks gather its weight) or its weight `[V, H]`.
        targets: `[T] int64`, the token each hidden state is to predict.
        temperature: Divides the logits; > 0.
        max_logits: Elements of `[chunk, V]` held at once.

    Returns:
        `[T] float32` logprobs and `[T] float32` entropies, natural log.
    """
    chunk_tokens = _chunk_tokens(head, max_logits)
    if hidden.shape[0] <= chunk_tokens:
        return _scores(hidden, head, targets, temperature)
    logprobs, entropies = [], []
    for rows, wanted in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
        if torch.is_grad_enabled():
            logprob, entropy = checkpoint(_scores, rows, head, wanted, temperature, use_reentrant=False)
        else:
            logprob, entropy = _scores(rows, head, wanted, temperature)
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)


def linear_argmax(hidden: Tensor, head: nn.Module | Tensor, *, max_logits: int = MAX_LOGITS) -> Tensor:
    """Most likely token of each position, `[T] int64`; ties go to the smaller id. Not differentiable."""
    with torch.no_grad():
        chunks = hidden.split(_chunk_tokens(head, max_logits))
        return torch.cat([_logits(rows, head).argmax(-1) for rows in chunks])


def _scores(hidden: Tensor, head: nn.Module | Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = _logits(hidden, head).float()
    if temperature != 1.0:
        logits = logits / temperature
    log_probabilities = logits.log_softmax(-1)
    logprobs = log_probabilities.gather(-1, targets[:, None])[:, 0]
    return logprobs, -(log_probabilities.exp() * log_probabilities).sum(-1)


def _logits(hidden: Tensor, head: nn.Module | Tensor) -> Tensor:
    return F.linear(hidden, head) if isinstance(head, Tensor) else cast("Tensor", head(hidden))


def _chunk_tokens(head: nn.Module | Tensor, max_logits: int) -> int:
    vocab_size = head.shape[0] if isinstance(head, Tensor) else cast("int", head.out_features)
    return max(1, max_logits // vocab_size)
