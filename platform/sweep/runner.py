"""Running the cells of a sweep one after the other, each as `penstock train` in a process of its own.

A cell whose run directory holds a completed run of the very same configuration is not run again, so a sweep that was
interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.platform.config.compose import to_yaml
from penstock.platform.config.load import load_config
from penstock.platform.config.schema import RunConfig
from penstock.platform.observability.summary import SUMMARY_FILE
from penstock.platform.run_dir import CONFIG_FILE
from penstock.platform.sweep.grid import Cell
from penstock.platform.sweep.results import Found
from penstock.platform.trackers.jsonl import read_metrics

_PROGRAM = "from penstock.platform.cli import main; main()"
_GRACE_S = 30.0
_LOG_TAIL_BYTES = 2000


def check_cells(cells: Sequence[Cell], overrides: Sequence[str], folder: Path) -> dict[Cell, RunConfig]:
    """Compose all cells before the first one runs.

    Raises:
        ConfigError: With what is wrong with each of them.
    """
    configs, problems = {}, []
    for cell in cells:
        try:
            configs[cell] = load_config("train", [*overrides, *cell.overrides(str(folder))]).config
        except ConfigError as refused:
            problems += [f"{cell.name}: {violation}" for violation in refused.violations]
    if problems:
        raise ConfigError(problems)
    return configs


def run_cells(
    configs: dict[Cell, RunConfig],
    overrides: Sequence[str],
    folder: Path,
    timeout_s: float,
    note: Callable[[str], None],
    keep: Callable[[dict[Cell, Found]], None],
) -> list[str]:
    """Run what is not there yet; a cell that fails is said, and the others go on.

    Args:
        configs: Of `check_cells`.
        overrides: The user's own.
        folder: Of the sweep; run directories and logs are in it.
        timeout_s: Longest run of one cell, seconds.
        note: Gets one line per cell, and why it failed.
        keep: Gets all that was found so far, after every cell.

    Returns:
        Names of the cells that failed or took too long.
    """
    results: dict[Cell, Found] = {}
    failed: list[str] = []
    for number, (cell, config) in enumerate(configs.items()):
        where = f"[{number + 1}/{len(configs)}] {cell.name}"
        found = completed(config)
        if found is None:
            note(f"{where}: running")
            try:
                _run([*overrides, *cell.overrides(str(folder))], folder / f"{cell.name}.log", timeout_s, cell.name)
            except PenstockError as failure:
                failed.append(cell.name)
                note(f"{where}: {failure}")
                continue
            found = completed(config)
            if found is None:
                failed.append(cell.name)
                note(f"{where}: ended without a result; see {folder / cell.name}.")
                continue
        results[cell] = found
        keep(results)
        note(f"{where}: accuracy {found.accuracy:.3f} ({found.gain:+.3f}), mean lag {found.mean_lag:.2f} versions")
    return failed


def completed(config: RunConfig) -> Found | None:
    """What a completed run of this very configuration has found; None if there is none."""
    run_dir = Path(config.run_dir)
    written, summary_file = run_dir / CONFIG_FILE, run_dir / SUMMARY_FILE
    if not summary_file.exists() or not written.exists() or written.read_text() != to_yaml(config):
        return None
    summary = json.loads(summary_file.read_text())
    if summary["status"] != "completed" or summary["eval_after"] is None:
        return None
    lag = "staleness/mean_versions"
    lags = [record.metrics[lag] for record in read_metrics(run_dir) if lag in record.metrics]
    before = summary["eval_before"] or 0.0
    accuracy = summary["eval_after"]
    return Found(accuracy, accuracy - before, sum(lags) / max(len(lags), 1), summary["max_staleness_seen"])


def _run(arguments: Sequence[str], log: Path, timeout_s: float, name: str) -> None:
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, "train", *arguments], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise PenstockError(f"sweep: {name} took longer than {timeout_s:.0f} s; its output is in {log}.") from None
        finally:
            _end(process)
    if code:
        tail = log.read_text(errors="replace")[-_LOG_TAIL_BYTES:]
        raise PenstockError(f"sweep: {name} failed with exit code {code}. The end of {log}:\n{tail}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a run to end, which takes its processes with it; make it if it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
