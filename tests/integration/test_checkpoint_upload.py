"""Checkpoints that are copied to another place while a run trains, and what is there after every kind of mishap."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from penstock.dataflow.errors import CheckpointError, ConfigError
from penstock.platform.checks.load import compose_config
from penstock.platform.checks.machine import check_upload
from penstock.platform.cli.branch import branch
from penstock.platform.metrics.trackers.jsonl import read_metrics
from penstock.platform.run import checkpoint_upload, resume
from penstock.platform.run.checkpoint import CheckpointFolder, choose_checkpoint
from penstock.platform.run.checkpoint_upload import CheckpointUpload, Place, download
from penstock.platform.run.run import Run
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import read_summary
from tests.in_process import in_process, train_in_process
from tests.small_run import small_run_overrides

STEPS = 5
OF_RUN = [
    "dataflow.batch_groups=2",
    "dataflow.max_staleness=2",
    "reward.fn=own:letters",
    "model.max_context_tokens=64",
    "checkpoint.every_steps=1",
    "checkpoint.keep=2",
    f"total_steps={STEPS}",
]
REWARD = "def letters(trajectory, **_): return len(set(trajectory.response)) / 10"


class FullDisk(LocalFileSystem):
    """The local file system, of which every write fails from the moment that `is_full` is set."""

    protocol = "fulldisk"
    is_full = False

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        if FullDisk.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), rpath)
        super().put_file(lpath, rpath, **options)


fsspec.register_implementation("fulldisk", FullDisk, clobber=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("upload")
    (folder / "own.py").write_text(REWARD)
    return folder


def train(folder: Path, name: str, url: str, *more: str) -> Path:
    overrides = small_run_overrides(folder, name, character_tokenizer(), *OF_RUN, f"checkpoint.upload={url}", *more)
    checkpoint = Run.maybe_checkpoint

    async def maybe_checkpoint(run: Run) -> None:
        await checkpoint(run)
        await run.checkpointer.written()  # steps are so short that one would be skipped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "maybe_checkpoint", maybe_checkpoint)
        train_in_process(folder, overrides)
    return folder / "runs" / name


def assert_complete(place: Path, versions: list[int], scratch: Path) -> None:
    """Every checkpoint whose manifest is in the place can be fetched, and no file of it is missing or damaged."""
    assert CheckpointFolder(place).versions() == versions
    for version in versions:
        fetched = scratch / f"fetched{version}"
        download(f"file://{place}", fetched, version)
        assert choose_checkpoint(fetched, version).version == version


def test_what_a_run_keeps_is_in_the_place_and_another_run_begins_from_it(folder: Path, tmp_path: Path) -> None:
    place = folder / "place"
    run_dir = train(folder, "copied", f"file://{place}", "checkpoint.keep_every=3")
    assert CheckpointFolder(run_dir).versions() == [3, 4, 5], "the newest two, and every third"
    versions = CheckpointFolder(place).versions()
    assert 5 in versions, "the last one is waited for"
    assert_complete(place, versions, tmp_path)
    assert not (run_dir / "uploading").exists() or not any((run_dir / "uploading").iterdir())
    in_run, in_place = ({path.name for path in (one / "spool").iterdir()} for one in (run_dir, place))
    assert in_place <= in_run
    for version in {3, 4, 5} - set(versions):  # those that fell due while another one was copied
        Place(f"file://{place}", run_dir).copy(version, run_dir)
    assert any("checkpoint/upload_s" in record.metrics for record in read_metrics(run_dir))
    with in_process(folder):
        with pytest.raises(ConfigError, match="has the checkpoints of"):
            branch(f"file://{place}", "elsewhere", [f"checkpoint.upload=file://{place}"], 4, None)
        assert branch(f"file://{place}", "elsewhere", [f"total_steps={STEPS + 2}"], 4, None) == 0
    elsewhere = folder / "runs" / "elsewhere"
    with pytest.raises(CheckpointError, match=r"of another run \(steps \[3, 4, 5\]\), and this one would remove"):
        Place(f"file://{place}", elsewhere).copy(STEPS + 2, elsewhere)
    assert_complete(place, [3, 4, 5], tmp_path / "after")
    summary = read_summary(elsewhere)
    assert summary["steps"] == STEPS + 2
    assert summary["branched_from"] == {"run": f"file://{place}", "step": 4, "restored": "groups"}
    assert [path.name for path in (folder / "runs").iterdir() if path.name.startswith(".")] == []


def test_the_same_command_on_an_empty_disk_leaves_the_place_of_the_lost_run_as_it_is(
    folder: Path, tmp_path: Path
) -> None:
    """As `resume=auto` starts it once the machine of the run is lost: the same name, and nothing in its directory."""
    lost, place = folder / "runs" / "copied", tmp_path / "place"
    Place(f"file://{place}", lost).copy(STEPS, lost)
    words = small_run_overrides(tmp_path, "copied", character_tokenizer(), *OF_RUN, "resume=auto")
    with in_process(tmp_path):
        config = compose_config([*words, f"checkpoint.upload=file://{place}"])
        with pytest.raises(ConfigError, match=rf"steps \[{STEPS}\]\), .* penstock resume file://{place} --as NEW"):
            resume.train(config)
        assert not Path(config.run_dir).exists()
        again = prepare_run_dir(config).absolute()
    shutil.copytree(lost / "checkpoints", again / "checkpoints")
    shutil.copytree(lost / "spool", again / "spool")
    with pytest.raises(CheckpointError, match="has checkpoints of another run"):
        Place(f"file://{place}", again).copy(STEPS - 1, again)
    assert_complete(place, [STEPS], tmp_path)


def test_a_place_that_vanishes_is_said_once_and_filled_again(folder: Path, tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "place"
    place.write_text("a file where the folder of the bucket should be")
    run_dir = train(folder, "vanished", f"file://{place}")
    assert read_summary(run_dir)["status"] == "completed"
    assert CheckpointFolder(run_dir).versions() == [STEPS - 1, STEPS]
    assert capsys.readouterr().out.count("could not be copied there") == 1
    failed = [
        one.metrics["checkpoint/upload_failed"]
        for one in read_metrics(run_dir)
        if "checkpoint/upload_failed" in one.metrics
    ]
    assert failed
    assert failed == sorted(failed)
    place.unlink()
    Place(f"file://{place}", run_dir).copy(STEPS, run_dir)
    assert_complete(place, [STEPS], tmp_path)


async def test_a_full_disk_leaves_what_was_there_and_the_next_copy_makes_it_whole(folder: Path, tmp_path: Path) -> None:
    run_dir, place, notes = folder / "runs" / "copied", tmp_path / "full", []
    upload = CheckpointUpload(Place(f"fulldisk://{place}", run_dir), run_dir, notes.append)
    await upload.start(3)
    await upload.finished()
    FullDisk.is_full = True
    try:
        for version in (4, 5):
            await upload.start(version)
            await upload.finished()
    finally:
        FullDisk.is_full = False
    assert (upload.copied, len([one for one in notes if "No space left" in one])) == (3, 1)
    assert notes[-1] == f"the last checkpoint, of v5, was not copied: fulldisk://{place} has v3"
    assert_complete(place, [3], tmp_path / "a")
    await upload.start(5)
    await upload.finished()
    assert notes[-1] == "checkpoints are copied again, v5 first"
    assert_complete(place, [3, 5], tmp_path / "b")
    assert upload.take_metrics()["checkpoint/upload_failed"] == 2


async def test_a_copy_that_cannot_be_begun_is_counted_and_the_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk knows no links the files are copied first: in a thread, and it may be full."""
    run_dir, notes = tmp_path / "run", []
    shutil.copytree(folder / "runs" / "copied", run_dir)
    threads: set[int] = set()

    def full(source: Path, target: Path) -> None:
        threads.add(threading.get_ident())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    upload = CheckpointUpload(Place(f"file://{tmp_path}/place", run_dir), run_dir, notes.append)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_upload, "link_or_copy", full)
        for version in (STEPS - 1, STEPS):
            await upload.start(version)
    await upload.finished()
    assert threading.get_ident() not in threads
    begun, last = notes
    assert "of v4 could not be kept for its copy: OSError: [Errno 28] No space left" in begun
    assert last.endswith(f"of v{STEPS}, was not copied: file://{tmp_path}/place has no checkpoint of this start")
    assert upload.take_metrics() == {"checkpoint/upload_failed": 2}


KILLED = """
import sys, time
from pathlib import Path
from fsspec.implementations.local import LocalFileSystem
from penstock.platform.run.checkpoint_upload import Place
put = LocalFileSystem.put_file
def slow(self, lpath, rpath, **options):
    put(self, lpath, rpath, **options)
    print(rpath, flush=True)
    time.sleep(0.2)
LocalFileSystem.put_file = slow
place = Place(sys.argv[1], Path(sys.argv[2]))
for version in (3, 4, 5):
    place.copy(version, Path(sys.argv[2]))
"""


@pytest.mark.full
@pytest.mark.parametrize("num_files", [1, 4, 7, 10, 13])
def test_a_kill_in_the_middle_of_a_copy_leaves_only_complete_checkpoints(
    folder: Path, tmp_path: Path, num_files: int
) -> None:
    run_dir, place = folder / "runs" / "copied", tmp_path / "place"
    program = [sys.executable, "-c", KILLED, f"file://{place}", str(run_dir)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(num_files):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    versions = CheckpointFolder(place).versions()
    whole = [version for version in versions if (place / "checkpoints" / f"step_{version}" / "driver.json").exists()]
    for version in whole:
        download(f"file://{place}", tmp_path / f"fetched{version}", version)
        choose_checkpoint(tmp_path / f"fetched{version}", version)
    Place(f"file://{place}", run_dir).copy(5, run_dir)
    download(f"file://{place}", tmp_path / "again", None)
    assert choose_checkpoint(tmp_path / "again").version == 5


def train_again(run_dir: Path, version: int) -> Path:
    """Replace a checkpoint by one of another training, with zeros in the file of the trainer; returns that file."""
    local = CheckpointFolder(run_dir)
    before, folder = local.read(version), local.unfinished(version)
    (saved, _), (name, size, _) = local.flow_snapshot(before), before.manifest["trainer_files"][0]
    (folder / name).write_bytes(bytes(size))
    written = (size, zlib.crc32(bytes(size)))
    files = [one for one in before.manifest["files"] if one[0].startswith("spool/")]
    files.append((f"checkpoints/step_{version}/{name}", *written))
    shutil.rmtree(before.path)
    again = {**before.manifest, "trainer_files": [(name, *written)], "files": files}
    return local.commit(folder, saved, again).path / name


def test_a_version_that_was_trained_again_replaces_the_one_in_the_place(folder: Path, tmp_path: Path) -> None:
    """Its files have the sizes of the old ones. Cut off, it is not complete there until it is copied again."""
    run_dir, place = tmp_path / "run", tmp_path / "place"
    shutil.copytree(folder / "runs" / "copied", run_dir)
    copies = Place(f"fulldisk://{place}", run_dir)
    for version in (STEPS - 1, STEPS):
        copies.copy(version, run_dir)
    written = train_again(run_dir, STEPS)
    FullDisk.is_full = True
    try:
        with pytest.raises(CheckpointError, match="No space left"):
            copies.copy(STEPS, run_dir)
    finally:
        FullDisk.is_full = False
    assert not (place / "checkpoints" / f"step_{STEPS}" / "driver.json").exists()
    copies.copy(STEPS, run_dir)
    assert (place / written.relative_to(run_dir)).read_bytes() == written.read_bytes()
    assert_complete(place, [STEPS - 1, STEPS], tmp_path / "a")
    assert copies.copy(STEPS, run_dir) < written.stat().st_size, "it is there"
    train_again(run_dir, STEPS - 1)
    copies.copy(STEPS, run_dir)
    assert_complete(place, [STEPS], tmp_path / "b")


async def test_the_run_may_remove_what_is_being_copied_and_only_the_newest_waits(folder: Path, tmp_path: Path) -> None:
    run_dir, place = tmp_path / "run", tmp_path / "place"
    shutil.copytree(folder / "runs" / "copied", run_dir)
    copied: list[int] = []

    class Slow(Place):
        def copy(self, version: int, source: Path) -> int:
            time.sleep(0.2)
            copied.append(version)
            return super().copy(version, source)

    upload = CheckpointUpload(Slow(f"file://{place}", run_dir), run_dir, print)
    for version in (3, 4, 5):
        await upload.start(version)
        await asyncio.sleep(0.01)
    CheckpointFolder(run_dir).prune(1, 5)
    assert CheckpointFolder(run_dir).versions() == [5]
    await upload.finished()
    assert copied == [3, 5]
    assert_complete(place, [5], tmp_path)


def test_a_place_that_cannot_be_is_refused_before_the_start(tmp_path: Path) -> None:
    config = compose_config(["experiment=arithmetic", f"run_dir={tmp_path / 'run'}"])

    def found(**keys: Any) -> list[str]:
        checkpoint = config.checkpoint.model_copy(update=keys)
        return [one.message for one in check_upload(config.model_copy(update={"checkpoint": checkpoint}))]

    assert found(upload="file:///tmp/elsewhere") == []
    assert "Protocol not known: bucket" in found(upload="bucket://x")[0]
    assert "is run_dir itself" in found(upload=f"file://{tmp_path / 'run'}")[0]
    assert "there are no checkpoints" in found(upload="memory://x", every_minutes=0.0, every_steps=0)[0]


def test_nothing_to_fetch_is_said_with_what_there_is(folder: Path, tmp_path: Path) -> None:
    place = folder / "place"
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 99; found steps \[3, 4, 5\]"):
        download(f"file://{place}", tmp_path / "a", 99)
    with pytest.raises(CheckpointError, match="found none"):
        download(f"file://{tmp_path}/empty", tmp_path / "b", None)
    with pytest.raises(ConfigError, match="fsspec cannot open it"):
        download("nothing://there", tmp_path / "c", None)
    assert json.loads((folder / "runs" / "copied" / "summary.json").read_text())["steps"] == STEPS
