"""The root of the validated configuration. Hydra composes YAML from `conf/`; once, at the door, it becomes this.

Sections live next to what they configure; components get their section, never the root.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.envs.config import EnvConfig, RewardConfig
from penstock.envs.sandbox.config import SandboxConfig
from penstock.platform.config.dataflow import DataflowConfig
from penstock.platform.config.section import Section
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


class PoolConfig(Section):
    """A set of equal accelerators, or of CPU slots.

    Attributes:
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


class JsonlTrackerConfig(Section):
    """`metrics.jsonl` in the run directory. Always on."""


class TensorboardTrackerConfig(Section):
    """TensorBoard event files in the run directory."""


class WandbTrackerConfig(Section):
    """Weights & Biases. Without an API key it logs offline into the run directory."""

    project: str = "penstock"
    entity: str | None = None
    mode: Literal["auto", "online", "offline"] = "auto"


class TrackerConfig(Section):
    """Which metric sinks are on: `tracker=[jsonl,wandb,tensorboard]`."""

    jsonl: JsonlTrackerConfig = JsonlTrackerConfig()
    wandb: WandbTrackerConfig | None = None
    tensorboard: TensorboardTrackerConfig | None = None


class EvaluationConfig(Section):
    """Greedy evaluation on held-out tasks.

    Attributes:
        num_tasks: Held-out tasks of the first and the last evaluation.
        every_steps: Evaluate beside training every so many steps; 0 is never.
        num_tasks_beside: Held-out tasks of an evaluation beside training.
    """

    num_tasks: int = Field(default=1024, ge=1)
    every_steps: int = Field(default=20, ge=0)
    num_tasks_beside: int = Field(default=256, ge=1)


class CheckpointConfig(Section):
    """Policy snapshots in Hugging Face form; the last one is always written."""

    every_steps: int = Field(default=0, ge=0)


class SampleConfig(Section):
    """`penstock sample`.

    Attributes:
        num_tasks: That are answered.
        answers_per_task: To each.
        pairs_per_task: Most pairs of a better and a worse answer that are written of each.
        side: Which tasks.
    """

    num_tasks: int = Field(default=1024, ge=1)
    answers_per_task: int = Field(default=4, ge=1)
    pairs_per_task: int = Field(default=4, ge=0)
    side: Literal["train", "held_out"] = "train"


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
        name: Name of the run; its directory is `run_dir`.
        total_steps: Batches to train.
        overwrite: Delete a non-empty `run_dir` instead of refusing to start.
        warm_start: Overrides of the `penstock sft` that `penstock train` runs first, where `model.path` is not there
            yet; None: it has to be there.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    run_dir: str
    seed: int = Field(default=0, ge=0)
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
    def prefetches(self) -> bool:
        """The trainer forwards ready groups while it waits for their batch (docs/concepts/dataflow.md)."""
        algorithm, flow = self.algorithm, self.dataflow
        is_own_reference = algorithm.needs_reference and not self.num_frozen("reference")
        is_needed = algorithm.needs_critic or algorithm.proximal == "recompute" or is_own_reference
        return flow.prefetch and is_needed and not flow.stream_micro_batches and not self.cluster.colocated

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
