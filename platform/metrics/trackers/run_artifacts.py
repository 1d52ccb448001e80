"""What W&B and MLflow get of a run besides figures: its page, its configuration, and transcripts as files and a table.

All of it is bounded, because it is uploaded while the run ends (`BackgroundTracker`); the run directory has the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from penstock.platform.metrics.run_files import CONFIG_FILE, EVALUATIONS_DIR, REPORT_FILE
from penstock.platform.metrics.trajectory_table import TRAJECTORIES_DIR, spread_steps

logger = logging.getLogger(__name__)

MAX_BYTES = 16 << 20
"""Total size of the files: 30 s at 4.5 Mbit/s."""
NUM_STEPS, ROWS_PER_STEP = 16, 16
"""Steps that the table has of the trajectories and of each kind of evaluation, and rows of each."""
MAX_CHARACTERS = 8000
"""Longest prompt or answer in the table; of a longer one, the middle is left out."""
_OF_A_ROW = ("step", "task_id", "prompt", "response", "reward", "finish_reason", "staleness", "num_tokens")
COLUMNS = ("from", *_OF_A_ROW)
"""Columns of the table: where a row is from, `trajectories` or `evaluations`, and columns of that file."""


def run_artifacts(run_dir: Path, tracker: str, max_bytes: int = MAX_BYTES) -> list[Path]:
    """The files to upload: the page, the configuration, and the tables of the newest steps that fit.

    What does not fit is said in a warning.

    Args:
        run_dir: Directory of the run.
        tracker: Name of the tracker in the warning.
        max_bytes: Limit of their total size.
    """
    tables = sorted(_tables(run_dir), key=lambda path: path.stem, reverse=True)
    wanted = [path for path in (run_dir / REPORT_FILE, run_dir / CONFIG_FILE) if path.is_file()] + tables
    chosen: list[Path] = []
    left_out: list[Path] = []
    num_bytes = 0
    for path in wanted:
        size = path.stat().st_size
        fits = num_bytes + size <= max_bytes
        (chosen if fits else left_out).append(path)
        num_bytes += size if fits else 0
    if left_out:
        logger.warning(
            "tracker %s: %d of %d files of the run, %.1f MiB, are not uploaded, since a run uploads at most %.0f MiB "
            "while it ends: %s%s. %s has them.",
            tracker,
            len(left_out),
            len(wanted),
            sum(path.stat().st_size for path in left_out) / 2**20,
            max_bytes / 2**20,
            left_out[0].relative_to(run_dir),
            f" to {left_out[-1].relative_to(run_dir)}" if len(left_out) > 1 else "",
            run_dir,
        )
    return chosen


def transcripts(run_dir: Path) -> list[tuple[Any, ...]]:
    """Rows of the table of transcripts, of steps that are evenly spread over the run, the first and the last included.

    Of an evaluation these are the answers to its first tasks, the same ones each time.
    """
    return [
        (folder.relative_to(run_dir).as_posix(), *(_shortened(row[name]) for name in _OF_A_ROW))
        for folder in sorted({path.parent for path in _tables(run_dir)})
        for path in spread_steps(folder, NUM_STEPS)
        for row in pq.read_table(path, columns=list(_OF_A_ROW)).slice(0, ROWS_PER_STEP).to_pylist()
    ]


def _tables(run_dir: Path) -> Iterator[Path]:
    for name in (TRAJECTORIES_DIR, EVALUATIONS_DIR):
        yield from (run_dir / name).rglob("step_*.parquet")


def _shortened(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= MAX_CHARACTERS:
        return value
    half = MAX_CHARACTERS // 2
    return f"{value[:half]} … {len(value) - 2 * half} characters … {value[-half:]}"
