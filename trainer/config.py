"""How the policy is trained."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from penstock.trainer.algorithms.catalog import find, known


def _as_list(value: Any) -> Any:
    """One name is a chain of one; YAML has lists where a chain is a tuple."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


def _as_word(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


CorrectionName = Annotated[str, AfterValidator(known("correction"))]


class OptimizerConfig(BaseModel):
    """AdamW (torch), with linear warm-up to a learning rate that is constant or decays.

    Attributes:
        decay_steps: Optimizer steps, those of the warm-up included, after which a half cosine has brought the rate to
            `final_lr_ratio` of it, where it stays; 0 is constant.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int = Field(default=0, ge=0)
    final_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    gradient_clip_norm: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _decays_after_it_warmed_up(self) -> Self:
        if 0 < self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"optimizer.decay_steps={self.decay_steps} counts the steps of the warm-up too, and warmup_steps="
                f"{self.warmup_steps}: the rate would fall before it has risen. Set more, or 0 for a constant one."
            )
        return self


class LoraConfig(BaseModel):
    """Low-rank adapters in place of whole weights (`trainer/models/lora.py`): W + alpha / rank · B·A with W frozen.

    Attributes:
        rank: Rows of A and columns of B.
        alpha: With it fixed, the best learning rate hardly depends on the rank (and is about ten times that of
            whole weights).
        targets: Linear layers, by the last part of their names or more of it (`q_proj`, `layers.0.mlp.up_proj`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    targets: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )

    def adapts(self, layer: str) -> bool:
        """Whether a linear layer of this name gets an adapter."""
        return any(f".{layer}".endswith(f".{target}") for target in self.targets)


class TrainerConfig(BaseModel):
    """The trainer group.

    Attributes:
        backend: `deepspeed` (any number of ranks) or `torch` (one rank, for tests and tiny runs).
        num_ranks: Processes: data-parallel size x tensor_parallel_size x sequence_parallel_size.
        zero_stage: DeepSpeed ZeRO stage 0..3, over the ranks that hold the same part of every weight.
        tensor_parallel_size: Ranks that split every layer's weights (DeepSpeed AutoTP) and train the same sequences.
        sequence_parallel_size: Ranks that split every sequence (DeepSpeed Ulysses).
        max_tokens_per_micro_batch: Token budget of one forward-backward on one rank.
        share_prompts: Compute a prompt once for the sequences of a row that begin with it.
        compile: Run the layers through torch.compile.
        lora: Train adapters and freeze the weights; None trains all of them.
        max_bad_steps: Skipped steps in a row (non-finite numbers) before the run stops.
        step_timeout_s: Longest wait for one training step, seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Literal["deepspeed", "torch"] = "deepspeed"
    num_ranks: int = Field(default=1, ge=1)
    zero_stage: Literal[0, 1, 2, 3] = 0
    tensor_parallel_size: int = Field(default=1, ge=1)
    sequence_parallel_size: int = Field(default=1, ge=1)
    gradient_checkpointing: bool = False
    offload_optimizer: bool = False
    max_tokens_per_micro_batch: int = Field(gt=0)
    share_prompts: bool = False
    compile: bool = False
    lora: LoraConfig | None = None
    optimizer: OptimizerConfig
    max_bad_steps: int = Field(default=3, ge=1)
    start_timeout_s: float = Field(default=300.0, gt=0)
    step_timeout_s: float = Field(default=1800.0, gt=0)

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks that train different sequences."""
        return self.num_ranks // (self.tensor_parallel_size * self.sequence_parallel_size)

    @property
    def max_group_tokens(self) -> int:
        """Token budget of one forward-backward of the ranks that share sequences."""
        return self.max_tokens_per_micro_batch * self.sequence_parallel_size


class AlgorithmConfig(BaseModel):
    """An algorithm: advantage × policy loss × behavior correction × KL × aggregation, each by name.

    Formulas and papers of all names: trainer/algorithms/catalog.py, `penstock algorithms`, docs/paper_index.md.

    Attributes:
        advantage: A name, or the import path of a function `(rewards [G], AlgorithmConfig) -> [G]` of one group.
        advantage_std: What grpo and the whitening divide by.
        std_epsilon: ε added to that standard deviation.
        reward_weights: Named part of the reward -> weight; each part is normalised in its group and then summed.
            Empty: the reward as a whole.
        gae_gamma, gae_lambda: γ and λ of gae.
        whiten: Advantages of gae and reinforce_pp: `batch` takes their mean over all loss tokens of the batch away and
            divides by the deviation; `none` leaves them as they are.
        loss: A name, or the import path of a function `(LossTokens, AlgorithmConfig) -> PolicyLoss`.
        clip_low: ε_lo: the ratio is clipped below 1 − ε_lo (ppo_clip, dual_clip, gspo, gspo_token).
        clip_high: ε_hi: the ratio is clipped above 1 + ε_hi (those and cispo).
        dual_clip: c_dual of dual_clip.
        cispo_low: Lower clip of cispo at 1 − cispo_low; None: none.
        sapo_tau_positive, sapo_tau_negative: τ⁺ and τ⁻ of sapo.
        dppo_delta: δ of dppo, in probability.
        dppo_cap: Largest weight exp(c − b) of dppo: 3 in its authors' recipes, 10 in their function.
        pairs: Which pairs of a group online_dpo and ipo compare.
        pair_margin: τ: a pair needs rewards that differ by more than this, and by more than rounding does.
        pair_beta: β of online_dpo and ipo.
        ipo_length: Whether ipo compares per-token means or sums of logprobs.
        value_clip: ε_v of value.
        proximal: Centre of the trust region.
        mini_batches: Optimizer steps of one pass over a batch; each takes its share of the groups.
        epochs: Passes over a batch. The version goes up by one per batch, whatever the number of optimizer steps.
        correction: Chain of behavior corrections: at most one weight, any number of masks.
        correction_cap: Tokens whose behavior weight exceeds it are masked (decoupled).
        tis_cap: C of tis_token, tis_seq and f_tis.
        mis_low, mis_high: Bounds of mis_token.
        geo_low, geo_high: Bounds of mis_seq_geo.
        opsm_delta: δ of opsm, nat per token.
        f_tis_max_kl: Largest KL of f_tis, nat per token.
        veto_floor: A sequence with any behavior weight below it is masked (veto).
        renormalise: Divide by what the corrections kept, not by the whole batch; not with a divergence in the loss.
        kl_in: Where the divergence from the reference goes.
        kl_coefficient: β of that divergence; 0 needs no reference.
        kl_estimator: `k2` (gradient of reverse KL) or `k3` (of forward KL) in the loss, `k1` in the reward.
        overlong: What happens to answers that were cut off: shorten them by a soft penalty, mask their loss, or drop
            them before the baseline.
        overlong_cache_share: Length of the ramp of that penalty, as a share of `rollout.sampling.max_new_tokens`; the
            paper's is 4096 of 20480 tokens.
        lag_decay: Factor of a token's term per version of staleness; 1 is off.
        entropy_top_share: q: only this share of each sequence's tokens, those of highest entropy, is trained.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    advantage: Annotated[str, AfterValidator(known("advantage", or_import_path=True))] = "grpo"
    advantage_std: Literal["sample", "population", "none"] = "sample"
    std_epsilon: float = Field(default=1e-4, gt=0)
    reward_weights: dict[str, float] = Field(default_factory=dict)
    gae_gamma: float = Field(default=1.0, ge=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    whiten: Literal["none", "batch"] = "batch"
    loss: Annotated[str, AfterValidator(known("loss", or_import_path=True))] = "ppo_clip"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0)
    dual_clip: float = Field(default=3.0, gt=1)
    cispo_low: float | None = Field(default=None, gt=0, lt=1)
    sapo_tau_positive: float = Field(default=1.0, gt=0)
    sapo_tau_negative: float = Field(default=1.05, gt=0)
    dppo_delta: float = Field(default=0.2, gt=0, lt=1)
    dppo_cap: float = Field(default=3.0, ge=1)
    pairs: Literal["best_worst", "all"] = "best_worst"
    pair_margin: float = Field(default=0.0, ge=0)
    pair_beta: float = Field(default=0.1, gt=0)
    ipo_length: Literal["mean", "sum"] = "mean"
    value_clip: float = Field(default=0.2, gt=0)
    proximal: Annotated[str, AfterValidator(known("proximal"))] = "target"
    mini_batches: int = Field(default=1, ge=1)
    epochs: int = Field(default=1, ge=1)
    correction: Annotated[tuple[CorrectionName, ...], BeforeValidator(_as_list)] = ("decoupled",)
    correction_cap: float = Field(default=5.0, ge=1)
    tis_cap: float = Field(default=2.0, ge=1)
    mis_low: float = Field(default=0.5, gt=0, le=1)
    mis_high: float = Field(default=5.0, ge=1)
    geo_low: float = Field(default=0.99, gt=0, le=1)
    geo_high: float = Field(default=1.01, ge=1)
    opsm_delta: float = Field(default=0.1, gt=0)
    f_tis_max_kl: float = Field(default=0.1, gt=0)
    veto_floor: float = Field(default=1e-4, gt=0, lt=1)
    renormalise: bool = False
    kl_in: Annotated[Literal["loss", "reward", "off"], BeforeValidator(_as_word)] = "loss"
    kl_coefficient: float = Field(default=0.0, ge=0)
    kl_estimator: Annotated[str, AfterValidator(known("kl"))] = "k2"
    aggregation: Annotated[str, AfterValidator(known("aggregation"))] = "token_mean"
    overlong: Annotated[Literal["off", "penalty", "mask", "drop"], BeforeValidator(_as_word)] = "off"
    overlong_cache_share: float = Field(default=0.2, gt=0, le=1)
    lag_decay: float = Field(default=1.0, gt=0, le=1)
    entropy_top_share: float = Field(default=1.0, gt=0, le=1)

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps of one batch."""
        return self.mini_batches * self.epochs

    @property
    def compares_pairs(self) -> bool:
        """The loss is of pairs of sequences, which a micro-batch must hold together."""
        return find("loss", self.loss).level == "pair"

    @property
    def kl_in_loss(self) -> float:
        """β of the divergence in the loss; 0 if it is not there."""
        return self.kl_coefficient if self.kl_in == "loss" else 0.0

    @property
    def kl_in_reward(self) -> float:
        """β of the divergence in the reward; 0 if it is not there."""
        return self.kl_coefficient if self.kl_in == "reward" else 0.0

    @property
    def needs_teacher(self) -> bool:
        """A teacher has to score every sampled token."""
        return self.loss == "distill"

    @property
    def needs_critic(self) -> bool:
        """A critic has to value every sampled token."""
        return self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """A reference policy has to score every sampled token."""
        return self.compares_pairs or self.kl_in_loss > 0 or self.kl_in_reward > 0


class CriticConfig(BaseModel):
    """The critic of `algorithm.advantage: gae`: a model of its own on the trainer ranks (loss: `algorithm.value_clip`).

    Attributes:
        path: Hugging Face directory or hub name of a sequence classifier of one label (a reward model) or of a causal
            language model, of the policy's tokenizer and about its size; None is the policy that training starts from.
        optimizer: Its own; everything else is as for the policy.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = None
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


class ReferenceConfig(BaseModel):
    """The frozen policy that the trained one is held to, by `algorithm.kl_coefficient` or by pairs (online_dpo, ipo).

    Attributes:
        path: Hugging Face directory or hub name; None is the policy that training starts from.
        num_workers: Processes; each holds the whole policy in float32.
        pool: Pool that they run on; None is the trainer's.
        timeout_s: Longest wait for the logprobs of one group, seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = None
    num_workers: int = Field(default=1, ge=1)
    pool: str | None = None
    timeout_s: float = Field(default=600.0, gt=0)


class TeacherConfig(ReferenceConfig):
    """The frozen policy that `algorithm.loss: distill` learns from: any size, but the policy's tokenizer.

    Attributes:
        path: Hugging Face directory or hub name.
        num_workers: Processes; each holds the whole teacher in float32.
        pool: Pool that they run on; None is the trainer's.
        timeout_s: Longest wait for the logprobs of one group, seconds.
        num_parameters: Its weights, for the estimate of memory; None: as many as the policy has.
    """

    num_parameters: int | None = Field(default=None, gt=0)


class SftConfig(BaseModel):
    """Supervised warm start (`penstock sft`).

    Attributes:
        batch_size: Examples per optimizer step.
        max_steps: Upper limit of optimizer steps.
        eval_every_steps: Held-out accuracy is measured this often.
        eval_tasks: Held-out tasks per measurement.
        stop_at_accuracy: Stop when one sample answers this share of held-out tasks with the gold answer (the mean
            probability of the whole answer); None trains for `max_steps`.
        max_greedy_accuracy: Kept is the best step at which greedy decoding is no better than this: a warm start
            that leaves reinforcement learning something to show. 1 is no condition.
        reuse: Do nothing where the run directory holds a finished run of the same configuration.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: int = Field(gt=0)
    max_steps: int = Field(gt=0)
    eval_every_steps: int = Field(default=10, gt=0)
    eval_tasks: int = Field(default=256, gt=0)
    stop_at_accuracy: float | None = Field(default=None, gt=0, le=1)
    max_greedy_accuracy: float = Field(default=1.0, gt=0, le=1)
    reuse: bool = False


class PreferenceConfig(BaseModel):
    """Learning from pairs of answers (`penstock rm`, `penstock dpo`).

    Attributes:
        batch_size: Pairs per optimizer step.
        num_steps: Optimizer steps.
        eval_every_steps: Held-out accuracy is measured this often.
        eval_pairs: Held-out pairs per measurement.
        beta: β of DPO; a reward model has 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: int = Field(gt=0)
    num_steps: int = Field(gt=0)
    eval_every_steps: int = Field(default=10, gt=0)
    eval_pairs: int = Field(default=256, gt=0)
    beta: float = Field(default=0.1, gt=0)
