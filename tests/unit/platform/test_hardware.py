"""What this machine has, as the kernel tells it."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from penstock.platform import hardware

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
