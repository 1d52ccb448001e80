"""`penstock doctor`: checks this machine, one line per check, with advice for everything that is broken.

Heavy imports run in child processes with a time limit, so a package that hangs or crashes fails only its own check.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from penstock.envs.sandbox.bubblewrap import why_no_namespaces
from penstock.platform.cluster import hardware
from penstock.platform.cluster.hardware import MIN_NVIDIA_DRIVER
from penstock.platform.cluster.memory import GIB

Status = Literal["ok", "warn", "bad"]
IMPORT_TIMEOUT_S = 120
MIN_MEMORY_GIB, MIN_DISK_GIB, MIN_SHM_GIB = 6.0, 2.0, 0.5
"""Requirements of the demo."""

_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "bad": "bold red"}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One line of the report."""

    subject: str
    """What was checked."""
    status: Status
    found: str
    """What was found."""
    advice: str = ""
    """How to fix it; empty if nothing is wrong."""


def run_doctor(console: Console | None = None) -> int:
    """Print one line per diagnosis; returns 1 if something is broken, else 0."""
    console = console or Console(highlight=False, soft_wrap=True)
    is_broken = False
    for look in (check_python, check_packages, check_devices, check_engines, check_free_space, check_sandbox_support):
        for diagnosis in look():
            is_broken |= diagnosis.status == "bad"
            line = Text(f"{diagnosis.status:<5}", style=_STYLES[diagnosis.status])
            line.append(f"{diagnosis.subject:<14}{diagnosis.found}", style="default")
            if diagnosis.advice:
                line.append(f". {diagnosis.advice}", style="default")
            console.print(line)
    console.print("something is broken: see the lines marked bad" if is_broken else "ready")
    return int(is_broken)


def run_cluster_doctor(address: str, console: Console) -> int:
    """Print a table of the nodes of a Ray cluster, and what is wrong with them; returns 1 if something is, else 0.

    The working directory is taken for a run directory, which all nodes must see.
    """
    from penstock.actors.cluster import JobNeeds, ray_session
    from penstock.actors.node_probe import NodeReport, ProbeRequest, probe_nodes
    from penstock.platform.cluster.preflight import NodeNeeds, show_nodes
    from penstock.platform.run.lifecycle import EXIT_OK, Interrupted, run_to_end

    found: list[tuple[NodeReport, list[NodeReport]]] = []

    async def probe() -> int:
        async with ray_session(address, needs=JobNeeds()):
            found.append(await probe_nodes(ProbeRequest(Path.cwd() if os.access(Path.cwd(), os.W_OK) else None)))
        return EXIT_OK

    try:
        run_to_end(probe)
    except Interrupted as interrupted:
        return interrupted.exit_code
    ((here, nodes),) = found
    problems = show_nodes(here, nodes, NodeNeeds(), console)
    for problem in problems:
        console.print(Text("bad  ", style=_STYLES["bad"]).append(problem, style="default"))
    console.print(f"{len(problems)} problems on {len(nodes)} nodes" if problems else f"{len(nodes)} nodes are ready")
    return int(bool(problems))


def check_python() -> Iterator[Diagnosis]:
    """Report the version of the interpreter."""
    yield Diagnosis("python", "ok", f"{sys.version.split()[0]} ({sys.executable})")


def check_packages() -> Iterator[Diagnosis]:
    """Check that all requirements, including those of the cpu or cuda extra, are there in versions that are allowed."""
    flavor = "cpu" if hardware.is_cpu_build() else "cuda"
    needed = [Requirement(text) for text in metadata.requires("penstock") or []]
    needed = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": flavor})]
    all_are_there = True
    for one in needed:
        found, wanted = hardware.installed_version(one.name), str(one.specifier)
        if found is not None and one.specifier.contains(found, prereleases=True):
            continue
        all_are_there = False
        if found is None:
            yield Diagnosis(one.name, "bad", f"not installed, {wanted} is needed", "`make setup`")
        else:
            yield Diagnosis(one.name, "warn", f"{found}, tested with {wanted}", f"pip install '{one.name}{wanted}'")
    if all_are_there:
        yield Diagnosis("packages", "ok", f"all {len(needed)} required packages in allowed versions")


def check_devices() -> Iterator[Diagnosis]:
    """Check CPU cores, the NVIDIA driver, and whether torch sees the driver's GPUs."""
    yield Diagnosis("cpu", "ok", f"{hardware.num_cpus()} cores for this process")
    if not hardware.has_nvidia_driver():
        yield Diagnosis("gpu", "ok", "no NVIDIA driver: CPU experiments only")
        return
    yield _diagnose_driver(hardware.nvidia_driver_version())
    for problem in hardware.gpu_problems(hardware.gpu_capabilities()):
        advice = "Use an Ampere or newer GPU, e.g. A10, A100, L4 or H100, or `make setup FLAVOR=cpu`."
        yield Diagnosis("gpu", "warn" if hardware.is_cpu_build() else "bad", problem, advice)
    if hardware.is_cpu_build():
        advice = "Run `make setup FLAVOR=cuda` in a fresh environment to use them."
        hidden = f" ({shown})" if (shown := hardware.hidden_gpus()) else ""
        found = f"{hardware.num_nvidia_gpus()} GPUs{hidden}, but torch is the CPU build"
        yield Diagnosis("gpu", "warn", found, advice)
    else:
        yield _import_in_child(
            "gpu",
            "import torch; assert torch.cuda.is_available(), 'torch.cuda.is_available() is false'; "
            "print(torch.cuda.device_count(), 'x', torch.cuda.get_device_name(0), 'CUDA', torch.version.cuda)",
            "If the driver is new enough (the line above), check CUDA_VISIBLE_DEVICES.",
        )


def check_engines() -> Iterator[Diagnosis]:
    """Check that Ray, DeepSpeed and vLLM can be imported, each in its own process."""
    reinstall = "Run `make setup`. If that does not help, remove .venv first."
    for name in ("torch", "transformers", "ray", "deepspeed"):
        yield _import_in_child(name, f"import {name}; print({name}.__version__)", reinstall)
    if find_spec("vllm") is None:
        yield Diagnosis("vllm", "warn", "not installed", "Run `make setup`, or use rollout/engine=torch.")
    else:
        program = "from vllm import AsyncLLMEngine; import vllm; print(vllm.__version__)"
        yield _import_in_child("vllm", program, reinstall)


def check_free_space() -> Iterator[Diagnosis]:
    """Check free memory, disk space and shared memory."""
    total = hardware.total_memory_bytes() / GIB
    free = hardware.available_memory_bytes() / GIB
    advice = "Stop other programs, or use fewer engines."
    yield _free_space("memory", free, f"of {total:.1f} GiB free", MIN_MEMORY_GIB, advice)
    disk = hardware.free_disk_bytes(Path.cwd()) / GIB
    yield _free_space("disk", disk, f"free at {Path.cwd()}", MIN_DISK_GIB, "Free some, or set run_dir to another disk.")
    if hardware.SHARED_MEMORY.is_dir():
        shared = hardware.free_disk_bytes(hardware.SHARED_MEMORY) / GIB
        advice = "Enlarge it (containers: --shm-size=2g), or set weights.directory."
        yield _free_space("shared memory", shared, f"free in {hardware.SHARED_MEMORY}", MIN_SHM_GIB, advice)
    else:
        advice = "Published weights go to the temporary folder, or to weights.directory."
        yield Diagnosis("shared memory", "warn", f"no {hardware.SHARED_MEMORY}", advice)


def check_sandbox_support() -> Iterator[Diagnosis]:
    """Check whether programs of a policy, and user code with `isolation=strict`, can run in a sandbox."""
    if problem := why_no_namespaces():
        advice = "Rewards that run code are refused. Allow user namespaces: docs/guides/sandbox.md."
        yield Diagnosis("sandboxes", "warn", f"no sandbox and no isolation=strict here: {problem}", advice)
    else:
        yield Diagnosis("sandboxes", "ok", "programs of a policy run in sandboxes, and user code with isolation=strict")


def _diagnose_driver(version: str | None) -> Diagnosis:
    """Compare the driver with the minimum of the CUDA build of torch. The CPU build does not need it."""
    if version is None:
        advice = f"FLAVOR=cuda needs {MIN_NVIDIA_DRIVER} or newer: compare it with what `nvidia-smi` prints."
        return Diagnosis("nvidia driver", "warn", "its version is not known", advice)
    if (problem := hardware.driver_problem(version)) is None:
        return Diagnosis("nvidia driver", "ok", version)
    advice = "Install a newer NVIDIA driver, or use `make setup FLAVOR=cpu`."
    return Diagnosis("nvidia driver", "warn" if hardware.is_cpu_build() else "bad", problem, advice)


def _free_space(subject: str, gib: float, words: str, least_gib: float, advice: str) -> Diagnosis:
    found = f"{gib:.1f} GiB {words}"
    if gib >= least_gib:
        return Diagnosis(subject, "ok", found)
    return Diagnosis(subject, "bad", f"{found}, the demo needs {least_gib:g}", advice)


def _import_in_child(subject: str, program: str, advice: str) -> Diagnosis:
    """Run a short program and report the last line of its output or traceback."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-c", program]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return Diagnosis(subject, "bad", f"does not import within {IMPORT_TIMEOUT_S} s", advice)
    output = ended.stdout if ended.returncode == 0 else ended.stderr
    last = (output.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    return Diagnosis(subject, "ok", last) if ended.returncode == 0 else Diagnosis(subject, "bad", last, advice)
