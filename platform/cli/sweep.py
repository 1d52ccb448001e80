"""`penstock sweep`: one training run per combination of the values in the overrides.

    penstock sweep experiment=arithmetic trainer.lr=1e-4,3e-4 dataflow.max_staleness=0,4 seeds=0:3 total_steps=30

1. `parse_grid` parses the overrides: `KEY=A,B` and `seeds=FIRST:END` are axes, all others apply to every trial.
2. `check_trials` composes and checks all trials, and reports all violations before the first trial starts.
3. `run_trials` runs them one after the other, or some side by side, each as `penstock train` in its own process. A
   trial whose run directory holds a completed run of the same configuration is skipped, so the same command continues
   an interrupted sweep. A failed trial is recorded, and the next one starts. One that falls behind can be stopped
   early (`FallsBehind`).
4. `write_results` writes the table, figures and plot after every trial.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Literal

import yaml
from hydra.errors import HydraException

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.platform.checks.load import load_config
from penstock.platform.cli.child import EndedError, run_penstock, run_side_by_side
from penstock.platform.cli.simulate import parse_seeds
from penstock.platform.config.compose import to_yaml
from penstock.platform.config.overrides import parse_override
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.run_files import CONFIG_FILE, SUMMARY_FILE
from penstock.platform.metrics.trackers.jsonl import read_metrics
from penstock.platform.run.run_dir import locked

if TYPE_CHECKING:
    from rich.console import Console

OF_THE_SWEEP = ("name", "run_dir", "overwrite")
"""Keys that the sweep sets for each trial."""
SEED = "seed"
STOPPED_FILE = "stopped_early.txt"
"""In the run directory of a trial that was stopped: why."""
FEWEST_OTHERS, LOOK_S = 3, 2.0
ACCURACY_METRIC = "eval/accuracy"
STALENESS_METRIC = "staleness/mean_versions"
KL_METRIC, KL_STEPS = "loss/reference_kl", 10
_MAX_NAME = 119
"""Of a trial, characters: a hash of 9 follows, and `RunConfig.name` has 128 at most."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a sweep."""

    values: tuple[tuple[str, str], ...]
    """Its value on each axis, in the order of the axes, as typed."""
    overrides: tuple[str, ...]
    """The same values as overrides."""

    @property
    def name(self) -> str:
        """Name of the run directory, e.g. `lr-0.0001--seed-0`. A hash replaces what the name of a run cannot hold."""
        plain = "--".join(f"{key.rpartition('.')[2].replace('/', '.')}-{value}" for key, value in self.values)
        safe = re.sub(r"[^A-Za-z0-9._-]", "_", plain)[:_MAX_NAME]
        if safe == plain:
            return safe
        return f"{safe}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"

    @property
    def line(self) -> tuple[tuple[str, str], ...]:
        """The values without the seed, which are common to the trials of all seeds."""
        return tuple((key, value) for key, value in self.values if key != SEED)


@dataclass(frozen=True, slots=True)
class Grid:
    """The trials of a sweep."""

    axes: dict[str, tuple[str, ...]]
    """Key -> values, as typed; the seeds, if given, are the last axis."""
    fixed: tuple[str, ...]
    """Overrides of all trials."""
    trials: tuple[Trial, ...]
    """All combinations, seed by seed, so that an interrupted sweep has complete tables of the first seeds."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one trial ended."""

    status: Literal["completed", "stopped", "failed"]
    """`completed`; `stopped` early; or `failed` with the cause in the trial's log."""
    run_dir: str
    """Run directory of the trial."""
    accuracy: float | None = None
    """Held-out accuracy after the last step; None if the run has no evaluation."""
    gain: float | None = None
    """Increase of the accuracy over the run."""
    mean_staleness: float | None = None
    """Mean staleness of the trained tokens, versions."""
    max_staleness: int | None = None
    """Largest staleness of any trained token, versions."""
    reward: float | None = None
    """Mean reward of the trained answers over the last steps, as `reward_last` of the run's summary."""
    reference_kl: float | None = None
    """Mean divergence from the reference over the last `KL_STEPS` steps, nat per token; None without a reference."""
    wall_s: float | None = None
    """Wall time of the run, seconds."""


Results = Mapping[Trial, Result]


def parse_grid(overrides: Sequence[str]) -> Grid:
    """Parse the overrides of `penstock sweep` with Hydra, so commas in quotes or brackets do not separate values.

    Raises:
        ConfigError: Listing all overrides that cannot be parsed, or that set keys of the sweep itself.
    """
    problems: list[str] = []
    axes: dict[str, tuple[str, ...]] = {}
    typed_keys: dict[str, str] = {}
    fixed = []
    for text in overrides:
        if text.startswith("seeds="):
            try:
                seeds = parse_seeds(text.removeprefix("seeds="), "seeds=")
            except ConfigError as refused:
                problems += refused.violations
                continue
            key, values, typed_keys[SEED] = SEED, tuple(str(seed) for seed in seeds), SEED
        else:
            try:
                override, as_read = parse_override(text)
            except HydraException as error:
                detail = " ".join(str(error).split())
                problems.append(f"{text!r} is not an override: {detail}. Write KEY=VALUE or KEY=A,B.")
                continue
            key = override.key_or_group
            if as_read != text and "," in text:
                problems.append(f"{text}: it can be a list or one text. Write {key}='A','B' for a list, or {as_read}.")
                continue
            if key in OF_THE_SWEEP:
                problems.append(f"{text}: a sweep names its run directories itself. Choose their folder with --folder.")
                continue
            if not override.is_sweep_override():
                fixed.append(text)
                continue
            if not override.is_discrete_sweep():
                problems.append(f"{text}: an interval has no values to run. List them: {key}=A,B.")
                continue
            values, typed_keys[key] = tuple(override.sweep_string_iterator()), override.get_key_element()
        if key in axes:
            problems.append(f"{text}: {key} has values already. Give all of them once.")
        if len(set(values)) < len(values):
            problems.append(f"{text}: a value is listed twice and would run twice. List it once.")
        axes[key] = values
    if not axes and not problems:
        problems.append("The sweep has no axis: list values as KEY=A,B, or give seeds=FIRST:END.")
    if problems:
        raise ConfigError(problems)
    if SEED in axes:
        axes[SEED] = axes.pop(SEED)
    others = [key for key in axes if key != SEED]
    trials = []
    for seed in axes.get(SEED, (None,)):
        for values in itertools.product(*(axes[key] for key in others)):
            of_trial = [*zip(others, values, strict=True), *([] if seed is None else [(SEED, seed)])]
            trials.append(Trial(tuple(of_trial), tuple(f"{typed_keys[key]}={value}" for key, value in of_trial)))
    return Grid(axes, tuple(fixed), tuple(trials))


def check_trials(
    grid: Grid, folder: Path, config_dir: Path | None = None, *, dry_run: bool = False
) -> tuple[dict[Trial, RunConfig], list[str]]:
    """Compose and check all trials before the first one runs.

    Args:
        grid: The sweep.
        folder: Folder of the sweep.
        config_dir: Folder with the user's own YAML.
        dry_run: Whether to report missing resources of this machine as warnings.

    Returns:
        The configuration of each trial, and the distinct warnings.

    Raises:
        ConfigError: Listing all violations. A violation of every trial is listed once.
    """
    configs: dict[Trial, RunConfig] = {}
    warnings: dict[str, None] = {}
    problems: dict[str, list[str]] = {}
    for trial in grid.trials:
        overrides = _overrides(grid, trial, folder)
        try:
            loaded = load_config("train", overrides, config_dir=config_dir, dry_run=dry_run)
            configs[trial] = loaded.config
            warnings.update(dict.fromkeys(loaded.warnings))
        except ConfigError as refused:
            for violation in refused.violations:
                problems.setdefault(violation, []).append(trial.name)
    if problems:
        raise ConfigError(
            [
                violation if len(names) == len(grid.trials) else f"{', '.join(names)}: {violation}"
                for violation, names in problems.items()
            ]
        )
    return configs, list(warnings)


def run_trials(
    grid: Grid,
    configs: Mapping[Trial, RunConfig],
    folder: Path,
    timeout_s: float,
    note: Callable[[str], None],
    config_dir: Path | None = None,
    *,
    side_by_side: int = 1,
    stops_early: bool = False,
) -> Results:
    """Run the uncompleted trials. A failed trial does not end the sweep.

    After every trial the results so far are written.

    Args:
        grid: The sweep.
        configs: Result of `check_trials`.
        folder: Folder of the sweep, which holds run directories and logs.
        timeout_s: Time limit of one trial, seconds.
        note: Prints a line before and after each trial.
        config_dir: Folder with the user's own YAML.
        side_by_side: Trials that run at the same time.
        stops_early: Whether a trial that falls behind the others is stopped.
    """
    results: dict[Trial, Result] = {}
    own_yaml = [] if config_dir is None else ["--config-dir", str(config_dir)]
    is_ending, writing = threading.Event(), threading.Lock()
    began_at: dict[str, float] = {}

    def run(numbered: tuple[int, Trial]) -> None:
        number, trial = numbered
        config = configs[trial]
        where = f"[{number + 1}/{len(configs)}] {trial.name}"
        behind = FallsBehind(config, began_at)

        def ending() -> str | None:
            if is_ending.is_set():
                return "the sweep was told to end"
            return behind() if stops_early else None

        result = find_completed(config) or find_stopped(config, stops_early=stops_early)
        began_at[config.run_dir] = 0.0 if result else time.time()
        if result is None:
            note(f"{where}: running")
            log = folder / f"{trial.name}.log"
            log.unlink(missing_ok=True)
            cause = f"it ended without completing; its output is in {log}."
            try:
                words = ["train", *own_yaml, *_overrides(grid, trial, folder)]
                run_penstock(words, log, timeout_s, f"sweep: {trial.name}", config.stop_grace_s, ending)
            except EndedError as reason:
                cause = str(reason)
                if not is_ending.is_set():
                    (Path(config.run_dir) / STOPPED_FILE).write_text(f"{cause}\n")
            except PenstockError as failure:
                cause = str(failure)
            result = find_completed(config) or find_stopped(config, stops_early=stops_early)
        if result is None or result.status == "stopped":
            note(f"{where}: {cause if result is None else 'stopped early'}")
        else:
            accuracy, gain, staleness = (
                _number(value) for value in (result.accuracy, result.gain, result.mean_staleness)
            )
            note(f"{where}: accuracy {accuracy}, gain {gain}, mean staleness {staleness} versions")
        with writing:
            results[trial] = result or Result("failed", config.run_dir)
            in_order = {one: results[one] for one in configs if one in results}
            write_results(grid, in_order, folder)

    run_side_by_side(run, list(enumerate(configs)), side_by_side, is_ending, first_alone=True)
    return {trial: results[trial] for trial in configs}


class FallsBehind:
    """Whether a trial falls behind: the median stopping rule of Golovin et al., "Google Vizier", 2017, section 3.2.1.

    At an evaluation during training, its best accuracy so far is compared with the median of the means, up to the same
    step, of the other trials of this sweep that came as far. It needs `FEWEST_OTHERS` of them.
    """

    def __init__(self, config: RunConfig, began_at: Mapping[str, float]) -> None:
        """Compare nothing yet.

        Args:
            config: Of the trial.
            began_at: Run directory of each trial that has begun, this one included -> Unix time from which its records
                count: an earlier sweep may have left some of another configuration.
        """
        self._run_dir = config.run_dir
        self._began_at = began_at
        self._read_at = 0.0

    def __call__(self) -> str | None:
        """Why it is stopped; None if it is not. The files are read every `LOOK_S`."""
        if time.monotonic() - self._read_at < LOOK_S:
            return None
        self._read_at = time.monotonic()
        others = dict(self._began_at)  # which other threads add to
        mine = _accuracies(self._run_dir, others.pop(self._run_dir))
        if not mine or (step := mine[-1][0]) == 0:
            return None
        means = []
        for other, since_s in others.items():
            found = _accuracies(other, since_s)
            if found and found[-1][0] >= step:
                means.append(mean(value for at, value in found if at <= step))
        best = max(value for _, value in mine)
        if len(means) < FEWEST_OTHERS or best >= median(means):
            return None
        return (
            f"its best accuracy at step {step}, {best:.3f}, is below the median of {len(means)} others, "
            f"{median(means):.3f}"
        )


def _accuracies(run_dir: str, since_s: float = 0.0) -> list[tuple[int, float]]:
    """Step and accuracy of the evaluations of a run from a Unix time on; empty if it has not begun."""
    try:
        records = [one for one in read_metrics(Path(run_dir)) if one.time_s >= since_s]
    except FileNotFoundError:
        return []
    return [(one.step, one.metrics[ACCURACY_METRIC]) for one in records if ACCURACY_METRIC in one.metrics]


def find_stopped(config: RunConfig, *, stops_early: bool) -> Result | None:
    """The result of a trial that was stopped early; None if it was not, or is to be completed now."""
    found = _accuracies(config.run_dir)
    if not stops_early or not found or not (Path(config.run_dir) / STOPPED_FILE).exists() or not _is_of(config):
        return None
    return Result("stopped", config.run_dir, accuracy=found[-1][1], gain=found[-1][1] - found[0][1])


def _is_of(config: RunConfig) -> bool:
    """Whether the run in the directory has this configuration."""
    written = Path(config.run_dir) / CONFIG_FILE
    return written.exists() and _without_keep(written.read_text()) == _without_keep(to_yaml(config))


def _without_keep(text: str) -> dict[str, Any]:
    """A configuration without the number of checkpoints that are kept, whose default depends on the free disk."""
    tree: dict[str, Any] = yaml.safe_load(text)
    tree["checkpoint"].pop("keep", None)
    return tree


def find_completed(config: RunConfig) -> Result | None:
    """Return the result of a completed run of the same configuration; None if there is none."""
    run_dir = Path(config.run_dir)
    summary_file = run_dir / SUMMARY_FILE
    if not summary_file.exists() or not _is_of(config):
        return None
    summary = json.loads(summary_file.read_text())
    if summary["status"] != "completed":
        return None
    metrics = [record.metrics for record in read_metrics(run_dir)]
    staleness, kl = ([one[name] for one in metrics if name in one] for name in (STALENESS_METRIC, KL_METRIC))
    before, after = summary["eval_before"], summary["eval_after"]
    return Result(
        "completed",
        config.run_dir,
        accuracy=after,
        gain=None if before is None or after is None else after - before,
        mean_staleness=mean(staleness) if staleness else None,
        max_staleness=summary["max_staleness_seen"],
        reward=summary["reward_last"],
        reference_kl=mean(kl[-KL_STEPS:]) if kl else None,
        wall_s=summary["wall_s"],
    )


def result_rows(grid: Grid, results: Results) -> list[list[str]]:
    """Header and one row per combination of values, with means over the seeds and the range of the accuracy."""
    keys = [key for key in grid.axes if key != SEED]
    rows = [[*keys, "completed", "accuracy", "gain", "mean staleness, versions", "run directory"]]
    for line in dict.fromkeys(trial.line for trial in grid.trials):
        trials = [trial for trial in grid.trials if trial.line == line]
        found = [results[trial] for trial in trials if trial in results]
        ends = Counter(result.status for result in found)
        others = [f"{ends[end]} {end}" for end in ("stopped", "failed") if ends[end]]
        completed = ", ".join([f"{ends['completed']} of {len(trials)}", *others])
        accuracies = [result.accuracy for result in found if result.accuracy is not None]
        spread = f" ({min(accuracies):.3f} to {max(accuracies):.3f})" if len(accuracies) > 1 else ""
        gains = [result.gain for result in found if result.gain is not None]
        staleness = [result.mean_staleness for result in found if result.mean_staleness is not None]
        names = [Path(result.run_dir).name for result in found]
        rows.append(
            [
                *(value for _, value in line),
                completed,
                _mean(accuracies) + spread,
                _mean(gains),
                _mean(staleness),
                names[0] if len(names) == 1 else f"{names[0]} …" if names else "–",
            ]
        )
    return rows


def write_results(grid: Grid, results: Results, folder: Path) -> None:
    """Write sweep.md (the table), sweep.csv and sweep.json (one record per trial), and sweep.html (a plot)."""
    header, *rows = result_rows(grid, results)
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    title = "Held-out accuracy after the last step: mean over seeds, with minimum and maximum."
    (folder / "sweep.md").write_text("\n".join([title, "", *lines]) + "\n")
    records = [dict(trial.values) | asdict(result) for trial, result in results.items()]
    (folder / "sweep.json").write_text(json.dumps(records, indent=2) + "\n")
    with (folder / "sweep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*grid.axes, *Result.__dataclass_fields__])
        writer.writeheader()
        writer.writerows(records)
    _plot(grid, results, folder / "sweep.html")


def run_sweep(
    overrides: Sequence[str],
    *,
    folder: Path,
    cell_timeout_s: float,
    dry_run: bool,
    config_dir: Path | None,
    console: Console,
    side_by_side: int = 1,
    stops_early: bool = False,
) -> int:
    """Check all trials, run the uncompleted ones and print the table; returns the exit code.

    Raises:
        ConfigError: If a trial is invalid, or another sweep runs in the folder; raised before any trial runs.
        PenstockError: If trials failed; raised after all others are done.
    """
    from rich.table import Table
    from rich.text import Text

    grid = parse_grid(overrides)
    configs, warnings = check_trials(grid, folder, config_dir, dry_run=dry_run)

    def note(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    for warning in warnings:
        note(f"warning: {warning}")
    if dry_run:
        for trial, config in configs.items():
            note(f"{trial.name}: {'completed' if find_completed(config) else 'to run'}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)

    with locked(folder, "--folder "):
        results = run_trials(
            grid, configs, folder, cell_timeout_s, note, config_dir, side_by_side=side_by_side, stops_early=stops_early
        )
    header, *rows = result_rows(grid, results)
    shown = Table(*header, title="held-out accuracy after training", title_justify="left")
    for row in rows:
        shown.add_row(*map(Text, row))
    console.print(shown)
    note(f"{folder / 'sweep.md'}, sweep.csv, sweep.json, sweep.html")
    failed = [trial.name for trial, result in results.items() if result.status == "failed"]
    if failed:
        raise PenstockError(
            f"sweep: {len(failed)} of {len(results)} trials failed: {', '.join(failed)}. Their output is in "
            f"{folder}/<trial>.log. The same command runs them again."
        )
    return 0


def _overrides(grid: Grid, trial: Trial, folder: Path) -> list[str]:
    own = [f"name={trial.name}", f"run_dir={folder}/{trial.name}", "overwrite=true"]
    return [*grid.fixed, *trial.overrides, *own]


def _plot(grid: Grid, results: Results, path: Path) -> None:
    """Plot accuracy over the last axis, one line per combination of the others; bars span the range over seeds."""
    import plotly.graph_objects as go

    keys = [key for key in grid.axes if key != SEED] or [SEED]
    over = keys[-1]
    lines: dict[str, dict[str, list[float]]] = {}
    for trial, result in results.items():
        if result.accuracy is not None:
            of_trial = dict(trial.values)
            name = ", ".join(f"{key}={of_trial[key]}" for key in keys[:-1]) or "accuracy"
            lines.setdefault(name, {}).setdefault(of_trial[over], []).append(result.accuracy)
    figure = go.Figure()
    for name, points in lines.items():
        at = [value for value in grid.axes[over] if value in points]
        means = [mean(points[value]) for value in at]
        spread = {
            "array": [max(points[value]) - middle for value, middle in zip(at, means, strict=True)],
            "arrayminus": [middle - min(points[value]) for value, middle in zip(at, means, strict=True)],
        }
        figure.add_scatter(x=at, y=means, name=name, error_y=spread, mode="lines+markers")
    figure.update_layout(
        xaxis={"title": over, "type": "category"},
        yaxis={"title": "held-out accuracy", "range": [0, 1.02]},
        template="plotly_white",
        showlegend=True,
    )
    figure.write_html(path, include_plotlyjs=True)


def _mean(values: Sequence[float]) -> str:
    return _number(mean(values) if values else None)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
