"""Writes what a rank did in a step, for Perfetto or `chrome://tracing` (`trainer.profile_steps`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def profiled(path: Path) -> Iterator[None]:
    """Write a torch profile of the block to `path`, `*.json.gz`. A disk that cannot be written only costs the profile.

    The operators of this thread are in it and, on a GPU, all its kernels.
    """
    with torch.profiler.profile() as profile:
        yield
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        print(f"trainer.profile_steps: {path} cannot be written ({error}); the run continues.")
