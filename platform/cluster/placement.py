"""The placement plan: assigns every process to devices of a pool, as a pure function of the configuration.

A *pool* (platform/config/pools.py) is a set of equal accelerators or CPU slots. Actors and `--dry-run` use the same
plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import Literal

from penstock.actors.bundles import Bundle
from penstock.dataflow.ids import PARTNER, POLICY, PolicyId
from penstock.platform.cluster.memory import (
    BASE_HOST_GIB,
    Memory,
    Part,
    engine_memory,
    frozen_memory,
    resident_gib,
    shared_gib,
    trainer_memory,
)
from penstock.platform.cluster.weight_routes import DEVICE_BUFFER_ROUTES, weight_route
from penstock.platform.config.findings import WITHOUT_ENGINES, Command
from penstock.platform.config.pools import PoolConfig
from penstock.platform.config.schema import FROZEN_ROLES, RunConfig

Role = Literal["trainer", "engine", "reference", "teacher", "reward", "driver"]
Process = tuple[Role, PolicyId, int]
"""A process of a run: role, policy, and rank or number."""


@dataclass(frozen=True, slots=True)
class RolePlacement:
    """One process of a run."""

    role: Role
    index: int
    """Rank of a trainer, or number of an engine or reward worker."""
    pool: str | None
    """Name of its pool; None for processes without a device (driver, reward workers without reward.pool)."""
    device: Literal["cpu", "gpu"]
    slot: int
    """Its first device in the pool, 0 ≤ slot < count. Colocated roles share slots; CPU slots are always shared."""
    num_gpus: float
    """GPUs that Ray reserves for it; 0 when colocated, where `shared_bundles` are reserved for all."""
    memory: Memory
    num_slots: int = 1
    """Number of its devices, starting at `slot`; above 1 for an engine with tensor parallelism."""
    policy_id: PolicyId = POLICY
    """The policy of the run that it belongs to."""


def plan_placement(config: RunConfig, command: Command = "train") -> list[RolePlacement]:
    """Place every process that `command` starts. The pools of the configuration must exist (checks/cluster.py).

    On GPU pools, rank i is on slot i. Engines follow with `tensor_parallel_size` slots each, numbered over all rollout
    pools; they start at slot 0 when colocated or in their own pool. The next slots are for references, then teachers,
    then reward workers with a pool, and finally the ranks and engines of a partner.
    """
    has_partner = config.partner is not None and command == "train"
    own = _plan(config, command, has_partner=has_partner)
    if not has_partner:
        return own
    taken = Counter[str]()
    for placement in own:
        if placement.pool is not None:
            taken[placement.pool] += placement.num_slots
    partner = [
        replace(placement, policy_id=PARTNER, slot=(placement.slot + taken[pool]) % config.cluster.pools[pool].count)
        for placement in _plan(config.partner_view, command, has_partner=True)
        if placement.role in ("trainer", "engine") and (pool := placement.pool) is not None
    ]
    return [*own, *partner]


def _plan(config: RunConfig, command: Command, *, has_partner: bool) -> list[RolePlacement]:
    """Place the processes of one policy. Each role takes the slots after those of the previous roles."""
    cluster, taken = config.cluster, Counter[str]()

    def place(
        role: Role,
        name: str,
        count: int,
        estimate: Callable[[RunConfig, PoolConfig], Memory],
        num_slots: int = 1,
        view: RunConfig = config,
    ) -> Iterator[RolePlacement]:
        takes_turns = _takes_turns(config, role, command)
        first = 0 if takes_turns else taken[name]
        taken[name] += count * num_slots
        for index in range(count):
            pool = cluster.pools[name]
            num_gpus = float(num_slots) if pool.device == "gpu" and not takes_turns else 0.0
            slot = (first + index * num_slots) % pool.count
            yield RolePlacement(role, index, name, pool.device, slot, num_gpus, estimate(view, pool), num_slots)

    in_shared_memory: dict[Part, float] = {"published": shared_gib(config)} if command == "train" else {}
    driver = Memory({}, {"base": BASE_HOST_GIB["driver"], **in_shared_memory})
    placements = [RolePlacement("driver", 0, None, "cpu", 0, 0.0, driver)]
    num_ranks = 0 if command in ("eval", "sample") else config.trainer.num_ranks
    placements += place("trainer", cluster.trainer_pool, num_ranks, partial(trainer_memory, has_partner=has_partner))
    engines: list[RolePlacement] = []
    for view in () if command in WITHOUT_ENGINES else config.rollout_views:
        width = view.rollout.engine.tensor_parallel_size
        engines += place("engine", view.cluster.rollout_pool, view.rollout.num_engines, engine_memory, width, view)
    placements += [replace(engine, index=number) for number, engine in enumerate(engines)]
    if command == "train":
        for role in FROZEN_ROLES:
            num_parameters = config.teacher.num_parameters if role == "teacher" else None
            of_role = partial(frozen_memory, weights=num_parameters, is_offloaded=config.takes_turns(role))
            placements += place(role, config.frozen_pool(role), config.num_frozen(role), of_role)
    num_rewards = config.reward.num_workers if engines else 0
    if config.reward.pool is not None:
        on_gpu = cluster.pools[config.reward.pool].device == "gpu"
        of_reward = partial(
            frozen_memory, weights=config.reward.num_parameters, dtype="bfloat16" if on_gpu else "float32"
        )
        return [*placements, *place("reward", config.reward.pool, num_rewards, of_reward)]
    small = Memory({}, {"base": BASE_HOST_GIB["reward"]})
    return [*placements, *(RolePlacement("reward", index, None, "cpu", 0, 0.0, small) for index in range(num_rewards))]


def shared_bundles(config: RunConfig, command: Command = "train") -> list[int]:
    """Sizes of the bundles of GPUs that colocated roles share; empty if there are none.

    Each bundle is on one node, and as wide as an engine and a group of ranks that split a model or a sequence, which
    cannot span several nodes (their least common multiple). Slot s is therefore device s mod width of bundle s ÷ width.
    """
    turns = [
        placement
        for placement in plan_placement(config, command)
        if _takes_turns(config, placement.role, command) and placement.device == "gpu"
    ]
    split = config.trainer.tensor_parallel_size * config.trainer.sequence_parallel_size
    width = lcm(config.rollout.engine.tensor_parallel_size, split)
    used = max((placement.slot + placement.num_slots for placement in turns), default=0)
    return [min(width, used - first) for first in range(0, used, width)]


def device_bundles(config: RunConfig, command: Command = "train") -> list[Bundle]:
    """All GPUs that `command` reserves. The bundles that colocated roles use in turns come first.

    What communicates within every layer is on one node: the tensor-parallel ranks of an engine, and the ranks of the
    trainer that split a model or a sequence.
    """
    cluster, trainer = config.cluster, config.trainer
    shared_type = cluster.pools[cluster.trainer_pool].accelerator_type
    bundles = [Bundle(count, shared_type) for count in shared_bundles(config, command)]
    width = trainer.tensor_parallel_size * trainer.sequence_parallel_size
    together: dict[Process, list[RolePlacement]] = {}
    for placement in plan_placement(config, command):
        if placement.num_gpus:
            index = placement.index // width if placement.role == "trainer" else placement.index
            together.setdefault((placement.role, placement.policy_id, index), []).append(placement)
    for placements in together.values():
        pool = placements[0].pool
        bundles.append(
            Bundle(
                sum(int(placement.num_gpus) for placement in placements),
                None if pool is None else cluster.pools[pool].accelerator_type,
                tuple((placement.role, placement.policy_id, placement.index) for placement in placements),
            )
        )
    return bundles


def _takes_turns(config: RunConfig, role: Role, command: Command) -> bool:
    if not config.cluster.colocated or command != "train":
        return False
    return role in ("trainer", "engine") or (role in FROZEN_ROLES and config.takes_turns(role))


def device_load_gib(config: RunConfig, placements: list[RolePlacement]) -> dict[str, float]:
    """Peak memory of the fullest GPU of every pool, GiB.

    Colocated roles take turns, but what a rank keeps between steps stays while the engine generates, and so do the
    context and the version buffers of an engine that sleeps: max(whole rank + sleeping engine, resting rank + engine).
    A frozen policy with `offload` is on the device while the engine generates; of one at rest the context stays.
    """
    by_slot: dict[tuple[str, int], list[RolePlacement]] = defaultdict(list)
    for placement in placements:
        if placement.pool is not None and placement.device == "gpu":
            for slot in range(placement.slot, placement.slot + placement.num_slots):
                by_slot[placement.pool, slot].append(placement)
    loads: dict[str, float] = {}
    for (pool, _), here in by_slot.items():
        loads[pool] = max(loads.get(pool, 0.0), _slot_load(here, config))
    return loads


def host_load_gib(placements: list[RolePlacement]) -> float:
    """Main memory of all processes together, GiB."""
    return sum(placement.memory.host_gib for placement in placements)


def _slot_load(here: list[RolePlacement], config: RunConfig) -> float:
    if not config.cluster.colocated:
        return sum(placement.memory.device_gib for placement in here)
    ranks = [placement.memory for placement in here if placement.role == "trainer"]
    engines = [placement.memory for placement in here if placement.role == "engine"]
    frozen = [one.memory for one in here if one.role in FROZEN_ROLES and config.takes_turns(one.role)]
    others = sum(one.memory.device_gib for one in here if not _takes_turns(config, one.role, "train"))
    has_buffers = weight_route(config) in DEVICE_BUFFER_ROUTES
    asleep = sum(memory.device["base"] + memory.device["published"] * has_buffers for memory in engines)
    training = sum(memory.device_gib for memory in ranks) + asleep + sum(memory.device["base"] for memory in frozen)
    generating = sum(resident_gib(config, memory) for memory in ranks)
    generating += sum(memory.device_gib for memory in (*engines, *frozen))
    turns = max(training, generating)
    return turns + others
