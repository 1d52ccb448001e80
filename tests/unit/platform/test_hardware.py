"""The hardware of this machine, as the kernel reports it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from penstock.platform.checks.load import compose_config
from penstock.platform.checks.machine import check_driver, check_threads
from penstock.platform.cli.doctor import check_devices
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


def test_cpus_that_a_process_may_not_use_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert next(check_devices()).found == "1 cores for this process"
    (finding,) = check_threads(compose_config(["experiment=arithmetic", "cluster.threads_per_process=2"]))
    assert "cluster.threads_per_process=2, but this process may use 1 CPUs" in finding.message
    assert not [*check_threads(compose_config(["experiment=arithmetic", "cluster.threads_per_process=1"]))]


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


SMI = """#!/bin/sh
case "$*" in
-L) printf 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa-0)\\nGPU 1: Tesla T4 (UUID: GPU-ab-1)\\n'
    printf '  MIG 1g.10gb     Device  0: (UUID: MIG-c-2)\\nGPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-b-3)\\n';;
*=compute_cap,uuid,name*) printf '9.0, GPU-aa-0, NVIDIA H100 80GB HBM3\\n7.5, GPU-ab-1, Tesla T4\\n'
    printf '9.0, GPU-b-3, NVIDIA H100 80GB HBM3\\n';;
*=uuid,memory.total*) printf 'GPU-aa-0, 81920\\nGPU-ab-1, 15360\\nGPU-b-3, 81920\\n';;
*driver_version*) echo 580.95.05;;
esac
"""
"""Of two H100 and a T4, which has a part."""


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program nvidia-smi that lists three GPUs, of which nothing is hidden."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def test_capabilities_of_visible_gpus_are_read_from_nvidia_smi(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hardware.gpu_capabilities() == {"NVIDIA H100 80GB HBM3": "9.0", "Tesla T4": "7.5"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert hardware.gpu_capabilities() == {"NVIDIA H100 80GB HBM3": "9.0"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert hardware.gpu_capabilities() == {"Tesla T4": "7.5"}
    # An old driver does not know the question.
    smi.write_text("#!/bin/sh\necho 'Field \"compute_cap\" is not a valid field to query.'\n")
    assert hardware.gpu_capabilities() == {}


@pytest.mark.parametrize(
    ("named", "visible", "memory_gib"),
    [
        ("0", ["GPU-aa-0"], 80),
        ("2, 0", ["GPU-b-3", "GPU-aa-0"], 80),
        ("GPU-b,GPU-ab-1", ["GPU-b-3", "GPU-ab-1"], 15),
        ("MIG-c-2", ["MIG-c-2"], None),
        ("0,7,1", ["GPU-aa-0"], 80),  # CUDA ends the list at an entry that names no GPU
        ("GPU-a", [], None),  # or several
        ("-1", [], None),
        ("", [], None),
        ("0,0", [], None),
    ],
)
def test_gpus_that_cuda_hides_are_neither_counted_nor_measured(
    smi: Path, monkeypatch: pytest.MonkeyPatch, named: str, visible: list[str], memory_gib: float | None
) -> None:
    assert hardware.num_nvidia_gpus() == 3
    assert hardware.gpu_memory_gib() == 15
    assert hardware.hidden_gpus() == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert hardware.visible_gpus() == visible
    assert hardware.num_nvidia_gpus() == len(visible)
    assert hardware.gpu_memory_gib() == memory_gib
    assert hardware.hidden_gpus() == f"CUDA_VISIBLE_DEVICES={named} shows {len(visible)} of 3"
    assert hardware.has_nvidia_driver(), "there is one, whatever is hidden"


def test_a_run_on_more_gpus_than_are_visible_is_refused_and_the_doctor_counts_those(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "is_cpu_build", lambda: True)
    config = compose_config(["experiment=math_qwen_8gpu"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    *_, finding = check_driver(config, "train")
    assert finding.severity == "absent"
    assert finding.message.startswith("GPU: the run uses 8, but CUDA_VISIBLE_DEVICES=0 shows 1 of 3. Name more there, ")
    assert "1 GPUs (CUDA_VISIBLE_DEVICES=0 shows 1 of 3), but torch is" in [*check_devices()][-1].found
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    *_, finding = check_driver(config, "train")
    assert finding.message.startswith("GPU: the run uses 8, but nvidia-smi lists 3. Use another machine")
    assert "3 GPUs, but torch is" in [*check_devices()][-1].found
