"""The hardware of this machine, as the kernel reports it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from penstock.platform.cluster import hardware

GIB = 1 << 30


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """The files of a container's memory controller on a machine of 64 GiB."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=48 * GIB, total=64 * GIB))
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    return tmp_path


def test_without_a_container_the_machine_counts(cgroup):
    assert hardware.available_memory_bytes() == 48 * GIB
    assert hardware.total_memory_bytes() == 64 * GIB


def test_an_unlimited_container_is_no_container(cgroup):
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text(f"{60 * GIB}\n")
    assert hardware.available_memory_bytes() == 48 * GIB


def test_a_container_has_what_is_left_and_its_idle_page_cache(cgroup):
    (cgroup / "memory.max").write_text(f"{16 * GIB}\n")
    (cgroup / "memory.current").write_text(f"{15 * GIB}\n")
    assert hardware.available_memory_bytes() == 1 * GIB
    (cgroup / "memory.stat").write_text(f"anon {5 * GIB}\nactive_file {GIB}\ninactive_file {9 * GIB}\n")
    assert hardware.available_memory_bytes() == 10 * GIB
    assert hardware.total_memory_bytes() == 16 * GIB


@pytest.mark.parametrize(
    "said",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:19:51 UTC 2025\nGCC version: 13.3.0",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)",
    ],
)
def test_the_driver_version_is_read_from_the_kernel_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    (tmp_path / "version").write_text(said)
    monkeypatch.setattr(hardware, "_NVIDIA_DRIVER", tmp_path / "version")
    assert hardware.nvidia_driver_version() == "580.65.06"


def test_without_a_kernel_module_in_proc_it_is_read_from_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 575.57.08\n")
    program.chmod(0o755)
    monkeypatch.setattr(hardware, "_NVIDIA_DRIVER", tmp_path / "no-such-file")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert hardware.nvidia_driver_version() == "575.57.08"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert hardware.nvidia_driver_version() is None


def test_capabilities_of_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    program.write_text(
        "#!/bin/sh\nprintf 'NVIDIA H100 80GB HBM3, 9.0\\nNVIDIA H100 80GB HBM3, 9.0\\nTesla T4, 7.5\\n'\n"
    )
    program.chmod(0o755)
    assert hardware.gpu_capabilities() == {"NVIDIA H100 80GB HBM3": "9.0", "Tesla T4": "7.5"}
    # An old driver does not know the question.
    program.write_text("#!/bin/sh\necho 'Field \"compute_cap\" is not a valid field to query.'\n")
    assert hardware.gpu_capabilities() == {}
