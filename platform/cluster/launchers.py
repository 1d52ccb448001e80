"""What starts a run on several nodes: a SLURM script, a KubeRay manifest, or the commands of plain Ray.

All three come from the placement plan: `node_groups` packs the devices of its processes onto nodes, and the rest is
text. Nothing is started here (cli/launch.py).
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Annotated, Any, cast

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import AfterValidator, Field

from penstock.actors.bundles import Bundle
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.settings import Settings
from penstock.platform.cluster.hardware import SHARED_MEMORY
from penstock.platform.cluster.memory import shared_gib
from penstock.platform.cluster.placement import Process, RolePlacement, device_bundles, host_load_gib, plan_placement
from penstock.platform.config.schema import RunConfig

GRACE_S = 600
"""Time from the signal to the end of a job, for the policy and the last checkpoint."""
KILL_RESERVE_S = 30
"""Part of it that is left when the driver has ended, which gets the rest (`stop_grace_s`)."""
NODE_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # with Ray's default of 15 any other program starves the engines
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_JOB_STOP_WAIT_TIME_S": str(GRACE_S),  # `ray job stop` kills after 3 s by default, in a checkpoint
}
"""What a raylet passes on to processes. A driver sets it for a Ray of its own, but cannot for one that it joins."""
START_TIMEOUT_S = 600
MEMORY_FACTOR, MEMORY_RESERVE_GIB = 1.3, 16
"""Of a node, over the estimate of its processes: what the estimate misses, and Ray's object store."""


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("it is an absolute path that is the same on every node, e.g. /shared/me")
    return path


def _slurm_time(value: str) -> str:
    if not re.fullmatch(r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}", value):
        raise ValueError("it is minutes, HH:MM:SS or DAYS-HH:MM:SS, e.g. 12:00:00")
    return value


class LaunchSettings(Settings):
    """Settings of every launcher (`launch.KEY=VALUE`)."""

    gpus_per_node: int = Field(default=8, ge=1, le=64)
    """GPUs of a node; a run that needs fewer takes fewer."""
    shared_dir: Annotated[str, AfterValidator(_absolute)]
    """Folder that every node sees under this path. The run starts there, so modules, relative paths and `runs/` are in
    it."""


class SlurmSettings(LaunchSettings):
    """Settings of `penstock launch slurm`; without `shared_dir` the working directory is taken."""

    shared_dir: Annotated[str, AfterValidator(_absolute)] = Field(default_factory=lambda: str(Path.cwd()))
    partition: str | None = None
    """None: the default partition of the site."""
    account: str | None = None
    """None: the default account of the user."""
    time_limit: Annotated[str, AfterValidator(_slurm_time)] | None = None
    """None: that of the partition."""
    gpu_names: dict[str, str] = Field(default_factory=dict)
    """`cluster.pools.NAME.accelerator_type` -> this site's name of that GPU; by default in lower case."""


class KubeRaySettings(LaunchSettings):
    """Settings of `penstock launch kuberay`."""

    shared_dir: Annotated[str, AfterValidator(_absolute)] = "/shared"
    image: str
    """Image with Penstock, e.g. one made from the Dockerfile."""
    volume_claim: str
    """Claim of a volume that all pods can write (ReadWriteMany); mounted at `shared_dir`."""
    namespace: str = "default"
    """Namespace of the job."""
    gpu_label: str = "nvidia.com/gpu.product"
    """Label of the nodes that names their GPU."""
    gpu_names: dict[str, str] = Field(default_factory=dict)
    """`cluster.pools.NAME.accelerator_type` -> value of that label. Without an entry any GPU is taken."""


class RaySettings(LaunchSettings):
    """Settings of `penstock launch ray`; without `shared_dir` the working directory is taken."""

    shared_dir: Annotated[str, AfterValidator(_absolute)] = Field(default_factory=lambda: str(Path.cwd()))
    head: str = Field(pattern=r"^[\w.-]+$")
    """Host name or address of the head node."""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Equal nodes."""

    accelerator_type: str | None
    """Ray's label of their GPUs; None: any."""
    num_nodes: int
    """How many."""
    gpus: int
    """GPUs of each."""
    cpus: int
    """CPU cores of each."""
    memory_gib: int
    """Main memory of each, /dev/shm included."""


def node_groups(config: RunConfig, gpus_per_node: int) -> list[NodeGroup]:
    """Pack the processes of a training run onto nodes, a group for each type of GPU; without GPUs one node.

    What must be on one node is packed whole: an engine, and the ranks that share the weights or the sequences of a
    layer. Processes without a GPU may be started on any node, so each node has room for all of them.

    Raises:
        ConfigError: If something that must be on one node has more than `gpus_per_node` GPUs, or pools of different
            GPUs cannot be told apart.
    """
    placements = plan_placement(config)
    on_cpu = [placement for placement in placements if placement.device == "cpu"]
    by_type: dict[str | None, list[Bundle]] = defaultdict(list)
    for bundle in device_bundles(config):
        by_type[bundle.accelerator_type].append(bundle)
    if not by_type:
        return [NodeGroup(None, 1, 0, *_cores_and_memory(config, [], on_cpu, 1))]
    _check_types(config, placements)
    groups = []
    for accelerator_type, bundles in by_type.items():
        widths = [bundle.num_gpus for bundle in bundles]
        widest = max(widths)
        if widest > gpus_per_node:
            processes = bundles[widths.index(widest)].processes
            role = cast("Process", processes[0])[0] if processes else None  # colocated roles share a bundle
            keys = f"rollout.engine.tensor_parallel_size={widest}"
            if role == "trainer" or (role is None and config.rollout.engine.tensor_parallel_size < widest):
                trainer = config.trainer
                keys = (
                    f"trainer.tensor_parallel_size={trainer.tensor_parallel_size} with "
                    f"sequence_parallel_size={trainer.sequence_parallel_size}"
                )
            raise ConfigError(
                f"launch.gpus_per_node={gpus_per_node} is too small: {keys} needs {widest} GPUs of one node, because "
                f"they exchange data in every layer. Use nodes of {widest} GPUs, or lower it."
            )
        num_nodes = _num_nodes(widths, gpus_per_node)
        gpus = next(size for size in range(widest, gpus_per_node + 1) if _num_nodes(widths, size) == num_nodes)
        mine = [
            placement
            for placement in placements
            if placement.device == "gpu" and _accelerator_type(config, placement) == accelerator_type
        ]
        size = _cores_and_memory(config, mine, on_cpu, num_nodes)
        groups.append(NodeGroup(accelerator_type, num_nodes, gpus, *size))
    return groups


def _num_nodes(widths: Sequence[int], gpus_per_node: int) -> int:
    """First-fit decreasing."""
    free: list[int] = []
    for width in sorted(widths, reverse=True):
        index = next((index for index, left in enumerate(free) if left >= width), None)
        if index is None:
            free.append(gpus_per_node - width)
        else:
            free[index] -= width
    return len(free)


def _check_types(config: RunConfig, placements: Sequence[RolePlacement]) -> None:
    names = dict.fromkeys(placement.pool for placement in placements if placement.device == "gpu")
    pools = {name: config.cluster.pools[name] for name in names if name is not None}
    sizes = {(pool.accelerator_type, pool.limit_gib) for pool in pools.values()}
    if len(sizes) > 1 and any(pool.accelerator_type is None for pool in pools.values()):
        told = ", ".join(
            f"{name}: {pool.limit_gib:g} GiB, {pool.accelerator_type or 'any'}" for name, pool in pools.items()
        )
        raise ConfigError(
            f"cluster.pools: their GPUs differ ({told}), and one that accepts any could get the other's nodes. Name "
            "each with cluster.pools.NAME.accelerator_type, e.g. H100."
        )


def _accelerator_type(config: RunConfig, placement: RolePlacement) -> str | None:
    return None if placement.pool is None else config.cluster.pools[placement.pool].accelerator_type


def _cores_and_memory(
    config: RunConfig, divided: Sequence[RolePlacement], anywhere: Sequence[RolePlacement], num_nodes: int
) -> tuple[int, int]:
    """CPU cores and main memory (GiB) of each node, for its share of some processes and for all of others."""

    def threads(placements: Sequence[RolePlacement]) -> int:
        return sum(config.cluster.threads_per_process if placement.pool else 1 for placement in placements)

    load_gib = host_load_gib(list(divided)) / num_nodes + host_load_gib(list(anywhere))
    cores = ceil(threads(divided) / num_nodes) + threads(anywhere) + 2
    return cores, ceil(MEMORY_FACTOR * load_gib) + MEMORY_RESERVE_GIB


def train_command(overrides: Sequence[str], config_dir: Path | None) -> list[str]:
    """The command of the driver."""
    folder = [] if config_dir is None else ["--config-dir", str(config_dir)]
    return ["penstock", "train", *overrides, *folder]


def slurm_script(config: RunConfig, command: Sequence[str], settings: SlurmSettings, bin_dir: Path) -> str:
    """A batch script for sbatch.

    Args:
        config: Configuration of the run.
        command: Command of the driver.
        settings: Settings of the site.
        bin_dir: Folder with the commands `ray` and `penstock`, on every node.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  a script, in which everything of the user's is quoted
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    groups = node_groups(config, settings.gpus_per_node)
    kinds = [group.accelerator_type for group in groups]
    names = {name: "" if name is None else settings.gpu_names.get(name, name.lower()) + ":" for name in kinds}
    return environment.get_template("slurm.sh.j2").render(
        name=config.name,
        groups=groups,
        names=names,
        settings=settings,
        bin_dir=bin_dir,
        environment=NODE_ENVIRONMENT,
        command=shlex.join(command),
        num_nodes=sum(group.num_nodes for group in groups),
        start_timeout_s=START_TIMEOUT_S,
        grace_s=GRACE_S,
        reserve_s=KILL_RESERVE_S,
    )


def kuberay_manifest(config: RunConfig, command: Sequence[str], settings: KubeRaySettings) -> str:
    """A RayJob for kubectl: a head pod with the driver and the processes without a GPU, and a pod for each GPU node."""
    groups = node_groups(config, settings.gpus_per_node)
    on_cpu = [placement for placement in plan_placement(config) if placement.device == "cpu"]
    head = NodeGroup(None, 1, 0, *_cores_and_memory(config, [], on_cpu, 1))
    workers = [
        {
            "groupName": _dns_name(f"gpu-{group.accelerator_type or 'any'}"),
            "replicas": group.num_nodes,
            "minReplicas": group.num_nodes,
            "maxReplicas": group.num_nodes,
            "rayStartParams": {},
            "template": _pod("ray-worker", group, config, settings),
        }
        for group in groups
        if group.gpus
    ]
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": _dns_name(f"penstock-{config.name}"), "namespace": settings.namespace},
        "spec": {
            # Posted as it is. The other modes paste it into a shell command, which takes its quotes away.
            "submissionMode": "HTTPMode",
            "entrypoint": f"cd {shlex.quote(settings.shared_dir)} && exec {shlex.join(command)}",
            # Each retry starts a new cluster, and the run continues from its newest checkpoint.
            "backoffLimit": 10,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": {
                "rayVersion": version("ray"),
                "headGroupSpec": {
                    "rayStartParams": {"dashboard-host": "0.0.0.0"},  # noqa: S104  inside the cluster's network
                    "template": _pod("ray-head", head, config, settings),
                },
                "workerGroupSpecs": workers,
            },
        },
    }
    return yaml.safe_dump(job, sort_keys=False)


def _dns_name(name: str) -> str:
    """A name that Kubernetes accepts; KubeRay appends to it, and a label has at most 63 characters."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].rstrip("-")


def _pod(container: str, group: NodeGroup, config: RunConfig, settings: KubeRaySettings) -> dict[str, Any]:
    limits = {"cpu": str(group.cpus), "memory": f"{group.memory_gib}Gi"}
    if group.gpus:
        limits["nvidia.com/gpu"] = str(group.gpus)
    shm_gib = ceil(shared_gib(config)) + MEMORY_RESERVE_GIB // 2
    spec: dict[str, Any] = {
        "containers": [
            {
                "name": container,
                "image": settings.image,
                "env": [{"name": name, "value": value} for name, value in NODE_ENVIRONMENT.items()],
                # Keys of services, e.g. HF_TOKEN and WANDB_API_KEY.
                "envFrom": [{"secretRef": {"name": "penstock", "optional": True}}],
                "resources": {"limits": limits, "requests": limits},
                "volumeMounts": [
                    {"name": "shared", "mountPath": settings.shared_dir},
                    {"name": "shm", "mountPath": str(SHARED_MEMORY)},
                ],
            }
        ],
        "securityContext": {"fsGroup": 1000},  # of the user in the Dockerfile, who writes to the volume
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": settings.volume_claim}},
            # Ray's object store, published weights and NCCL; 64 MiB by default, which is too small for each of them.
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_gib}Gi"}},
        ],
    }
    label = group.accelerator_type
    if label is not None and label in settings.gpu_names:
        spec["nodeSelector"] = {settings.gpu_label: settings.gpu_names[label]}
    if group.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    return {"spec": spec}


def ray_commands(config: RunConfig, command: Sequence[str], settings: RaySettings) -> str:
    """Commands that start Ray on each node, submit the run, and end Ray.

    Raises:
        ConfigError: If an override does not survive `ray job submit`.
    """
    groups = node_groups(config, settings.gpus_per_node)
    told = []
    for group in groups:
        nodes = "1 node" if group.num_nodes == 1 else f"{group.num_nodes} nodes"
        gpus = f"{group.gpus} {group.accelerator_type or ''}".strip() + (" GPU" if group.gpus == 1 else " GPUs")
        device = gpus if group.gpus else "no GPU"
        told.append(f"{nodes} with {device}, {group.cpus} cores and {group.memory_gib} GiB of memory each")
    variables = " ".join(f"{name}={value}" for name, value in {**NODE_ENVIRONMENT, "RAY_AUTH_MODE": "token"}.items())
    folder = shlex.quote(settings.shared_dir)
    lines = [
        f"# {', and '.join(told)}. Activate Penstock's environment on each node. All of them need the same token:",
        "# `ray get-auth-token --generate` on the head writes ~/.ray/auth_token; copy it to the others.",
        f"# On the head node ({settings.head}), one of those with GPUs:",
        f"cd {folder} && {variables} ray start --head --port=6379 --dashboard-host=0.0.0.0",
    ]
    if others := sum(group.num_nodes for group in groups) - 1:
        lines += [
            f"# On each of the other {others}:" if others > 1 else "# On the other node:",
            f"cd {folder} && {variables} ray start --address={settings.head}:6379",
        ]
    lines += [
        "# From any machine with the token that reaches port 8265 of the head:",
        shlex.join(job_submission(command, settings)),
        "# When it has ended, on each node:",
        "ray stop",
    ]
    return "\n".join(lines) + "\n"


def job_submission(command: Sequence[str], settings: RaySettings) -> list[str]:
    """The words of `ray job submit`."""
    enter = ["cd", _job_word(settings.shared_dir), "&&", "exec"]
    address = f"http://{settings.head}:8265"
    return ["ray", "job", "submit", "--address", address, "--", *enter, *map(_job_word, command)]


def _job_word(word: str) -> str:
    """A word as `ray job submit` needs it, which joins words as Windows does before a shell reads them.

    That puts words with spaces into double quotes, and a backslash before each double quote.

    Raises:
        ConfigError: If no form of it survives both.
    """
    has_space = re.search(r"\s", word) is not None
    if re.search(r"[$`\\]" if has_space else r"\\\"", word):
        raise ConfigError(
            f"{word}: `ray job submit` does not keep these spaces and special characters. Write the value into a YAML "
            "file of your own (--config-dir)."
        )
    return word if has_space else re.sub(r"([^\w@%+=:,./\"-])", r"\\\1", word)
