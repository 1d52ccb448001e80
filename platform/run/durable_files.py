"""The file operations of a checkpoint, each on its own, so that the simulator can crash between any two of them.

A file's content is durable after `sync` of the file, its name after `sync` of its folder. A rename replaces at once.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class Files:
    """The file system. The simulation's loses what was not synced."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        """Create or replace a file. It is durable after `sync`."""
        path.write_bytes(data)

    def sync(self, path: Path) -> None:
        """Make the content of a file, or the names in a folder, durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its content; nothing if it does not exist."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def names(self, folder: Path) -> list[str]:
        """Names in a folder, sorted; empty if it does not exist."""
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def size(self, path: Path) -> int | None:
        """Bytes of a file; None if it does not exist."""
        return path.stat().st_size if path.is_file() else None


def link_or_copy(source: Path, target: Path) -> None:
    """The same file under another name where the file system can do that: files of checkpoints never change.

    Raises:
        FileNotFoundError: If it is gone.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
