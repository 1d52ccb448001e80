"""Copies of complete checkpoints in another place, made while training goes on: any location that fsspec knows.

The place has the layout of the run directory, so that a run can be branched from it (`penstock resume URL --as NEW`):

    config.yaml · environment.json · data.json · metrics.jsonl · start_policy/… (of a branch of the weights alone)
    spool/<group>.group
    checkpoints/step_<v>/…, driver.json last

Invariant: a checkpoint whose driver.json is in the place is complete there, with every file that it names. The order of
copying is that of writing (checkpoint.py), and driver.json is the first that is removed. So nothing is lost if this
process is killed at any time; what is half copied is copied again. The run may remove a checkpoint that is being
copied: it is copied from names of its own (`UPLOADING`).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec

from penstock.dataflow.errors import CheckpointError, ConfigError, boundary
from penstock.platform.metrics.run_files import (
    CONFIG_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    START_PARTNER,
    START_POLICY,
)
from penstock.platform.run.checkpoint import CHECKPOINTS, MANIFEST, PREFIX, SPOOL, Checkpoint, CheckpointFolder
from penstock.platform.run.durable_files import link_or_copy
from penstock.platform.run.run_dir import read_environment

OF_THE_RUN = (CONFIG_FILE, ENVIRONMENT_FILE, DATA_FILE, METRICS_FILE)
UPLOADING = "uploading"
"""Folder with names of the files of checkpoints that are being copied."""
END_S = 1800.0
"""Longest wait for the copy of the last checkpoint, seconds."""


def opened(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    Raises:
        ConfigError: If no installed package knows it.
    """
    try:
        fs, root = fsspec.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError([f"{url}: fsspec cannot open it: {error}"]) from error
    return fs, root.rstrip("/")


class Place:
    """The copies of one run in a location. Blocking; called from a thread.

    Attributes:
        url: The location.
    """

    def __init__(self, url: str, run_dir: Path) -> None:
        self.url = url.rstrip("/")
        self._run_dir = run_dir
        self._local = CheckpointFolder(run_dir)
        self._opened: tuple[Any, str] | None = None

    def copy(self, version: int, source: Path) -> int:
        """Copy a checkpoint, and remove those that the run does not keep any more; returns the bytes that were copied.

        Another checkpoint of that version is removed first: its files often have the sizes of the new ones.

        Args:
            version: Of the checkpoint.
            source: Folder with its files, in the layout of the run directory.

        Raises:
            CheckpointError: If the location or the disk fails; other checkpoints that were there before stay.
        """
        with boundary(CheckpointError, f"{self.url}: the checkpoint of v{version} could not be copied there"):
            fs, root = self._opened = self._opened or opened(self.url)
            checkpoint = CheckpointFolder(source).read(version)
            there = sizes(fs, root)
            if problem := of_another_run(self.url, fs, root, there, read_environment(self._run_dir)["run_id"]):
                raise CheckpointError(problem)
            if not is_there(fs, root, there, checkpoint):
                step = f"{CHECKPOINTS}/{checkpoint.path.name}"
                remove_checkpoint(fs, root, there, step)
                there = {name: size for name, size in there.items() if not name.startswith(f"{step}/")}
            num_bytes = 0
            files = [(self._run_dir, *file) for file in of_the_run(self._run_dir)]
            for folder, name, size in [*files, *((source, *file) for file in files_of(checkpoint))]:
                if there.get(name) != size or name in OF_THE_RUN:
                    fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
                    fs.put_file(str(folder / name), f"{root}/{name}")
                    num_bytes += size
            self._remove_others(fs, root, there, checkpoint)
            return num_bytes

    def _remove_others(self, fs: Any, root: str, there: dict[str, int], copied: Checkpoint) -> None:
        """Remove checkpoints and groups that the run does not keep, or keeps from another training of that version."""
        kept = [copied]
        for version in self._local.versions():
            with suppress(CheckpointError, FileNotFoundError):  # removed meanwhile
                if is_there(fs, root, there, one := self._local.read(version)):
                    kept.append(one)
        named = {name for one in kept for name, *_ in one.manifest["files"]}
        of_checkpoints = {name.split("/")[1] for name in there if name.startswith(f"{CHECKPOINTS}/{PREFIX}")}
        for folder in sorted(of_checkpoints - {one.path.name for one in kept}):
            remove_checkpoint(fs, root, there, f"{CHECKPOINTS}/{folder}")
        for name in there:
            if name.startswith(f"{SPOOL}/") and name not in named:
                fs.rm_file(f"{root}/{name}")


def check_is_free(url: str | None) -> None:
    """Check, before a new run begins, that no checkpoints of another one are where it copies its own.

    Raises:
        ConfigError: If there are.
        CheckpointError: If the location fails.
    """
    if url is None:
        return
    fs, root = opened(url)
    with boundary(CheckpointError, f"checkpoint.upload={url}: the place cannot be read"):
        problem = of_another_run(url, fs, root, sizes(fs, root), None)
    if problem is not None:
        raise ConfigError([problem])


def of_another_run(url: str, fs: Any, root: str, there: Mapping[str, int], run_id: str | None) -> str | None:
    """Why a run must not copy its checkpoints to a location; None if it may.

    Args:
        url: The location.
        fs: Its file system.
        root: Path in that.
        there: What is in it.
        run_id: That of the run; None for a run that begins.
    """
    if not (versions := versions_in(there)):
        return None
    with fs.open(f"{root}/{ENVIRONMENT_FILE}") as file:
        if json.load(file)["run_id"] == run_id:
            return None
    return (
        f"checkpoint.upload={url} has checkpoints of another run (steps {versions}), and this one would remove them. "
        f"To go on from them: penstock resume {url} --as NEW. Or give this run another place."
    )


def versions_in(there: Mapping[str, int]) -> list[int]:
    """Versions of the complete checkpoints in a location, ascending."""
    manifests = [name for name in there if name.startswith(f"{CHECKPOINTS}/{PREFIX}") and name.endswith(f"/{MANIFEST}")]
    return sorted(int(name.split("/")[1].removeprefix(PREFIX)) for name in manifests)


def is_there(fs: Any, root: str, there: Mapping[str, int], checkpoint: Checkpoint) -> bool:
    """Whether a location has this very checkpoint, complete, and not another one of its version."""
    name = f"{CHECKPOINTS}/{checkpoint.path.name}/{MANIFEST}"
    manifest: bytes = (checkpoint.path / MANIFEST).read_bytes()
    return there.get(name) == len(manifest) and fs.cat_file(f"{root}/{name}") == manifest


def remove_checkpoint(fs: Any, root: str, there: Mapping[str, int], folder: str) -> None:
    """Remove a checkpoint from a location, driver.json first: what is left must not look complete."""
    if f"{folder}/{MANIFEST}" in there:
        fs.rm_file(f"{root}/{folder}/{MANIFEST}")
    if any(name.startswith(f"{folder}/") for name in there):
        fs.rm(f"{root}/{folder}", recursive=True)


def of_the_run(run_dir: Path) -> Iterator[tuple[str, int]]:
    """Name and size of the files that a branch needs besides the checkpoint."""
    for pattern in (*OF_THE_RUN, f"{START_POLICY}/**/*", f"{START_PARTNER}/**/*"):
        for path in filter(Path.is_file, run_dir.glob(pattern)):
            yield path.relative_to(run_dir).as_posix(), path.stat().st_size


def files_of(checkpoint: Checkpoint) -> Iterator[tuple[str, int]]:
    """Name below the run directory, and size, of every file of a checkpoint, in the order of copying."""
    for name, size, _ in checkpoint.manifest["files"]:
        yield name, size
    size = (checkpoint.path / MANIFEST).stat().st_size
    yield f"{CHECKPOINTS}/{checkpoint.path.name}/{MANIFEST}", size


def sizes(fs: Any, root: str) -> dict[str, int]:
    """Name below the location -> bytes, of all files in it."""
    fs.invalidate_cache()
    if not fs.exists(root):
        return {}
    return {path.removeprefix(f"{root}/"): info["size"] for path, info in fs.find(root, detail=True).items()}


def download(url: str, run_dir: Path, step: int | None) -> None:
    """Fetch a checkpoint of a run, and what else a branch of it needs, into a folder.

    Args:
        url: Where the run has copied its checkpoints to.
        run_dir: A new folder, which then is like the directory of the run.
        step: Which checkpoint; None is the newest.

    Raises:
        CheckpointError: If there is none, or the location fails.
    """
    fs, root = opened(url)
    with boundary(CheckpointError, f"{url}: the checkpoint could not be fetched"):
        there = sizes(fs, root)
        versions = versions_in(there)
        wanted = versions[-1:] if step is None else [one for one in versions if one == step]
        if not wanted:
            raise CheckpointError(
                f"{url}: no complete checkpoint{'' if step is None else f' of step {step}'}; found "
                f"{f'steps {versions}' if versions else 'none'}. A run with checkpoint.upload={url} copies them there."
            )

        def fetch(name: str) -> None:
            (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(f"{root}/{name}", str(run_dir / name))

        fetch(f"{CHECKPOINTS}/{PREFIX}{wanted[0]}/{MANIFEST}")
        checkpoint = CheckpointFolder(run_dir).read(wanted[0])
        for name in (
            *(one for one in there if one in OF_THE_RUN or one.startswith((f"{START_POLICY}/", f"{START_PARTNER}/"))),
            *(name for name, *_ in checkpoint.manifest["files"]),
        ):
            fetch(name)


class CheckpointUpload:
    """Copies each complete checkpoint to its place, one at a time; of those that wait only the newest is copied.

    Consumes: versions of complete checkpoints. Waits for: the location. Unblocked by: the copy, or its failure, which
    is said once and counted; the next checkpoint tries again.

    Attributes:
        copied: Version of the newest checkpoint that is in the place; None before the first.
    """

    def __init__(self, place: Place, run_dir: Path, note: Callable[[str], None]) -> None:
        self.copied: int | None = None
        self._place = place
        self._run_dir = run_dir
        self._note = note
        self._newest: int | None = None
        self._next: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._metrics: dict[str, float] = {}
        self._num_failed = 0
        self._is_failing = False
        shutil.rmtree(run_dir / UPLOADING, ignore_errors=True)  # of a process that was killed

    async def start(self, version: int) -> None:
        """Copy a checkpoint, which was just completed, as soon as the one before is copied.

        Returns once its files have names of their own, which stay when the run removes it.
        """
        self._newest = version
        try:
            await asyncio.to_thread(self._keep, version)
        except CheckpointError as error:
            self._fail(error)
            shutil.rmtree(self._names_of(version), ignore_errors=True)
            return
        waiting, self._next = self._next, version
        if waiting is not None:
            shutil.rmtree(self._names_of(waiting), ignore_errors=True)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._copy_all(), name="upload of checkpoints")

    def _keep(self, version: int) -> None:
        """Give the files of a checkpoint names of their own. Blocking, and long where the disk knows no links."""
        folder = self._names_of(version)
        with boundary(CheckpointError, f"{folder}: the checkpoint of v{version} could not be kept for its copy"):
            for name, _ in files_of(CheckpointFolder(self._run_dir).read(version)):
                link_or_copy(self._run_dir / name, folder / name)

    def _names_of(self, version: int) -> Path:
        return self._run_dir / UPLOADING / f"{PREFIX}{version}"

    async def finished(self) -> None:
        """Wait until the newest checkpoint is copied, or has failed, for at most `END_S`; say if it was not."""
        if self._task is not None and not self._task.done():
            self._note("copying the last checkpoint …")
            await asyncio.wait({self._task}, timeout=END_S)
        if self.copied != self._newest:
            in_time = "" if self._task is None or self._task.done() else f" within {END_S:g} s"
            there = "no checkpoint of this start" if self.copied is None else f"v{self.copied}"
            self._note(
                f"the last checkpoint, of v{self._newest}, was not copied{in_time}: {self._place.url} has {there}"
            )

    def take_metrics(self) -> dict[str, float]:
        """Metrics of copies since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def _copy_all(self) -> None:
        while self._next is not None:
            version, self._next = self._next, None
            started = time.monotonic()
            try:
                num_bytes = await in_daemon_thread(partial(self._place.copy, version, self._names_of(version)))
            except CheckpointError as error:
                self._fail(error)
            else:
                if self._is_failing:
                    self._note(f"checkpoints are copied again, v{version} first")
                self._is_failing, self.copied = False, version
                self._metrics["checkpoint/upload_s"] = time.monotonic() - started
                self._metrics["checkpoint/uploaded_bytes"] = float(num_bytes)
            finally:
                shutil.rmtree(self._names_of(version), ignore_errors=True)

    def _fail(self, error: CheckpointError) -> None:
        self._num_failed += 1
        self._metrics["checkpoint/upload_failed"] = float(self._num_failed)
        if not self._is_failing:
            self._note(f"{error}. The run goes on, and tries again with the next checkpoint.")
        self._is_failing = True


async def in_daemon_thread(call: Callable[[], int]) -> int:
    """Run it in a thread that does not keep the process from ending, since a location may never answer."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[int] = loop.create_future()

    def tell(answer: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if done.done() else answer())

    def run() -> None:
        try:
            copied = call()
        except BaseException as error:  # noqa: BLE001 - passed on
            failure = error
            tell(lambda: done.set_exception(failure))
        else:
            tell(lambda: done.set_result(copied))

    threading.Thread(target=run, name="upload of checkpoints", daemon=True).start()
    return await done
