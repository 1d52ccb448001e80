"""The variants of an algorithm: each loss, advantage estimator and correction has a section with its own settings only.

A configuration chooses a variant by a config group (`algorithm/loss=dppo`), which replaces the whole section, so that
no setting of another variant remains. Formulas and papers of all names: catalog.py, `penstock algorithms`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from penstock.trainer.algorithms.catalog import is_import_path, known


def _import_path(value: str) -> str:
    if not is_import_path(value):
        raise ValueError("name a function as package.module:function")
    return value


ImportPath = Annotated[str, AfterValidator(_import_path)]


class Variant(BaseModel):
    """Base of all sections here: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Named(Variant):
    """A variant of the catalog."""

    type: str

    @property
    def name(self) -> str:
        """Its name in the catalog."""
        return self.type


class Custom(Variant):
    """A function of the user's own."""

    type: Literal["custom"] = "custom"
    """Always `custom`."""
    function: ImportPath
    """Import path of the function, `package.module:function`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Settings of the function, which it finds in `config.args`."""

    @property
    def name(self) -> str:
        """The import path, which is its name in the catalog."""
        return self.function


# -- Policy losses ----------------------------------------------------------------------------------------------------


class ClippedConfig(Named):
    """`max(−A ρ, −A clip(ρ, 1 − ε_lo, 1 + ε_hi))` of the ratio of a token (ppo_clip) or a sequence (the others)."""

    type: Literal["ppo_clip", "gspo", "gspo_token"] = "ppo_clip"
    """Which ratio is clipped."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """ε_lo: the ratio is clipped below 1 − ε_lo (PPO's paper, section 6.1: 0.2)."""
    clip_high: float = Field(default=0.2, gt=0)
    """ε_hi: the ratio is clipped above 1 + ε_hi (likewise)."""


class DualClipConfig(Named):
    """`ppo_clip` whose loss is bounded where the advantage is negative."""

    type: Literal["dual_clip"] = "dual_clip"
    """Always `dual_clip`."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """ε_lo: the ratio is clipped below 1 − ε_lo."""
    clip_high: float = Field(default=0.2, gt=0)
    """ε_hi: the ratio is clipped above 1 + ε_hi."""
    max_ratio: float = Field(default=3.0, gt=1)
    """c_dual: largest ratio that counts where the advantage is negative."""


class GmpoConfig(Named):
    """Geometric mean of the ratios of a sequence, each clipped before the mean."""

    type: Literal["gmpo"] = "gmpo"
    """Always `gmpo`."""
    clip_low: float = Field(default=0.4, gt=0)
    """The log-ratio of a token is clipped below −clip_low where the advantage is negative, nats (its paper, section 3:
    0.4)."""
    clip_high: float = Field(default=0.4, gt=0)
    """It is clipped above clip_high where the advantage is positive, nats (likewise)."""


class ClipCovConfig(Named):
    """`ppo_clip` without the gradient of a few tokens whose advantage and logprob vary together."""

    type: Literal["clip_cov"] = "clip_cov"
    """Always `clip_cov`."""
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """ε_lo: the ratio is clipped below 1 − ε_lo; 1 as in the authors' recipes is no lower bound."""
    clip_high: float = Field(default=1.0, gt=0)
    """ε_hi: the ratio is clipped above 1 + ε_hi."""
    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the tokens of a batch that are drawn, at least one token (its paper, section 4.3: 0.0002)."""
    min_covariance: float = 1.0
    """Tokens of a larger covariance can be drawn (likewise: 1)."""
    max_covariance: float = 5.0
    """Tokens of a smaller covariance can be drawn (likewise: 5)."""


class KlCovConfig(Named):
    """A ratio without a clip; the tokens of largest covariance are held to the proximal policy by a divergence."""

    type: Literal["kl_cov"] = "kl_cov"
    """Always `kl_cov`."""
    share: float = Field(default=2e-4, gt=0, le=1)
    """Share of the tokens of a batch, those of largest covariance, at least one token (its paper, section 4.3: 0.0002
    for 32 B parameters, 0.002 for 7 B)."""
    coefficient: float = Field(default=1.0, ge=0)
    """β of their divergence ρ − log ρ − 1 from the proximal policy. The paper's number, 1, is of |log ρ|, whose slope
    is 1 at any distance; ours has the slope ρ − 1, which reaches 1 only at ρ = 2."""


class CispoConfig(Named):
    """Policy gradient whose importance weight is clipped, not its gradient."""

    type: Literal["cispo"] = "cispo"
    """Always `cispo`."""
    clip_low: float | None = Field(default=None, gt=0, lt=1)
    """The weight is at least 1 − clip_low; null is no lower bound."""
    clip_high: float = Field(default=4.0, gt=0)
    """The weight is at most 1 + clip_high; its paper has no number."""


class SapoConfig(Named):
    """A soft gate around ratio 1 instead of a clip."""

    type: Literal["sapo"] = "sapo"
    """Always `sapo`."""
    tau_positive: float = Field(default=1.0, gt=0)
    """τ⁺, steepness of the gate for positive advantages (its paper, section 5.1: 1.0)."""
    tau_negative: float = Field(default=1.05, gt=0)
    """τ⁻, steepness of the gate for negative advantages (its paper, section 5.1: 1.05)."""


class DppoConfig(Named):
    """A trust region in probability instead of in ratio."""

    type: Literal["dppo"] = "dppo"
    """Always `dppo`."""
    delta: float = Field(default=0.2, gt=0, lt=1)
    """δ, largest change of a token's probability (its paper, appendix E: 0.2)."""
    max_weight: float = Field(default=3.0, ge=1)
    """Largest weight exp(c − b): 3 in the authors' recipes, 5 in the large runs of their paper, 10 in their function.
    """


class PlainConfig(Named):
    """A loss without settings."""

    type: Literal["reinforce", "topr", "distill", "sft"]
    """Which loss."""


class PairsConfig(Named):
    """What all losses of pairs of answers to one task have."""

    pairs: Literal["best_worst", "all"] = "best_worst"
    """Which pairs of a group are compared: the best with the worst answer, or all of different reward."""
    margin: float = Field(default=0.0, ge=0)
    """A pair needs rewards that differ by more than this, and by more than rounding does."""
    beta: float = Field(default=0.1, gt=0)
    """β: how strongly the policy is kept close to the reference (DPO's paper, appendix B: 0.1)."""


class DpoConfig(PairsConfig):
    """A loss of pairs of answers to one task."""

    type: Literal["online_dpo"] = "online_dpo"
    """Always `online_dpo`."""
    length: Literal["mean", "sum"] = "sum"
    """Whether an answer counts by the sum or by the mean of the logprobs of its tokens."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """ε: probability that the worse answer of a pair is the better one."""


class IpoConfig(PairsConfig):
    """A loss of pairs that aims at a finite margin."""

    type: Literal["ipo"] = "ipo"
    """Always `ipo`."""
    beta: float = Field(default=0.1, gt=0)
    """β: the goal is a margin of 1 / (2 β) (OAIF's runs of IPO, arXiv 2402.04792: 1.0, with sums)."""
    length: Literal["mean", "sum"] = "mean"
    """Whether an answer counts by the mean or by the sum of the logprobs of its tokens."""


LossConfig = Annotated[
    ClippedConfig | DualClipConfig | GmpoConfig | ClipCovConfig | KlCovConfig | CispoConfig | SapoConfig | DppoConfig
    | PlainConfig | DpoConfig | IpoConfig | Custom,
    Field(discriminator="type"),
]  # fmt: skip


# -- Advantage estimators ---------------------------------------------------------------------------------------------

Deviation = Literal["sample", "population", "none"]


class GrpoConfig(Named):
    """`(R − mean R) / (std R + ε)` within a group."""

    type: Literal["grpo"] = "grpo"
    """Always `grpo`."""
    std: Deviation = "sample"
    """Which standard deviation divides; `none` only subtracts the mean."""
    epsilon: float = Field(default=1e-4, gt=0)
    """ε added to that deviation."""


class CentredConfig(Named):
    """A baseline of the group, without settings."""

    type: Literal["dr_grpo", "rloo", "maxrl", "pass_at_k"]
    """The mean of the group (`dr_grpo`, and `maxrl`, which also divides by it), the mean of its other members (`rloo`),
    or the best of them (`pass_at_k`)."""


class WhitenedConfig(Named):
    """Returns whitened over all loss tokens of the batch."""

    type: Literal["reinforce_pp", "reinforce_pp_baseline"]
    """Without (`reinforce_pp`) or with (`reinforce_pp_baseline`) the mean of the group subtracted first."""
    whiten: Literal["none", "batch"] = "batch"
    """`batch` subtracts the mean over all loss tokens of the batch and divides by the deviation; `none` leaves the
    returns as they are."""
    std: Deviation = "sample"
    """Which standard deviation divides; `none` only subtracts the mean."""
    epsilon: float = Field(default=1e-4, gt=0)
    """ε added to that deviation."""


class GaeConfig(Named):
    """Generalised advantage estimation with a critic (section `critic`)."""

    type: Literal["gae"] = "gae"
    """Always `gae`."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """γ, discount per token."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """λ: 1 learns from whole returns; below 1 (PPO's paper: 0.95) the critic's own estimates replace a part of them."""
    bootstrap: bool = False
    """Where an answer was cut off at the length limit, γ V of the state at the cut is added to its reward: the limit is
    not the end of the task."""
    whiten: Literal["none", "batch"] = "batch"
    """`batch` subtracts the mean over all loss tokens of the batch and divides by the deviation; `none` leaves the
    advantages as they are."""
    std: Deviation = "sample"
    """Which standard deviation divides; `none` only subtracts the mean."""
    epsilon: float = Field(default=1e-4, gt=0)
    """ε added to that deviation."""


AdvantageConfig = Annotated[
    GrpoConfig | CentredConfig | WhitenedConfig | GaeConfig | Custom, Field(discriminator="type")
]


# -- Corrections of off-policy data -----------------------------------------------------------------------------------


class DecoupledConfig(Variant):
    """Weight w = exp(p − b); larger ones are masked."""

    max_weight: float = Field(default=5.0, ge=1)
    """Tokens of a larger weight are masked."""


class TruncatedConfig(Variant):
    """Truncated importance weight, of tokens or of whole sequences."""

    min_weight: float = Field(default=0.0, ge=0, le=1)
    """Smaller weights are raised to it; 0 is no lower bound."""
    max_weight: float = Field(default=2.0, ge=1)
    """C: larger weights are truncated to it."""


class MisTokenConfig(Variant):
    """Weight w of tokens within a band; the others are masked."""

    min_weight: float = Field(default=0.5, gt=0, le=1)
    """Tokens of a smaller weight are masked."""
    max_weight: float = Field(default=5.0, ge=1)
    """Tokens of a larger weight are masked."""


class MisSeqGeoConfig(Variant):
    """Mask of sequences by the geometric mean of their weights."""

    min_weight: float = Field(default=0.99, gt=0, le=1)
    """Sequences of a smaller geometric mean are masked."""
    max_weight: float = Field(default=1.01, ge=1)
    """Sequences of a larger geometric mean are masked."""


class OpsmConfig(Variant):
    """Mask of answers of negative advantage that the policy has moved away from."""

    delta: float = Field(default=0.1, gt=0)
    """δ: answers whose mean b − c is larger are masked, nat per token."""


class FTisConfig(Variant):
    """Truncated weight of tokens, and a mask of distant answers of negative advantage."""

    max_weight: float = Field(default=2.0, ge=1)
    """C: larger weights are truncated to it."""
    max_kl: float = Field(default=0.1, gt=0)
    """Answers of negative advantage whose mean b − c is larger are masked, nat per token."""


class M2poConfig(Variant):
    """Mask of the few tokens that make the second moment of the log weights of a batch too large."""

    max_second_moment: float = Field(default=0.04, gt=0)
    """τ: largest mean of (p − b)² over the tokens that the advantage moves further from the behavior policy (its paper,
    section 5.2: 0.04)."""


class VetoConfig(Variant):
    """Mask of sequences that hold a token the policy would not sample."""

    min_weight: float = Field(default=1e-4, gt=0, lt=1)
    """Sequences with any smaller weight are masked."""


class CorrectionConfig(Variant):
    """A chain of corrections: those that have a section. At most one of them has a weight; all others only mask."""

    decoupled: DecoupledConfig | None = None
    """Weight w; masked above a bound."""
    tis_token: TruncatedConfig | None = None
    """Truncated weight per token."""
    tis_seq: TruncatedConfig | None = None
    """Truncated weight per sequence."""
    mis_token: MisTokenConfig | None = None
    """Weight w; masked outside a band."""
    f_tis: FTisConfig | None = None
    """Truncated weight per token; distant answers of negative advantage are masked."""
    mis_seq_geo: MisSeqGeoConfig | None = None
    """Mask of sequences by their geometric mean weight."""
    opsm: OpsmConfig | None = None
    """Mask of distant answers of negative advantage."""
    veto: VetoConfig | None = None
    """Mask of sequences with an impossible token."""
    m2po: M2poConfig | None = None
    """Mask of tokens by the second moment of the log weights of the batch."""
    renormalize: Literal["none", "kept", "weights"] = "none"
    """Divide the gradient of a batch by the share that its corrections left: `kept` by that of the tokens that are not
    masked, `weights` by the mean weight, where masked tokens count 0, so that weights have mean 1 over the batch;
    `none` is no division. Where `aggregation` sums over the tokens of a sequence, the weights and masks of whole
    sequences are averaged over sequences. Not with a divergence in the loss."""

    @model_serializer(mode="wrap")
    def _omit_unused(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out corrections that are off, so that a printed configuration shows the chain."""
        return {name: value for name, value in serialize(self).items() if value is not None}

    def __str__(self) -> str:
        """As it is chosen: `none`, `decoupled` or `[tis_token,veto]`."""
        names = list(self.chain)
        return "none" if not names else names[0] if len(names) == 1 else f"[{','.join(names)}]"

    @property
    def chain(self) -> dict[str, Variant]:
        """Name -> settings of each correction that is on."""
        found = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: section for name, section in found if isinstance(section, Variant)}


# -- Everything else --------------------------------------------------------------------------------------------------


class KlConfig(Variant):
    """Divergence from a frozen reference (section `reference`)."""

    coefficient: float = Field(default=0.0, ge=0, le=100)
    """β; with 0 no reference is started."""
    apply_to: Literal["loss", "reward"] = "loss"
    """Whether it is added to the loss or subtracted from the reward."""
    estimator: Annotated[str, AfterValidator(known("kl"))] = "k2"
    """`k2` (gradient of the reverse KL) or `k3` (of the forward KL) in the loss, `k1` in the reward."""
    max_weight: float = Field(default=2.0, ge=1)
    """C: in the loss, the divergence of a token has the weight min(exp(c − b), C) if the policy loss takes no weight of
    `correction`, since it uses the behavior logprobs itself or needs no correction."""
    target: float | None = Field(default=None, gt=0)
    """KL*: after every batch the coefficient moves towards the one that keeps `loss/reference_kl` there, nat per token;
    None keeps `coefficient`."""
    gain: float = Field(default=0.1, gt=0, le=1)
    """K: how fast it moves, by at most 0.2 K of itself per batch (Ziegler et al.: 0.1)."""


class EntropyConfig(Variant):
    """Bonus for the entropy of the policy, which keeps it exploring."""

    coefficient: float = Field(default=0.0, ge=0, le=1)
    """η; with a target, the one of the first batch."""
    target: float | None = Field(default=None, gt=0)
    """H*: after every batch η rises by `step` if `loss/entropy` is below, nat per token, and else falls; a batch after
    one above it has no bonus. None keeps `coefficient`."""
    step: float = Field(default=1e-4, gt=0, le=1)
    """Δ: change of η per batch (Skywork-OR1's scripts: 0.0001)."""
    max_coefficient: float = Field(default=5e-3, gt=0, le=1)
    """η is at most this (Skywork-OR1's scripts: 0.005)."""


class OverlongConfig(Variant):
    """What happens to answers that were cut off at the length limit."""

    mode: Literal["keep", "penalty", "mask", "drop"] = "keep"
    """`keep` treats them as any other; `penalty` lowers the reward of long answers (DAPO); `mask` gives them no loss;
    `drop` leaves them out of the baseline too."""
    ramp_share: float = Field(default=0.2, gt=0, le=1)
    """Length of the ramp of the penalty as a share of `rollout.sampling.max_new_tokens`; the paper has 4096 of 20480
    tokens (section 4.1)."""
