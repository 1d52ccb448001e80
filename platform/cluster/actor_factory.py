"""Starts the actors of a run according to the placement plan, and stops them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from penstock.actors.cluster import (
    ObjectStore,
    Resources,
    node_ids,
    start_engines,
    start_rewards,
    start_trainer,
)
from penstock.actors.devices import ReservedDevices, reserve_devices
from penstock.actors.engine.client import RemoteEngine
from penstock.actors.frozen_policies import FrozenPolicyClient, start_frozen_policies
from penstock.actors.reward.client import RewardClient
from penstock.actors.trainer.client import TrainerClient
from penstock.actors.weights.process_group import (
    EngineReceivers,
    InPlaceTransport,
    NodeReceivers,
    ProcessGroupTransport,
)
from penstock.actors.weights.publisher import ActorWeightPublisher, Probe
from penstock.actors.weights.transports import (
    AdapterTransport,
    DeviceMemoryTransport,
    GatherTransport,
    SharedMemoryTransport,
    WeightTransport,
    is_one_node,
)
from penstock.dataflow.errors import ConfigError, EngineLostError, PlacementError, WeightSyncError
from penstock.dataflow.ids import PARTNER, POLICY, EngineId, PolicyId
from penstock.platform.cluster.memory import kv_cache_gib
from penstock.platform.cluster.placement import Role, device_bundles, plan_placement
from penstock.platform.cluster.session import cluster_session, is_joined
from penstock.platform.cluster.weight_routes import GROUP_ROUTES, MULTI_LAYOUT_ROUTES, WeightRoute, weight_route
from penstock.platform.config.findings import Command
from penstock.platform.config.schema import FROZEN_ROLES, FrozenRole, RunConfig
from penstock.platform.metrics.flow_stats import sampled_every
from penstock.platform.metrics.run_files import LOGS_FOLDER, PROFILES_FOLDER
from penstock.rollout.config import VllmEngineConfig
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.trainer.batches.examples import ModelKind
from penstock.trainer.spec import FrozenPolicySpec, TrainerSpec
from penstock.weights.copies import copy_environment
from penstock.weights.layout.algebra import Layout, TensorSpec, side_by_side
from penstock.weights.layout.sides import EngineLayout
from penstock.weights.planner.plan import BUCKET_BYTES

logger = logging.getLogger(__name__)

_Started = TypeVar("_Started")

RESERVE_S = 300.0
"""Longest wait for GPUs, seconds: nothing is loaded in it."""


@dataclass(slots=True)
class RunActors:
    """The actors of a run. The trainer is replaced when one of its ranks was lost."""

    engines: list[RemoteEngine]
    trainer: TrainerClient
    rewards: RewardClient
    store: ObjectStore
    reference: FrozenPolicyClient | None
    teacher: FrozenPolicyClient | None
    partner: RunActors | None = None
    devices: ReservedDevices | None = None
    policy_id: PolicyId = POLICY
    num_engines_started: int = 0
    layout: EngineLayout | None = None
    shards: dict[str, range] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_engines_started = len(self.engines)

    async def lost_ranks(self) -> list[str]:
        """Trainer ranks that are dead or do not answer."""
        lost = [f"trainer rank {rank}" for rank in await self.trainer.lost_ranks()]
        if self.partner is not None:
            lost += [f"{rank} of the partner" for rank in await self.partner.lost_ranks()]
        return lost

    async def roll_back(self, config: RunConfig, restore_from: str, policy_id: PolicyId = POLICY) -> None:
        """Start the trainer again from a checkpoint. Engines stay up, and forget versions of the lost lineage.

        Colocated engines sleep meanwhile, since a trainer that loads needs more memory than one between steps.

        Raises:
            TrainingError, EngineLostError, PlacementError: The first failure, after all starts have ended.
        """
        if config.cluster.colocated:
            await _all_ended([engine.sleep() for engine in self.engines])
            await self._restart_trainer(config, policy_id, restore_from)
            await _all_ended([engine.wake() for engine in self.engines])
            await self.renew_engines(config)
            return
        starts = [self._restart_trainer(config, policy_id, restore_from), self.renew_engines(config)]
        if self.partner is not None:
            folder = str(Path(restore_from) / PARTNER)
            starts.append(self.partner.roll_back(config.partner_view, folder, PARTNER))
        await _all_ended(starts)

    async def renew_engines(self, config: RunConfig) -> None:
        """Have all engines drop their requests and versions.

        Those that were lost too, e.g. with the node of a rank, are restarted, since a run is built from engines that
        answer.

        Raises:
            EngineLostError, PlacementError: The first failure, after all starts have ended.
        """
        await _all_ended([self._renew(engine, config) for engine in self.engines])

    async def _renew(self, engine: RemoteEngine, config: RunConfig) -> None:
        try:
            await engine.forget_versions()
        except EngineLostError:
            if config.cluster.colocated:  # its model may be loaded only in its turn on the shared devices
                raise
            logger.warning("%s was lost too, and is restarted", engine.engine_id)
            await self.restarted(config, engine.engine_id)

    async def _restart_trainer(self, config: RunConfig, policy_id: PolicyId, restore_from: str) -> None:
        nodes = self.trainer.nodes
        self.trainer.kill()
        self.trainer = await start_trainer_group(
            config, policy_id=policy_id, devices=self.devices, restore_from=restore_from, near=nodes
        )

    def of_policies(self) -> list[TrainerClient | RemoteEngine]:
        """Trainers and engines of all policies."""
        return [self.trainer, *self.engines, *([] if self.partner is None else self.partner.of_policies())]

    async def publisher(self, pool: EnginePool, config: RunConfig, probe: Probe) -> ActorWeightPublisher:
        return ActorWeightPublisher(pool, config.weights, await self._export(pool, config), self.trainer, probe)

    async def restarted(self, config: RunConfig, engine_id: EngineId) -> RemoteEngine:
        """Kill the remains of an engine and start a new process with the model of `model.path`, not yet in the pool.

        Raises:
            PlacementError: If it does not start within `rollout.start_timeout_s`.
            EngineLostError: If it fails to start.
        """
        lost = next(engine for engine in self.engines if engine.engine_id == engine_id)
        lost.kill()
        engine = await self.start_engine(config, engine_index(engine_id), lost.node_id)
        self.engines[self.engines.index(lost)] = engine  # looked up now: meanwhile others may have joined or left
        return engine

    async def started(self, config: RunConfig) -> RemoteEngine:
        """Start one more engine, with an id that no engine of this run has had; not yet in the pool.

        Raises:
            PlacementError: If it does not start within `rollout.start_timeout_s`.
            EngineLostError: If it fails to start.
        """
        index, self.num_engines_started = self.num_engines_started, self.num_engines_started + 1
        process = ("engine", self.policy_id, index)
        if self.devices is not None:
            need = resources(config, "engine", "train")[0]
            self.devices.reuse(process, int(need.num_gpus), need.accelerator_type)
        try:
            engine = await self.start_engine(config, index)
        except BaseException:
            if self.devices is not None:
                self.devices.release(process)
            raise
        self.engines.append(engine)
        return engine

    async def start_engine(self, config: RunConfig, index: int, near: str | None = None) -> RemoteEngine:
        """Start one engine during a run, on node `near` if that is possible.

        All engines of a pool that are not colocated need the same resources.
        """
        needs = resources(config, "engine", "train")
        need = needs[index % len(needs)]
        need = replace(need, near=near or need.near)
        if self.devices is not None:
            need = replace(need, place=self.devices.place(("engine", self.policy_id, index)))
        (engine,) = await start_engines(
            [engine_spec(config, index, self.policy_id)], [need], config.rollout.start_timeout_s
        )
        engine.shards = self.shards.get(rollout_pool_of(config, engine))
        return engine

    async def ended(self, engine: RemoteEngine) -> None:
        """End the process of an engine that has left."""
        self.engines.remove(engine)
        await engine.close()
        engine.kill()
        if self.devices is not None:
            self.devices.release(("engine", self.policy_id, engine_index(engine.engine_id)))

    async def _export(self, pool: EnginePool, config: RunConfig) -> WeightTransport:
        """Create the weight transport, by the configuration and the nodes on which Ray placed trainer and engines."""
        weights, dtype = config.weights, config.model.dtype
        route, first = weight_route(config, is_one_node=is_one_node(self.trainer, self.engines)), self.trainer.node_id
        if route == "cuda_ipc" and (problem := await self._no_peer_access()):
            if weights.transport == "cuda_ipc":
                raise PlacementError(f"weights.transport=cuda_ipc: {problem}. Use weights.transport=auto.")
            logger.warning("weights: %s, so versions go through shared memory instead of CUDA IPC", problem)
            route = "shared_memory"
        if weights.codec != "full" and route not in GROUP_ROUTES:
            logger.warning("weights.codec=%s has no effect: the weight route is %s", weights.codec, route)
        if route == "gather":
            return GatherTransport(self.trainer, pool)
        training, _ = await self.trainer.training_sharding()
        if self.layout is None:  # asked once: after a rollback the first engine may just have been lost, too
            self.layout, self.shards = await engine_layout(config, self.engines, training.tensors, route)
        layout = self.layout
        if route == "adapters":
            return AdapterTransport(self.trainer, pool, layout, dtype)
        if route == "cuda_ipc":
            return DeviceMemoryTransport(self.trainer, pool, layout, dtype, weights)
        if route == "shared_memory":
            return SharedMemoryTransport(
                self.trainer, self.engines, layout, dtype, weights.timeout_s, weights.num_buffers
            )
        if route == "live_parameters":
            return InPlaceTransport(self.trainer, EngineReceivers(pool, first), layout, dtype, weights)
        receivers = EngineReceivers(pool, first) if route == "engine_devices" else NodeReceivers(pool, first, weights)
        return ProcessGroupTransport(self.trainer, receivers, layout, dtype, weights)

    async def _no_peer_access(self) -> str:
        """Why a rank cannot write into the memory of an engine's device; empty if all can."""
        by_engine = await asyncio.gather(*(engine.seen_devices() for engine in self.engines))
        try:
            closed = await self.trainer.without_peer_access([name for names in by_engine for name in names])
        except WeightSyncError as error:
            return str(error).removeprefix("weights: ").rstrip(".")
        if not closed:
            return ""
        (one, other), more = closed[0], len(closed) - 1
        others = f" and {more} more pairs" if more else ""
        return f"GPU {one} of the trainer and GPU {other} of an engine{others} have no peer access"


@asynccontextmanager
async def start_actors(
    config: RunConfig, restore_from: str | None = None, pending: set[str] | None = None
) -> AsyncIterator[RunActors]:
    """Start Ray, trainer, engines and reward workers concurrently. They are always stopped on exit.

    Colocated engines start after the trainer: loading takes more memory than it keeps, and vLLM measures what is free.

    Args:
        config: Configuration of the run.
        restore_from: Folder of the checkpoint that the trainer continues from; None: from `model.path`.
        pending: Holds the names of what is being started; changed meanwhile.
    """
    pending = set() if pending is None else pending

    async def named(name: str, start: Awaitable[_Started]) -> _Started:
        pending.add(name)
        try:
            return await start
        finally:
            pending.discard(name)

    pending.add("Ray")
    async with cluster_session(config, "train", Path(config.run_dir) / LOGS_FOLDER) as config:
        pending.discard("Ray")
        devices = await reserve_run_devices(config)
        rewards = reward_workers(config, devices=devices)
        async with asyncio.TaskGroup() as starting:
            partner_start = (
                starting.create_task(named("the partner", _start_partner(config, rewards, devices, restore_from)))
                if config.partner
                else None
            )
            trainer = start_trainer_group(config, devices=devices, restore_from=restore_from)
            trainer_start = starting.create_task(named(counted(config.trainer.num_ranks, "trainer rank"), trainer))
            first = trainer_start if config.cluster.colocated else None
            engines = start_engine_group(config, devices=devices, after=first)
            engines_start = starting.create_task(named(counted(config.num_engines, "engine"), engines))
            starting.create_task(named("the reward workers", rewards_are_loaded(config, rewards)))
            frozen_starts = [
                starting.create_task(named(f"the {role}", start_frozen_group(config, role, devices)))
                for role in FROZEN_ROLES
            ]
        reference, teacher = (start.result() for start in frozen_starts)
        actors = RunActors(
            engines_start.result(),
            trainer_start.result(),
            rewards,
            ObjectStore(),
            reference,
            teacher,
            None if partner_start is None else partner_start.result(),
            devices,
        )
        try:
            yield actors
        finally:
            for frozen in (reference, teacher):
                if frozen is not None:
                    frozen.close()
            await asyncio.gather(rewards.close(), *(part.close() for part in actors.of_policies()))


def counted(number: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


async def _start_partner(
    config: RunConfig, rewards: RewardClient, devices: ReservedDevices | None, restore_from: str | None
) -> RunActors:
    """Start the trainer and the engines of the partner policy."""
    view = config.partner_view
    folder = None if restore_from is None else str(Path(restore_from) / PARTNER)
    trainer, engines = await asyncio.gather(
        start_trainer_group(view, policy_id=PARTNER, devices=devices, restore_from=folder),
        start_engine_group(view, devices=devices, policy_id=PARTNER),
    )
    return RunActors(engines, trainer, rewards, ObjectStore(), None, None, devices=devices, policy_id=PARTNER)


async def _all_ended(starts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them at once until all have ended; raises the first failure then."""
    for end in await asyncio.gather(*starts, return_exceptions=True):
        if isinstance(end, BaseException):
            raise end


async def reserve_run_devices(config: RunConfig, command: Command = "train") -> ReservedDevices | None:
    """Reserve all GPUs that `command` uses, at once; None if it uses none.

    Raises:
        PlacementError: If the cluster does not have these GPUs.
    """
    bundles = device_bundles(config, command)
    if not bundles:
        return None
    return await reserve_devices(bundles, min(RESERVE_S, config.rollout.start_timeout_s))


async def start_trainer_group(
    config: RunConfig,
    path: str | None = None,
    kind: ModelKind = "policy",
    command: Command = "train",
    policy_id: PolicyId = POLICY,
    devices: ReservedDevices | None = None,
    restore_from: str | None = None,
    near: Sequence[str] = (),
) -> TrainerClient:
    """Start the trainer ranks of `config` with the policy at `path` (default: `model.path`).

    Rank i is started on node `near[i]` if that is possible.
    """
    spec = replace(trainer_spec(config, path, kind, policy_id), restore_from=restore_from)
    if command != "train":  # it trains one policy on given answers, which no temperature has sampled
        spec = replace(spec, has_partner=False, temperature=1.0)
    needs = resources(config, "trainer", command, devices, policy_id)
    if near:
        needs = [replace(need, near=node) for need, node in zip(needs, near, strict=True)]
    return await start_trainer(spec, needs, torch_environment(config, spec.device))


def trainer_spec(
    config: RunConfig, path: str | None = None, kind: ModelKind = "policy", policy_id: PolicyId = POLICY
) -> TrainerSpec:
    """Settings of the trainer ranks."""
    cluster = config.cluster
    return TrainerSpec(
        model_path=path or model_path(config),
        model=config.model,
        trainer=config.trainer,
        algorithm=config.algorithm,
        device=pool_device(config, cluster.trainer_pool),
        threads=cluster.threads_per_process,
        seed=config.seed,
        temperature=config.rollout.sampling.temperature,
        max_new_tokens=config.rollout.sampling.max_new_tokens,
        publish_in=config.weights.directory,
        profile_in=profiles_folder(config, policy_id),
        shares_devices=cluster.colocated,
        kind=kind,
        policy_id=policy_id,
        has_partner=config.partner is not None or policy_id != POLICY,
        record_every=sampled_every(config.dataflow.batch_groups, config.dataflow.group_size),
        critic=config.critic if config.algorithm.needs_critic else None,
        pass_reward=config.dataflow.pass_reward,
    )


async def start_frozen_group(
    config: RunConfig, role: FrozenRole, devices: ReservedDevices | None = None
) -> FrozenPolicyClient | None:
    """Start the processes of the reference policy or the teacher; None if the algorithm needs none."""
    if not config.num_frozen(role):
        return None
    section = config.frozen(role)
    spec = FrozenPolicySpec(
        path=section.path or model_path(config),
        model=config.model,
        device=pool_device(config, config.frozen_pool(role)),
        threads=config.cluster.threads_per_process,
        max_tokens=config.trainer.max_group_tokens,
        temperature=config.rollout.sampling.temperature,
        replays_routes=role == "reference" and section.path in (None, config.model.path),
        offloads=config.takes_turns(role),
    )
    environment = torch_environment(config, spec.device)
    start_timeout_s = config.trainer.start_timeout_s
    needs = resources(config, role, "train", devices)
    return await start_frozen_policies(role, spec, needs, environment, start_timeout_s)


def torch_environment(config: RunConfig, device: str) -> dict[str, str]:
    """Environment variables of a process that uses torch."""
    return {
        "OMP_NUM_THREADS": str(config.cluster.threads_per_process),
        "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads must not occupy the cores of the others
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": device,
    } | copy_environment()


def reward_workers(
    config: RunConfig, command: Command = "train", devices: ReservedDevices | None = None
) -> RewardClient:
    """Start the reward workers, on the devices of `reward.pool` if it is set."""
    device = "cpu" if config.reward.pool is None else pool_device(config, config.reward.pool)
    return start_rewards(config.reward, config.sandbox, resources(config, "reward", command, devices), device)


async def rewards_are_loaded(config: RunConfig, rewards: RewardClient) -> None:
    """Wait for the models of reward workers with a pool. Workers without a pool load on first use."""
    if config.reward.pool is not None:
        await rewards.start(config.rollout.start_timeout_s)


async def start_engine_group(
    config: RunConfig,
    command: Command = "train",
    devices: ReservedDevices | None = None,
    policy_id: PolicyId = POLICY,
    after: Awaitable[TrainerClient] | None = None,
) -> list[RemoteEngine]:
    """Start the rollout engines of `config`, once `after` has ended."""
    if after is not None:
        await after
    needs = resources(config, "engine", command, devices, policy_id)
    return await start_engines(engine_specs(config, policy_id, command), needs, config.rollout.start_timeout_s)


def engine_specs(config: RunConfig, policy_id: PolicyId = POLICY, command: Command = "train") -> list[EngineSpec]:
    """Settings of the engines that a run begins with."""
    return [engine_spec(config, index, policy_id, command) for index in range(config.num_engines)]


def engine_spec(config: RunConfig, index: int, policy_id: PolicyId = POLICY, command: Command = "train") -> EngineSpec:
    """Settings of the engine `engine-<index>`, of a partner `partner-engine-<index>`: logs and errors name it."""
    view = config.rollout_view_of(index)
    cluster, engine = view.cluster, view.rollout.engine
    if cluster.colocated and isinstance(engine, VllmEngineConfig):  # as planned: vLLM would take the trainer's share
        planned = kv_cache_gib(view, cluster.pools[cluster.rollout_pool])
        engine = engine.model_copy(update={"kv_cache_gib": planned})
    return EngineSpec(
        engine_id=EngineId(f"{'' if policy_id == POLICY else f'{policy_id}-'}engine-{index}"),
        model_path=model_path(config),
        model=config.model,
        engine=engine,
        device=pool_device(config, cluster.rollout_pool),
        update_mode=config.weights.kv_mode,
        bucket_bytes=BUCKET_BYTES if config.weights.staging == "bucket" else None,
        # Shorter than the driver's time limit, because the engine's own error has more detail.
        stage_timeout_s=0.9 * config.weights.timeout_s,
        publish_in=config.weights.directory,
        records_routes=command == "train" and config.algorithm.routing == "replay",
        profile_steps=config.trainer.profile_steps,
        profile_in=profiles_folder(config, policy_id),
        seed=config.seed + index,
        threads=cluster.threads_per_process,
    )


def profiles_folder(config: RunConfig, policy_id: PolicyId) -> str:
    """Where the ranks and engines of a policy write their profiles."""
    folder = Path(config.run_dir).absolute() / PROFILES_FOLDER
    return str(folder if policy_id == POLICY else folder / policy_id)


def engine_index(engine_id: EngineId) -> int:
    """The index that `engine_spec` has named an engine by."""
    return int(engine_id.rpartition("-")[2])


def rollout_pool_of(config: RunConfig, engine: RemoteEngine) -> str:
    """Name of the pool of an engine."""
    return config.rollout_view_of(engine_index(engine.engine_id)).cluster.rollout_pool


async def engine_layout(
    config: RunConfig, engines: Sequence[RemoteEngine], tensors: Sequence[TensorSpec], route: WeightRoute
) -> tuple[EngineLayout, dict[str, range]]:
    """Ask an engine of each pool how it holds the policy.

    Pools may hold it differently. Then a version is written in all of their layouts, one after the other, and the
    engines are told which ranks of the result are theirs (`RemoteEngine.shards`).

    Returns:
        The layout that versions are written in, and the ranks of each pool in it; none if all have the same layout.

    Raises:
        PlacementError: If they differ and the route has one layout.
    """
    ranks: dict[str, range] = {}
    layouts: list[Layout] = []
    for engine in engines:
        if (pool := rollout_pool_of(config, engine)) not in ranks:
            layout = await engine.layout(tensors)
            if layout not in layouts:
                layouts.append(layout)
            first = sum(known.num_ranks for known in layouts[: layouts.index(layout)])
            ranks[pool] = range(first, first + layout.num_ranks)
    if len(layouts) == 1:
        return EngineLayout(config.rollout.engine.type, layouts[0]), {}
    if route not in MULTI_LAYOUT_ROUTES:
        raise PlacementError(
            f"weights: the engines of {' and '.join(ranks)} hold the policy in {len(layouts)} layouts, but the route "
            f"{route} sends one layout to all engines. Use engines of one kind of accelerator, or on one node "
            "weights.transport=shared_memory."
        )
    for engine in engines:
        engine.shards = ranks[rollout_pool_of(config, engine)]
    return EngineLayout(config.rollout.engine.type, side_by_side(layouts)), ranks


def resources(
    config: RunConfig,
    role: Role,
    command: Command,
    devices: ReservedDevices | None = None,
    policy_id: PolicyId = POLICY,
) -> list[Resources]:
    """Ray resources of each process of a role.

    On a cluster that is joined, processes on CPU pools are dealt to the nodes in turn: they ask Ray for nothing, so it
    would start all of them on one.

    Args:
        config: Configuration of one policy.
        role: Of the processes.
        command: What is run.
        devices: Reserved devices of the run; None: Ray looks for GPUs when each process starts.
        policy_id: The policy that `config` is of.
    """
    needs, nodes = [], node_ids() if is_joined(config) else []
    for number, placement in enumerate(plan_placement(config, command)):
        if (placement.role, placement.policy_id) != (role, POLICY):
            continue
        need = Resources(
            num_gpus=placement.num_gpus,
            accelerator_type=config.cluster.pools[placement.pool].accelerator_type if placement.pool else None,
        )
        if devices is not None and placement.num_gpus:
            need = replace(need, place=devices.place((role, policy_id, placement.index)))
        elif devices is not None and placement.device == "gpu":
            need = replace(need, assignment=devices.assign(placement.slot, placement.num_slots))
        if nodes and placement.device == "cpu":
            need = replace(need, near=nodes[number % len(nodes)])
        needs.append(need)
    return needs


def pool_device(config: RunConfig, pool: str) -> Literal["cpu", "cuda"]:
    return "cuda" if config.cluster.pools[pool].device == "gpu" else "cpu"


def model_path(config: RunConfig) -> str:
    if config.model.path is None:
        raise ConfigError(["model.path is not set: `penstock train` and `penstock eval` start from a policy on disk."])
    return config.model.path
