"""How the policy is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from penstock.dataflow.settings import MAX_TIMEOUT_S, Settings
from penstock.trainer.algorithms.advantages import GrpoConfig, OverlongConfig
from penstock.trainer.algorithms.catalog import Custom, Entry, Named, find, known, sections
from penstock.trainer.algorithms.conditions import ADVANTAGES, SEVERAL_UPDATES, Condition, ratio_moves
from penstock.trainer.algorithms.controllers import EntropyConfig
from penstock.trainer.algorithms.corrections import CorrectionConfig, DecoupledConfig
from penstock.trainer.algorithms.kl import KlConfig
from penstock.trainer.algorithms.losses.clipped import ClippedConfig
from penstock.weights.model_config import DType

if TYPE_CHECKING:
    LossConfig: TypeAlias = Named | Custom
    AdvantageConfig: TypeAlias = Named | Custom
else:
    LossConfig, AdvantageConfig = sections("loss"), sections("advantage")

ZERO_BUCKET_ELEMENTS = 50_000_000
"""Gradients that ZeRO 1 to 3 reduce at once, and updated weights that it gathers at once."""
MOMENTS_PIECE_ELEMENTS = 1 << 22
"""Elements of a tensor that AdamW updates at once where its moments are kept in bfloat16: float32 ones of a whole
tensor, which ZeRO makes of all parameters of a rank, would take more memory than that saves."""


def _as_list(value: Any) -> Any:
    """One name is a chain of one; YAML has lists where a chain is a tuple."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


class MuonConfig(Settings):
    """Muon for hidden matrices (`trainer/optimizers/muon.py`), with learning rate and weight decay of AdamW, which has
    the rest. It takes whole matrices: zero_stage=0, tensor_parallel_size=1 and no adapters.
    """

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of gradients that is orthogonalised; the step looks ahead (Nesterov)."""


class OptimizerConfig(Settings):
    """AdamW, or Muon with AdamW for what is no hidden matrix; the learning rate warms up, stays, and decays."""

    lr: float = Field(gt=0, le=1)
    """Learning rate. AdamW changes a weight by about this much per step; Muon by a fifth, in the quadratic mean."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's first and second moment; each in [0, 1)."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the root of AdamW's second moment."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """Decoupled weight decay; a step multiplies weights by 1 - lr x weight_decay."""
    moments_dtype: DType = "float32"
    """How AdamW's moments are kept between steps. bfloat16: half the memory, rounded stochastically; steps compute in
    float32."""
    muon: MuonConfig | None = None
    """Muon for hidden matrices; None is AdamW for all parameters."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up."""
    stable_steps: int = Field(default=0, ge=0)
    """Optimizer steps, those of the warm-up included, before the rate begins to decay; 0: it decays after the warm-up.
    """
    decay_steps: int = Field(default=0, ge=0)
    """Number of the optimizer step, the first is 1, in which the rate has decayed to `final_lr_ratio` of it, where it
    stays; 0 is constant."""
    decay: Literal["cosine", "linear", "exponential", "sqrt"] = "cosine"
    """Curve of the decay: half a `cosine`, `linear`, `exponential` (MiniCPM's WSD), or `sqrt`, 1 minus the root."""
    final_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the learning rate that is left after the decay; with 0 step `decay_steps` changes nothing."""
    gradient_clip_norm: float = Field(default=1.0, gt=0)
    """The global gradient norm is clipped to this."""

    @model_validator(mode="after")
    def _check_betas(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas={list(self.betas)} is out of range: each must be in [0, 1).")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if 0 < self.stable_steps <= self.warmup_steps:
            raise ValueError(
                f"optimizer.stable_steps={self.stable_steps} counts the steps of the warm-up too, and warmup_steps="
                f"{self.warmup_steps}: the rate would decay before it has risen. Set more, or 0 for no stable phase."
            )
        if self.stable_steps and not self.decay_steps:
            raise ValueError(
                f"optimizer.stable_steps={self.stable_steps} without decay_steps has no effect: the rate never decays. "
                "Set decay_steps, or stable_steps=0."
            )
        before = "stable_steps" if self.stable_steps else "warmup_steps"
        if 0 < self.decay_steps <= max(self.warmup_steps, self.stable_steps):
            raise ValueError(
                f"optimizer.decay_steps={self.decay_steps} counts the steps before the decay too, and {before}="
                f"{getattr(self, before)}: no step is left to decay in. Set more, or 0 for a constant rate."
            )
        if self.decay_steps and self.decay == "exponential" and self.final_lr_ratio == 0:
            raise ValueError(
                "optimizer.final_lr_ratio=0 with decay=exponential: an exponential curve reaches no 0, so the rate "
                "would drop to 0 at its first step. Set a ratio above 0, or decay=linear, cosine or sqrt."
            )
        return self

    def states(self, *, is_matrix: bool) -> dict[str, DType]:
        """Name and dtype of what is kept of a trained parameter between steps; each has its shape.

        Args:
            is_matrix: Whether it is a hidden matrix, or one for each expert (`trainer.optimizers.muon`).
        """
        if is_matrix and self.muon is not None:
            return {"momentum_buffer": "float32"}
        return {"exp_avg": self.moments_dtype, "exp_avg_sq": self.moments_dtype}


class LoraConfig(Settings):
    """Low-rank adapters in place of whole weights (`trainer/models/lora.py`): W + alpha / rank · B·A with W frozen."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""
    alpha: int = Field(default=32, ge=1)
    """With a fixed alpha, the best learning rate hardly depends on the rank (and is about ten times that of whole
    weights)."""
    targets: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Linear layers, by the end of their names (`q_proj`, `layers.0.mlp.up_proj`); of a mixture also the weights of all
    experts (`experts.gate_up_proj`, `experts.down_proj`)."""

    def adapts(self, layer: str) -> bool:
        """Whether a linear layer of this name gets an adapter."""
        return any(f".{layer}".endswith(f".{target}") for target in self.targets)

    def adapts_experts(self, weight: str) -> bool:
        """Whether a weight of experts does: only if a target says that it means experts, not linear layers beside."""
        return any(f".{weight}".endswith(f".{target}") for target in self.targets if "experts" in target.split("."))


class TrainerConfig(Settings):
    """The trainer group."""

    backend: Literal["deepspeed", "fsdp2", "torch"] = "deepspeed"
    """`deepspeed` (any number of ranks), `fsdp2` (torch's `fully_shard`, any number of ranks) or `torch` (one rank, for
    tests and tiny runs)."""
    num_ranks: int = Field(default=1, ge=1)
    """Processes: data-parallel size x tensor_parallel_size x sequence_parallel_size."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage 0..3, over the ranks that hold the same part of every weight. `fsdp2` shards all of it, like
    3, and takes 0."""
    fsdp_copies: int = Field(default=1, ge=1)
    """Copies of the model, each sharded over num_ranks / fsdp_copies ranks (HSDP): within a node, say, so that only
    gradients cross the network. For `fsdp2`."""
    expert_parallel: bool = False
    """Send tokens to the ranks that hold their experts, instead of gathering all experts of a layer on every rank. For
    `fsdp2`."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that split every layer's weights (DeepSpeed AutoTP) and train the same sequences."""
    sequence_parallel_size: int = Field(default=1, ge=1)
    """Ranks that split every sequence."""
    sequence_parallel: Literal["ulysses", "context"] | None = None
    """How they do: `ulysses` exchanges stretches for heads, `context` gathers keys and values, for any number of heads.
    None: ulysses where it can run."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about 30 % more time."""
    offload_optimizer: bool = False
    """Keep master weights and moments in host memory; needs zero_stage >= 1, or of `fsdp2` offload_parameters."""
    offload_parameters: bool = False
    """Keep the weights in host memory, but those of the layers that compute; needs zero_stage=3, or of `fsdp2`
    offload_optimizer."""
    max_tokens_per_micro_batch: int = Field(gt=0)
    """Token budget of one forward-backward on one rank."""
    share_prompts: bool = True
    """Compute tokens once that several sequences of a row begin with: a prompt, the turns before a fork."""
    compile: bool = False
    """Run the layers through torch.compile; not with zero_stage=3, tensor or sequence parallelism."""
    lora: LoraConfig | None = None
    """Train adapters and freeze the weights; None trains all of them."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Other settings of DeepSpeed, in its own form, e.g. `{zero_optimization: {overlap_comm: true}}`. Those that would
    change batches, numbers or the layout of the weights are refused."""
    optimizer: OptimizerConfig
    max_bad_steps: int = Field(default=3, ge=1)
    """Skipped steps in a row (non-finite numbers) before the run stops."""
    profile_steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps of which every rank writes a torch profile to `profiles/` of the run, and every engine one of 5 s."""
    start_timeout_s: float = Field(default=1800.0, ge=1, le=MAX_TIMEOUT_S)
    """Longest wait for all ranks to start, seconds: a download, loading. Those that are not up are named every minute.
    """
    step_timeout_s: float = Field(default=1800.0, ge=1, le=MAX_TIMEOUT_S)
    """Longest wait for one training step, seconds."""

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks that train different sequences."""
        return self.num_ranks // (self.tensor_parallel_size * self.sequence_parallel_size)

    @property
    def num_shards(self) -> int:
        """Ranks over which weights or optimizer state are partitioned."""
        return max(1, self.num_ranks // (self.tensor_parallel_size * self.fsdp_copies))

    @property
    def sharding(self) -> str:
        """How ranks share weights, gradients and optimizer state, for messages."""
        if self.backend == "torch":
            return "torch"
        if self.backend == "deepspeed":
            return f"ZeRO-{self.zero_stage}"
        return "FSDP2" if self.fsdp_copies == 1 else f"FSDP2 in {self.fsdp_copies} copies"

    @property
    def max_group_tokens(self) -> int:
        """Token budget of one forward-backward of the ranks that share sequences."""
        return self.max_tokens_per_micro_batch * self.sequence_parallel_size


_LOSS_IS_ITS_OWN = Condition(
    lambda config: (
        not config.loss_entry.is_plain_at_one
        or ratio_moves(config)
        # Where advantages differ within a sequence, one term per sequence averages them.
        or (config.loss_entry.has_one_term and (config.needs_critic or config.kl_in_reward > 0))
    ),
    ("proximal", "mini_batches", "epochs"),
    "with one optimizer update per batch the ratio to the proximal policy is 1, so the gradient equals that of "
    "ppo_clip and of reinforce",
    "Use algorithm.proximal=behavior with algorithm/correction=none, or several updates with proximal=recompute",
)
_PROXIMAL_IS_READ = Condition(
    lambda config: (
        config.loss_entry.is_plain_at_one
        or config.loss_entry.level == "batch"
        or config.loss_entry.is_own
        or not set(config.correction.chain) <= {"opsm"}
    ),
    ("loss", "correction"),
    "neither this loss nor this correction uses the proximal policy",
    "Use algorithm.proximal=target",
)
_PROXIMAL_DIFFERS = SEVERAL_UPDATES._replace(
    holds=lambda config: ratio_moves(config) or config.proximal == "target" or bool(config.entries_of_batch),
    why="with one optimizer update per batch it equals proximal=target, and recompute costs one more forward pass",
)
_HAS_CRITIC = Condition(lambda config: config.needs_critic, ("advantage",), "there is no critic", "Use algorithm=ppo")


class AlgorithmConfig(Settings):
    """An algorithm: advantage × policy loss × corrections × divergence × aggregation."""

    advantage: Annotated[AdvantageConfig, ADVANTAGES] = GrpoConfig()
    """Estimator of how much better than expected an answer was (`algorithm/advantage=NAME`)."""
    reward_weights: Annotated[dict[str, float], ADVANTAGES] = Field(default_factory=dict)
    """Named part of the reward -> weight; each part is normalised in its group and then summed. Empty: the reward as a
    whole."""
    loss: Annotated[LossConfig, _LOSS_IS_ITS_OWN] = ClippedConfig()
    """Policy loss (`algorithm/loss=NAME`)."""
    proximal: Annotated[str, AfterValidator(known("proximal")), _PROXIMAL_IS_READ, _PROXIMAL_DIFFERS] = "target"
    """Center of the trust region: `target` (the ratio is 1 and clips do nothing), `behavior` (the ratio carries all
    staleness), `recompute` (one more forward per batch) or `interpolate`."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps of one pass over a batch; each takes its share of the groups."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a batch. The version goes up by one per batch, whatever the number of optimizer steps."""
    correction: CorrectionConfig = CorrectionConfig(decoupled=DecoupledConfig())
    """Correction of off-policy data (`algorithm/correction=NAME` or `=[NAME,NAME]`)."""
    kl: KlConfig = KlConfig()
    """Divergence from a frozen reference."""
    entropy: EntropyConfig = EntropyConfig()
    """Bonus for the entropy of the policy."""
    routing: Literal["replay", "current"] = "replay"
    """Experts of a mixture, in the trainer: `replay`, those to which the engine sent each token, or `current`, those
    that the trainer's routers choose. Without effect on a dense model."""
    balance_coefficient: float = Field(default=0.0, ge=0, le=10)
    """Weight of the loss that spreads tokens evenly over the experts of a mixture (0.001 to 0.01 in pretraining; the
    loss is k if k experts per token are used evenly), from the tokens of a micro-batch. Without effect on a dense
    model."""
    aggregation: Annotated[str, AfterValidator(known("aggregation"))] = "token_mean"
    """How the terms of tokens are averaged."""
    teacher_coefficient: float = Field(default=0.0, ge=0, le=100)
    """Advantage per nat by which the teacher's logprob of a token exceeds the policy's, added to that of the rewards;
    0: no teacher."""
    nll_coefficient: float = Field(default=0.0, ge=0, le=100)
    """Weight of the mean −logprob of all tokens of the answers that pass (`dataflow.pass_reward`), in nat, added to the
    loss (VAPO's paper: 0.1). Of a loss of pairs: of the mean over the pairs of the mean −logprob of the better
    answer's tokens (RPO's paper: 1)."""
    overlong: OverlongConfig = OverlongConfig()
    """What happens to answers that were cut off."""
    staleness_decay: float = Field(default=1.0, gt=0, le=1)
    """Factor of a token's term per version of staleness; 1 is off."""
    entropy_top_share: float = Field(default=1.0, gt=0, le=1)
    """q: only this share of each sequence's tokens, those of highest entropy, is trained; 1 is all."""

    @property
    def loss_entry(self) -> Entry:
        """What is known of the loss."""
        return find("loss", self.loss.name)

    @property
    def entries_of_batch(self) -> list[Entry]:
        """The loss and the corrections that select tokens by comparing all tokens of a batch."""
        return [entry for entry in (self.loss_entry, *self.correction.entries) if entry.level == "batch"]

    @property
    def weighs_divergence(self) -> bool:
        """Whether the policy loss takes no weight of a correction, so that the divergence needs its own."""
        return self.proximal == "behavior" or not self.loss_entry.takes_weight

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps of one batch."""
        return self.mini_batches * self.epochs

    @property
    def imitates_passing(self) -> bool:
        """Whether the loss has a mean over the answers of the whole batch that pass."""
        return self.nll_coefficient > 0 and not self.compares_pairs

    @property
    def compares_pairs(self) -> bool:
        """Whether the loss compares pairs of sequences, which must be in one micro-batch."""
        return self.loss_entry.level == "pair"

    @property
    def kl_in_loss(self) -> float:
        """β of the divergence in the loss; 0 if it is not in the loss."""
        return self.kl.coefficient if self.kl.apply_to == "loss" else 0.0

    @property
    def kl_in_reward(self) -> float:
        """β of the divergence in the reward; 0 if it is not in the reward."""
        return self.kl.coefficient if self.kl.apply_to == "reward" else 0.0

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher has to score every sampled token."""
        return self.loss.type == "distill" or self.teacher_coefficient > 0

    @property
    def needs_critic(self) -> bool:
        """Whether a critic has to value every sampled token."""
        return self.advantage.type == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy has to score every sampled token."""
        return self.compares_pairs or self.kl_in_loss > 0 or self.kl_in_reward > 0


class CriticOptimizerConfig(OptimizerConfig):
    """The critic's own optimizer."""

    lr: float = Field(default=1e-5, gt=0, le=1)
    """Learning rate. It is ten times the policy's, because values are learned from scratch."""


class CriticConfig(Settings):
    """The critic of `algorithm/advantage=gae`: a model of its own on the trainer ranks."""

    path: str | None = None
    """Hugging Face directory or hub name of a sequence classifier of one label (a reward model) or of a causal language
    model, of the policy's tokenizer and about its size; None is the policy that training starts from."""
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()
    """The critic's own optimizer; all other settings are the trainer's."""
    value_clip: Annotated[float, _HAS_CRITIC, SEVERAL_UPDATES] = Field(default=0.2, gt=0)
    """ε_v: a value is clipped to ± this around the value at the start of the batch."""
    warmup_steps: Annotated[int, _HAS_CRITIC] = Field(default=0, ge=0)
    """Batches at the start that train the critic only; the policy stays as it is."""
    updates_per_policy_update: float = Field(default=1.0, gt=0, le=100)
    """Optimizer steps of the critic per optimizer step of the policy, also while only the critic is trained. 2.5: two
    and three in turn on the sequences of the policy's step, towards the same returns; 0.5: on every second step."""


class ReferenceConfig(Settings):
    """The frozen policy for `algorithm.kl.coefficient` and losses of pairs (online_dpo, ipo)."""

    path: str | None = None
    """Hugging Face directory or hub name; None is the policy that training starts from."""
    num_workers: int = Field(default=1, ge=1)
    """Processes; each holds the whole policy in float32."""
    pool: str | None = None
    """Pool that they run on; None is the trainer's."""
    offload: bool = False
    """With `cluster.colocated`: they share the trainer's GPUs, and their weights are in host memory while it steps."""


class TeacherConfig(ReferenceConfig):
    """The frozen policy for `algorithm/loss=distill` and `algorithm.teacher_coefficient`: any size, but the policy's
    tokenizer.
    """

    path: str | None = None
    """Hugging Face directory or hub name."""
    num_workers: int = Field(default=1, ge=1)
    """Processes; each holds the whole teacher in float32."""
    num_parameters: int | None = Field(default=None, gt=0)
    """Number of its parameters, for the estimate of memory; None: as many as the policy has."""


class SftConfig(Settings):
    """Supervised warm start (`penstock sft`)."""

    batch_size: int = Field(gt=0)
    """Examples per optimizer step."""
    max_steps: int = Field(gt=0)
    """Upper limit of optimizer steps."""
    eval_every_steps: int = Field(default=10, gt=0)
    """The share of held-out gold answers is measured this often."""
    eval_tasks: int = Field(default=256, ge=0)
    """Held-out tasks per measurement; 0: none, and the policy after `max_steps` is kept."""
    stop_at_accuracy: float | None = Field(default=None, gt=0, le=1)
    """Stop when one sample answers this share of held-out tasks with the gold answer (the mean probability of the whole
    answer); None trains for `max_steps`."""
    max_greedy_accuracy: float = Field(default=1.0, gt=0, le=1)
    """The best step whose greedy decoding gives at most this share of held-out gold answers is kept, so that
    reinforcement learning can still improve on it. 1 is no condition."""
    reuse: bool = False
    """Do nothing where the run directory holds a finished run of the same configuration."""


class PreferenceConfig(Settings):
    """Learning from pairs of answers (`penstock rm`, `penstock dpo`)."""

    batch_size: int = Field(gt=0)
    """Pairs per optimizer step."""
    num_steps: int = Field(gt=0)
    """Optimizer steps."""
    eval_every_steps: int = Field(default=10, gt=0)
    """Held-out accuracy is measured this often."""
    eval_pairs: int = Field(default=256, ge=0)
    """Held-out pairs per measurement; 0: none."""
    beta: float = Field(default=0.1, gt=0)
    """β of DPO; a reward model always has 1."""
    length: Literal["mean", "sum"] = "sum"
    """Of DPO: whether an answer counts by the sum or by the mean of the logprobs of its tokens."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """ε: probability that the rejected answer of a pair is the better one."""
    nll_coefficient: float = Field(default=0.0, ge=0, le=100)
    """Of DPO: weight of the mean −logprob of the chosen answer, added to the loss."""
