"""Fast probes of this machine, without torch: accelerators, memory, disk."""

from __future__ import annotations

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


def has_nvidia_driver() -> bool:
    """Whether an NVIDIA driver is installed and answers."""
    return _NVIDIA_DRIVER.exists() or bool(num_nvidia_gpus())


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
    """Name of each kind of GPU -> its compute capability, e.g. `{"NVIDIA L4": "8.9"}`; empty if unknown."""
    said = _run_nvidia_smi("--query-gpu=name,compute_cap", "--format=csv,noheader") or ""
    found = (line.rpartition(",") for line in said.splitlines())
    return {name.strip(): text.strip() for name, _, text in found if re.fullmatch(r"\d+\.\d+", text.strip())}


def gpu_problems(capabilities: Mapping[str, str]) -> list[str]:
    """GPUs, as `gpu_capabilities` gives them, that are too old for bfloat16 in vLLM and for our kernels."""
    least = version_numbers(MIN_COMPUTE_CAPABILITY)
    return [
        f"{name} has compute capability {capability}, and {MIN_COMPUTE_CAPABILITY} is needed for bfloat16"
        for name, capability in capabilities.items()
        if version_numbers(capability) < least
    ]


def num_nvidia_gpus() -> int | None:
    """Number of GPUs that nvidia-smi lists; None if it cannot be run."""
    listed = _run_nvidia_smi("-L")
    return None if listed is None else sum(line.startswith("GPU ") for line in listed.splitlines())


def gpu_memory_gib() -> float | None:
    """Memory of the smallest GPU that nvidia-smi lists, GiB; None if it cannot be run."""
    said = _run_nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits") or ""
    sizes = [int(line) for line in said.splitlines() if line.strip().isdecimal()]
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
