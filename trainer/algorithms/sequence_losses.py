"""Policy losses that look at whole sequences: `(LossTokens, AlgorithmConfig) -> PolicyLoss`.

A sequence lies whole in one micro-batch (batches/packing.py), so its sums are exact. Sums and means are taken first and
clamped to ±20 then.

Shape legend: T loss tokens, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.algorithms.policy_losses import clipped_surrogate
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, clamped_exp, unclipped
from penstock.trainer.config import AlgorithmConfig


def gspo(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`ppo_clip` on `s_i = exp(mean_t(c − p))`, one term per sequence. GSPO, arXiv 2507.18071.

    The term stands at each of its n_i tokens, and `seq_mean_token_mean` weighs each 1 / (N n_i). Advantages that differ
    within a sequence are averaged.
    """
    advantages = tokens.segment_mean(tokens.advantages)
    loss = clipped_surrogate(_sequence_ratio(tokens), advantages, config)
    return PolicyLoss(*map(tokens.spread, loss))


def gspo_token(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`ppo_clip` on `sg(s_i)·exp(c − sg(c))`: ratio of the sequence, advantage of the token. arXiv 2507.18071."""
    ratio = tokens.spread(_sequence_ratio(tokens)).detach() * (tokens.target - tokens.target.detach()).exp()
    return clipped_surrogate(ratio, tokens.advantages, config)


def topr(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """A > 0: `−A c`; else `−sg(min(exp(Σ_t (c − b)), 1)) A c`. Tapered off-policy REINFORCE, arXiv 2503.14286."""
    del config
    ratio = clamped_exp(tokens.segment_sum((tokens.target - tokens.behavior).detach())).clamp(max=1.0)
    weight = torch.where(tokens.advantages > 0, torch.ones_like(tokens.advantages), tokens.spread(ratio))
    return unclipped(-weight * tokens.advantages * tokens.target)


def _sequence_ratio(tokens: LossTokens) -> Tensor:
    """`[S]` s_i."""
    return clamped_exp(tokens.segment_mean(tokens.target - tokens.proximal))
