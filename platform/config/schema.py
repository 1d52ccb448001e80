"""The root of the validated configuration. Hydra composes YAML from `conf/`; once, at the door, it becomes this.

Sections live next to what they configure; components get their section, never the root.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.dataflow.staleness import ExpiryPolicy
from penstock.envs.config import EnvConfig, RewardConfig
from penstock.envs.sandbox.config import SandboxConfig
from penstock.platform.metrics.trackers.config import TrackerConfig
from penstock.rollout.config import RolloutConfig
from penstock.trainer.config import (
    AlgorithmConfig,
    CriticConfig,
    OptimizerConfig,
    PreferenceConfig,
    ReferenceConfig,
    SftConfig,
    TeacherConfig,
    TrainerConfig,
)
from penstock.weights.config import WeightsConfig
from penstock.weights.model_config import ModelConfig

FrozenRole = Literal["reference", "teacher"]
FROZEN_ROLES: tuple[FrozenRole, ...] = ("reference", "teacher")
"""Policies that score what the trained one samples, each in processes of its own."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolConfig(Section):
    """A set of equal accelerators, or of CPU slots.

    Attributes:
        device: What the pool is made of.
        count: Accelerators (or CPU slots) in the pool.
        memory_gib: Memory of one of them, GiB; for CPU the machine's.
        accelerator_type: Ray accelerator label, e.g. `H100`; None takes any.
    """

    device: Literal["cpu", "gpu"]
    count: int = Field(ge=1)
    memory_gib: float = Field(gt=0)
    accelerator_type: str | None = None


class ClusterConfig(Section):
    """Pools and which role runs on which.

    Attributes:
        address: `local` starts Ray on this machine; else the address of a running cluster.
        pools: Name -> pool.
        trainer_pool: Pool of the trainer ranks.
        rollout_pool: Pool of the engines.
        colocated: Trainer and engines share their devices and take turns (needs max_staleness 0).
        threads_per_process: CPU threads of each engine and trainer process.
    """

    address: str = "local"
    pools: dict[str, PoolConfig]
    trainer_pool: str
    rollout_pool: str
    colocated: bool = False
    threads_per_process: int = Field(default=1, ge=1)


class FilterConfig(Section):
    """Which ready groups are not worth a gradient (docs/concepts/dataflow.md). Each filtered group is replaced.

    Attributes:
        zero_variance: Filter groups whose members all earned the same.
        zero_variance_part: Compare this named part of the reward instead of the sum, e.g. raw correctness.
        max_overlong_share: Filter groups of which a larger share was cut off at the length limit; None is off.
        pass_rate: Keep groups of which a share in [lowest, highest] passes (`dataflow.pass_reward`); None is off.
        user: Import path of a function `(trajectories) -> bool`; groups for which it is false are filtered.
    """

    zero_variance: bool = False
    zero_variance_part: str | None = None
    max_overlong_share: float | None = Field(default=None, ge=0, lt=1)
    pass_rate: tuple[float, float] | None = None
    user: str | None = None


class DataflowConfig(Section):
    """Batching, staleness and retries (docs/concepts/staleness.md).

    Attributes:
        batch_groups: B, groups per training batch.
        group_size: Trajectories per group; they share a baseline.
        pass_reward: Reward from which a trajectory passes, for `filters.pass_rate` and `by_success`.
        group_sizing: `by_success` (dataflow/difficulty.py), or import path of a `GroupSizing` (dataflow/task_queue.py):
            gives single tasks fewer; None is off.
        length_limiting: `by_success`, or import path of a `LengthLimiting`, that gives single tasks shorter turns; None
            is off.
        max_staleness: η, the oldest a trained token may be, in policy versions. 0 is the synchronous algorithm.
        on_expiry: What happens to groups that would become too old: the batch is held open for them (`wait`), their
            over-old tokens lose their loss weight (`trim`), or they are dropped and their tasks start again (`drop`).
        max_requeues: How often a task starts again after `drop`.
        surplus: Redundant groups admitted beyond the window; when a batch could close but for a few stragglers, as
            many of those are given up. Biased to short answers.
        gang: All members of a group run on one engine and start at one version.
        stream_micro_batches: The trainer begins with the first groups of a batch while the rest is still being
            generated; the gradient is the same.
        early_logprobs: While the trainer waits for a batch it forwards the groups that are ready (critic, proximal
            logprobs, a reference below adapters); the gradient is the same. Without effect where nothing of the kind is
            needed, with colocated roles, and with `stream_micro_batches`.
        max_retries: Retries of one trajectory after its environment or reward failed.
        min_group_size: A group whose failed members are gone still trains with this many.
        max_live_gib: Memory reserved at admission for the payloads of all live groups, GiB; None is no limit.
        filters: Which ready groups are not trained.
        batch_timeout_s: Longest wait for a batch without a new token, score or ready group, seconds, before the run
            stops and lists what it waits for.
    """

    batch_groups: int = Field(ge=1)
    group_size: int = Field(ge=2)
    pass_reward: float = 1.0
    group_sizing: str | None = None
    length_limiting: str | None = None
    max_staleness: int = Field(ge=0)
    on_expiry: ExpiryPolicy = ExpiryPolicy.WAIT
    max_requeues: int = Field(default=3, ge=0)
    surplus: int = Field(default=0, ge=0)
    gang: bool = False
    stream_micro_batches: bool = False
    early_logprobs: bool = True
    max_retries: int = Field(default=2, ge=0)
    min_group_size: int = Field(default=2, ge=2)
    max_live_gib: float | None = Field(default=None, gt=0)
    filters: FilterConfig = FilterConfig()
    batch_timeout_s: float = Field(default=1800.0, gt=0)


class EvaluationConfig(Section):
    """Greedy evaluation on held-out tasks.

    Attributes:
        num_tasks: Held-out tasks of the first and the last evaluation.
        every_steps: Evaluate beside training every so many steps; 0 is never.
        num_tasks_during_training: Held-out tasks of an evaluation beside training.
    """

    num_tasks: int = Field(default=1024, ge=1)
    every_steps: int = Field(default=20, ge=0)
    num_tasks_during_training: int = Field(default=256, ge=1)


class CheckpointConfig(Section):
    """Checkpoints of the whole run, from which `penstock resume` continues.

    Attributes:
        every_minutes: Take one at the first step that ends so many minutes after the last one; 0 turns this off.
        every_steps: Take one every so many steps, too; 0 turns this off.
        keep: Number of newest checkpoints that are kept.
    """

    every_minutes: float = Field(default=15.0, ge=0, allow_inf_nan=False)
    every_steps: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)


class SampleConfig(Section):
    """`penstock sample`.

    Attributes:
        num_tasks: That are answered.
        answers_per_task: To each.
        pairs_per_task: Most pairs of a better and a worse answer that are written of each.
        split: Which tasks.
    """

    num_tasks: int = Field(default=1024, ge=1)
    answers_per_task: int = Field(default=4, ge=1)
    pairs_per_task: int = Field(default=4, ge=0)
    split: Literal["train", "held_out"] = "train"


class PartnerConfig(Section):
    """A second policy that learns in the same run, from the same groups: half of each is sampled by it.

    Attributes:
        model: Of any size; its tokenizer is that of `model`.
        optimizer: None is `trainer.optimizer`.
    """

    model: ModelConfig
    optimizer: OptimizerConfig | None = None


class RunConfig(Section):
    """Everything one run needs.

    Attributes:
        name: Name of the run: letters, digits and `._-`.
        run_dir: Where the run is written, relative to the working directory.
        seed: Of tasks, sampling and initial weights.
        total_steps: Batches to train.
        overwrite: Delete a non-empty `run_dir` instead of refusing to start.
        warm_start: Overrides of the `penstock sft` that `penstock train` runs first, where `model.path` is not there
            yet; None: it has to be there.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    run_dir: str
    seed: int = Field(ge=0)
    total_steps: int = Field(ge=1)
    overwrite: bool = False
    model: ModelConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    env: EnvConfig
    reward: RewardConfig
    sandbox: SandboxConfig = SandboxConfig()
    dataflow: DataflowConfig
    weights: WeightsConfig = WeightsConfig()
    cluster: ClusterConfig
    tracker: TrackerConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    critic: CriticConfig = CriticConfig()
    partner: PartnerConfig | None = None
    sample: SampleConfig = SampleConfig()
    warm_start: tuple[str, ...] | None = None
    sft: SftConfig | None = None
    preference: PreferenceConfig | None = None

    @property
    def partner_view(self) -> RunConfig:
        """The configuration of the partner, as if it were alone."""
        assert self.partner is not None, "there is a partner"
        trainer = self.trainer
        if self.partner.optimizer is not None:
            trainer = trainer.model_copy(update={"optimizer": self.partner.optimizer})
        return self.model_copy(update={"model": self.partner.model, "trainer": trainer, "partner": None})

    @property
    def computes_logprobs_early(self) -> bool:
        """The trainer forwards ready groups while it waits for their batch (docs/concepts/dataflow.md)."""
        algorithm, flow = self.algorithm, self.dataflow
        is_own_reference = algorithm.needs_reference and not self.num_frozen("reference")
        is_needed = algorithm.needs_critic or algorithm.proximal == "recompute" or is_own_reference
        return flow.early_logprobs and is_needed and not flow.stream_micro_batches and not self.cluster.colocated

    def frozen(self, role: FrozenRole) -> ReferenceConfig | TeacherConfig:
        """The section of a frozen policy."""
        return self.reference if role == "reference" else self.teacher

    def num_frozen(self, role: FrozenRole) -> int:
        """Processes that hold it; 0 if the algorithm asks it nothing, or it is the trained one without its adapters."""
        algorithm = self.algorithm
        is_needed = algorithm.needs_reference if role == "reference" else algorithm.needs_teacher
        is_without_adapters = role == "reference" and self.trainer.lora is not None and self.reference.path is None
        return self.frozen(role).num_workers if is_needed and not is_without_adapters else 0

    def frozen_pool(self, role: FrozenRole) -> str:
        return self.frozen(role).pool or self.cluster.trainer_pool
