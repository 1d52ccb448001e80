from __future__ import annotations

import dataclasses
import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.platform import cli_sweep
from penstock.platform.cli_sweep import _numbers
from penstock.platform.config.compose import to_yaml
from penstock.platform.config.load import load_config
from penstock.platform.sweep import runner
from penstock.platform.sweep.grid import Cell, grid
from penstock.platform.sweep.results import Found, table, write
from penstock.platform.sweep.runner import check_cells, completed, run_cells
from penstock.platform.trackers.jsonl import JsonlTracker

ETAS = [0, 4, 16]
OVERRIDES = ["experiment=arithmetic"]


def accuracy_of(cell: Cell) -> float:
    return round(0.9 - 0.01 * cell.staleness - (0.2 if not cell.is_corrected else 0) + 0.02 * cell.seed, 3)


def results(seeds: list[int]) -> dict[Cell, Found]:
    cells = grid(["grpo", "gspo"], ETAS, seeds, with_uncorrected=True)
    return {cell: Found(accuracy_of(cell), 0.3, cell.staleness / 2, cell.staleness) for cell in cells}


def test_the_first_seed_is_whole_before_the_second_begins() -> None:
    cells = list(grid(["grpo"], ETAS, [0, 1], with_uncorrected=True))
    assert [cell.seed for cell in cells] == [0] * 5 + [1] * 5
    assert len({cell.name for cell in cells}) == 10


def test_nothing_is_corrected_at_bound_0_so_it_is_run_once() -> None:
    cells = list(grid(["grpo"], ETAS, [0], with_uncorrected=True))
    assert [(cell.staleness, cell.is_corrected) for cell in cells] == [
        (0, True), (4, True), (4, False), (16, True), (16, False)
    ]  # fmt: skip
    assert len(list(grid(["grpo"], ETAS, [0], with_uncorrected=False))) == 3


def test_losses_that_correct_themselves_are_not_run_twice() -> None:
    assert [cell.is_corrected for cell in grid(["topr"], ETAS, [0], with_uncorrected=True)] == [True] * 3


def test_a_table_has_a_line_per_algorithm_and_correction_with_the_spread_over_seeds() -> None:
    header, *rows = table(results([0, 1]), ETAS)
    assert header == ["algorithm", "η = 0", "η = 4", "η = 16"]
    assert [row[0] for row in rows] == [
        "grpo", "grpo, uncorrected", "gspo", "gspo, uncorrected", "mean lag of trained tokens, versions",
    ]  # fmt: skip
    assert rows[0][1:] == ["0.910 (0.900 … 0.920)", "0.870 (0.860 … 0.880)", "0.750 (0.740 … 0.760)"]
    assert rows[1][1] == rows[0][1], "one run serves both lines at bound 0"
    assert rows[-1][1:] == ["0.00", "2.00", "8.00"]


def test_what_is_missing_is_a_dash() -> None:
    some = {cell: found for cell, found in results([0]).items() if cell.staleness != 16}
    assert table(some, ETAS)[1][-1] == "–"


def test_all_three_files_are_written(tmp_path: Path) -> None:
    write(results([0]), ETAS, tmp_path)
    assert "| grpo | 0.900 | 0.860 | 0.740 |" in (tmp_path / "sweep.md").read_text()
    assert json.loads((tmp_path / "sweep.json").read_text())["grpo-uncorrected-eta4-seed0"]["accuracy"] == 0.66
    assert "greedy held-out accuracy" in (tmp_path / "sweep.html").read_text()


def cells_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Two cells, composed without looking at the machine."""
    monkeypatch.setattr(runner, "load_config", lambda command, overrides: load_config(command, overrides, dry_run=True))
    return check_cells(list(grid(["grpo"], [0, 2], [0], with_uncorrected=False)), OVERRIDES, folder)


def finish(config, accuracy: float = 0.8, status: str = "completed") -> None:
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    summary = {"status": status, "eval_before": 0.5, "eval_after": accuracy, "max_staleness_seen": 1}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    tracker = JsonlTracker(run_dir)
    for lag in (0.0, 1.0):
        tracker.log(1, {"staleness/mean_versions": lag})
    tracker.log(2, {"eval/accuracy": accuracy})
    tracker.close()


def test_only_what_is_not_there_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = cells_at(tmp_path, monkeypatch)
    first, second = configs.values()
    finish(first)
    started = []

    def run(arguments, log, timeout_s, name):
        started.append(name)
        finish(second, 0.7)

    monkeypatch.setattr(runner, "_run", run)
    notes: list[str] = []
    found: dict[Cell, Found] = {}
    assert run_cells(configs, OVERRIDES, tmp_path, 10.0, notes.append, found.update) == []
    assert started == ["grpo-eta2-seed0"]
    assert [one.accuracy for one in found.values()] == [0.8, 0.7]
    assert next(iter(found.values())).mean_lag == 0.5
    assert re.search(r"\[2/2\] grpo-eta2-seed0: accuracy 0\.700 \(\+0\.200\)", notes[-1])


def test_a_cell_that_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = cells_at(tmp_path, monkeypatch)
    _, second = configs.values()

    def run(arguments, log, timeout_s, name):
        if name == "grpo-eta0-seed0":
            raise PenstockError("planted")
        finish(second, 0.7)

    monkeypatch.setattr(runner, "_run", run)
    monkeypatch.setattr(cli_sweep, "check_cells", lambda *_: configs)
    options = {"algorithms": "grpo", "staleness": "0,2", "seeds": "0:1", "with_uncorrected": False}
    told = StringIO()
    with pytest.raises(PenstockError, match="1 of 2 cells failed: grpo-eta0-seed0"):
        cli_sweep.run_staleness_sweep(
            OVERRIDES, **options, folder=tmp_path, cell_timeout_s=1.0, console=Console(file=told, width=200)
        )
    assert "grpo-eta0-seed0: planted" in told.getvalue()
    assert "| grpo | – | 0.700 |" in (tmp_path / "sweep.md").read_text()


def test_the_table_is_written_after_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = cells_at(tmp_path, monkeypatch)
    for config in configs.values():
        finish(config)
    sizes: list[int] = []
    run_cells(configs, OVERRIDES, tmp_path, 1.0, lambda _: None, lambda found: sizes.append(len(found)))
    assert sizes == [1, 2]


@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_a_run_that_did_not_complete_is_run_again(tmp_path: Path, monkeypatch, status: str) -> None:
    config = next(iter(cells_at(tmp_path, monkeypatch).values()))
    finish(config, status=status)
    assert completed(config) is None


def test_a_completed_run_of_another_configuration_does_not_count(tmp_path: Path, monkeypatch) -> None:
    config = next(iter(cells_at(tmp_path, monkeypatch).values()))
    finish(config)
    assert completed(config) is not None
    assert completed(config.model_copy(update={"total_steps": config.total_steps + 1})) is None


def test_all_that_is_wrong_is_said_before_anything_runs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runner, "load_config", lambda command, overrides: load_config(command, overrides, dry_run=True))
    cells = list(grid(["grpo", "gspoo"], [0], [0], with_uncorrected=False))
    with pytest.raises(ConfigError, match=r"gspoo-eta0-seed0: .*gspoo"):
        check_cells(cells, OVERRIDES, tmp_path)


def test_a_run_that_fails_is_named_with_the_end_of_its_output(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runner, "_PROGRAM", "import sys; print('what went wrong'); sys.exit(3)")
    with pytest.raises(PenstockError, match=r"(?s)a-cell failed with exit code 3.*what went wrong"):
        runner._run(["x"], tmp_path / "log", 60.0, "a-cell")


def test_a_run_that_hangs_is_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runner, "_PROGRAM", "import time; time.sleep(60)")
    with pytest.raises(PenstockError, match=r"a-cell took longer than 1 s"):
        runner._run(["x"], tmp_path / "log", 1.0, "a-cell")


@pytest.mark.parametrize("text", ["", "four", "0,-1", "1.5"])
def test_a_list_of_bounds_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no list of bounds"):
        _numbers(text)


def test_cells_are_values() -> None:
    assert dataclasses.replace(Cell("grpo", 4, is_corrected=True, seed=0), seed=1).name == "grpo-eta4-seed1"
