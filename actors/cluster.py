"""Starting and ending everything that runs in other processes: Ray itself, engines, trainer ranks, reward workers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import ray
import ray._private.utils as ray_utils
from ray._private import services
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.services import canonicalize_bootstrap_address
from ray.actor import ActorHandle
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.core.generated.gcs_service_pb2 import CheckAliveRequest
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.devices import BundlePlace, DeviceAssignment
from penstock.actors.engine.actor import EngineActor
from penstock.actors.engine.client import RemoteEngine
from penstock.actors.job_environment import passed_variables, shipped_folder, user_locations
from penstock.actors.processes import end_processes, ray_processes
from penstock.actors.ray_errors import answer_of, wait_started
from penstock.actors.reward.actor import RewardActor
from penstock.actors.reward.client import RewardClient
from penstock.actors.trainer.actor import TrainerRank
from penstock.actors.trainer.client import TrainerClient
from penstock.actors.worker_log import LOGS_VARIABLE
from penstock.dataflow.errors import EngineLostError, PlacementError, TrainingError
from penstock.dataflow.trajectory import GroupPayload
from penstock.envs.config import RewardConfig
from penstock.envs.contract import Device
from penstock.envs.sandbox.config import SandboxConfig
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.trainer.spec import TrainerSpec
from penstock.weights.copies import copy_environment
from penstock.weights.transport.shared_memory import remove_directories_of

ENGINE_CONCURRENCY = 64
# Above the number of pending calls: further calls would wait inside the worker, and so would its liveness check.
REWARD_CONCURRENCY = 100_000
# Calls that do not wait for a step: transfers of weights, checkpoints, saved policies, the sign of life.
RANK_CONCURRENCY = {"weight_io": 1, "checkpoint": 1, "saving": 1, "health": 1}
FETCH_TIMEOUT_S = 120.0
DRAIN_QUERY_S = 5
CONNECT_S = 10.0
RAY_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # with Ray's default of 15 any other program starves the engines
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


@dataclass(frozen=True, slots=True)
class Resources:
    """Ray resources of one actor."""

    num_gpus: float = 0.0
    """GPUs of its own; 0 on a CPU pool, or with an assignment."""
    accelerator_type: str | None = None
    """Ray's accelerator label, or None for any; of a process without a place."""
    assignment: DeviceAssignment | None = None
    """GPUs that it shares in turns with other actors (colocated), already reserved."""
    place: BundlePlace | None = None
    """Where its own GPUs are reserved; None for a process that joins later."""
    near: str | None = None
    """Node on which it is started if it is alive. For a lost process the one that it was on, since the route of the
    weights depends on it."""

    def options(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """Arguments of `.options(...)`."""
        seen = {} if self.assignment is None else self.assignment.environment()
        options: dict[str, Any] = {"num_cpus": 0}
        if variables := {**environment, **seen}:  # none at all would replace those of the job
            options["runtime_env"] = {"env_vars": variables}
        if self.assignment is not None:
            return options | self.assignment.options()
        if self.place is not None:
            return options | self.place.options(self.num_gpus)
        if self.num_gpus:
            options["num_gpus"] = self.num_gpus
        if self.accelerator_type:
            options["accelerator_type"] = self.accelerator_type
        # Ray ignores soft affinity of actors that ask for no CPU or GPU.
        if self.near is not None and self.near in node_ids():
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self.near, soft=False)
        return options


@dataclass(frozen=True, slots=True)
class JobNeeds:
    """What the workers of a joined cluster need from the driver."""

    modules: tuple[str, ...] = ()
    """Names of the modules that the configuration names; those that are not installed are sent."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that the configuration names."""


@asynccontextmanager
async def ray_session(
    address: str, publish_in: str | None = None, logs: Path | None = None, needs: JobNeeds | None = None
) -> AsyncIterator[None]:
    """Ray for the duration of a run: started here for `local`, joined otherwise.

    Args:
        address: Address of the cluster, or `local`.
        publish_in: Parent of the folders of published versions; None: shared memory.
        logs: Folder for the output of the workers (worker_log.py); None: it stays in Ray's logs.
        needs: Of the workers of a joined cluster; None: those of `local` inherit all from this process.

    Raises:
        PlacementError: If no cluster can be joined at `address`.
        ConfigError: If the user's modules are too large.
    """
    variables = {} if logs is None else {LOGS_VARIABLE: str(logs.absolute())}
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    os.environ.update({key: value for key, value in RAY_ENVIRONMENT.items() if key not in os.environ})
    if needs is not None:
        # Ray lowers the priority of a worker in the worker itself, so that this also reaches those of other nodes.
        own = {key: os.environ[key] for key in RAY_ENVIRONMENT}
        variables = own | passed_variables(os.environ, needs.variables) | variables
        # A driver that `ray job submit` has started inherits a runtime environment: what is given here replaces it.
        os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
        if problem := connection_problem(address):
            raise PlacementError(
                f"cluster.address={address} cannot be joined: {problem}. Start Ray on that machine with `ray start "
                "--head`, give the address that it prints, and open its port."
            )
        # `ray start --head` demands the token of ~/.ray wherever a local run has once made one, but Ray gives it to the
        # address `auto` only. A cluster that demands none cannot call a driver that does: its actors die at once.
        logging.getLogger("ray").setLevel(logging.ERROR)  # as `ray.init` below does
        if address != "auto" and demands_token(address):
            maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    locations = user_locations(needs.modules if needs is not None else ())
    with shipped_folder(locations, Path.cwd()) as sent, out_of_reach_of_signals():
        try:
            ray.init(
                address=address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=True,
                runtime_env={"env_vars": variables, **sent},
            )
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            if needs is None:
                raise
            raise PlacementError(
                f"cluster.address={address} cannot be joined: {' '.join(str(error).split())} Check with `ray status "
                f"--address {address}`; every node needs the same versions of Python and Ray, and the same "
                "~/.ray/auth_token if the cluster demands one, as this machine."
            ) from error
    try:
        yield
    finally:
        # Listed now: after the raylet has ended, its workers are no children of this process. Those of a joined cluster
        # are others', even if this process has started it.
        started = ray_processes() if needs is None else []
        # While Ray's worker of this process is gone and its Python object is not, freeing an object reference ends the
        # process silently, with code 1 (`CoreWorkerProcess::EnsureInitialized`). Other threads collect garbage, too.
        gc.collect()
        gc.disable()
        try:
            ray.shutdown()
        finally:
            gc.enable()
        end_processes(started)
        remove_directories_of([process.pid for process in started], publish_in)


@contextmanager
def out_of_reach_of_signals() -> Iterator[None]:
    """Within it, Ray starts its daemons in sessions of their own, and leaves this process's signal handlers alone.

    A signal to the process group, as a closed terminal, `timeout` or a scheduler sends it, would end them before the
    driver could save anything. They still die with the driver (PR_SET_PDEATHSIG). Ray has no setting for either.
    """
    start, set_handler = services.ConsolePopen, ray_utils.set_sigterm_handler
    services.ConsolePopen = partial(start, start_new_session=True)
    ray_utils.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        services.ConsolePopen, ray_utils.set_sigterm_handler = start, set_handler


def connection_problem(address: str) -> str:
    """Why nothing can be reached at HOST:PORT, or where `auto` leads to; empty if it can, or is not known.

    `ray.init` tries a dead address for minutes.
    """
    found = address
    if address == "auto":  # the newest cluster of this machine by Ray's record, which outlives it
        with contextlib.suppress(OSError, ValueError):  # none: `ray.init` says so
            found = canonicalize_bootstrap_address(address) or address
    host, _, port = found.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        where = "there" if found == address else f"at {found}, the last one that Ray started here"
        return f"nothing answers {where} ({error.strerror or error})"
    return ""


def demands_token(address: str) -> bool:
    """Whether the Ray cluster at HOST:PORT refuses calls without a token. What does not say so counts as no."""
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=CONNECT_S)
        except grpc.RpcError as error:
            return bool(error.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False


async def draining_nodes() -> set[str]:
    """Ids of the nodes that Ray has been told to drain, e.g. because they are about to be preempted.

    Ray publishes this neither in `ray.nodes()` nor, without a dashboard, in `ray.util.state`. This is what the command
    `ray status` asks.
    """
    address = ray.get_runtime_context().gcs_address
    status = await asyncio.to_thread(get_cluster_status, address, timeout=DRAIN_QUERY_S)
    nodes = [*status.active_nodes, *status.idle_nodes]
    return {node.node_id for node in nodes if node.node_status == "DRAINING" and node.node_id is not None}


class ObjectStore:
    """`PayloadStore` in Ray's object store; a payload lives as long as its handle."""

    async def put(self, payload: GroupPayload) -> ray.ObjectRef:
        return ray.put(payload)

    async def get(self, handle: ray.ObjectRef) -> GroupPayload:
        hint = "The node that holds it does not answer."
        payload: GroupPayload = await answer_of(handle, FETCH_TIMEOUT_S, TrainingError, "a stored group", hint)
        return payload


def node_ids() -> list[str]:
    """The nodes that are alive and offer CPUs, in the order of their addresses. Some heads are not meant for work."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    return [node["NodeID"] for node in sorted(nodes, key=lambda node: str(node["NodeManagerAddress"]))]


async def start_engines(
    specs: Sequence[EngineSpec], resources: Sequence[Resources], timeout_s: float
) -> list[RemoteEngine]:
    """Start all engines at once and wait until every one has loaded its model.

    Raises:
        PlacementError: If the cluster cannot place them within the time limit.
        EngineLostError: If one fails to start, with its cause.
    """
    actors = [engine_actor(spec, need) for spec, need in zip(specs, resources, strict=True)]
    starts = {str(spec.engine_id): actor.start.remote() for spec, actor in zip(specs, actors, strict=True)}
    hint = "Lower rollout.num_engines, or raise rollout.start_timeout_s if they are only slow; see logs/ of the run."
    try:
        nodes = await wait_started("cluster: starting the engines", starts, timeout_s, EngineLostError, hint)
    except PlacementError as late:
        has = f"Ray has {ray.available_resources()} free of {ray.cluster_resources()}."
        raise PlacementError(f"{late} {has}") from None
    return [RemoteEngine(spec.engine_id, actor, node) for spec, actor, node in zip(specs, actors, nodes, strict=True)]


def engine_actor(spec: EngineSpec, need: Resources) -> ActorHandle:
    """A process for one engine; its model is loaded by `start`."""
    options = need.options(vllm_environment(spec.device, spec.threads, spec.model.dtype) | copy_environment())
    return ray.remote(EngineActor).options(max_concurrency=ENGINE_CONCURRENCY, **options).remote(spec)


async def start_trainer(
    spec: TrainerSpec, resources: Sequence[Resources], environment: Mapping[str, str]
) -> TrainerClient:
    """Start the trainer ranks and connect them."""
    ranks = trainer_ranks(spec, resources, environment)
    client = TrainerClient(ranks, spec.trainer.step_timeout_s)
    await client.start(spec.trainer.start_timeout_s)
    return client


def trainer_ranks(
    spec: TrainerSpec, resources: Sequence[Resources], environment: Mapping[str, str]
) -> list[ActorHandle]:
    """A process for each rank; the policy is loaded by `start`."""
    rank_type = ray.remote(concurrency_groups=RANK_CONCURRENCY)(TrainerRank)
    return [rank_type.options(**need.options(environment)).remote(spec, rank) for rank, need in enumerate(resources)]


def start_rewards(
    config: RewardConfig, sandbox: SandboxConfig, resources: Sequence[Resources], device: Device = "cpu"
) -> RewardClient:
    """Start the reward workers; the reward function was found importable before Ray started."""
    worker_type = ray.remote(RewardActor)

    def starting(need: Resources) -> Callable[[], ActorHandle]:
        def start() -> ActorHandle:  # where it is started depends on the nodes that are alive then
            options = worker_type.options(max_concurrency=REWARD_CONCURRENCY, **need.options({}))
            return options.remote(config, sandbox, device)

        return start

    return RewardClient([starting(need) for need in resources])
