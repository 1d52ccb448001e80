"""Searches how to use the devices of a run: the fastest plans by `costs.py` that fit in memory by `memory.py`. Pure.

A plan is a split of the devices between trainer ranks and engines, sequence parallelism, ZeRO stage and micro-batch of
the ranks, and tensor parallelism of the engines. All valid combinations are timed. Only the micro-batch is bisected: a
larger one is never slower and never needs less memory. Memory of a side alone discards options before that; whole
plans are checked in the order of their step times, until enough fit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from math import ceil
from typing import NamedTuple

from penstock.platform.cluster.costs import Prediction, Scales, Workload, predict, train_s
from penstock.platform.cluster.memory import engine_memory, kv_cache_gib, sequence_kv_gib, trainer_memory
from penstock.platform.cluster.placement import device_load_gib, host_load_gib, plan_placement
from penstock.platform.config.schema import RunConfig
from penstock.trainer.validation import trainer_violations

MICRO_BATCHES = range(8, 64 * 8 + 1)
"""Eighths of the longest sequence that are tried as `max_tokens_per_micro_batch`."""
MIN_GAIN = 1.01
"""A larger micro-batch needs more memory, so it is taken only if training is faster by this factor."""
OF_TRAINER = ("num_ranks", "sequence_parallel_size", "zero_stage", "max_tokens_per_micro_batch")
"""Keys of the trainer that are searched."""


class Split(NamedTuple):
    """Devices for trainer ranks and for the engines of `cluster.rollout_pool`."""

    ranks: int
    engine_devices: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings that are searched."""

    num_ranks: int
    sequence_parallel_size: int
    zero_stage: int
    max_tokens_per_micro_batch: int
    num_engines: int
    tensor_parallel_size: int
    sharding: str | None = None
    """Of a trainer without ZeRO."""

    @property
    def trainer_words(self) -> str:
        """The trainer's part, for tables and messages."""
        split = f", sequences over {self.sequence_parallel_size}" if self.sequence_parallel_size > 1 else ""
        sharding = self.sharding or f"ZeRO-{self.zero_stage}"
        return f"{self.num_ranks} ranks, {sharding}{split}, {self.max_tokens_per_micro_batch} tokens"

    @property
    def words(self) -> str:
        """All of it."""
        return f"{self.trainer_words}; {self.num_engines} engines over {self.tensor_parallel_size}"

    @classmethod
    def of(cls, config: RunConfig) -> Plan:
        """The plan that a configuration has."""
        trainer, rollout = config.trainer, config.rollout
        return cls(
            trainer.num_ranks,
            trainer.sequence_parallel_size,
            trainer.zero_stage,
            trainer.max_tokens_per_micro_batch,
            rollout.num_engines,
            rollout.engine.tensor_parallel_size,
            None if trainer.backend == "deepspeed" else trainer.sharding,
        )

    def applied(self, config: RunConfig) -> RunConfig:
        """The run with this plan."""
        trainer = {name: getattr(self, name) for name in OF_TRAINER}
        engine = config.rollout.engine
        if engine.type == "vllm":
            engine = engine.model_copy(update={"tensor_parallel_size": self.tensor_parallel_size})
        rollout = config.rollout.model_copy(update={"num_engines": self.num_engines, "engine": engine})
        pools = dict(config.cluster.pools)
        for name, count in self._moved(config).items():
            pools[name] = pools[name].model_copy(update={"count": count})
        return config.model_copy(
            update={
                "trainer": config.trainer.model_copy(update=trainer),
                "rollout": rollout,
                "cluster": config.cluster.model_copy(update={"pools": pools}),
            }
        )

    def overrides(self, config: RunConfig) -> list[str]:
        """The words that make a command of the run one with this plan."""
        words = [f"trainer.{name}={getattr(self, name)}" for name in OF_TRAINER]
        words.append(f"rollout.num_engines={self.num_engines}")
        if config.rollout.engine.type == "vllm":
            words.append(f"rollout.engine.tensor_parallel_size={self.tensor_parallel_size}")
        return words + [f"cluster.pools.{name}.count={count}" for name, count in self._moved(config).items()]

    def _moved(self, config: RunConfig) -> dict[str, int]:
        """New sizes of the pools, if devices may be moved between them."""
        cluster = config.cluster
        if not are_alike(config):
            return {}
        total = cluster.pools[cluster.trainer_pool].count + cluster.pools[cluster.rollout_pool].count
        of_trainer = self.num_ranks + taken_by_others(config)[cluster.trainer_pool]
        return {cluster.trainer_pool: of_trainer, cluster.rollout_pool: total - of_trainer}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and its predicted step."""

    plan: Plan
    predicted: Prediction


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Something that does not fit."""

    excess_gib: float
    """How much memory a device lacks."""
    what: str
    """The settings that need it."""


@dataclass(slots=True)
class Search:
    """All candidates, and what was discarded."""

    config: RunConfig
    candidates: list[Candidate] = field(default_factory=list)
    """Fastest first. Each side fits by itself; `fitting` checks both together."""
    too_large: list[TooLarge] = field(default_factory=list)
    """Options of one side that do not fit."""

    def fitting(self) -> Iterator[Candidate]:
        """The candidates that fit in memory, fastest first."""
        for candidate in self.candidates:
            excess = excess_gib(candidate.plan.applied(self.config))
            if excess > 0:
                self.too_large.append(TooLarge(excess, candidate.plan.words))
            else:
                yield candidate


def search(config: RunConfig, workload: Workload, scales: Scales, splits: Sequence[Split] | None = None) -> Search:
    """Time all plans of a run, over `splits` (default: all of its devices).

    Raises:
        ConfigError: If the accelerators of a pool are not known.
    """
    found = Search(config)
    for split in possible_splits(config) if splits is None else splits:
        for engines in _engine_options(config, split, found.too_large):
            for plan in _trainer_options(engines.applied(config), workload, found.too_large):
                found.candidates.append(Candidate(plan, predict(plan.applied(config), workload, scales)))
    # Of equally fast plans, the one with the most left in reserve.
    found.candidates.sort(key=lambda one: (one.predicted.step_s, one.predicted.generate_s, one.predicted.train_s))
    return found


def are_alike(config: RunConfig) -> bool:
    """Whether trainer and engines have pools of their own, but of equal devices, which may be moved between them."""
    cluster = config.cluster
    one, other = cluster.pools[cluster.trainer_pool], cluster.pools[cluster.rollout_pool]
    return cluster.trainer_pool != cluster.rollout_pool and one == other.model_copy(update={"count": one.count})


def taken_by_others(config: RunConfig) -> Counter[str]:
    """Pool -> GPUs of processes that are not planned: reference, teacher, rewards, engines of extra pools."""
    taken = Counter[str]()
    for one in plan_placement(config):
        is_planned = one.role == "trainer" or (one.role == "engine" and one.pool == config.cluster.rollout_pool)
        if one.pool is not None and one.device == "gpu" and not is_planned:
            taken[one.pool] += one.num_slots
    return taken


def possible_splits(config: RunConfig) -> list[Split]:
    """All splits of the devices. Colocated roles use each device twice; devices of unequal pools are not moved."""
    cluster, taken = config.cluster, taken_by_others(config)
    trainer, rollout = (
        cluster.pools[name].count - taken[name] for name in (cluster.trainer_pool, cluster.rollout_pool)
    )
    if cluster.colocated:
        return [Split(ranks, trainer) for ranks in range(1, trainer + 1)]
    if cluster.trainer_pool == cluster.rollout_pool:
        return [Split(ranks, trainer - ranks) for ranks in range(1, trainer)]
    if are_alike(config):
        return [Split(ranks, trainer + rollout - ranks) for ranks in range(1, trainer + rollout)]
    return [Split(ranks, rollout) for ranks in range(1, trainer + 1)]


def excess_gib(config: RunConfig) -> float:
    """How much memory the fullest device of a run lacks, or the machine of its CPU pools; at most 0 if it fits.

    A KV cache that does not hold one trajectory of full length lacks memory as well.
    """
    placements, pools = plan_placement(config), config.cluster.pools
    excess = [load - pools[name].limit_gib for name, load in device_load_gib(config, placements).items()]
    on_cpu = {one.pool for one in placements if one.pool is not None and one.device == "cpu"}
    if on_cpu:
        excess.append(host_load_gib(placements) - sum(pools[name].limit_gib for name in on_cpu))
    return max([*excess, _lacking_cache_gib(config)])


def _engine_options(config: RunConfig, split: Split, too_large: list[TooLarge]) -> Iterator[Plan]:
    """Plans whose engines are valid and fit, with the ranks of the split and the given settings of the trainer."""
    cluster, engine = config.cluster, config.rollout.engine
    pool, devices = cluster.pools[cluster.rollout_pool], split.engine_devices
    begin = split.ranks if cluster.trainer_pool == cluster.rollout_pool and not cluster.colocated else 0
    per_node = pool.devices_per_node or begin + devices
    for tp in range(1, min(per_node, devices) + 1 if engine.type == "vllm" else 2):
        slots = range(begin, begin + devices - tp + 1, tp)
        # An engine never leaves its node.
        num_engines = next((n for n, slot in enumerate(slots) if slot % per_node + tp > per_node), len(slots))
        if config.model.shape.uneven_sizes(tp) or not num_engines:
            continue
        plan = replace(Plan.of(config), num_ranks=split.ranks, num_engines=num_engines, tensor_parallel_size=tp)
        run = plan.applied(config)
        excess = max(engine_memory(run, pool).device_gib - pool.limit_gib, _lacking_cache_gib(run))
        if excess > 0 and not cluster.colocated:  # where it depends on the trainer
            too_large.append(TooLarge(excess, f"engines over {tp}"))
        else:
            yield plan


def _trainer_options(config: RunConfig, workload: Workload, too_large: list[TooLarge]) -> Iterator[Plan]:
    """Plans with the ranks and engines of `config` whose trainer is valid and fits, each with its best micro-batch."""
    num_ranks, pool = config.trainer.num_ranks, config.cluster.pools[config.cluster.trainer_pool]
    for sp, stage in product(range(1, min(num_ranks, pool.devices_per_node or num_ranks) + 1), range(4)):
        sized = partial(_sized, config, sp, stage)
        smallest = sized(MICRO_BATCHES[0])
        num_replicas = smallest.trainer.data_parallel_size
        is_even = num_replicas and not config.dataflow.batch_groups % num_replicas
        if not is_even or trainer_violations(smallest.model, smallest.trainer):
            continue
        num_fitting = bisect_right(MICRO_BATCHES, 0.0, key=lambda eighths: _trainer_excess_gib(sized(eighths)))
        if not num_fitting:
            too_large.append(TooLarge(_trainer_excess_gib(smallest), Plan.of(smallest).trainer_words))
            continue
        fitting = MICRO_BATCHES[:num_fitting]
        enough_s = train_s(sized(fitting[-1]), workload) * MIN_GAIN
        chosen = fitting[bisect_left(fitting, -enough_s, key=lambda eighths: -train_s(sized(eighths), workload))]
        yield Plan.of(sized(chosen))


def _sized(config: RunConfig, sequence_parallel_size: int, zero_stage: int, eighths: int) -> RunConfig:
    """The run with micro-batches of so many eighths of the part of the longest sequence that a rank has."""
    update = {
        "sequence_parallel_size": sequence_parallel_size,
        "zero_stage": zero_stage,
        "max_tokens_per_micro_batch": ceil(config.model.max_context_tokens / sequence_parallel_size) * eighths // 8,
    }
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=update)})


def _trainer_excess_gib(config: RunConfig) -> float:
    """How much memory a rank lacks, or the whole run where ranks and engines have the same devices or main memory."""
    pool = config.cluster.pools[config.cluster.trainer_pool]
    alone = trainer_memory(config, pool).device_gib - pool.limit_gib
    is_shared = config.cluster.colocated or pool.device == "cpu"
    return excess_gib(config) if is_shared and alone <= 0 else alone


def _lacking_cache_gib(config: RunConfig) -> float:
    """How much more each device of an engine needs to hold the KV cache of one trajectory of full length."""
    needed = sequence_kv_gib(config) / config.rollout.engine.tensor_parallel_size
    return needed - kv_cache_gib(config, config.cluster.pools[config.cluster.rollout_pool])
