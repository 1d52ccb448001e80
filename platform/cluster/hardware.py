"""Fast probes of this machine, without torch: accelerators, memory, disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a mount point, not a temporary file
MIN_NVIDIA_DRIVER = "580.65.06"
"""Minimum for CUDA 13.0, which the pinned torch is built with, by NVIDIA's compatibility table of CUDA 13.x."""
MIN_COMPUTE_CAPABILITY = "8.0"
"""Minimum for bfloat16 in vLLM (`check_if_supports_dtype` in vllm/platforms/cuda.py), and of the compiled kernels."""
_CGROUP = Path("/sys/fs/cgroup")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_LISTED = re.compile(r"^( *)(?:GPU|MIG) .*\(UUID: (.+)\)", re.MULTILINE)
"""A line of `nvidia-smi -L`: a GPU, or, indented below it, a part of one."""


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is installed and answers."""
    return _NVIDIA_DRIVER.exists() or bool(_listed())


def nvidia_driver_version() -> str | None:
    """Version of the NVIDIA driver, e.g. `580.65.06`; None if unknown."""
    said = (
        _NVIDIA_DRIVER.read_text()
        if _NVIDIA_DRIVER.exists()
        else _run_nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    )
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", said or "")
    return found[0] if found else None


def version_numbers(version: str) -> tuple[int, ...]:
    """Numbers of a driver's version, in the order in which they are compared."""
    return tuple(int(number) for number in version.split("."))


def driver_problem(version: str | None) -> str | None:
    """Why the CUDA build of torch finds no GPU with this driver; None if it does, or the version is not known."""
    if version is None or version_numbers(version) >= version_numbers(MIN_NVIDIA_DRIVER):
        return None
    return f"{version}, but the CUDA 13.0 build of torch needs {MIN_NVIDIA_DRIVER} or newer and finds no GPU otherwise"


def gpu_capabilities() -> dict[str, str]:
    """Name of each kind of visible GPU -> its compute capability, e.g. `{"NVIDIA L4": "8.9"}`; empty if unknown."""
    said = _run_nvidia_smi("--query-gpu=compute_cap,uuid,name", "--format=csv,noheader") or ""
    visible, rows = visible_gpus() or (), (line.split(", ", 2) for line in said.splitlines())
    return {row[2]: row[0] for row in rows if len(row) == 3 and row[1] in visible and re.fullmatch(r"\d+\.\d+", row[0])}


def gpu_problems(capabilities: Mapping[str, str]) -> list[str]:
    """GPUs, as `gpu_capabilities` gives them, that are too old for bfloat16 in vLLM and for our kernels."""
    least = version_numbers(MIN_COMPUTE_CAPABILITY)
    return [
        f"{name} has compute capability {capability}, and {MIN_COMPUTE_CAPABILITY} is needed for bfloat16"
        for name, capability in capabilities.items()
        if version_numbers(capability) < least
    ]


def num_nvidia_gpus() -> int | None:
    """Number of visible GPUs; None if nvidia-smi cannot be run."""
    visible = visible_gpus()
    return None if visible is None else len(visible)


def visible_gpus() -> list[str] | None:
    """UUIDs of the GPUs that CUDA shows to programs that are started here; None if nvidia-smi cannot be run.

    `CUDA_VISIBLE_DEVICES` names them by their numbers or by beginnings of UUIDs, also of parts of GPUs (MIG). The list
    ends at the first entry that names none, and one with a GPU twice shows none. Numbers are those of nvidia-smi, which
    CUDA has, too, if all GPUs are alike or with `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
    """
    if (listed := _listed()) is None:
        return None
    gpus = [uuid for is_part, uuid in listed if not is_part]
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return gpus
    visible: list[str] = []
    for entry in map(str.strip, named.split(",")):
        if entry.isdecimal():
            found = gpus[int(entry) : int(entry) + 1]
        else:
            found = [uuid for _, uuid in listed if entry.startswith(("GPU-", "MIG-")) and uuid.startswith(entry)]
        if len(found) != 1:
            break
        visible += found
    return visible if len(set(visible)) == len(visible) else []


def hidden_gpus() -> str:
    """What hides GPUs of this machine, e.g. `CUDA_VISIBLE_DEVICES=0 shows 1 of 8`; empty if nothing does."""
    visible, num_gpus = visible_gpus() or [], sum(not is_part for is_part, _ in _listed() or ())
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={named} shows {len(visible)} of {num_gpus}" if len(visible) < num_gpus else ""


def gpu_memory_gib() -> float | None:
    """Memory of the smallest visible GPU, GiB; None if nvidia-smi cannot be run."""
    said = _run_nvidia_smi("--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits") or ""
    visible, rows = visible_gpus() or (), (line.partition(", ") for line in said.splitlines())
    sizes = [int(size) for uuid, _, size in rows if uuid in visible and size.isdecimal()]
    return min(sizes) / 1024 if sizes else None


def installed_version(package: str) -> str | None:
    """Installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_cpu_build() -> bool:
    """Whether the installed torch is the CPU build."""
    return (installed_version("torch") or "").endswith("+cpu")


def num_cpus() -> int:
    """Number of CPUs that this process may use, of those that the machine has."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return os.cpu_count() or 1
    return len(os.sched_getaffinity(0))


def available_memory_bytes() -> int:
    """Memory available to new processes: that of the machine, or the remaining memory of the container.

    Inactive file pages count as free, because the kernel reclaims them first.
    """
    available = psutil.virtual_memory().available
    limit = _read_cgroup("memory.max")
    used = _read_cgroup("memory.current")
    if limit is None or used is None:
        return available
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        lines = []
    inactive = next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
    return min(available, max(limit - used + inactive, 0))


def total_memory_bytes() -> int:
    """Total memory of the machine or the container."""
    total = psutil.virtual_memory().total
    return min(total, _read_cgroup("memory.max") or total)


def free_disk_bytes(path: Path) -> int:
    """Free space of the file system of `path`, which need not exist yet."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def disk_bytes(path: Path) -> int:
    """Size of the file system of an existing `path`."""
    return shutil.disk_usage(path).total


def _listed() -> list[tuple[bool, str]] | None:
    """Whether it is a part, and its UUID, of each GPU and then of its parts; None if nvidia-smi cannot be run."""
    said = _run_nvidia_smi("-L")
    return None if said is None else [(bool(indent), uuid) for indent, uuid in _LISTED.findall(said)]


def _run_nvidia_smi(*arguments: str) -> str | None:
    """Output of nvidia-smi; None if it cannot be run."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None


def _read_cgroup(name: str) -> int | None:
    """A value of the container's memory controller (cgroup v2); None if unlimited or absent."""
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
