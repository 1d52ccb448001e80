"""Policy losses of one token each: `(LossTokens, AlgorithmConfig) -> PolicyLoss`.

Shape legend: T loss tokens. c target (with gradient), p proximal, b behavior; ρ = exp(c − p); A advantage; sg
stop-gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, clamped_exp, unclipped
from penstock.trainer.config import AlgorithmConfig


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> PolicyLoss:
    """`max(−A ρ, −A clip(ρ, 1−ε_lo, 1+ε_hi))` of any ratio."""
    free = -advantages * ratio
    bound = -advantages * ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    is_clipped = (bound > free).detach()
    return PolicyLoss(torch.maximum(free, bound), is_clipped & (ratio < 1.0), is_clipped & (ratio > 1.0))


def ppo_clip(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`max(−A ρ, −A clip(ρ, 1−ε_lo, 1+ε_hi))`. PPO, arXiv 1707.06347; ε_hi > ε_lo: DAPO, arXiv 2503.14476."""
    return clipped_surrogate(clamped_exp(tokens.target - tokens.proximal), tokens.advantages, config)


def dual_clip(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """As ppo_clip; for A < 0: `min(that, −A c_dual)`, so a huge ratio cannot push without bound. arXiv 1912.09729."""
    loss = ppo_clip(tokens, config)
    ceiling = -tokens.advantages * config.dual_clip
    is_bounded = ((tokens.advantages < 0) & (loss.terms > ceiling)).detach()
    terms = torch.where(is_bounded, ceiling, loss.terms)
    return PolicyLoss(terms, loss.is_clipped_low, loss.is_clipped_high | is_bounded)


def cispo(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`−sg(min(ρ, 1+ε_hi)) A c`: every token keeps a gradient, only its weight is bounded. arXiv 2506.13585.

    With `cispo_low` the weight is also at least 1 − cispo_low.
    """
    ratio = clamped_exp(tokens.target - tokens.proximal).detach()
    lowest = 0.0 if config.cispo_low is None else 1.0 - config.cispo_low
    weight = ratio.clamp(lowest, 1.0 + config.clip_high)
    return PolicyLoss(-weight * tokens.advantages * tokens.target, ratio < weight, ratio > weight)


def reinforce(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`−A c`. Williams, 1992."""
    del config
    return unclipped(-tokens.advantages * tokens.target)


def sapo(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`−(4/τ) σ(τ (ρ − 1)) A`, τ⁺ for A > 0, else τ⁻: a gate that fades as ρ leaves 1. arXiv 2511.20347.

    Its slope at ρ = 1 is that of −A ρ.
    """
    ratio = clamped_exp(tokens.target - tokens.proximal)
    positive = torch.full_like(ratio, config.sapo_tau_positive)
    tau = torch.where(tokens.advantages > 0, positive, torch.full_like(ratio, config.sapo_tau_negative))
    return unclipped(-(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * tokens.advantages)


def dppo(tokens: LossTokens, config: AlgorithmConfig) -> PolicyLoss:
    """`−keep A min(exp(c − b), cap)`; a token is dropped iff A pushes its probability on, beyond δ. arXiv 2602.04879.

    Dropped iff (A > 0 and π − μ > δ) or (A ≤ 0 and π − μ < −δ), with π = exp(c), μ = exp(b): the binary form of the
    total variation between the policies. A probability bounds no ratio: π = 0.19 and μ = 1e-6 differ by less than 0.2
    and by a factor of 190,000. So the weight is capped as in the authors' code: the gradient is −A min(exp(c − b), cap)
    everywhere, also where the cap acts.
    """
    shift = tokens.target.detach().exp() - tokens.behavior.exp()
    goes_up = tokens.advantages > 0
    too_high = goes_up & (shift > config.dppo_delta)
    too_low = ~goes_up & (shift < -config.dppo_delta)
    weight = clamped_exp((tokens.target - tokens.behavior).detach()).clamp(max=config.dppo_cap)
    terms = -tokens.advantages * weight * (tokens.target - tokens.target.detach()).exp()
    return PolicyLoss(terms.masked_fill(too_high | too_low, 0.0), too_low, too_high)
