"""Checkpoints on the real disk: which are complete, what damage is named, and what happens if the disk is full."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import platform
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.dataflow.errors import CheckpointError, ConfigError
from penstock.dataflow.ids import GroupId, TaskId, TrajectoryId
from penstock.dataflow.ports import WrittenFile
from penstock.dataflow.saved_groups import MemberProgress, OpenGroup
from penstock.dataflow.trajectory import GroupPayload, GroupRef, Trajectory
from penstock.dataflow.versions import Span
from penstock.platform.checks.load import compose_config
from penstock.platform.cli.main import app
from penstock.platform.config.schema import CheckpointConfig
from penstock.platform.run.checkpoint import (
    FORMAT,
    MANIFEST,
    Checkpointer,
    CheckpointFolder,
    choose_checkpoint,
    next_incarnation,
)
from penstock.platform.run.durable_files import Files
from penstock.platform.run.flow import FlowSnapshot
from penstock.platform.run.run_dir import locked, prepare_run_dir
from tests.fakes import FakeStore
from tests.runs import at_once

TRAINER_FILE = "trainer_00000.safetensors"


class Trainer:
    """Its state is one file with the number of the snapshot."""

    num_snapshots = 0

    async def snapshot(self) -> float:
        self.num_snapshots += 1
        return 0.25

    async def write_checkpoint(self, folder: str) -> list[WrittenFile]:
        data = b"state %d" % self.num_snapshots
        (Path(folder) / TRAINER_FILE).write_bytes(data)
        return [WrittenFile(TRAINER_FILE, len(data), zlib.crc32(data))]


class FullDisk(Files):
    """Writes files until it is full."""

    is_full = False

    def write(self, path: Path, data: bytes) -> None:
        if self.is_full:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().write(path, data)


def trajectory(name: str) -> Trajectory:
    tokens, mask = np.array([3, 4, 5], np.int32), np.array([False, True, True])
    logprobs = np.array([0, -1, -2], np.float32)
    return Trajectory(
        TrajectoryId(name), TaskId("t"), tokens, mask, logprobs, (Span(0, 2),), "p", "r", "stop", reward=1.0
    )


def ready(group_id: int) -> GroupRef:
    payload = GroupPayload(GroupId(group_id), (trajectory(f"{group_id}/0"),))
    return GroupRef(GroupId(group_id), TaskId("t"), payload, ((Span(0, 2),),), (1.0,), 3)


def flow_with(*group_ids: int) -> FlowSnapshot:
    """A flow with these ready groups, and an open one."""
    open_group = OpenGroup(GroupId(99), (MemberProgress(trajectory=trajectory("99/0")), MemberProgress()))
    return FlowSnapshot({"counters": {"admitted": 100}}, tuple(ready(one) for one in group_ids), (open_group,))


class Run:
    """A run that only checkpoints, on the real disk; `notes` are its lines on the console."""

    def __init__(self, run_dir: Path, files: Files | None = None, **settings: Any) -> None:
        self.notes: list[str] = []
        self.folder = CheckpointFolder(run_dir, files)
        self.checkpointer = Checkpointer(
            CheckpointConfig(**settings), self.folder, Trainer(), FakeStore(), self.notes.append, in_thread=at_once
        )

    async def take(self, version: int, *ready_groups: int) -> None:
        await self.checkpointer.take(version, flow_with(*ready_groups), {"wall_s": 1.5 * version})
        await self.checkpointer.written()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_what_is_read_is_what_was_at_the_cut(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.take(3, 7, 8)
    checkpoint = choose_checkpoint(tmp_path)
    assert (checkpoint.version, checkpoint.incarnation, checkpoint.manifest["run"]) == (3, 0, {"wall_s": 4.5})
    assert names(checkpoint.path) == ["driver.json", "open_groups.group", TRAINER_FILE]
    assert (checkpoint.path / TRAINER_FILE).read_bytes() == b"state 1"
    saved, payloads = run.folder.flow_snapshot(checkpoint)
    assert saved.state == {"counters": {"admitted": 100}}
    assert [group.group_id for group in saved.open_groups] == [99]
    assert {key: payload.trajectories[0].trajectory_id for key, payload in payloads.items()} == {7: "7/0", 8: "8/0"}
    metrics = run.checkpointer.take_metrics()
    on_disk = [*checkpoint.path.iterdir(), *(tmp_path / "spool").iterdir()]
    assert metrics["checkpoint/bytes"] == sum(path.stat().st_size for path in on_disk if path.name != MANIFEST)
    assert metrics["checkpoint/blocked_s"] == 0.25
    assert run.checkpointer.take_metrics() == {}, "each is logged once"


async def test_a_checkpoint_is_not_removed_before_its_copy_has_begun(tmp_path: Path) -> None:
    run, there = Run(tmp_path, keep=1), []

    async def begin_copy(version: int, _seconds: float) -> None:
        await asyncio.sleep(0.01)
        there.append((version, run.folder.versions()))

    run.checkpointer = Checkpointer(
        CheckpointConfig(keep=1), run.folder, Trainer(), FakeStore(), print, in_thread=at_once, on_written=begin_copy
    )
    for version in (1, 2):
        await run.take(version)
    assert there == [(1, [1]), (2, [2])]


async def test_the_newest_are_kept_with_the_groups_that_they_name(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    await run.take(1, 0, 1)
    written = (tmp_path / "spool" / "0-1.group").stat().st_mtime_ns
    await run.take(2, 1, 2)
    assert names(tmp_path / "spool") == ["0-0.group", "0-1.group", "0-2.group"]
    await run.take(3, 1, 3)
    assert names(tmp_path / "checkpoints") == ["step_2", "step_3"]
    assert names(tmp_path / "spool") == ["0-1.group", "0-2.group", "0-3.group"]
    assert (tmp_path / "spool" / "0-1.group").stat().st_mtime_ns == written, "a ready group is written once"
    await run.take(4)
    await run.take(5)
    assert names(tmp_path / "spool") == []


async def test_what_a_resume_has_left_is_removed_and_later_groups_have_names_of_their_own(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    await run.take(1, 0)
    await run.take(2, 1)
    resumed = run.folder.read(1)
    run.folder.prune(2, newest=resumed.version)
    assert names(tmp_path / "checkpoints") == ["step_1"]
    assert names(tmp_path / "spool") == ["0-0.group"]
    again = Run(tmp_path)
    again.checkpointer = Checkpointer(
        CheckpointConfig(), run.folder, Trainer(), FakeStore(), print, resumed, incarnation=1, in_thread=at_once
    )
    await again.take(2, 1)
    assert run.folder.read(2).incarnation == 1
    assert names(tmp_path / "spool") == ["0-0.group", "1-1.group"]


async def test_the_first_step_an_interval_in_steps_or_minutes_and_the_last_step_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    steps = Run(tmp_path, every_steps=3, every_minutes=0).checkpointer
    never = Run(tmp_path, every_minutes=0).checkpointer
    assert [version for version in range(1, 8) if steps.is_due(version, is_last=False)] == [3, 6]
    run = Run(tmp_path, every_minutes=15)
    minutes = run.checkpointer
    assert minutes.is_due(1, is_last=False), "there is none to go back to"
    await run.take(1)
    assert not minutes.is_due(2, is_last=False)
    now += 15 * 60
    assert minutes.is_due(3, is_last=False)
    assert [one.is_due(7, is_last=True) for one in (steps, minutes, never)] == [True, True, False]


async def test_a_run_that_is_stopped_takes_a_last_one_unless_it_has_it_or_wants_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.checkpointer.take_last(2, flow_with(1), {})
    written = (tmp_path / "checkpoints" / "step_2").stat().st_ino
    await run.checkpointer.take_last(2, flow_with(1), {})
    assert (tmp_path / "checkpoints" / "step_2").stat().st_ino == written
    none = Run(tmp_path / "none", every_minutes=0)
    await none.checkpointer.take_last(2, flow_with(1), {})
    assert none.folder.versions() == []


async def test_one_is_written_at_a_time_and_training_waits_only_for_the_copy(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def slowly(work: Callable[..., Any], *args: Any) -> Any:
        await gate.wait()
        return work(*args)

    run = Run(tmp_path, every_steps=1)
    run.checkpointer = Checkpointer(
        CheckpointConfig(every_steps=1), run.folder, Trainer(), FakeStore(), print, in_thread=slowly
    )
    await run.checkpointer.take(1, flow_with(0), {})
    assert run.folder.versions() == [], "not written yet"
    assert not run.checkpointer.is_due(2, is_last=False)
    gate.set()
    await run.checkpointer.take(3, flow_with(0), {})  # that of the last step waits for the one before
    assert run.folder.versions() == [1]
    await run.checkpointer.written()
    assert run.folder.versions() == [1, 3]
    assert run.checkpointer.newest == 3


async def test_a_full_disk_costs_a_checkpoint_and_not_the_run_nor_the_one_before(tmp_path: Path) -> None:
    disk = FullDisk()
    run = Run(tmp_path, disk)
    await run.take(1, 0)
    run.checkpointer.take_metrics()
    disk.is_full = True
    for num_failed, version in enumerate((2, 3), start=1):
        await run.take(version, 0, 1)
        assert run.checkpointer.take_metrics() == {"checkpoint/blocked_s": 0.25, "checkpoint/failed": num_failed}
        assert f"checkpoint of v{version} failed; the run continues, that of v1 is kept" in run.notes[-1]
        assert "No space left on device" in run.notes[-1]
        assert choose_checkpoint(tmp_path).version == run.checkpointer.newest == 1
    disk.is_full = False
    await run.take(4, 1)
    assert choose_checkpoint(tmp_path).version == 4
    assert len(run.notes) == 2
    assert run.folder.flow_snapshot(choose_checkpoint(tmp_path))[1].keys() == {1}, "the torn group was written again"
    assert names(tmp_path / "checkpoints") == ["step_1", "step_4"]


async def test_a_first_checkpoint_that_fails_says_that_there_is_none(tmp_path: Path) -> None:
    disk = FullDisk()
    disk.is_full = True
    run = Run(tmp_path, disk)
    await run.take(1, 0)
    assert "checkpoint of v1 failed; the run continues, there is none before it" in run.notes[0]
    with pytest.raises(CheckpointError, match="no complete checkpoint; found none"):
        choose_checkpoint(tmp_path)


async def test_a_rank_that_cannot_write_is_noted_too(tmp_path: Path) -> None:
    run = Run(tmp_path)

    async def refuses(folder: str) -> list[WrittenFile]:
        raise CheckpointError(f"checkpoint {folder}: 5 of 8 bytes were written")

    run.checkpointer._trainer.write_checkpoint = refuses
    await run.take(1, 0)
    assert "5 of 8 bytes were written" in run.notes[0]
    assert names(tmp_path / "checkpoints") == ["step_1.tmp"]
    assert run.folder.versions() == [], "an unfinished folder is no checkpoint"


async def test_a_rank_that_writes_where_the_driver_cannot_see_is_told_to_use_a_shared_folder(tmp_path: Path) -> None:
    run = Run(tmp_path)

    async def writes_elsewhere(folder: str) -> list[WrittenFile]:
        del folder
        return [WrittenFile(TRAINER_FILE, 8, 0)]

    run.checkpointer._trainer.write_checkpoint = writes_elsewhere
    await run.take(1, 0)
    assert re.search(r"wrote 8 bytes, and the driver finds no file\. .* all nodes share", run.notes[0])
    assert run.folder.versions() == []


async def test_a_hook_whose_memory_is_no_json_costs_the_checkpoint_and_not_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.take(1, 0)
    await run.checkpointer.take(2, flow_with(0), {"memory": object()})
    await run.checkpointer.written()
    assert "checkpoint of v2 failed; the run continues, that of v1 is kept" in run.notes[0]
    assert choose_checkpoint(tmp_path).version == 1


async def test_a_driver_has_a_number_that_no_file_of_the_run_names(tmp_path: Path) -> None:
    assert next_incarnation(tmp_path) == 0
    run = Run(tmp_path)
    await run.take(1)
    assert next_incarnation(tmp_path) == 1, "by the checkpoint alone: the disk may have refused the ledger"
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "3-v1.log").touch()
    assert next_incarnation(tmp_path) == 4
    (tmp_path / "spool" / "11-5.group").touch()
    assert next_incarnation(tmp_path) == 12, "its checkpoint was never completed"


async def test_an_unfinished_folder_is_no_checkpoint_and_is_removed_by_the_next_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.take(1, 0)
    abandoned = tmp_path / "checkpoints" / "step_2.tmp"
    abandoned.mkdir()
    (abandoned / MANIFEST).write_bytes((tmp_path / "checkpoints" / "step_1" / MANIFEST).read_bytes())
    assert run.folder.versions() == [1]
    assert choose_checkpoint(tmp_path).version == 1
    await run.take(3, 0)
    assert names(tmp_path / "checkpoints") == ["step_1", "step_3"]


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, **changes: Any) -> None:
    manifest = json.loads(path.read_bytes().partition(b"\n")[2])
    body = json.dumps(manifest | changes).encode()
    path.write_bytes(b"%08x\n%b" % (zlib.crc32(body), body))


def make_foreign(path: Path) -> None:
    rewrite(path, format=FORMAT + 1, penstock="9.0")


OF_STEP_2 = Path("checkpoints/step_2")
DAMAGES = {
    "a torn driver.json": (OF_STEP_2 / MANIFEST, tear, "its checksum is .* damaged or edited"),
    "a changed driver.json": (OF_STEP_2 / MANIFEST, flip, "its checksum is .* damaged or edited"),
    "an empty driver.json": (OF_STEP_2 / MANIFEST, lambda path: path.write_bytes(b""), "its checksum is"),
    "no driver.json": (OF_STEP_2 / MANIFEST, Path.unlink, "cannot be read"),
    "another format": (OF_STEP_2 / MANIFEST, make_foreign, r"has format 2, written by Penstock 9\.0; .* format 1\."),
    "a torn spooled group": (Path("spool/0-1.group"), tear, r"has \d+ bytes of \d+"),
    "a changed spooled group": (Path("spool/0-1.group"), flip, "its checksum is .* was written"),
    "a missing spooled group": (Path("spool/0-1.group"), Path.unlink, "is missing"),
    "torn open groups": (OF_STEP_2 / "open_groups.group", tear, r"has \d+ bytes of \d+"),
    "a changed file of a rank": (OF_STEP_2 / TRAINER_FILE, flip, "its checksum is .* was written"),
    "no file of a rank": (OF_STEP_2 / TRAINER_FILE, Path.unlink, "is missing"),
}


@pytest.mark.parametrize(("name", "spoil", "words"), DAMAGES.values(), ids=DAMAGES)
async def test_a_damaged_checkpoint_is_named_with_its_file_and_the_one_before_is_used(
    tmp_path: Path, name: Path, spoil: Callable[[Path], object], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, keep=2)
    await run.take(1, 0)
    await run.take(2, 0, 1)
    spoil(tmp_path / name)
    with pytest.raises(CheckpointError, match=words) as refused:
        choose_checkpoint(tmp_path, step=2)
    assert str(tmp_path / (OF_STEP_2 if spoil is make_foreign else name)) in str(refused.value)
    assert "no complete checkpoint of step 2; found steps [1, 2]" in str(refused.value)
    caplog.clear()
    assert choose_checkpoint(tmp_path).version == 1
    (warning,) = caplog.messages
    assert re.search(words, warning)
    assert warning.endswith("Step 1 is taken instead.")
    await run.take(3, 0, 1)
    assert run.notes == [], "the next one is not affected"
    assert run.checkpointer.newest == 3


async def test_a_group_that_was_damaged_after_the_choice_is_not_trained(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.take(1, 0)
    chosen = choose_checkpoint(tmp_path)
    flip(tmp_path / "spool" / "0-0.group")
    with pytest.raises(CheckpointError, match=r"spool/0-0\.group: its checksum is .* was written"):
        run.folder.flow_snapshot(chosen)
    (tmp_path / "spool" / "0-0.group").unlink()
    with pytest.raises(CheckpointError, match=r"spool/0-0\.group: cannot be read"):
        run.folder.flow_snapshot(chosen)


async def test_the_command_lists_what_is_complete_damaged_and_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = prepare_run_dir(compose_config(["experiment=arithmetic", "name=listed"]))

    def listed() -> str:
        result = CliRunner().invoke(app, ["checkpoints", str(run_dir)], env={"COLUMNS": "400"})
        assert result.exit_code == 0, result.output
        return result.output

    assert "has no checkpoints: a run writes one every checkpoint.every_minutes" in listed()
    run = Run(run_dir, keep=3)
    for version in (1, 2, 3):
        await run.take(version, version)
    (run_dir / "spool" / "0-2.group").unlink()
    tear(run_dir / "checkpoints" / "step_3" / MANIFEST)
    (run_dir / "checkpoints" / "step_4.tmp").mkdir()
    lines = listed().splitlines()
    assert [" ".join(line.split()[:2]) for line in lines] == ["step_4.tmp incomplete:", "step 1", "step 2", "step 3"]
    assert re.search(r" MiB .* complete$", lines[1])
    assert re.search(r"damaged: .*0-2\.group is missing", lines[2])
    assert re.search(r"damaged: .*its checksum is", lines[3])


def test_a_folder_without_a_run_has_no_list(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["checkpoints", str(tmp_path)], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert "holds no config.yaml, so it is no run" in result.output


HOLD = """
import sys, pathlib
from penstock.platform.run.run_dir import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_told_who_uses_the_directory_until_that_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose_config(["experiment=arithmetic", "name=used"])
    run_dir = prepare_run_dir(config)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            used_by = rf"used is in use by process {holder.pid} on {platform.node()}: .*Wait for its end, or stop it"
            with pytest.raises(ConfigError, match=used_by), locked(run_dir):
                pass
            with pytest.raises(ConfigError, match=used_by):
                prepare_run_dir(config.model_copy(update={"overwrite": True}))
            assert (run_dir / "config.yaml").is_file(), "nothing of a run that goes on is deleted"
        finally:
            holder.kill()
    with locked(run_dir):  # a killed process holds nothing
        assert (run_dir / "lock").read_text() == f"process {os.getpid()} on {platform.node()}\n"


def test_the_names_of_all_folders_that_a_run_makes_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    synced: list[Path] = []
    monkeypatch.setattr(Files, "sync", lambda _self, path: synced.append(path))
    prepare_run_dir(compose_config(["experiment=arithmetic", "run_dir=runs/today/first"]))
    assert synced[-4:] == [Path(folder) for folder in ("runs/today/first", "runs/today", "runs", ".")]


def test_files_on_disk(tmp_path: Path) -> None:
    files, folder = Files(), tmp_path / "a" / "b"
    assert files.names(folder) == []
    files.make_folder(folder)
    files.make_folder(folder)
    files.write(folder / "one", b"first")
    files.write(folder / "one", b"2nd")
    files.sync(folder / "one")
    files.sync(folder)
    assert (files.read(folder / "one"), files.size(folder / "one")) == (b"2nd", 3)
    assert (files.size(folder / "two"), files.size(folder)) == (None, None)
    files.write(folder / "two", b"other")
    files.rename(folder / "two", folder / "one")
    assert (files.names(folder), files.read(folder / "one")) == (["one"], b"other")
    files.remove(folder / "one")
    files.remove(folder / "one")
    files.remove(folder.parent)
    assert files.names(tmp_path) == []
    with pytest.raises(OSError, match="No such file"):
        files.sync(folder)
