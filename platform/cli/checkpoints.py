"""`penstock checkpoints`: what a run has on disk to continue from."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from penstock.dataflow.errors import CheckpointError
from penstock.platform.run.checkpoint import UNFINISHED, CheckpointFolder
from penstock.platform.run.saved_config import read_saved_config


def run_checkpoints(run_dir: Path, console: Console) -> int:
    """List the checkpoints; returns the exit code.

    Raises:
        ConfigError: If the directory holds no run.
    """
    run_dir = run_dir.resolve()
    read_saved_config(run_dir)
    folder = CheckpointFolder(run_dir)
    lines = 0
    for name in sorted(path.name for path in folder.folder.iterdir()) if folder.folder.is_dir() else []:
        if name.endswith(UNFINISHED):
            console.print(f"  {name}  incomplete: it was being written when the run ended")
            lines += 1
    for version in folder.versions():
        try:
            checkpoint = folder.read(version)
        except CheckpointError as error:
            console.print(f"  step {version:>8}  damaged: {error}")
        else:
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.manifest["time"]))
            state = folder.damage(checkpoint)
            console.print(
                f"  step {version:>8}  {checkpoint.num_bytes / 2**20:10.1f} MiB  {written}  "
                + ("complete" if state is None else f"damaged: {state}")
            )
        lines += 1
    if not lines:
        console.print(f"{run_dir} has no checkpoints: a run writes one every checkpoint.every_minutes.")
    return 0
