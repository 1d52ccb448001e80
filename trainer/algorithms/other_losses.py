"""Losses beside the policy gradient, with the same signature: `(LossTokens, AlgorithmConfig) -> PolicyLoss`.

Shape legend: T loss tokens.
"""

from __future__ import annotations

import torch

from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, unclipped
from penstock.trainer.config import AlgorithmConfig


def sft(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`−c`: cross-entropy of the tokens, whatever they earned."""
    del config
    return unclipped(-tokens.target)


def distill(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """Reverse KL from the student to a teacher, on the student's own tokens. On-policy distillation, arXiv 2306.13649.

    Of the sampled tokens: `−sg(log π_teacher − c) · c`.
    """
    del config
    assert tokens.teacher is not None, "distill needs the teacher's logprobs"
    return unclipped(-(tokens.teacher - tokens.target).detach() * tokens.target)


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
