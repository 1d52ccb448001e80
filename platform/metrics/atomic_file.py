"""Atomic file writes: after a crash, and for concurrent readers, a file has either its old or its new content."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary path in the same folder, then rename the file to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`, in UTF-8 that escapes lone surrogates. Returns once it is on disk."""

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    write_atomically(path, write)
