"""Losses beside the policy gradient, with the same signature: `(LossTokens, AlgorithmConfig) -> PolicyLoss`.

Shape legend: T loss tokens, K entries of a truncated vocabulary.
"""

from __future__ import annotations

import torch

from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, unclipped
from penstock.trainer.config import AlgorithmConfig

_SMALLEST_TAIL = 1e-30


def sft(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`−c`: cross-entropy of the tokens, whatever they earned."""
    del config
    return unclipped(-tokens.target)


def distill(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Reverse KL from the student to a teacher, on the student's own tokens. On-policy distillation, arXiv 2306.13649.

    Sampled: `−sg(log π_teacher − c) · c`. With `top_k`, exact over the student's K likeliest tokens and one bucket for
    the rest: `Σ_k π_k (log π_k − log τ_k) + π_rest (log π_rest − log τ_rest)`.
    """
    del config
    if tokens.top_k is None:
        assert tokens.teacher is not None, "distill needs the teacher's logprobs"
        return unclipped(-(tokens.teacher - tokens.target).detach() * tokens.target)
    student, teacher = tokens.top_k
    head = (student.exp() * (student - teacher)).sum(-1)
    rest = (1.0 - student.exp().sum(-1)).clamp(min=_SMALLEST_TAIL)
    teacher_rest = (1.0 - teacher.exp().sum(-1)).clamp(min=_SMALLEST_TAIL)
    return unclipped(head + rest * (rest.log() - teacher_rest.log()))


def value(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`½ max((V − ret)², (clip(V, V_old ± ε_v) − ret)²)`: a critic's loss. PPO, arXiv 1707.06347."""
    assert tokens.values is not None, "value needs a critic"
    assert tokens.old_values is not None, "value needs the values at sampling"
    assert tokens.returns is not None, "value needs returns"
    low, high = tokens.old_values - config.value_clip, tokens.old_values + config.value_clip
    free = (tokens.values - tokens.returns).square()
    bound = (torch.clamp(tokens.values, low, high) - tokens.returns).square()
    is_clipped = (bound > free).detach()
    return PolicyLoss(
        0.5 * torch.maximum(free, bound), is_clipped & (tokens.values < low), is_clipped & (tokens.values > high)
    )
