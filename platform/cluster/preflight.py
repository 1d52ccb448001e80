"""The preflight of a joined cluster: every node is asked, and all problems are named, before anything is loaded.

`node_findings` is pure: it compares the reports of the nodes (actors/node_probe.py) with that of the driver's machine
and with what the run needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from penstock.actors.bundles import Bundle
from penstock.actors.node_probe import NodeReport, ProbeRequest, probe_nodes
from penstock.dataflow.errors import PlacementError
from penstock.platform.cluster.hardware import MIN_NVIDIA_DRIVER, driver_problem
from penstock.platform.cluster.memory import shared_gib
from penstock.platform.cluster.placement import device_bundles
from penstock.platform.config.findings import WITHOUT_ENGINES, Command, Finding, error, warning
from penstock.platform.config.import_paths import import_paths
from penstock.platform.config.pools import PoolConfig
from penstock.platform.config.schema import RunConfig

CLOCK_WARNING_S, CLOCK_LIMIT_S = 1.0, 60.0
_TABLE_WIDTH = 160
"""In a file, whose lines have no width of their own."""
_MEMORY_TOLERANCE = 0.9
"""Share of `memory_gib` that a GPU must have: a card sold as 80 GB shows 79.6 GiB."""


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """What a run needs of the nodes. The default is that of no run: only what must be equal on all nodes."""

    bundles: tuple[Bundle, ...] = ()
    """GPUs that it reserves."""
    pools: Mapping[str, PoolConfig] | None = None
    """Its GPU pools, by name."""
    packages: tuple[str, ...] = ("torch", "transformers", "deepspeed", "vllm")
    """Those that processes with a device use."""
    shm_gib: float = 0.0
    """Shared memory for published versions on every node that takes part."""


def needs_of(config: RunConfig, command: Command) -> NodeNeeds:
    """What `command` needs of the nodes."""
    has_engines = command not in WITHOUT_ENGINES
    packages = ["torch", "transformers"]
    if command not in ("eval", "sample") and config.trainer.backend == "deepspeed":
        packages.append("deepspeed")
    if has_engines and config.rollout.engine.type == "vllm":
        packages.append("vllm")
    return NodeNeeds(
        tuple(device_bundles(config, command)),
        {name: pool for name, pool in config.cluster.pools.items() if pool.device == "gpu"},
        tuple(packages),
        shared_gib(config) if command == "train" and config.weights.directory is None else 0.0,
    )


async def check_nodes(config: RunConfig, command: Command) -> None:
    """Ask every node, print what they answer as a table on stderr, and warn of what slows the run down.

    Args:
        config: Configuration with absolute paths; its run directory exists if `command` writes one.
        command: The command that uses it.

    Raises:
        PlacementError: With all problems that would end the run.
    """
    folder = Path(config.run_dir)
    paths = (config.model.path, config.reference.path, config.teacher.path, config.critic.path)
    request = ProbeRequest(
        folder if folder.is_dir() and command not in ("eval", "sample") else None,
        tuple(path for path in (*paths, config.weights.directory) if path is not None and path.startswith("/")),
        import_paths(config),
    )
    here, nodes = await probe_nodes(request)
    if problems := show_nodes(here, nodes, needs_of(config, command), Console(stderr=True)):
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise PlacementError(
            f"cluster.address={config.cluster.address}: {len(problems)} problems on its {len(nodes)} nodes, so nothing "
            f"was started:\n{listed}"
        )


def show_nodes(here: NodeReport, nodes: Sequence[NodeReport], needs: NodeNeeds, console: Console) -> list[str]:
    """Print the table and the warnings; returns the problems that would end a run."""
    if not console.is_terminal:
        console.width = max(console.width, _TABLE_WIDTH)
    console.print(node_table([here, *nodes]))
    findings = list(node_findings(here, nodes, needs))
    for finding in findings:
        if finding.severity == "warning":
            told = Text("warning", "yellow").append(f" {finding.message}", style="default")
            console.print(told, soft_wrap=True)
    return [finding.message for finding in findings if finding.severity == "error"]


def node_findings(here: NodeReport, nodes: Sequence[NodeReport], needs: NodeNeeds) -> Iterator[Finding]:
    """Everything that is wrong with the nodes, each finding with the nodes, both values, and what to do.

    Args:
        here: The report of the driver's own process.
        nodes: Those of all nodes.
        needs: Of the run. If it reserves GPUs, only nodes with GPUs take part in it; others may run reward workers,
            which need this package and the user's code.
    """
    for node in nodes:
        if node.silence:
            yield error(
                f"cluster: {node.name} is silent: {node.silence}. Look at `ray status` and at the raylet's log there "
                "(/tmp/ray/session_latest/logs), and start Ray on that node again or take it out of the cluster."
            )
    answered = [node for node in nodes if not node.silence]
    taking_part = [node for node in answered if node.ray_gpus] if needs.bundles else answered
    yield from _software(here, answered, taking_part, needs)
    yield from _devices(answered, taking_part, needs)
    yield from _files(answered, taking_part, needs)
    yield from _connections(here, answered)
    niced = {node.name: node.niceness for node in answered if node.niceness > here.niceness}
    if niced:
        yield warning(
            f"cluster: workers have a niceness of {_by_value(niced)}, this process of {here.niceness}, so that other "
            "programs there are served first. Export RAY_worker_niceness=0 before `ray start` on these nodes."
        )


def _software(
    here: NodeReport, answered: Sequence[NodeReport], taking_part: Sequence[NodeReport], needs: NodeNeeds
) -> Iterator[Finding]:
    without = [node.name for node in answered if not node.code]
    if without:
        yield error(
            f"cluster: penstock cannot be imported on {', '.join(without)}. Install it in the environment that "
            "`ray start` is called in there, at the version of this machine."
        )
    other = {node.name: node.code for node in answered if node.code and node.code != here.code}
    if other:
        yield error(
            f"cluster: the files of penstock are {here.code} on this machine, but {_by_value(other)} (fingerprints): "
            "processes of different versions misunderstand one another. Install the same version or commit on every "
            "node, and start Ray there again."
        )
    pythons = {node.name: node.python for node in answered if node.python != here.python}
    if pythons:
        yield error(
            f"cluster: Python is {here.python} on this machine, but {_by_value(pythons)}. Use the same version."
        )
    for package in dict.fromkeys(("ray", *needs.packages)):
        mine, compared = here.packages.get(package), answered if package == "ray" else taking_part
        different = {
            node.name: node.packages.get(package) or "not installed"
            for node in compared
            if _public(node.packages.get(package)) != _public(mine)
        }
        if different:
            yield error(
                f"cluster: {package} is {mine or 'not installed'} on this machine, but {_by_value(different)}. Install "
                f"the same version on every node (`make setup`, or pip install {package}=={_public(mine or '...')})."
            )


def _devices(answered: Sequence[NodeReport], taking_part: Sequence[NodeReport], needs: NodeNeeds) -> Iterator[Finding]:
    with_gpus = [node for node in answered if node.gpus]
    for node in with_gpus:
        if node.ray_gpus != len(node.gpus):
            yield warning(
                f"cluster: {node.name} has {len(node.gpus)} GPUs, but Ray counts {node.ray_gpus} there. Start it with "
                f"`ray start --num-gpus={len(node.gpus)}` to use all of them."
            )
    if not needs.bundles:
        return
    old = {node.name: str(node.nvidia_driver) for node in taking_part if driver_problem(node.nvidia_driver)}
    if old:
        yield error(
            f"cluster: the NVIDIA driver is {_by_value(old)}, but the CUDA 13.0 build of torch needs "
            f"{MIN_NVIDIA_DRIVER} or newer, and finds no GPU otherwise. Install a newer driver there."
        )
    cpu_builds = [node.name for node in taking_part if (node.packages.get("torch") or "").endswith("+cpu")]
    if cpu_builds:
        yield error(
            f"cluster: torch is the CPU build on {', '.join(cpu_builds)}, so it finds no GPU there. Run `make setup "
            "FLAVOR=cuda` in a fresh environment there."
        )
    yield from _gpu_counts(answered, needs)
    for name, pool in (needs.pools or {}).items():
        of_type = [node for node in taking_part if pool.accelerator_type in (None, *node.accelerator_types)]
        small = {
            node.name: f"{least:.0f} GiB"
            for node in of_type
            if (least := min((memory for _, memory in node.gpus), default=0.0))
            and least < _MEMORY_TOLERANCE * pool.limit_gib
        }
        if small:
            yield warning(
                f"cluster.pools.{name}.memory_gib={pool.memory_gib:g}, but the smallest GPU has {_by_value(small)}: "
                "what is planned for the pool may not fit. Lower memory_gib, or bind the pool to the larger GPUs by "
                "accelerator_type."
            )


def _gpu_counts(answered: Sequence[NodeReport], needs: NodeNeeds) -> Iterator[Finding]:
    for kind in dict.fromkeys(bundle.accelerator_type for bundle in needs.bundles):
        of_kind = f"{kind} GPUs" if kind else "GPUs"
        have = {node.name: node.ray_gpus for node in answered if kind in (None, *node.accelerator_types)}
        asked = [bundle.num_gpus for bundle in needs.bundles if bundle.accelerator_type == kind]
        has = ", ".join(f"{count} on {name}" for name, count in have.items() if count) or "none"
        if max(asked) > max(have.values(), default=0):
            yield error(
                f"cluster: {max(asked)} {of_kind} are needed in one node, but the nodes have {has}: the ranks of an "
                "engine, and those that split a model or a sequence, talk within every layer. Use a smaller "
                "rollout.engine.tensor_parallel_size, trainer.sequence_parallel_size or trainer.tensor_parallel_size, "
                "or larger nodes."
            )
        elif sum(asked) > sum(have.values()):
            yield error(
                f"cluster: {sum(asked)} {of_kind} are needed, but the nodes have {has}, {sum(have.values())} in all. "
                "Use fewer trainer.num_ranks or rollout.num_engines, or add nodes."
            )


def _files(answered: Sequence[NodeReport], taking_part: Sequence[NodeReport], needs: NodeNeeds) -> Iterator[Finding]:
    folders = {node.name: node.folder_problem for node in taking_part if node.folder_problem}
    if folders:
        yield error(
            f"cluster: the run directory {_by_value(folders)}. Ranks write checkpoints and the policy there. Use a "
            "run_dir on a file system that all nodes mount at the same path and may write."
        )
    missing: dict[str, list[str]] = {}
    for node in taking_part:
        for path in node.missing_paths:
            missing.setdefault(path, []).append(node.name)
    for path, names in missing.items():
        yield error(
            f"cluster: {path} does not exist on {', '.join(names)}. Put it on a file system that all nodes mount at "
            "the same path, or copy it there."
        )
    failed: dict[tuple[str, str], list[str]] = {}
    for node in answered:
        for key, why in node.import_errors.items():
            failed.setdefault((key, why), []).append(node.name)
    for (_, why), names in failed.items():
        yield error(
            f"cluster: your code cannot be imported on {', '.join(names)}: {why} Install what is missing there."
        )
    little = {
        node.name: f"{node.shm_free_gib:.1f} GiB free"
        for node in taking_part
        if node.shm_free_gib is not None and node.shm_free_gib < needs.shm_gib
    }
    if little:
        yield error(
            f"cluster: published versions need {needs.shm_gib:.1f} GiB of shared memory on every node, but /dev/shm "
            f"has {_by_value(little)}. Enlarge it there (containers: --shm-size), or set weights.directory."
        )


def _connections(here: NodeReport, answered: Sequence[NodeReport]) -> Iterator[Finding]:
    closed = [f"{node.name} -> {', '.join(node.unreachable)}" for node in (here, *answered) if node.unreachable]
    if closed:
        yield error(
            f"cluster: TCP ports are closed: {'; '.join(closed)}. Gradients and weights take ports that the system "
            "chooses, between all nodes. Open all TCP ports between them (firewall, security group, network policy)."
        )
    for limit_s, level in ((CLOCK_LIMIT_S, error), (CLOCK_WARNING_S, warning)):
        apart = {
            node.name: f"{node.clock_offset_s:+.1f} s"
            for node in answered
            if limit_s < abs(node.clock_offset_s) - node.clock_error_s
        }
        if apart:
            yield level(
                f"cluster: the clock differs from this machine's by {_by_value(apart)}, so that times in logs and the "
                "timeline do not fit together, and certificates may not be valid. Synchronise the clocks (chrony, ntp)."
            )
            return


def node_table(reports: Sequence[NodeReport]) -> Table:
    """One row for each node; the first one is the driver's machine."""
    headings = ("node", "python", "ray", "torch", "vllm", "penstock", "GPUs", "driver", "shm GiB", "clock s")
    columns = (Column(one, overflow="fold") for one in (*headings, "run_dir", "nice"))
    table = Table(*columns, title="nodes", title_justify="left")
    for number, node in enumerate(reports):
        if node.silence:
            table.add_row(node.name, "silent")
            continue
        kinds = dict.fromkeys(name for name, _ in node.gpus)
        versions = [node.packages.get(name) or "-" for name in ("ray", "torch", "vllm")]
        table.add_row(
            node.name,
            node.python,
            *versions,
            node.code or "-",
            f"{len(node.gpus)} {', '.join(kinds)}".strip(),
            node.nvidia_driver or "-",
            "-" if node.shm_free_gib is None else f"{node.shm_free_gib:.1f}",
            "-" if number == 0 else f"{node.clock_offset_s:+.3f} ± {node.clock_error_s:.3f}",
            "bad" if node.folder_problem else "ok",
            str(node.niceness),
        )
    return table


def _public(version: str | None) -> str | None:
    """A version without its local label: `2.13.0` of `2.13.0+cpu`."""
    return None if version is None else version.partition("+")[0]


def _by_value(values: Mapping[str, object]) -> str:
    """`0.31.0 on 10.0.0.2, 10.0.0.3; 0.30.0 on 10.0.0.4`."""
    names: dict[object, list[str]] = {}
    for name, value in values.items():
        names.setdefault(value, []).append(name)
    return "; ".join(f"{value} on {', '.join(at)}" for value, at in names.items())
