"""What killed processes leave in shared memory is removed by the next one, and nothing else is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest

from penstock.weights.transport import shared_memory
from penstock.weights.transport.shared_memory import private_directory, remove_directories_of

HOLDS_A_VERSION = """
import sys, time
from pathlib import Path
from penstock.weights.transport.shared_memory import private_directory
folder = private_directory(sys.argv[1])
(folder / "v7.safetensors").write_bytes(bytes(1 << 20))
print(folder, flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are told by /proc, of Linux")


class Process:
    """A process with a version in shared memory."""

    def __init__(self, place: Path) -> None:
        command = [sys.executable, "-c", HOLDS_A_VERSION, str(place)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    @cached_property
    def folder(self) -> Path:
        """Its folder, once it has one."""
        assert self.process.stdout is not None
        return Path(self.process.stdout.readline().strip())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def two_processes(tmp_path: Path) -> Iterator[list[Process]]:
    processes = [Process(tmp_path) for _ in range(2)]
    assert all(one.folder.is_dir() for one in processes)
    yield processes
    for one in processes:
        one.kill()


def test_the_next_process_removes_what_a_killed_one_has_left_and_nothing_of_living_ones(
    two_processes: list[Process], tmp_path: Path
) -> None:
    killed, living = two_processes
    killed.kill()
    assert (killed.folder / "v7.safetensors").exists()
    mine = private_directory(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == sorted([living.folder, mine])
    assert (living.folder / "v7.safetensors").stat().st_size == 1 << 20


@pytest.mark.full
def test_a_killed_process_that_has_not_been_waited_for_counts_as_dead(
    two_processes: list[Process], tmp_path: Path
) -> None:
    killed = two_processes[0]
    killed.process.kill()
    os.waitid(os.P_PID, killed.process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its entry stays
    private_directory(str(tmp_path))
    assert not killed.folder.exists()


def test_a_reused_pid_is_recognised_by_the_start_time_of_its_process(tmp_path: Path) -> None:
    mine = private_directory(str(tmp_path))
    pid, start, *rest = mine.name.removeprefix(shared_memory._PREFIX).split("-")
    assert pid == str(os.getpid())
    before = tmp_path / "-".join([f"{shared_memory._PREFIX}{pid}", str(int(start) - 1), *rest])
    before.mkdir()
    private_directory(str(tmp_path))
    assert mine.exists()
    assert not before.exists()


def test_folders_of_other_machines_and_programs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_machine", lambda: "0badcafe")
    elsewhere = private_directory(str(tmp_path))
    elsewhere = elsewhere.rename(tmp_path / elsewhere.name.replace(f"-{os.getpid()}-", "-99999999-"))
    monkeypatch.undo()
    others = [tmp_path / name for name in ("penstock-weights-99999999-abc", "penstock-weights-x-1-2-3", "other")]
    for folder in others:
        folder.mkdir()
    private_directory(str(tmp_path))
    assert elsewhere.exists()
    assert all(folder.exists() for folder in others)
    shutil.rmtree(elsewhere)


def test_the_folders_of_a_pid_are_found(tmp_path: Path) -> None:
    mine = private_directory(str(tmp_path))
    remove_directories_of([os.getpid() + 1], str(tmp_path))
    assert mine.exists()
    remove_directories_of([os.getpid()], str(tmp_path))
    assert not mine.exists()


def test_the_same_pid_of_another_container_keeps_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_machine", lambda: "01234567")
    elsewhere = private_directory(str(tmp_path))
    monkeypatch.undo()
    remove_directories_of([os.getpid()], str(tmp_path))
    assert elsewhere.exists()
