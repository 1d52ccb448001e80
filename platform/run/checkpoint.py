"""Checkpoints of a run: the cut is taken in the training loop, and written while training goes on.

    cut      directly after flow.advance(v): references to all groups, counters; the ranks copy their state to memory
    write    spool/<group>.group of each ready group, synced
             checkpoints/step_<v>.tmp/   trainer_*.safetensors (by the ranks) · open_groups.group · driver.json, synced
             rename to checkpoints/step_<v>, sync checkpoints/
             remove older checkpoints, then the spooled groups that none of the kept ones names

Invariant: a folder named step_<v> is complete, and every spooled group that it names exists. The reason is the order: a
name appears after the content is durable, and a group is removed after the last checkpoint that names it. A ready group
is written once, however many checkpoints keep it (docs/concepts/durability.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.dataflow.errors import CheckpointError, PenstockError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.ports import PayloadStore, TrainerGroup, WrittenFile
from penstock.dataflow.saved_groups import OpenGroup, decode, encode
from penstock.dataflow.trajectory import GroupPayload
from penstock.platform.config.schema import CheckpointConfig
from penstock.platform.run.durable_files import Files
from penstock.platform.run.flow import FlowSnapshot
from penstock.platform.run.ledger_log import LEDGER
from penstock.trainer.checkpoint import verify

logger = logging.getLogger(__name__)

FORMAT = 1
"""Version of the layout, the only one that is read."""
CHECKPOINTS, SPOOL, MANIFEST, OPEN_GROUPS = "checkpoints", "spool", "driver.json", "open_groups.group"
PREFIX, UNFINISHED = "step_", ".tmp"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    """Its folder."""
    manifest: Mapping[str, Any]
    """Content of driver.json."""

    @property
    def version(self) -> int:
        """Policy version at the cut."""
        version: int = self.manifest["version"]
        return version

    @property
    def incarnation(self) -> int:
        """How often the run had been resumed when it was taken."""
        incarnation: int = self.manifest["incarnation"]
        return incarnation

    @property
    def num_bytes(self) -> int:
        """Size of its files and of the groups that it names in the spool."""
        return sum(num_bytes for _, num_bytes, _ in self.manifest["files"])


class CheckpointFolder:
    """The checkpoints of a run on disk. Blocking; called from a thread."""

    def __init__(self, run_dir: Path, files: Files | None = None) -> None:
        self._run_dir = run_dir
        self._files = files or Files()
        self.folder = run_dir / CHECKPOINTS
        self._spool = run_dir / SPOOL

    def prepare(self) -> None:
        """Make both folders, durably: a name in a folder that itself is lost is lost, too."""
        self._files.make_folder(self.folder)
        self._files.make_folder(self._spool)
        self._files.sync(self._run_dir)

    def unfinished(self, version: int) -> Path:
        """An empty folder for the files of a checkpoint that is being written."""
        folder = self.folder / f"{PREFIX}{version}{UNFINISHED}"
        self._files.remove(folder)
        self._files.make_folder(folder)
        return folder

    def spool(self, name: str, payload: GroupPayload) -> tuple[str, int, int]:
        """Write a ready group, durably; returns its path below the run directory, its size and its crc32."""
        data = encode(payload)
        self._files.write(self._spool / name, data)
        self._files.sync(self._spool / name)
        return f"{SPOOL}/{name}", len(data), zlib.crc32(data)

    def commit(self, folder: Path, saved: FlowSnapshot, manifest: dict[str, Any]) -> Checkpoint:
        """Complete a checkpoint whose spooled groups and trainer files are durable.

        Args:
            folder: Result of `unfinished`.
            saved: The flow at the cut.
            manifest: Everything else for driver.json.
        """
        files, data = self._files, encode(tuple(group.packed() for group in saved.open_groups))
        files.write(folder / OPEN_GROUPS, data)
        files.sync(folder / OPEN_GROUPS)
        for name, num_bytes, _ in manifest["trainer_files"]:
            found = files.size(folder / name)
            if found != num_bytes:
                raise CheckpointError(
                    f"{folder / name}: the trainer ranks wrote {num_bytes} bytes, and the driver finds "
                    f"{'no file' if found is None else f'{found} bytes'}. Ranks on other nodes need a run directory on "
                    "a file system that all nodes share. Use one: run_dir=…"
                )
        final = folder.with_suffix("")
        manifest["files"].append((f"{CHECKPOINTS}/{final.name}/{OPEN_GROUPS}", len(data), zlib.crc32(data)))
        manifest = {"format": FORMAT, "penstock": __version__, "time": time.time(), **manifest, "flow": saved.state}
        body = json.dumps(manifest).encode()
        files.write(folder / MANIFEST, b"%08x\n%b" % (zlib.crc32(body), body))
        files.sync(folder / MANIFEST)
        files.sync(folder)
        files.sync(self._spool)
        files.rename(folder, final)
        files.sync(self.folder)
        return Checkpoint(final, manifest)

    def versions(self) -> list[int]:
        """Versions of the complete checkpoints, ascending."""
        names = [name.removeprefix(PREFIX) for name in self._files.names(self.folder) if name.startswith(PREFIX)]
        return sorted(int(name) for name in names if name.isdecimal())

    def read(self, version: int) -> Checkpoint:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: If it is missing, damaged or of another format.
        """
        path = self.folder / f"{PREFIX}{version}"
        try:
            checksum, _, body = self._files.read(path / MANIFEST).partition(b"\n")
        except OSError as error:
            raise CheckpointError(f"{path / MANIFEST}: cannot be read ({error}). Resume from another one.") from error
        if checksum != b"%08x" % zlib.crc32(body):
            raise CheckpointError(
                f"{path / MANIFEST}: its checksum is {zlib.crc32(body):08x}, the file says "
                f"{checksum.decode(errors='replace')[:8]}: it was damaged or edited. Resume from another checkpoint."
            )
        manifest = json.loads(body)
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: has format {manifest['format']}, written by Penstock {manifest['penstock']}; this is "
                f"{__version__}, which reads format {FORMAT}. Resume with the version that wrote it."
            )
        return Checkpoint(path, manifest)

    def damage(self, checkpoint: Checkpoint) -> str | None:
        """Which file of a checkpoint is missing or has another size; None if all are there."""
        for name, num_bytes, _ in checkpoint.manifest["files"]:
            found = self._files.size(self._run_dir / name)
            if found != num_bytes:
                what = "is missing" if found is None else f"has {found} bytes"
                return f"{self._run_dir / name} {what}, {num_bytes} were written"
        return None

    def flow_snapshot(self, checkpoint: Checkpoint) -> tuple[FlowSnapshot, dict[GroupId, GroupPayload]]:
        """The flow at the cut, and the payloads of its ready groups.

        Raises:
            CheckpointError: If a file is missing or damaged.
        """
        sums = {name: crc32 for name, _, crc32 in checkpoint.manifest["files"]}
        payloads = {
            GroupId(int(key)): self._decode(name, sums[name]) for key, name in checkpoint.manifest["spooled"].items()
        }
        return FlowSnapshot(checkpoint.manifest["flow"], (), self.open_groups(checkpoint)), payloads

    def open_groups(self, checkpoint: Checkpoint) -> tuple[OpenGroup, ...]:
        """The groups that were being sampled or scored at the cut.

        Raises:
            CheckpointError: If the file is missing or damaged.
        """
        name = f"{CHECKPOINTS}/{checkpoint.path.name}/{OPEN_GROUPS}"
        sums = {name: crc32 for name, _, crc32 in checkpoint.manifest["files"]}
        found: tuple[OpenGroup, ...] = self._decode(name, sums[name])
        return found

    def prune(self, keep: int, newest: int, spared: Collection[int] = (), every: int | None = None) -> None:
        """Remove what is not needed any more.

        Args:
            keep: Number of newest checkpoints to keep.
            newest: Version of the newest one; later ones are of a lineage that a resume has left.
            spared: Versions that are kept in addition.
            every: Multiples of it are kept, too.
        """
        versions = self.versions()
        lineage = [version for version in versions if version <= newest]
        kept = {*lineage[-keep:], *(one for one in lineage if one in spared or (every and one and one % every == 0))}
        for version in versions:
            if version not in kept:
                # Renamed first: a folder that is half removed must not look complete.
                path = self.folder / f"{PREFIX}{version}"
                self._files.remove(path.with_suffix(UNFINISHED))
                self._files.rename(path, path.with_suffix(UNFINISHED))
        self._files.sync(self.folder)
        for name in self._files.names(self.folder):
            if name.endswith(UNFINISHED):
                self._files.remove(self.folder / name)
        named: set[str] = set()
        for version in kept:
            with suppress(CheckpointError):  # damaged since: nothing can be resumed from it
                named.update(self.read(version).manifest["spooled"].values())
        for name in self._files.names(self._spool):
            if f"{SPOOL}/{name}" not in named:
                self._files.remove(self._spool / name)

    def _decode(self, name: str, crc32: int) -> Any:
        path = self._run_dir / name
        try:
            data = self._files.read(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}). Resume from another checkpoint.") from error
        if (found := zlib.crc32(data)) != crc32:
            raise CheckpointError(
                f"{path}: its checksum is {found:08x}, {crc32:08x} was written: it was damaged, or belongs to another "
                "run. Resume from another checkpoint."
            )
        return decode(data, str(path))


def next_incarnation(run_dir: Path) -> int:
    """A number that no driver and no rollback of this run has used, in any file that is left; 0 for a new run."""
    names = [path.name for folder in (SPOOL, LEDGER) for path in (run_dir / folder).glob("*-*")]
    used = [int(name.partition("-")[0]) for name in names if name.partition("-")[0].isdecimal()]
    folder = CheckpointFolder(run_dir)
    for version in folder.versions():
        with suppress(CheckpointError):
            used.append(folder.read(version).incarnation)
    return max(used, default=-1) + 1


class Checkpointer:
    """Takes the checkpoints of a run when they are due.

    Consumes: the state at a cut. Waits for: the ranks to copy their state, in the loop; the payloads, the files of the
    ranks and the disk, in the background. One checkpoint is written at a time; one that falls due meanwhile is taken at
    the first cut after it. A checkpoint that cannot be written is noted and counted, and the one before stays.

    Attributes:
        config: When to take them, and how many to keep.
        newest: Version of the newest complete checkpoint; None before the first.
        spared: Versions whose checkpoints are kept, however old.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: CheckpointFolder,
        trainer: TrainerGroup,
        store: PayloadStore,
        note: Callable[[str], None],
        resumed: Checkpoint | None = None,
        incarnation: int = 0,
        in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread,
        on_cut: Callable[[int], None] = lambda _version: None,
        on_written: Callable[[int, float], Awaitable[None]] | None = None,
    ) -> None:
        """Prepare to take checkpoints.

        Args:
            config: When to take them, and how many to keep.
            folder: Where they are written.
            trainer: Copies and writes its own state.
            store: Holds the payloads of ready groups.
            note: Prints a line on the console.
            resumed: The checkpoint that the run continues from; None for a new run.
            incarnation: Number of this driver or rollback, which no other one of the run has.
            in_thread: Runs blocking work.
            on_cut: Called with the version at every cut.
            on_written: Called with the version of a complete checkpoint, and the seconds that it took. No checkpoint is
                removed before it returns.
        """
        self.config = config
        self._folder = folder
        self._trainer = trainer
        self._store = store
        self._note = note
        self._in_thread = in_thread
        self._on_cut = on_cut
        self._on_written = on_written
        self._incarnation = incarnation
        self._spooled: dict[str, tuple[str, int, int]] = {}  # of the newest checkpoint: path, size, crc32
        self._taken_at = time.monotonic()
        self._writing: asyncio.Task[None] | None = None
        self._metrics: dict[str, float] = {}
        self._num_failed = 0
        self.newest = None if resumed is None else resumed.version
        self.spared: frozenset[int] = frozenset()

    def is_due(self, version: int, *, is_last: bool) -> bool:
        """Whether to take a checkpoint at this cut.

        One is taken after the first step, so that there is one to go back to, then at every interval unless the one
        before is still being written, and after the last step, from which a longer run continues.
        """
        every, minutes = self.config.every_steps, self.config.every_minutes
        if is_last:
            return bool(every or minutes)
        waits_for_first = self.newest is None and self._writing is None
        is_time = minutes and (waits_for_first or time.monotonic() - self._taken_at >= 60 * minutes)
        is_due = is_time or (every and version % every == 0)
        return bool(is_due) and (self._writing is None or self._writing.done())

    async def take(self, version: int, saved: FlowSnapshot, run_state: Mapping[str, Any]) -> None:
        """Take a checkpoint at this cut, and start to write it."""
        self._on_cut(version)
        await self.written()
        self._taken_at = time.monotonic()
        self._metrics["checkpoint/blocked_s"] = await self._trainer.snapshot()
        self._writing = asyncio.create_task(self._write(version, saved, run_state), name=f"checkpoint v{version}")

    async def take_last(self, version: int, saved: FlowSnapshot, run_state: Mapping[str, Any]) -> None:
        """Take a checkpoint before the run ends early, unless there is one of this version or none is wanted."""
        await self.written()
        if version != self.newest and (self.config.every_steps or self.config.every_minutes):
            await self.take(version, saved, run_state)
            await self.written()

    async def abandon(self) -> None:
        """Stop writing: a rank that has to write its part is lost."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def written(self) -> None:
        """Wait for the checkpoint that is being written, if there is one. It goes on if this is cancelled."""
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None

    def take_metrics(self) -> dict[str, float]:
        """Metrics of checkpoints since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def _write(self, version: int, saved: FlowSnapshot, run_state: Mapping[str, Any]) -> None:
        started = time.monotonic()
        try:
            checkpoint = await self._write_files(version, saved, run_state)
        except (PenstockError, OSError, TypeError, ValueError) as error:  # a hook's state may be no JSON
            self._num_failed += 1
            self._metrics["checkpoint/failed"] = float(self._num_failed)
            before = "there is none before it" if self.newest is None else f"that of v{self.newest} is kept"
            self._note(f"checkpoint of v{version} failed; the run continues, {before}: {error}")
            return
        self.newest = version
        self._metrics["checkpoint/write_s"] = seconds = time.monotonic() - started
        self._metrics["checkpoint/bytes"] = float(checkpoint.num_bytes)
        if self._on_written is not None:
            await self._on_written(version, seconds)

    async def _write_files(self, version: int, saved: FlowSnapshot, run_state: Mapping[str, Any]) -> Checkpoint:
        await self._in_thread(self._folder.prepare)
        spooled: dict[str, tuple[str, int, int]] = {}
        for group in saved.ready:
            key = str(group.group_id)
            if (written := self._spooled.get(key)) is None:
                payload = await self._store.get(group.handle)
                name = f"{self._incarnation}-{key}.group"
                written = await self._in_thread(self._folder.spool, name, payload)
            spooled[key] = written
        self._spooled = spooled
        folder = await self._in_thread(self._folder.unfinished, version)
        of_trainer = await self._trainer.write_checkpoint(str(folder))
        final = f"{CHECKPOINTS}/{folder.with_suffix('').name}"
        manifest = {
            "version": version,
            "incarnation": self._incarnation,
            "trainer_files": of_trainer,
            "spooled": {key: path for key, (path, _, _) in spooled.items()},
            "files": [*spooled.values(), *((f"{final}/{name}", size, crc32) for name, size, crc32 in of_trainer)],
            "run": run_state,
        }
        checkpoint: Checkpoint = await self._in_thread(self._folder.commit, folder, saved, manifest)
        keep, every = self.config.keep, self.config.keep_every
        await self._in_thread(self._folder.prune, keep, version, self.spared, every)
        return checkpoint


def choose_checkpoint(run_dir: Path, step: int | None = None) -> Checkpoint:
    """The newest checkpoint that is complete and undamaged, or that of a step. All its files are read.

    Raises:
        CheckpointError: If there is none.
    """
    folder = CheckpointFolder(run_dir)
    versions = folder.versions()
    reasons: list[str] = []
    for version in reversed(versions if step is None else [one for one in versions if one == step]):
        try:
            checkpoint = folder.read(version)
            verify(run_dir, [WrittenFile(*written) for written in checkpoint.manifest["files"]])
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            for reason in reasons:
                logger.warning("%s Step %d is taken instead.", reason, version)
            return checkpoint
    found = f"steps {versions}" if versions else "none"
    raise CheckpointError(
        f"{folder.folder}: no complete checkpoint{'' if step is None else f' of step {step}'}; found {found}. "
        + "".join(f"{reason} " for reason in reasons)
        + "A run writes one every checkpoint.every_minutes or checkpoint.every_steps. Start a new run, which may begin "
        "from a policy of this one: model.path=…"
    )
