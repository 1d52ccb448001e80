"""`penstock sweep staleness`: final accuracy over algorithm × η, with and without correction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.platform.cli_simulate import parse_seeds
from penstock.platform.sweep.grid import Cell, grid
from penstock.platform.sweep.results import Found, table, write
from penstock.platform.sweep.runner import check_cells, run_cells


def run_staleness_sweep(
    overrides: Sequence[str],
    *,
    algorithms: str,
    staleness: str,
    seeds: str,
    folder: Path,
    cell_timeout_s: float,
    with_uncorrected: bool,
    console: Console,
) -> int:
    """Run all cells that are not there yet, write table and plot after each, print the table; returns the exit code.

    Raises:
        ConfigError: If a cell cannot run, before any does.
        PenstockError: If cells failed, once all others are done.
    """
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    stalenesses = _numbers(staleness)
    cells = list(grid(names, stalenesses, parse_seeds(seeds), with_uncorrected=with_uncorrected))
    folder.mkdir(parents=True, exist_ok=True)
    configs = check_cells(cells, overrides, folder)
    results: dict[Cell, Found] = {}

    def keep(found: dict[Cell, Found]) -> None:
        results.update(found)
        write(results, stalenesses, folder)

    def note(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    failed = run_cells(configs, overrides, folder, cell_timeout_s, note, keep)
    header, *rows = table(results, stalenesses)
    shown = Table(title="greedy held-out accuracy after training", title_justify="left")
    for column in header:
        shown.add_column(column)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    console.print(f"{folder / 'sweep.md'}, sweep.json, sweep.html", highlight=False)
    if failed:
        raise PenstockError(
            f"sweep: {len(failed)} of {len(cells)} cells failed: {', '.join(failed)}. Their output is in "
            f"{folder}/<cell>.log; the same command runs them again."
        )
    return 0


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 0:
        raise ConfigError([f"--staleness {text} is no list of bounds. Give whole numbers from 0 on, e.g. 0,4,16."])
    return numbers
