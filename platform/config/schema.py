"""The root of the validated configuration. The YAML that Hydra composes from `conf/` is converted to it once, at start.

Sections are defined next to the component that they configure. A component receives its section, never the root.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PrivateAttr

from penstock.dataflow.settings import MAX_TIMEOUT_S, Settings
from penstock.dataflow.staleness import ExpiryPolicy
from penstock.envs.config import EnvConfig, RewardConfig, SourceConfig, StreamConfig
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.streams import stream_env
from penstock.platform.config.pools import ClusterConfig, ExtraRolloutConfig
from penstock.platform.metrics.trackers.config import ConsoleForm, TrackerConfig
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
TASKS_DURING_TRAINING = 256
"""Held-out tasks of an evaluation during training, unless a number is given."""
FROZEN_ROLES: tuple[FrozenRole, ...] = ("reference", "teacher")
"""Frozen policies that compute logprobs of the sampled tokens, each in its own processes."""


def set_stream(name: str) -> str:
    """The stream whose environment answers the tasks of an evaluation set with a source of its own."""
    return f"evaluation/{name}"


def is_within(key: str, section: str) -> bool:
    """Whether a dotted key is this section, or in it."""
    return key == section or key.startswith(f"{section}.")


class FilterConfig(Settings):
    """Filters of groups that should not be trained (docs/concepts/dataflow.md). Each filtered group is replaced."""

    zero_variance: bool = False
    """Filter groups whose rewards are all equal."""
    zero_variance_part: str | None = None
    """Compare this named part of the reward instead of the sum, e.g. raw correctness."""
    max_overlong_share: float | None = Field(default=None, ge=0, lt=1)
    """Filter groups with a larger share of truncated answers; None is off."""
    pass_rate: tuple[float, float] | None = None
    """Keep groups with a share of passing answers (`dataflow.pass_reward`) in [lowest, highest]; None is off."""
    user: str | None = None
    """Import path of a function `(trajectories) -> bool`; groups for which it is false are filtered."""


class DataflowConfig(Settings):
    """Batching, staleness and retries (docs/concepts/staleness.md)."""

    batch_groups: int = Field(ge=1, le=65_536)
    """B, groups per training batch."""
    group_size: int = Field(ge=1, le=1024)
    """Trajectories per group; they share a baseline."""
    pass_reward: float = 1.0
    """Reward from which an answer passes: for the accuracy of evaluations, `filters.pass_rate` and `by_success`."""
    group_sizing: str | None = None
    """`by_success` (dataflow/difficulty.py), or import path of a `GroupSizing` (dataflow/task_queue.py), which may
    reduce the group size of individual tasks; None is off."""
    length_limiting: str | None = None
    """`by_success`, or import path of a `LengthLimiting`, which may reduce the turn length of individual tasks; None is
    off."""
    max_staleness: int = Field(ge=0)
    """η, the maximum staleness of a trained token, in policy versions. 0 is the synchronous algorithm."""
    on_expiry: ExpiryPolicy = ExpiryPolicy.WAIT
    """What happens to groups that would become too old. `wait` holds the batch open for them, `trim` gives their tokens
    that are too old no loss weight, and `drop` drops them and requeues their tasks."""
    max_requeues: int = Field(default=3, ge=0)
    """How often a task is requeued after `drop`."""
    surplus: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    """Redundant groups admitted beyond the window. If only a few stragglers block a batch, up to this many of them are
    cancelled. Biased towards short answers. `auto`: the fewest, up to `max_surplus`, with which versions come fastest.
    """
    max_surplus: int | None = Field(default=None, ge=1)
    """Largest number of redundant groups with `surplus=auto`; null is a quarter of batch_groups, at least 1."""
    stream_micro_batches: bool = False
    """The trainer starts with the first groups of a batch while the rest is still being generated. The gradient is the
    same."""
    early_logprobs: bool = True
    """While the trainer waits for a batch, it computes values, proximal logprobs and reference logprobs (of a policy
    with adapters) of the ready groups. The gradient is the same. It has no effect if the algorithm needs none of
    these, with colocated roles, and with `stream_micro_batches`."""
    max_retries: int = Field(default=2, ge=0)
    """Retries of one trajectory after its environment or reward failed."""
    min_group_size: int | None = Field(default=None, ge=1)
    """Smallest number of members with which a group trains after others have failed; null is 2, and 1 for groups of
    one."""
    max_live_gib: float | None = Field(default=None, gt=0)
    """Memory reserved at admission for the payloads of all live groups, GiB; None is no limit."""
    filters: FilterConfig = FilterConfig()
    """Which ready groups are not trained."""
    batch_timeout_s: float = Field(default=1800.0, ge=1, le=MAX_TIMEOUT_S)
    """Longest wait for a batch without a new token, score or ready group, seconds, before the run stops and lists what
    it waits for."""

    @property
    def largest_surplus(self) -> int:
        """Redundant groups of a batch at most."""
        if self.surplus != "auto":
            return self.surplus
        return max(1, self.batch_groups // 4) if self.max_surplus is None else self.max_surplus

    @property
    def fewest_members(self) -> int:
        """Smallest number of members with which a group trains."""
        return min(2, self.group_size) if self.min_group_size is None else self.min_group_size


class EvaluationSetConfig(Settings):
    """A further evaluation set (docs/guides/evaluation.md). What is not set is as in `evaluation`."""

    env: SourceConfig | None = None
    """Source of its held-out tasks; null: those of `env`, answered in another way."""
    every_steps: int | None = Field(default=None, ge=0)
    """As `evaluation.every_steps`."""
    before_training: bool | None = None
    """As `evaluation.before_training`."""
    num_tasks: int | None = Field(default=None, ge=1)
    """As `evaluation.num_tasks`."""
    num_tasks_during_training: int | None = Field(default=None, ge=1)
    """As `evaluation.num_tasks_during_training`."""
    answers_per_task: int | None = Field(default=None, ge=1, le=1024)
    """As `evaluation.answers_per_task`."""
    temperature: float | None = Field(default=None, ge=0, le=10)
    """As `evaluation.temperature`."""


class EvaluationConfig(Settings):
    """Evaluation on held-out tasks (docs/guides/evaluation.md)."""

    num_tasks: int | None = Field(default=None, ge=0)
    """Held-out tasks of the first and the last evaluation; null is all of them, at most 1024; 0 is a run without
    evaluations."""
    every_steps: int = Field(default=20, ge=0)
    """Steps between evaluations that run concurrently with training; 0 disables them."""
    before_training: bool = True
    """Evaluate before the first step."""
    num_tasks_during_training: int | None = Field(default=None, ge=1)
    """The first so many of these tasks are those of such an evaluation; null is 256, and all of them with `keep_best`,
    which compares evaluations."""
    answers_per_task: int = Field(default=1, ge=1, le=1024)
    """k, answers per task. Above 1, `pass@k` and `maj@k` are measured, too."""
    temperature: float = Field(default=0.0, ge=0, le=10)
    """Of these answers; 0 is greedy, which gives every answer of a task the same text."""
    max_failed_share: float = Field(default=0.05, ge=0, lt=1)
    """Tolerated share of answers that cannot be sampled or scored after three attempts. They are left out of all
    figures. Beyond it, the evaluation fails."""
    keep_best: bool = False
    """Take a checkpoint with every evaluation, and keep that of the best one in addition to `checkpoint.keep`.
    `penstock export --best` writes its policy."""
    part: str | None = Field(default=None, min_length=1)
    """Part of the reward that evaluations measure instead of the whole: what the policy should be good at, if it learns
    from a reward model. The best evaluation is that of this part."""
    patience: int | None = Field(default=None, ge=1)
    """End the training after so many evaluations in a row of which none is better than the best one; null never does.
    """
    sets: dict[str, EvaluationSetConfig] = Field(default_factory=dict)
    """Name -> further evaluation set, with its own tasks, schedule and sampling. `keep_best` and `patience` do not look
    at it."""

    def of_set(self, name: str) -> EvaluationConfig:
        """The settings of a set; the empty name is that of `evaluation` itself."""
        return (
            self if not name else self.model_copy(update=self.sets[name].model_dump(exclude={"env"}, exclude_none=True))
        )

    def first_tasks(self, num_held_out: int) -> int:
        """How many of the held-out tasks an evaluation during training has."""
        if self.num_tasks_during_training is not None:
            return self.num_tasks_during_training
        return num_held_out if self.keep_best else min(num_held_out, TASKS_DURING_TRAINING)


class CheckpointConfig(Settings):
    """Checkpoints of the whole run, from which `penstock resume` continues."""

    every_minutes: float = Field(default=15.0, ge=0, allow_inf_nan=False)
    """Take one at the first step that ends so many minutes after the last one; 0 turns this off."""
    every_steps: int = Field(default=0, ge=0)
    """Take one every so many steps, too; 0 turns this off."""
    keep: int = Field(default=2, ge=1, le=10_000)
    """Number of newest checkpoints that are kept; those of `keep_best` and `keep_every` are kept in addition."""
    keep_best: int = Field(default=1, ge=1)
    """With `evaluation.keep_best`, keep those of so many best evaluations."""
    keep_every: int | None = Field(default=None, ge=1)
    """Keep for good those whose step is a multiple of this, too, if one is taken there (`every_steps`)."""
    upload: str | None = Field(default=None, min_length=1)
    """Where each complete checkpoint is copied while training goes on, e.g. `s3://bucket/runs/one`: any URL of fsspec,
    whose package must be installed. The place has the layout of the run directory."""


class SampleConfig(Settings):
    """Settings of `penstock sample`."""

    num_tasks: int = Field(default=1024, ge=1)
    """Number of tasks."""
    answers_per_task: int = Field(default=4, ge=1)
    """Answers sampled per task."""
    pairs_per_task: int = Field(default=4, ge=0)
    """Maximum number of preference pairs written per task."""
    split: Literal["train", "held_out"] = "train"
    """The split of the tasks."""


class PartnerConfig(Settings):
    """A second policy that is trained in the same run on the same groups, half of each sampled by it."""

    model: ModelConfig
    """Model of the partner, of any size, with the tokenizer of `model`."""
    optimizer: OptimizerConfig | None = None
    """Optimizer of the partner; None uses `trainer.optimizer`."""


class RunConfig(Settings):
    """Configuration of a run."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=128)
    """Name of the run: letters, digits and `._-`."""
    run_dir: str
    """Directory of the run, relative to the working directory."""
    seed: int = Field(ge=0, lt=2**32)
    """Seed of tasks, sampling and initial weights."""
    total_steps: int = Field(ge=1, le=100_000_000)
    """Number of batches to train."""
    max_hours: float | None = Field(default=None, gt=0, le=100_000)
    """End in order after so many hours, with policy and checkpoint, so that `penstock resume` goes on. None: no limit.
    """
    stop_grace_s: float = Field(default=25.0, ge=1, le=MAX_TIMEOUT_S)
    """Longest time from a signal (SIGTERM, Ctrl-C, a closed terminal) to the end of all processes, seconds. Less than
    the time until the sender of the signal kills: docker 10, SLURM and Kubernetes 30."""
    console: ConsoleForm = "table"
    """What it prints: `table`, a line for each step; `quiet`, only how it ended; `json`, an object per line."""
    overwrite: bool = False
    """Delete a non-empty `run_dir` instead of refusing to start."""
    resume: Literal["never", "auto"] = "never"
    """`auto`: `penstock train` continues the run in `run_dir` if there is one, so that a scheduler may start the same
    command again."""
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
    """Overrides of the `penstock sft` that `penstock train` runs first if `model.path` does not exist; None:
    `model.path` must exist."""
    sft: SftConfig | None = None
    preference: PreferenceConfig | None = None
    _typed: tuple[str, ...] = PrivateAttr(default=())

    def __eq__(self, other: object) -> bool:
        # Equal values are equal, typed or not.
        return isinstance(other, RunConfig) and self.__dict__ == other.__dict__

    __hash__ = Settings.__hash__

    @property
    def typed(self) -> tuple[str, ...]:
        """Dotted keys that somebody has set, on the command line or in a file of theirs; all others are defaults."""
        return self._typed

    def is_typed(self, key: str) -> bool:
        """Whether somebody has set a key, a section around it or a key in it."""
        return any(is_within(key, one) or is_within(one, key) for one in self._typed)

    @property
    def partner_view(self) -> RunConfig:
        """The configuration of the partner as a run of one policy."""
        assert self.partner is not None, "there is a partner"
        trainer = self.trainer
        if self.partner.optimizer is not None:
            trainer = trainer.model_copy(update={"optimizer": self.partner.optimizer})
        return self.model_copy(update={"model": self.partner.model, "trainer": trainer, "partner": None})

    @property
    def rollout_views(self) -> tuple[RunConfig, ...]:
        """The same run as seen from each of its rollout pools, the one of `cluster.rollout_pool` first.

        In the view of a pool, `cluster.rollout_pool` and `rollout` are those of its engines, and the other pools are
        the extra ones. Engines are numbered in this order.
        """
        cluster, rollout, views = self.cluster, self.rollout, []
        if not cluster.extra_rollout_pools:  # the planner asks thousands of times
            return (self,)
        pools = {cluster.rollout_pool: ExtraRolloutConfig(num_engines=rollout.num_engines, engine=rollout.engine)}
        for name, extra in cluster.extra_rollout_pools.items():
            # Resolved here, since `rollout.engine` is another one in each view.
            pools[name] = extra.model_copy(update={"engine": extra.engine or rollout.engine})
        for name, pool in pools.items():
            others = {other: pools[other] for other in pools if other != name}
            of_cluster = {"rollout_pool": name, "extra_rollout_pools": others}
            of_rollout = {"num_engines": pool.num_engines, "engine": pool.engine}
            views.append(
                self.model_copy(
                    update={
                        "cluster": cluster.model_copy(update=of_cluster),
                        "rollout": rollout.model_copy(update=of_rollout),
                    }
                )
            )
        return tuple(views)

    def set_env(self, name: str) -> EnvConfig:
        """The environment of a set of `evaluation.sets`."""
        source = self.evaluation.sets[name].env
        return self.env if source is None else stream_env(self.env, source)

    @property
    def played_env(self) -> EnvConfig:
        """`env` with the environments of evaluation sets as further streams: all that episodes may need."""
        sources = {set_stream(name): one.env for name, one in self.evaluation.sets.items() if one.env is not None}
        streams = {name: StreamConfig(**one.model_dump()) for name, one in sources.items()}
        return self.env.model_copy(update={"streams": {**self.env.streams, **streams}}) if streams else self.env

    @property
    def num_engines(self) -> int:
        """Engines on all pools."""
        return sum(view.rollout.num_engines for view in self.rollout_views)

    def rollout_view_of(self, engine: int) -> RunConfig:
        """The view of the pool of an engine, by its number; an engine that joins a run is on `cluster.rollout_pool`."""
        views = [view for view in self.rollout_views for _ in range(view.rollout.num_engines)]
        return views[engine] if engine < len(views) else self.rollout_views[0]

    @property
    def computes_logprobs_early(self) -> bool:
        """Whether the trainer computes logprobs of ready groups while it waits (docs/concepts/dataflow.md)."""
        algorithm, flow = self.algorithm, self.dataflow
        is_own_reference = algorithm.needs_reference and not self.num_frozen("reference")
        is_needed = algorithm.needs_critic or algorithm.proximal == "recompute" or is_own_reference
        return flow.early_logprobs and is_needed and not flow.stream_micro_batches and not self.cluster.colocated

    def frozen(self, role: FrozenRole) -> ReferenceConfig | TeacherConfig:
        """The section of a frozen policy."""
        return self.reference if role == "reference" else self.teacher

    def num_frozen(self, role: FrozenRole) -> int:
        """Number of its processes; 0 if the algorithm does not use it, or it is the policy without adapters."""
        algorithm = self.algorithm
        is_needed = algorithm.needs_reference if role == "reference" else algorithm.needs_teacher
        is_without_adapters = role == "reference" and self.trainer.lora is not None and self.reference.path is None
        return self.frozen(role).num_workers if is_needed and not is_without_adapters else 0

    def takes_turns(self, role: FrozenRole) -> bool:
        """Whether a frozen policy shares the GPUs of colocated roles, at rest while the trainer steps."""
        cluster, pool = self.cluster, self.frozen_pool(role)
        is_shared = cluster.colocated and pool == cluster.trainer_pool and cluster.pools[pool].device == "gpu"
        return is_shared and self.frozen(role).offload and self.num_frozen(role) > 0

    def frozen_pool(self, role: FrozenRole) -> str:
        return self.frozen(role).pool or self.cluster.trainer_pool
