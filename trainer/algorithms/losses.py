"""Losses: `(LossTokens, settings of the loss) -> PolicyLoss`, of single tokens, of sequences, of pairs, and without
ratio.

A new loss is a function here, an entry in catalog.py, a settings class in config.py if it has settings, and
conf/algorithm/loss/NAME.yaml. Your own loss needs none of them: `algorithm/loss=custom
algorithm.loss.function=pkg.module:function`.

Shape legend: T loss tokens, S sequences, P pairs, G members of a group. c target (with gradient), p proximal, b
behavior; ρ = exp(c − p); A advantage; sg stop-gradient.

A sequence is never split over micro-batches (batches/packing.py), so its sums are exact. Sums and means are computed
first and then clamped to ±20. The two members of a pair are in one micro-batch too (units). Each token of either member
gets half of the pair's loss and the weight 1 / (P n_i), so the total is the mean over the P pairs of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.dataflow.trajectory import rounding_error
from penstock.trainer.algorithms.config import (
    CispoConfig,
    ClipCovConfig,
    ClippedConfig,
    DpoConfig,
    DppoConfig,
    DualClipConfig,
    GmpoConfig,
    IpoConfig,
    KlCovConfig,
    PairsConfig,
    PlainConfig,
    SapoConfig,
)
from penstock.trainer.algorithms.kl import k3
from penstock.trainer.algorithms.tokens import LossTokens, PolicyLoss, clamped_exp, unclipped
from penstock.trainer.config import CriticConfig


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, config: ClippedConfig | DualClipConfig | ClipCovConfig
) -> PolicyLoss:
    """`max(−A ρ, −A clip(ρ, 1−ε_lo, 1+ε_hi))` of any ratio."""
    free = -advantages * ratio
    bound = -advantages * ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    is_clipped = (bound > free).detach()
    return PolicyLoss(torch.maximum(free, bound), is_clipped & (ratio < 1.0), is_clipped & (ratio > 1.0))


def ppo_clip(tokens: LossTokens, config: ClippedConfig | DualClipConfig) -> PolicyLoss:
    """`max(−A ρ, −A clip(ρ, 1−ε_lo, 1+ε_hi))`. PPO, arXiv 1707.06347; ε_hi > ε_lo: DAPO, arXiv 2503.14476."""
    return clipped_surrogate(clamped_exp(tokens.target - tokens.proximal), tokens.advantages, config)


def dual_clip(tokens: LossTokens, config: DualClipConfig) -> PolicyLoss:
    """As ppo_clip; for A < 0: `min(that, −A c_dual)`, so the loss of a huge ratio is bounded. arXiv 1912.09729."""
    loss = ppo_clip(tokens, config)
    ceiling = -tokens.advantages * config.max_ratio
    is_bounded = ((tokens.advantages < 0) & (loss.terms > ceiling)).detach()
    terms = torch.where(is_bounded, ceiling, loss.terms)
    return PolicyLoss(terms, loss.is_clipped_low, loss.is_clipped_high | is_bounded)


def cispo(tokens: LossTokens, config: CispoConfig) -> PolicyLoss:
    """`−sg(min(ρ, 1+ε_hi)) A c`: every token keeps a gradient, only its weight is bounded. arXiv 2506.13585.

    With `clip_low` the weight is also at least 1 − clip_low.
    """
    ratio = clamped_exp(tokens.target - tokens.proximal).detach()
    lowest = 0.0 if config.clip_low is None else 1.0 - config.clip_low
    weight = ratio.clamp(lowest, 1.0 + config.clip_high)
    return PolicyLoss(-weight * tokens.advantages * tokens.target, ratio < weight, ratio > weight)


def reinforce(tokens: LossTokens, config: PlainConfig) -> PolicyLoss:
    """`−A c`. Williams, 1992."""
    del config
    return unclipped(-tokens.advantages * tokens.target)


def sapo(tokens: LossTokens, config: SapoConfig) -> PolicyLoss:
    """`−(4/τ) σ(τ (ρ − 1)) A`, τ⁺ for A > 0, else τ⁻: a gate whose slope falls as ρ leaves 1. arXiv 2511.20347.

    Its slope at ρ = 1 is that of −A ρ.
    """
    ratio = clamped_exp(tokens.target - tokens.proximal)
    positive = torch.full_like(ratio, config.tau_positive)
    tau = torch.where(tokens.advantages > 0, positive, torch.full_like(ratio, config.tau_negative))
    return unclipped(-(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * tokens.advantages)


def dppo(tokens: LossTokens, config: DppoConfig) -> PolicyLoss:
    """`−keep A min(exp(c − b), cap)`; drops tokens that A would move further than δ. arXiv 2602.04879.

    Dropped iff (A > 0 and π − μ > δ) or (A ≤ 0 and π − μ < −δ), with π = exp(c), μ = exp(b): the binary form of the
    total variation between the policies. A limit on the difference does not limit the ratio: π = 0.19 and μ = 1e-6
    differ by less than 0.2 and by a factor of 190,000. So the weight is capped as in the authors' code, and the
    gradient is −A min(exp(c − b), cap) everywhere, also where the cap acts.
    """
    shift = tokens.target.detach().exp() - tokens.behavior.exp()
    goes_up = tokens.advantages > 0
    too_high = goes_up & (shift > config.delta)
    too_low = ~goes_up & (shift < -config.delta)
    weight = clamped_exp((tokens.target - tokens.behavior).detach()).clamp(max=config.max_weight)
    terms = -tokens.advantages * weight * (tokens.target - tokens.target.detach()).exp()
    return PolicyLoss(terms.masked_fill(too_high | too_low, 0.0), too_low, too_high)


def gspo(tokens: LossTokens, config: ClippedConfig) -> PolicyLoss:
    """`ppo_clip` on `s_i = exp(mean_t(c − p))`, one term per sequence. GSPO, arXiv 2507.18071.

    Each of the n_i tokens gets the term, with the weight 1 / (N n_i) by `seq_mean_token_mean`. Advantages that differ
    within a sequence are averaged.
    """
    advantages = tokens.segment_mean(tokens.advantages)
    loss = clipped_surrogate(_sequence_ratio(tokens), advantages, config)
    return PolicyLoss(*map(tokens.spread, loss))


def gspo_token(tokens: LossTokens, config: ClippedConfig) -> PolicyLoss:
    """`ppo_clip` on `sg(s_i)·exp(c − sg(c))`: ratio of the sequence, advantage of the token. arXiv 2507.18071."""
    ratio = tokens.spread(_sequence_ratio(tokens)).detach() * (tokens.target - tokens.target.detach()).exp()
    return clipped_surrogate(ratio, tokens.advantages, config)


def gmpo(tokens: LossTokens, config: GmpoConfig) -> PolicyLoss:
    """`−A exp(mean_t d)`, d = c − p, at most ε_hi where A > 0, at least −ε_lo where A < 0. GMPO, arXiv 2507.20673.

    The geometric mean of the ratios, each clipped in nats before the mean (the paper: e^−0.4 to e^0.4), so that a
    single ratio moves it little. One term per sequence, as in gspo; advantages that differ within one are averaged.
    """
    advantages = tokens.spread(tokens.segment_mean(tokens.advantages))
    drift = tokens.target - tokens.proximal
    is_high = (advantages > 0) & (drift > config.clip_high)
    is_low = (advantages < 0) & (drift < -config.clip_low)
    clipped = drift.masked_fill(is_high, config.clip_high).masked_fill(is_low, -config.clip_low)
    ratio = tokens.spread(clamped_exp(tokens.segment_mean(clipped)))
    return PolicyLoss(-advantages * ratio, is_low, is_high)


def clip_cov(tokens: LossTokens, config: ClipCovConfig) -> PolicyLoss:
    """As ppo_clip, without the tokens that `selection.clip_cov` has drawn from the batch. arXiv 2505.22617.

    Tokens whose advantage and logprob vary together are those that lower the entropy. The drawn ones count as clipped.
    """
    loss = clipped_surrogate(clamped_exp(tokens.target - tokens.proximal), tokens.advantages, config)
    is_drawn = tokens.selection("clip_cov")
    return PolicyLoss(loss.terms.masked_fill(is_drawn, 0.0), loss.is_clipped_low, loss.is_clipped_high | is_drawn)


def kl_cov(tokens: LossTokens, config: KlCovConfig) -> PolicyLoss:
    """`−A ρ`, and `+ β (ρ − log ρ − 1)` at the tokens of `selection.kl_cov`. arXiv 2505.22617.

    The added term estimates KL(π_p‖π) from tokens of π_p. The authors' code adds β |c − p|, whose slope is ±β also
    where c and p differ by rounding only; so the gradient would depend on how a batch is packed. Ours has the slope
    β (ρ − 1), so the published β = 1, of |c − p|, holds a token less firmly here while ρ is below 2.
    """
    ratio = clamped_exp(tokens.target - tokens.proximal)
    divergence = config.coefficient * k3(tokens.proximal, tokens.target)
    is_held = tokens.selection("kl_cov")
    return unclipped(-tokens.advantages * ratio + divergence.masked_fill(~is_held, 0.0))


def topr(tokens: LossTokens, config: PlainConfig) -> PolicyLoss:
    """A > 0: `−A c`; else `−sg(min(exp(Σ_t (c − b)), 1)) A c`. Tapered off-policy REINFORCE, arXiv 2503.14286."""
    del config
    ratio = clamped_exp(tokens.segment_sum((tokens.target - tokens.behavior).detach())).clamp(max=1.0)
    weight = torch.where(tokens.advantages > 0, torch.ones_like(tokens.advantages), tokens.spread(ratio))
    return unclipped(-weight * tokens.advantages * tokens.target)


def _sequence_ratio(tokens: LossTokens) -> Tensor:
    """`[S]` s_i."""
    return clamped_exp(tokens.segment_mean(tokens.target - tokens.proximal))


def online_dpo(tokens: LossTokens, config: DpoConfig) -> PolicyLoss:
    """`−(1 − ε) log σ(β Δ) − ε log σ(−β Δ)`, `Δ = (Σc⁺ − Σr⁺) − (Σc⁻ − Σr⁻)`. DPO, arXiv 2305.18290.

    Online, with pairs of the policy's own answers: arXiv 2402.04792. ε is `label_smoothing`: conservative DPO, for
    preferences that are wrong in a share ε of the pairs (Mitchell, 2023). `length: mean` has means in place of the
    sums, so that a long answer has no larger margin for its length.
    """
    logits = config.beta * pair_margins(tokens, per_token=config.length == "mean")
    agree, disagree = torch.nn.functional.logsigmoid(logits), torch.nn.functional.logsigmoid(-logits)
    smoothing = config.label_smoothing
    return _spread_pair_losses(tokens, -(1.0 - smoothing) * agree - smoothing * disagree)


def ipo(tokens: LossTokens, config: IpoConfig) -> PolicyLoss:
    """`(Δ − 1/(2β))²`: the goal is a finite margin, where the gradient of a pair is 0. arXiv 2310.12036.

    `length`: `mean`, Δ of per-token means, so that the goal means the same for answers of any length (the authors'
    reading; TRL and AReaL do so); `sum`, Δ of sums as in DPO, the paper to the letter.
    """
    margins = pair_margins(tokens, per_token=config.length == "mean")
    return _spread_pair_losses(tokens, (margins - 1.0 / (2.0 * config.beta)).square())


def pair_margins(tokens: LossTokens, *, per_token: bool = False) -> Tensor:
    """`[P] float64` Δ: how much more than the reference the policy prefers the better member.

    Differences of each token are summed, in float64: the logprobs of a long answer add up to some ten thousand nats, of
    which float32 keeps two decimals, and the margin is the difference of four such sums.

    Args:
        tokens: With pairs.
        per_token: Divide each member's sum by its number of tokens.
    """
    drift = tokens.target.double() - tokens.reference.double()
    of_member = tokens.segment_mean(drift) if per_token else tokens.segment_sum(drift)
    return of_member[tokens.pairs[:, 0]] - of_member[tokens.pairs[:, 1]]


def preference_pairs(
    rewards: NDArray[np.float64], eligible: Sequence[int], config: PairsConfig
) -> list[tuple[int, int]]:
    """Pairs (better, worse) whose rewards differ by more than `max(margin, rounding_error)`.

    Args:
        rewards: `[G]`.
        eligible: Members that can be compared: those with loss tokens.
        config: `pairs: best_worst` gives at most one pair, the first best and the first worst; `all` every one.
    """
    members = list(eligible)
    if not members:
        return []
    least = max(config.margin, rounding_error(rewards[members]))
    if config.pairs == "best_worst":
        members = [max(members, key=lambda one: rewards[one]), min(members, key=lambda one: rewards[one])]
    gaps = [(better, worse, float(rewards[better] - rewards[worse])) for better in members for worse in members]
    return [(better, worse) for better, worse, gap in gaps if gap > least]


def _spread_pair_losses(tokens: LossTokens, pair_losses: Tensor) -> PolicyLoss:
    """`[P] float64` -> `[T]`: at each token half the losses of all pairs of its sequence."""
    members = tokens.pairs.T.flatten()
    halves = pair_losses.new_zeros(tokens.num_segments).index_add(0, members, 0.5 * pair_losses.repeat(2))
    return unclipped(tokens.spread(halves).to(tokens.target.dtype))


def sft(tokens: LossTokens, config: PlainConfig) -> PolicyLoss:
    """`−c`: cross-entropy of the tokens; rewards are not used."""
    del config
    return unclipped(-tokens.target)


def negative_logprob(tokens: LossTokens) -> Tensor:
    """`[T]`: `−c φ`, of answers that are worth imitating. RPO, arXiv 2404.19733; VAPO, arXiv 2504.05118.

    With the token weights, φ (`nll_factors`) makes it one of two means over the batch. Of a loss of pairs, over the
    pairs, of the mean −c of the better answer's tokens: an answer counts once for each pair that it wins (RPO). Else
    over all tokens of the answers that pass (`dataflow.pass_reward`), however few they are (VAPO).

    A margin or an advantage only says that an answer is better than others, and both answers of a pair may lose
    probability.
    """
    return -tokens.target * (0.0 if tokens.nll_factors is None else tokens.nll_factors)


def distill(tokens: LossTokens, config: PlainConfig) -> PolicyLoss:
    """Reverse KL from the student to a teacher, on the student's own tokens. On-policy distillation, arXiv 2306.13649.

    Of the sampled tokens: `−sg(log π_teacher − c) · c`.
    """
    del config
    assert tokens.teacher is not None, "distill needs the teacher's logprobs"
    return unclipped(-(tokens.teacher - tokens.target).detach() * tokens.target)


def value(tokens: LossTokens, config: CriticConfig) -> PolicyLoss:
    """`½ max((V − ret)², (clip(V, V_old ± ε_v) − ret)²)`: a critic's loss. Engstrom et al., arXiv 2005.12729, 3."""
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
