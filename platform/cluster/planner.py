"""Searches how to use the devices of a run: the fastest plans by `costs.py` that fit in memory by `memory.py`. Pure.

A plan is a split of the devices between trainer ranks and engines, sequence parallelism, ZeRO stage and micro-batch of
the ranks, and tensor parallelism of the engines. How long a batch trains does not depend on the engines, and how long
it is generated does not depend on the ranks. So the options of both sides are timed once for each split, and their
pairs are only combined and sorted. Memory of a side alone discards options before that; whole plans are checked in the
order of their step times, until enough fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

from penstock.platform.cluster.costs import Prediction, Scales, Workload, combine, generate_s, send_s, swap_s, train_s
from penstock.platform.cluster.memory import engine_memory, kv_cache_gib, sequence_kv_gib, trainer_memory
from penstock.platform.cluster.placement import device_load_gib, host_load_gib, plan_placement
from penstock.platform.config.schema import RunConfig
from penstock.trainer.validation import trainer_violations

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
"""Multiples of the longest sequence that are tried as `max_tokens_per_micro_batch`."""


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

    @property
    def trainer_words(self) -> str:
        """The trainer's part, for tables and messages."""
        split = f", Ulysses over {self.sequence_parallel_size}" if self.sequence_parallel_size > 1 else ""
        return f"{self.num_ranks} ranks, ZeRO-{self.zero_stage}{split}, {self.max_tokens_per_micro_batch} tokens"

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
        )

    def applied(self, config: RunConfig) -> RunConfig:
        """The run with this plan."""
        trainer = {name: getattr(self, name) for name in _OF_TRAINER}
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
        words = [f"trainer.{name}={getattr(self, name)}" for name in _OF_TRAINER]
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


_OF_TRAINER = ("num_ranks", "sequence_parallel_size", "zero_stage", "max_tokens_per_micro_batch")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan and its predicted step."""

    plan: Plan
    predicted: Prediction


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Something that does not fit.

    Attributes:
        excess_gib: How much memory a device lacks.
        what: The settings that need it.
    """

    excess_gib: float
    what: str


@dataclass(slots=True)
class Search:
    """All candidates, and what was discarded.

    Attributes:
        candidates: Fastest first. Each side fits by itself; `fitting` checks both together.
        too_large: Options of one side that do not fit.
    """

    config: RunConfig
    candidates: list[Candidate] = field(default_factory=list)
    too_large: list[TooLarge] = field(default_factory=list)

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
        of_ranks = [
            (plan, train_s(plan.applied(config), workload) * scales.train)
            for plan in _trainer_options(config, split.ranks, found.too_large)
        ]
        for num_engines, tp in _engine_options(config, split, found.too_large) if of_ranks else ():
            plans = [
                (replace(plan, num_engines=num_engines, tensor_parallel_size=tp), seconds) for plan, seconds in of_ranks
            ]
            run = plans[0][0].applied(config)  # what follows depends on the number of ranks alone
            generated_s = generate_s(run, workload) * scales.generate
            sent_s, swapped_s = send_s(run) * scales.publish, swap_s(run) * scales.publish
            found.candidates += [
                Candidate(plan, combine(run, trained_s, generated_s, sent_s, swapped_s)) for plan, trained_s in plans
            ]
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
    """How much memory the fullest device of a run lacks, or the machine of its CPU pools; at most 0 if it fits."""
    placements, pools = plan_placement(config), config.cluster.pools
    excess = [load - pools[name].memory_gib for name, load in device_load_gib(config, placements).items()]
    on_cpu = {one.pool for one in placements if one.pool is not None and one.device == "cpu"}
    if on_cpu:
        excess.append(host_load_gib(placements) - sum(pools[name].memory_gib for name in on_cpu))
    return max(excess, default=0.0)


def _trainer_options(config: RunConfig, num_ranks: int, too_large: list[TooLarge]) -> Iterator[Plan]:
    """Plans of the ranks that are valid and fit, with the engines of `config`."""
    pool, context = config.cluster.pools[config.cluster.trainer_pool], config.model.max_context_tokens
    given = replace(Plan.of(config), num_ranks=num_ranks)
    for sp in range(1, min(num_ranks, pool.devices_per_node or num_ranks) + 1):
        if num_ranks % sp or config.model.shape.num_kv_heads % sp:
            continue
        longest = ceil(context / sp)
        sizes = [longest * multiple for multiple in MICRO_BATCHES]
        if given.max_tokens_per_micro_batch >= longest:
            sizes = sorted({*sizes, given.max_tokens_per_micro_batch})
        for stage in range(4):
            for tokens in sizes:
                plan = replace(given, sequence_parallel_size=sp, zero_stage=stage, max_tokens_per_micro_batch=tokens)
                run = plan.applied(config)
                size = run.trainer.data_parallel_size
                if size == 0 or config.dataflow.batch_groups % size or trainer_violations(run.model, run.trainer):
                    break
                excess = trainer_memory(run, pool).device_gib - pool.memory_gib
                if excess > 0:  # with larger micro-batches even more
                    too_large.append(TooLarge(excess, plan.trainer_words))
                    break
                yield plan


def _engine_options(config: RunConfig, split: Split, too_large: list[TooLarge]) -> Iterator[tuple[int, int]]:
    """Numbers of engines and their tensor-parallel sizes that are valid and fit."""
    name, engine = config.cluster.rollout_pool, config.rollout.engine
    pool, devices = config.cluster.pools[name], split.engine_devices
    per_node = min(pool.devices_per_node or devices, devices)
    for tp in range(1, per_node + 1 if engine.type == "vllm" else 2):
        # An engine never leaves its node.
        num_engines = devices // per_node * (per_node // tp) + devices % per_node // tp
        if config.model.shape.uneven_sizes(tp) or not num_engines:
            continue
        run = replace(Plan.of(config), num_engines=num_engines, tensor_parallel_size=tp).applied(config)
        lacking = sequence_kv_gib(run) - kv_cache_gib(run, pool) * tp
        excess = max(engine_memory(run, pool).device_gib - pool.memory_gib, lacking / tp)
        if excess > 0:
            too_large.append(TooLarge(excess, f"engines over {tp}"))
        else:
            yield num_engines, tp
