"""`penstock sweep`: how overrides become runs, what is run again, and what is written about them."""

from __future__ import annotations

import csv
import json
import re
import shutil
import threading
import time
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.platform.checks.load import LoadedConfig, compose_config, load_config
from penstock.platform.cli import child, sweep
from penstock.platform.cli.sweep import (
    FallsBehind,
    Grid,
    Result,
    check_trials,
    find_completed,
    find_stopped,
    parse_grid,
    result_rows,
    run_sweep,
    run_trials,
    write_results,
)
from penstock.platform.config.compose import to_yaml
from penstock.platform.config.findings import Command
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.trackers.jsonl import JsonlTracker
from penstock.platform.run.run_dir import locked

TWO = ["experiment=arithmetic", "dataflow.max_staleness=0,2"]


def names(*overrides: str) -> list[str]:
    return [trial.name for trial in parse_grid(overrides).trials]


def test_lists_make_a_grid_and_other_overrides_hold_for_all_cells() -> None:
    grid = parse_grid(["experiment=arithmetic", "trainer.optimizer.lr=1e-4,3e-4", "algorithm=grpo,rloo", "seeds=0:2"])
    assert grid.fixed == ("experiment=arithmetic",)
    assert list(grid.axes) == ["trainer.optimizer.lr", "algorithm", "seed"]
    assert grid.trials[1].overrides == ("trainer.optimizer.lr=0.0001", "algorithm=rloo", "seed=0")
    assert [trial.name for trial in grid.trials] == [
        f"lr-{lr}--algorithm-{algorithm}--seed-{seed}"
        for seed in (0, 1)
        for lr in ("0.0001", "0.0003")
        for algorithm in ("grpo", "rloo")
    ], "the first seed is whole before the second begins"


@pytest.mark.parametrize(
    "fixed", ["key=[1,2]", "key={a: 1, b: 2}", "key='a,b'", 'key="[a,b],c"', "~key", "key=3", "key='--x 1,2 --y'"]
)
def test_commas_in_brackets_and_quotes_are_no_lists(fixed: str) -> None:
    grid = parse_grid([fixed, "seeds=3"])
    assert grid.fixed == (fixed,)
    assert len(grid.trials) == 1
    assert grid.trials[0].overrides == ("seed=3",)


def test_a_value_that_a_run_takes_without_quotes_needs_none_here() -> None:
    word = "model.path=dir with space/pol é"
    grid = parse_grid([word, "seeds=3"])
    assert (grid.fixed, len(grid.trials)) == ((word,), 1)


def test_elements_of_a_list_may_be_quoted_or_lists_themselves() -> None:
    grid = parse_grid(["+key='a,b',c,[1,2]"])
    assert [trial.overrides for trial in grid.trials] == [("+key='a,b'",), ("+key=c",), ("+key=[1,2]",)]
    assert len({trial.name for trial in grid.trials}) == 3


@pytest.mark.parametrize("value", ["long" * 40, "'größe'", "a+b"])
def test_the_name_of_a_trial_is_one_of_a_run(value: str) -> None:
    one, other = names(f"key={value},x")
    assert other == "key-x"
    name = RunConfig.model_fields["name"]
    TypeAdapter(Annotated[str, *name.metadata]).validate_python(one)


def test_values_that_cannot_be_folder_names_get_different_folders() -> None:
    one, other = names("model.path=a/b,a_b")
    assert one != other
    assert names("model.path=a/b,a_b") == [one, other], "the same every time: finished trials are found by it"


def test_a_range_of_seeds_is_that_of_a_slice_and_one_number_is_one_seed() -> None:
    assert names("seeds=2:4") == ["seed-2", "seed-3"]
    assert names("seeds=7") == ["seed-7"]
    assert names("seed=7,9") == ["seed-7", "seed-9"]


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["seeds=3:1"], "FIRST < END"),
        (["seeds=a"], "write seeds=FIRST:END"),
        (["key=interval(0,1)"], "an interval has no values"),
        (["key=1,2", "key=3,4"], "key has values already"),
        (["seed=1,2", "seeds=0:3"], "seed has values already"),
        (["key=1,1"], "listed twice"),
        (["name=a,b"], "names its run directories"),
        (["run_dir=x", "seeds=3"], "names its run directories"),
        (["experiment=arithmetic"], "has no axis"),
        (["staleness", "seeds=3"], "not an override"),
        (["model.path=é,b", "seeds=3"], "model.path='A','B'"),
    ],
)
def test_what_is_no_sweep_is_refused(overrides: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_grid(overrides)


def test_all_syntax_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_grid(["seeds=3:1", "name=x", "key=1,1"])
    assert len(refused.value.violations) == 3


@pytest.fixture(autouse=True)
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are checked for any machine."""

    def load(command: Command, overrides: list[str], **_: object) -> LoadedConfig:
        return load_config(command, overrides, dry_run=True)

    monkeypatch.setattr(sweep, "load_config", load)


@pytest.mark.full
def test_all_errors_of_all_runs_are_reported_before_anything_runs(tmp_path: Path) -> None:
    grid = parse_grid(
        ["experiment=arithmetic", "algorithm=grpo,gspoo", "dataflow.max_staleness=0,-1", "total_stepps=3"]
    )
    with pytest.raises(ConfigError) as refused:
        check_trials(grid, tmp_path)
    text = "\n".join(refused.value.violations)
    assert re.search(
        r"^algorithm-gspoo--max_staleness-0, algorithm-gspoo--max_staleness--1: .*gspoo", text, re.MULTILINE
    )
    assert re.search(
        r"^algorithm-grpo--max_staleness--1, algorithm-gspoo--max_staleness--1: .*max_staleness", text, re.MULTILINE
    )
    assert text.count("total_stepps") == 1, "what is wrong with every trial is said once"


def two_trials(folder: Path) -> tuple[Grid, dict[Any, RunConfig]]:
    grid = parse_grid(TWO)
    return grid, check_trials(grid, folder)[0]


def finish(config: RunConfig, accuracy: float | None = 0.8, status: str = "completed") -> None:
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    summary = {"status": status, "eval_before": 0.5, "eval_after": accuracy, "max_staleness_seen": 1}
    summary |= {"reward_last": 0.6, "wall_s": 81.5}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    tracker = JsonlTracker(run_dir)
    for staleness in (0.0, 1.0):
        tracker.log(1, {"staleness/mean_versions": staleness})
    tracker.log(2, {"eval/accuracy": 0.7})
    tracker.close()


def test_only_what_has_not_completed_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, configs = two_trials(tmp_path)
    first, second = configs.values()
    finish(first)
    started = []

    def run(arguments: list[str], log: Path, timeout_s: float, name: str, grace_s: float, ending: object) -> None:
        started.append(arguments)
        finish(second, 0.7)

    monkeypatch.setattr(sweep, "run_penstock", run)
    notes: list[str] = []
    sizes: list[int] = []
    monkeypatch.setattr(sweep, "write_results", lambda _grid, found, _folder: sizes.append(len(found)))
    results = run_trials(grid, configs, tmp_path, 10.0, notes.append)
    assert started == [
        [
            "train", "experiment=arithmetic", "dataflow.max_staleness=2", "name=max_staleness-2",
            f"run_dir={tmp_path}/max_staleness-2", "overwrite=true",
        ]
    ]  # fmt: skip
    assert [result.accuracy for result in results.values()] == [0.8, 0.7]
    assert [result.mean_staleness for result in results.values()] == [0.5, 0.5]
    assert notes[-1] == "[2/2] max_staleness-2: accuracy 0.700, gain 0.200, mean staleness 0.500 versions"
    assert sizes == [1, 2], "results are kept after every trial"


def test_a_run_that_fails_is_named_and_the_others_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, second = two_trials(tmp_path)[1].values()

    def run(arguments: list[str], log: Path, timeout_s: float, name: str, grace_s: float, ending: object) -> None:
        if name == "sweep: max_staleness-0":
            raise PenstockError("planted")
        finish(second, 0.7)

    monkeypatch.setattr(sweep, "run_penstock", run)
    told = StringIO()
    console = Console(file=told, width=200, soft_wrap=True)
    with pytest.raises(PenstockError, match=r"1 of 2 trials failed: max_staleness-0\."):
        run_sweep(TWO, folder=tmp_path, cell_timeout_s=1.0, dry_run=False, config_dir=None, console=console)
    assert "max_staleness-0: planted" in told.getvalue()
    assert "\nheld-out accuracy after training\n" in told.getvalue(), "the evaluation may sample"
    assert (tmp_path / "sweep.md").read_text().startswith("Held-out accuracy after the last step: mean over seeds")
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert [(row["dataflow.max_staleness"], row["status"], row["accuracy"]) for row in rows] == [
        ("0", "failed", ""), ("2", "completed", "0.7"),
    ]  # fmt: skip


def test_values_in_brackets_are_in_the_table(tmp_path: Path) -> None:
    typed = ["experiment=arithmetic", "rollout.sampling.stop=[end],[stop]"]
    for config in check_trials(parse_grid(typed), tmp_path)[0].values():
        finish(config)
    told = StringIO()
    console = Console(file=told, width=200, soft_wrap=True)
    assert run_sweep(typed, folder=tmp_path, cell_timeout_s=1.0, dry_run=False, config_dir=None, console=console) == 0
    assert "│ [end] " in told.getvalue()
    assert "│ [stop] " in told.getvalue()


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "run_penstock", lambda *_: pytest.fail("it ran"))
    console = Console(quiet=True)
    with locked(tmp_path), pytest.raises(ConfigError, match=rf"--folder {tmp_path} is in use by process"):
        run_sweep(TWO, folder=tmp_path, cell_timeout_s=1.0, dry_run=False, config_dir=None, console=console)


def test_a_run_that_ends_without_completing_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, configs = two_trials(tmp_path)
    monkeypatch.setattr(sweep, "run_penstock", lambda *_: None)
    notes: list[str] = []
    results = run_trials(grid, configs, tmp_path, 10.0, notes.append)
    assert {result.status for result in results.values()} == {"failed"}
    assert "ended without completing" in notes[-1]


@pytest.mark.full
def test_a_dry_run_prints_what_would_run_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(next(iter(two_trials(tmp_path / "sweep")[1].values())))
    monkeypatch.setattr(sweep, "run_penstock", lambda *_: pytest.fail("it ran"))
    told = StringIO()
    folder, console = tmp_path / "sweep", Console(file=told, width=200, soft_wrap=True)
    assert run_sweep(TWO, folder=folder, cell_timeout_s=1.0, dry_run=True, config_dir=None, console=console) == 0
    lines = [line for line in told.getvalue().splitlines() if not line.startswith("warning: ")]
    assert lines == ["max_staleness-0: completed", "max_staleness-2: to run"]
    assert not (folder / "sweep.csv").exists()


def test_what_this_machine_lacks_is_a_warning_of_a_dry_run_and_ends_a_sweep(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sweep, "load_config", load_config)
    monkeypatch.chdir(tmp_path)  # where no warm start was made
    grid = parse_grid([*TWO])
    configs, warnings = check_trials(grid, tmp_path, dry_run=True)
    assert len(configs) == 2
    assert sum("seed0/policy does not exist" in warning for warning in warnings) == 1, "said once"
    with pytest.raises(ConfigError, match=r"seed0/policy does not exist"):
        check_trials(grid, tmp_path)


@pytest.mark.some(1)
@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_a_run_that_did_not_complete_is_run_again(tmp_path: Path, status: str) -> None:
    config = next(iter(two_trials(tmp_path)[1].values()))
    finish(config, status=status)
    assert find_completed(config) is None


def test_a_completed_run_of_another_configuration_does_not_count(tmp_path: Path) -> None:
    config = next(iter(two_trials(tmp_path)[1].values()))
    finish(config)
    assert find_completed(config) is not None
    assert find_completed(config.model_copy(update={"total_steps": config.total_steps + 1})) is None


def test_a_record_has_the_reward_the_divergence_from_the_reference_and_the_wall_time(tmp_path: Path) -> None:
    first, second = two_trials(tmp_path)[1].values()
    finish(first)
    finish(second)
    tracker = JsonlTracker(Path(second.run_dir))
    for step in range(3, 15):  # twelve steps: 0.03, 0.04, ..., 0.14
        tracker.log(step, {"loss/reference_kl": step / 100})
    tracker.close()
    found = [find_completed(config) for config in (first, second)]
    assert [(one.reward, one.wall_s) for one in found] == [(0.6, 81.5)] * 2
    assert found[0].reference_kl is None, "without a reference"
    assert found[1].reference_kl == pytest.approx(sum(range(5, 15)) / 1000), "of the last ten steps"


def test_a_run_without_an_evaluation_completes_too(tmp_path: Path) -> None:
    config = next(iter(two_trials(tmp_path)[1].values()))
    finish(config, accuracy=None)
    found = find_completed(config)
    assert found is not None
    assert (found.status, found.accuracy, found.gain) == ("completed", None, None)


def two_seeds() -> tuple[Grid, dict[Any, Result]]:
    """Everything but one failed trial and one that has not run."""
    grid = parse_grid(["algorithm=grpo,rloo", "dataflow.max_staleness=0,4", "seeds=0:2"])
    results = {}
    for trial in grid.trials[:-1]:
        values = dict(trial.values)
        accuracy = 0.9 - 0.01 * int(values["dataflow.max_staleness"]) + 0.02 * int(values["seed"])
        results[trial] = Result(
            "completed", f"runs/sweep/{trial.name}", round(accuracy, 3), 0.3, 1.5, 2, 0.7, 0.02, 9.5
        )
    results[grid.trials[0]] = Result("failed", f"runs/sweep/{grid.trials[0].name}")
    return grid, results


def test_a_table_has_a_row_for_each_combination_with_the_spread_over_seeds() -> None:
    header, *rows = result_rows(*two_seeds())
    assert header[:4] == ["algorithm", "dataflow.max_staleness", "completed", "accuracy"]
    assert [row[:6] for row in rows] == [
        ["grpo", "0", "1 of 2, 1 failed", "0.920", "0.300", "1.500"],
        ["grpo", "4", "2 of 2", "0.870 (0.860 to 0.880)", "0.300", "1.500"],
        ["rloo", "0", "2 of 2", "0.910 (0.900 to 0.920)", "0.300", "1.500"],
        ["rloo", "4", "1 of 2", "0.860", "0.300", "1.500"],
    ]


def test_a_sweep_over_seeds_alone_has_one_row() -> None:
    grid = parse_grid(["seeds=0:3"])
    assert [row[0] for row in result_rows(grid, {})] == ["completed", "0 of 3"]


def test_table_figures_and_plot_are_written(tmp_path: Path) -> None:
    write_results(*two_seeds(), tmp_path)
    assert "| grpo | 4 | 2 of 2 | 0.870 (0.860 to 0.880) |" in (tmp_path / "sweep.md").read_text()
    records = json.loads((tmp_path / "sweep.json").read_text())
    assert records[1] == {
        "algorithm": "grpo", "dataflow.max_staleness": "4", "seed": "0", "status": "completed",
        "run_dir": "runs/sweep/algorithm-grpo--max_staleness-4--seed-0",
        "accuracy": 0.86, "gain": 0.3, "mean_staleness": 1.5, "max_staleness": 2,
        "reward": 0.7, "reference_kl": 0.02, "wall_s": 9.5,
    }  # fmt: skip
    assert len(list(csv.DictReader((tmp_path / "sweep.csv").open()))) == len(records) == 7
    assert '"held-out accuracy"' in (tmp_path / "sweep.html").read_text()


def test_a_run_that_fails_is_named_with_the_end_of_its_output(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(child, "_PROGRAM", "import sys; print('what went wrong'); sys.exit(3)")
    with pytest.raises(PenstockError, match=r"(?s)a-trial failed with exit code 3.*what went wrong"):
        child.run_penstock(["x"], tmp_path / "log", 60.0, "a-trial", 25.0)


def test_a_run_that_hangs_is_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(child, "_PROGRAM", "import time; time.sleep(60)")
    with pytest.raises(PenstockError, match=r"a-trial took longer than 1 s"):
        child.run_penstock(["x"], tmp_path / "log", 1.0, "a-trial", 25.0)


def evaluate(config: RunConfig, *accuracies: float) -> None:
    """Metrics of a run with evaluations at steps 0, 10, 20, …"""
    tracker = JsonlTracker(Path(config.run_dir))
    for number, accuracy in enumerate(accuracies):
        tracker.log(10 * number, {"eval/accuracy": accuracy})
    tracker.close()


def of_runs(folder: Path, num_runs: int) -> list[RunConfig]:
    config = compose_config(["experiment=arithmetic"])
    return [config.model_copy(update={"run_dir": str(folder / f"run{number}")}) for number in range(num_runs)]


def test_a_trial_is_stopped_when_its_best_is_below_the_median_of_the_others_means(tmp_path: Path) -> None:
    mine, *others = of_runs(tmp_path, 5)
    for other, last in zip(others, (0.9, 0.8, 0.7, 0.2), strict=True):
        evaluate(other, 0.1, 0.4, last)
    for accuracies, said in (
        ((0.1,), None),  # before training nothing is known
        ((0.1, 0.2), "its best accuracy at step 10, 0.200, is below the median of 4 others, 0.250"),
        ((0.1, 0.26), None),
        ((0.1, 0.26, 0.1), "at step 20, 0.260, is below the median of 4 others, 0.417"),
        ((0.1, 0.5, 0.1), None),  # its best counts
    ):
        shutil.rmtree(mine.run_dir, ignore_errors=True)
        evaluate(mine, *accuracies)
        found = FallsBehind(mine, dict.fromkeys([mine.run_dir, *(other.run_dir for other in others)], 0.0))()
        assert (found is None) if said is None else (said in (found or ""))


def test_too_few_others_stop_nothing(tmp_path: Path) -> None:
    mine, *others = of_runs(tmp_path, 4)
    evaluate(mine, 0.1, 0.1)
    for other in others[:2]:
        evaluate(other, 0.1, 0.9)
    evaluate(others[2], 0.1)  # has not come as far
    assert FallsBehind(mine, dict.fromkeys([mine.run_dir, *(other.run_dir for other in others)], 0.0))() is None


def test_a_trial_is_not_compared_by_what_earlier_sweeps_have_left(tmp_path: Path, monkeypatch) -> None:
    grid = parse_grid(["experiment=arithmetic", "dataflow.max_staleness=0,1,2,3,4"])
    configs, _ = check_trials(grid, tmp_path, dry_run=True)
    for config in configs.values():  # of another sweep
        evaluate(config, 0.1, 0.1 if config is list(configs.values())[3] else 0.9)
    monkeypatch.setattr(sweep, "LOOK_S", 0.0)
    reasons = []

    def run(arguments: list[str], log: Path, timeout_s: float, name: str, grace_s: float, ending: Any) -> None:
        config = list(configs.values())[len(reasons)]
        time.sleep(0.002)  # the times of records are rounded to milliseconds
        before = ending()
        evaluate(config, 0.1, 0.1 if len(reasons) == 3 else 0.9)
        reasons.append((before, ending()))

    monkeypatch.setattr(sweep, "run_penstock", run)
    run_trials(grid, configs, tmp_path, 10.0, print, stops_early=True)
    assert [reason for reason, _ in reasons] == [None] * 5, "its own old evaluations are those of another run"
    assert [reason is None for _, reason in reasons] == [True, True, True, False, True]
    assert "below the median of 3 others, 0.500" in reasons[3][1]


def test_a_stopped_trial_is_kept_and_completed_without_the_option(tmp_path: Path) -> None:
    (config,) = of_runs(tmp_path, 1)
    evaluate(config, 0.1, 0.3)
    (Path(config.run_dir) / "config.yaml").write_text(to_yaml(config))
    assert find_stopped(config, stops_early=True) is None
    (Path(config.run_dir) / "stopped_early.txt").write_text("why")
    found = find_stopped(config, stops_early=True)
    assert found is not None
    assert (found.status, found.accuracy, found.gain) == ("stopped", 0.3, pytest.approx(0.2))
    assert find_stopped(config, stops_early=False) is None
    other = config.model_copy(update={"total_steps": config.total_steps + 1})
    assert find_stopped(other, stops_early=True) is None, "it was stopped under another configuration"


@pytest.mark.full
def test_trials_side_by_side_run_at_the_same_time_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = parse_grid(["experiment=arithmetic", "dataflow.max_staleness=0,1,2"])
    configs, _ = check_trials(grid, tmp_path, dry_run=True)
    by_dir = {f"run_dir={config.run_dir}": config for config in configs.values()}
    running, most = 0, []
    together = threading.Barrier(2, timeout=10)

    def run(arguments: list[str], *_: object) -> None:
        nonlocal running
        running += 1
        most.append(running)
        if len(most) > 1:
            together.wait()
        finish(by_dir[next(word for word in arguments if word.startswith("run_dir="))])
        running -= 1

    monkeypatch.setattr(sweep, "run_penstock", run)
    results = run_trials(grid, configs, tmp_path, 10.0, print, side_by_side=2)
    assert [trial.name for trial in results] == [trial.name for trial in configs]
    assert most[0] == 1
    assert sorted(most[1:]) == [1, 2]
