"""A file system that loses what was not synced, and a process that dies at any of its operations.

Durable is what the POSIX calls promise and no more: the content of a file after its own `sync`, a name after the `sync`
of its folder. After a crash each file holds its durable content, what was written, or a prefix of that; each folder has
some of the changes since its last `sync`, in their order. `dies_at` plants a crash: that operation is the last one, and
may or may not have happened.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


class DriverDiedError(Exception):
    """The driver died at a file operation."""


@dataclass(slots=True, eq=False)
class _File:
    data: bytes = b""
    durable: bytes = b""


@dataclass(slots=True, eq=False)
class _Folder:
    """`changes` since the last sync: name -> what it is now; None if it was removed. One rename is one change."""

    names: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    changes: list[dict[str, _File | _Folder | None]] = field(default_factory=list)

    def change(self, **entries: _File | _Folder | None) -> None:
        _apply(self.names, entries)
        self.changes.append(entries)


def _apply(names: dict[str, _File | _Folder], entries: dict[str, _File | _Folder | None]) -> None:
    for name, entry in entries.items():
        if entry is None:
            names.pop(name, None)
        else:
            names[name] = entry


class ModelledDisk:
    """`Files` in memory.

    Attributes:
        num_operations: Writes, syncs, renames and removals so far.
        dies_at: The operation at which the driver dies; None: at none.
        on_death: Called when it does.
        is_full: Whether writes fail with ENOSPC, after a part of what is written.
        num_refused: Writes that failed so.
        refused_at_s: Time of the newest of them, virtual seconds.
        is_dead: Whether it has; nothing is written any more.
    """

    def __init__(self, rng: random.Random) -> None:
        self.num_operations = 0
        self.dies_at: int | None = None
        self.is_full = False
        self.num_refused = 0
        self.refused_at_s = -math.inf
        self.on_death: Callable[[], None] = lambda: None
        self._rng = rng
        self._root = _Folder()
        self.is_dead = False

    def crash(self) -> None:
        """Lose what a crash may lose, and be there for the next driver."""
        self.is_dead = self.is_full = False
        self.dies_at = None
        self._settle(self._root)

    def make_folder(self, path: Path) -> None:
        folder = self._root
        for name in path.parts:
            if name not in folder.names:
                self._refuse_if_full(path)
                self._operate()
                folder.change(**{name: _Folder()})
            entry = folder.names[name]
            assert isinstance(entry, _Folder)
            folder = entry

    def write(self, path: Path, data: bytes) -> None:
        has_happened = self._operate()
        folder = self._folder(path.parent)
        if has_happened:
            if path.name not in folder.names:
                folder.change(**{path.name: _File()})
            entry = folder.names[path.name]
            assert isinstance(entry, _File)
            entry.data = data[: self._rng.randrange(len(data) + 1)] if self.is_full else data
        self._die_if_dead()
        self._refuse_if_full(path)

    def sync(self, path: Path) -> None:
        has_happened = self._operate()
        entry = self._find(path)
        assert entry is not None, f"{path} is synced and does not exist"
        if has_happened and isinstance(entry, _File):
            entry.durable = entry.data
        elif has_happened and isinstance(entry, _Folder):
            entry.durable, entry.changes = dict(entry.names), []
        self._die_if_dead()

    def rename(self, old: Path, new: Path) -> None:
        has_happened = self._operate()
        assert old.parent == new.parent, "names change within a folder"
        folder = self._folder(old.parent)
        assert new.name not in folder.names, f"{new} exists"
        if has_happened:
            folder.change(**{new.name: folder.names[old.name], old.name: None})
        self._die_if_dead()

    def remove(self, path: Path) -> None:
        entry = self._find(path)
        if entry is None:
            return
        if isinstance(entry, _Folder):
            for name in list(entry.names):
                self.remove(path / name)
        has_happened = self._operate()
        if has_happened:
            self._folder(path.parent).change(**{path.name: None})
        self._die_if_dead()

    def names(self, folder: Path) -> list[str]:
        entry = self._find(folder)
        return sorted(entry.names) if isinstance(entry, _Folder) else []

    def read(self, path: Path) -> bytes:
        entry = self._find(path)
        if not isinstance(entry, _File):
            raise FileNotFoundError(path)
        return entry.data

    def size(self, path: Path) -> int | None:
        entry = self._find(path)
        return len(entry.data) if isinstance(entry, _File) else None

    def _operate(self) -> bool:
        """Count an operation; returns whether it happens. The driver dies at `dies_at`, before or after it."""
        if self.is_dead:
            raise DriverDiedError("a dead driver writes nothing")
        self.num_operations += 1
        if self.dies_at is None or self.num_operations < self.dies_at:
            return True
        self.is_dead = True
        self.on_death()
        return self._rng.random() < 0.5

    def _die_if_dead(self) -> None:
        if self.is_dead:
            raise DriverDiedError(f"the driver died at file operation {self.num_operations}")

    def _refuse_if_full(self, path: Path) -> None:
        if self.is_full:
            self.num_refused += 1
            self.refused_at_s = asyncio.get_running_loop().time()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def _find(self, path: Path) -> _File | _Folder | None:
        entry: _File | _Folder | None = self._root
        for name in path.parts:
            entry = entry.names.get(name) if isinstance(entry, _Folder) else None
        return entry

    def _folder(self, path: Path) -> _Folder:
        entry = self._find(path)
        assert isinstance(entry, _Folder), f"{path} is no folder"
        return entry

    def _settle(self, folder: _Folder) -> None:
        survived = self._rng.randrange(len(folder.changes) + 1)
        for change in folder.changes[:survived]:
            _apply(folder.durable, change)
        folder.names, folder.changes = dict(folder.durable), []
        for entry in folder.names.values():
            if isinstance(entry, _Folder):
                self._settle(entry)
            elif entry.data != entry.durable:
                torn = entry.data[: self._rng.randrange(len(entry.data) + 1)]
                entry.data = entry.durable = self._rng.choice((entry.durable, torn, entry.data))
