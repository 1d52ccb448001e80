"""`penstock population`: train several members side by side; the worst go on as branches of the best, with other keys.

The rule is platform/run/population.py. A member is a run: `penstock train` in its first generation, `penstock resume`
after it, and a branch (branch.py) where it goes on from another one. DIR holds the runs, their logs, and from the
start on population.json, with which the same command continues, population.md and population.html.

Ray Tune has a scheduler of this kind. It is not used: a trial of Tune holds its checkpoints in Tune's storage and its
processes in Tune's cluster, while a member here is a run of its own, on this machine with a Ray of its own or in the
cluster that `cluster.address` names, whose checkpoints another run can begin with.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.envs.import_path import load_object
from penstock.platform.checks.load import load_config
from penstock.platform.cli.branch import begin
from penstock.platform.cli.child import run_penstock, run_side_by_side
from penstock.platform.config.field_errors import nearest_choice
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.atomic_file import write_text_atomically
from penstock.platform.metrics.hub import catalog, undeclared
from penstock.platform.metrics.run_files import CONFIG_FILE
from penstock.platform.metrics.trackers.jsonl import read_metrics
from penstock.platform.run.checkpoint import CheckpointFolder
from penstock.platform.run.population import Keys, Member, Population, Range, Trainable
from penstock.platform.run.run_dir import locked

if TYPE_CHECKING:
    from rich.console import Console

STATE_FILE = "population.json"
OF_A_MEMBER = ("name", "run_dir", "overwrite", "total_steps", "resume")
"""Keys that the population sets for each member."""


class Runs:
    """`Trainable` whose members are runs below one folder."""

    def __init__(
        self,
        overrides: Sequence[str],
        folder: Path,
        config_dir: Path | None,
        score: str,
        timeout_s: float,
        grace_s: float,
    ) -> None:
        self.ending = threading.Event()
        self._overrides = list(overrides)
        self._folder = folder
        self._own_yaml = [] if config_dir is None else ["--config-dir", str(config_dir)]
        self._score = score
        self._timeout_s = timeout_s
        self._grace_s = grace_s

    def branch(self, parent: str, name: str, step: int, keys: Keys) -> None:
        """Make a member that begins at this step of another one, unless a killed population has made it before."""
        run_dir = self._folder / name
        if CheckpointFolder(run_dir).versions():
            return
        if run_dir.exists():
            shutil.rmtree(run_dir)
        begin(str(self._folder / parent), str(run_dir), [*_typed(keys), f"total_steps={step + 1}"], step, None)

    def train(self, name: str, step: int, keys: Keys) -> float:
        """Train a member until it has done so many steps in all; returns its score at that step.

        Raises:
            PenstockError: If its process fails, or it has no score.
        """
        run_dir, log = self._folder / name, self._folder / f"{name}.log"
        if (score := self._score_at(run_dir, step)) is None:
            if (run_dir / CONFIG_FILE).exists() and CheckpointFolder(run_dir).versions():
                words = ["resume", str(run_dir), f"total_steps={step}"]
            else:
                own = [f"name={name}", f"run_dir={run_dir}", f"total_steps={step}", "resume=auto"]
                words = ["train", *self._own_yaml, *self._overrides, *own, *_typed(keys)]
            run_penstock(
                *(words, log, self._timeout_s, name, self._grace_s),
                lambda: "the population was told to end" if self.ending.is_set() else None,
            )
            score = self._score_at(run_dir, step)
        if score is None:
            raise PenstockError(f"{name}: {self._score} was not measured at step {step}; its output is in {log}.")
        return score

    def _score_at(self, run_dir: Path, step: int) -> float | None:
        """The newest score of the policy of this step.

        An evaluation is logged at the step that the run has reached when it ends, and may be of an older policy.
        """
        try:
            found = [
                one.metrics[self._score]
                for one in read_metrics(run_dir)
                if one.step == step
                and self._score in one.metrics
                and all(of == step for name, of in one.metrics.items() if name.startswith("eval/version_min"))
            ]
        except FileNotFoundError:
            return None
        return found[-1] if found else None


def _written(value: float) -> str:
    return f"{value:.6g}"


def _typed(keys: Keys) -> list[str]:
    return [f"{key}={_written(value)}" for key, value in keys.items()]


def run_population(
    overrides: Sequence[str],
    *,
    num_members: int,
    generations: int,
    steps_per_generation: int,
    seed: int,
    score: str,
    trainable: str | None,
    folder: Path,
    side_by_side: int,
    timeout_s: float,
    dry_run: bool,
    config_dir: Path | None,
    console: Console,
) -> int:
    """Train a population, or continue one; returns the exit code.

    Args:
        overrides: Of all members; `KEY=LOW:HIGH` is a searched key.
        num_members: Members.
        generations: After how many the population ends.
        steps_per_generation: Steps of every member in each.
        seed: Of the draws; the runs have that of their configuration.
        score: Metric by which members are compared; more is better.
        trainable: Import path of another kind of members, called with the folder; None: runs of `penstock train`.
        folder: DIR.
        side_by_side: Members that train at the same time.
        timeout_s: Longest time of a member in a generation, seconds.
        dry_run: Only check the first members.
        config_dir: Folder with the user's own YAML.
        console: Told what happens.

    Raises:
        ConfigError: If a member is invalid, or the folder holds another population or is in use.
        PenstockError: If all members have died.
    """
    folder = folder.absolute()  # a branch begins in the folder of its parent, and the process stays there
    ranges, fixed = searched(overrides)
    population = Population.begin(num_members, ranges, steps_per_generation, seed)

    def note(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    grace_s, is_made_first = 25.0, False
    if trainable is None:
        grace_s, is_made_first = check_members(population, fixed, folder, config_dir, score, dry_run=dry_run, note=note)
    if dry_run:
        for member in population.members:
            note(f"{member.name}: {', '.join(_typed(member.keys))}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"overrides": list(overrides), "members": num_members, "seed": seed, "score": score}
    settings |= {"steps_per_generation": steps_per_generation, "trainable": trainable}
    members: Trainable
    if trainable is None:
        members = runs = Runs(fixed, folder, config_dir, score, timeout_s, grace_s)
        ending = runs.ending
    else:
        members, ending = cast("Trainable", load_object(trainable, "--trainable")(folder)), threading.Event()

    def train_all(train: Callable[[Member], Member], of: Sequence[Member]) -> list[Member]:
        first_alone = is_made_first and not population.generation
        return run_side_by_side(train, of, side_by_side, ending, first_alone=first_alone)

    with locked(folder, "--folder "):
        continued(population, folder, settings)
        while population.generation < generations:
            population.advance(members, note, train_all)
            write_results(population, folder, settings)
            best = population.best
            where = f"generation {population.generation} of {generations}"
            note(f"{where}: the best is {best.name}, {score} {best.score:.4g}")
    note(f"{folder / 'population.md'}, population.json, population.html")
    return 0


def searched(overrides: Sequence[str]) -> tuple[dict[str, Range], list[str]]:
    """The searched keys, and the overrides of all members.

    Raises:
        ConfigError: If nothing is searched, or a key is the population's own.
    """
    ranges: dict[str, Range] = {}
    fixed: list[str] = []
    for word in overrides:
        key, _, value = word.partition("=")
        if key in OF_A_MEMBER:
            raise ConfigError([f"{word}: a population sets {key} for each member."])
        if Range.is_one(value):
            ranges[key] = Range.parse(key, value)
        else:
            fixed.append(word)
    if not ranges:
        raise ConfigError(["Nothing is searched. Give at least one range, e.g. trainer.optimizer.lr=1e-6:1e-4."])
    return ranges, fixed


def check_members(
    population: Population,
    fixed: Sequence[str],
    folder: Path,
    config_dir: Path | None,
    score: str,
    *,
    dry_run: bool,
    note: Callable[[str], None],
) -> tuple[float, bool]:
    """Compose and check the first and the last of the first members, and whether they can be compared and go on.

    Returns:
        Their `stop_grace_s`, and whether a warm start makes the policy of all of them first.

    Raises:
        ConfigError: If one is invalid, or would end a generation without score or checkpoint.
    """
    told: dict[str, None] = {}
    for member in (population.members[0], population.members[-1]):
        own = [f"name={member.name}", f"run_dir={folder}/{member.name}", "resume=auto"]
        own += [f"total_steps={population.steps_per_generation}", *_typed(member.keys)]
        loaded = load_config("train", [*fixed, *own], config_dir=config_dir, dry_run=dry_run)
        told |= dict.fromkeys(loaded.warnings)
    if problems := list(obstacles(loaded.config, score)):
        raise ConfigError(problems)
    for warning in told:
        note(f"warning: {warning}")
    return loaded.config.stop_grace_s, loaded.warm_start is not None


def obstacles(config: RunConfig, score: str) -> Iterator[str]:
    """Yield why members would have no score at the end of a generation, or could not go on."""
    evaluation, checkpoint = config.evaluation, config.checkpoint
    if undeclared([score]):
        yield f"--score {score}: no run logs such a metric.{nearest_choice(score, list(catalog()))}"
    if score.startswith("eval/") and evaluation.num_tasks == 0 and not evaluation.sets:
        yield f"--score {score}: it is never measured with evaluation.num_tasks=0. Leave that out, or give another one."
    if evaluation.patience is not None:
        yield (
            f"evaluation.patience={evaluation.patience}: a member that ends before its generation has no score. "
            "Use evaluation.patience=null: the population ends what is no longer better."
        )
    if not (checkpoint.every_steps or checkpoint.every_minutes):
        yield (
            "checkpoint.every_minutes=0 and checkpoint.every_steps=0: there would be no checkpoint with which a branch "
            "could begin, or a member go on. Set one of them."
        )


def continued(population: Population, folder: Path, settings: Mapping[str, Any]) -> None:
    """Continue where the population of this folder was, or write the state of a new one before its first member.

    Raises:
        ConfigError: If it is another one, or holds members whose settings are unknown.
    """
    path = folder / STATE_FILE
    if not path.exists():
        if found := [member.name for member in population.members if (folder / member.name).exists()]:
            raise ConfigError(
                [
                    f"--folder {folder}: it holds {', '.join(found)}, and no {STATE_FILE} that says with which keys "
                    "they began, so they cannot be continued. Use another folder, or delete them."
                ]
            )
        write_results(population, folder, settings)
        return
    state = json.loads(path.read_text())
    if (before := state["settings"]) != dict(settings):
        different = next(key for key in settings if before.get(key) != settings[key])
        raise ConfigError(
            [
                f"--folder {folder}: it holds a population whose {different} is {before.get(different)}, and this one "
                f"has {settings[different]}. Use the same command to continue it, or another folder."
            ]
        )
    population.generation = state["generation"]
    population.members = [Member(**one) for one in state["members"]]
    population.lineage = [(generation, Member(**one)) for generation, one in state["lineage"]]


def write_results(population: Population, folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the state, a table of all members and a picture of their scores."""
    state = {
        "settings": dict(settings),
        "generation": population.generation,
        "members": [asdict(member) for member in population.members],
        "lineage": [[generation, asdict(member)] for generation, member in population.lineage],
    }
    write_text_atomically(folder / STATE_FILE, json.dumps(state, indent=2) + "\n")
    keys = list(population.ranges)
    rows = ["| step | member | begins with | " + " | ".join(keys) + " | " + settings["score"] + " |"]
    rows.append("|---" * (len(keys) + 4) + "|")
    for generation, member in population.lineage:
        origin = (
            "" if member.parent is None else f"{member.parent}, step {member.born * population.steps_per_generation}"
        )
        values = " | ".join(_written(member.keys[key]) for key in keys)
        score = "died" if member.score is None else f"{member.score:.4g}"
        rows.append(
            f"| {generation * population.steps_per_generation} | {member.name} | {origin} | {values} | {score} |"
        )
    write_text_atomically(folder / "population.md", "\n".join(rows) + "\n")
    draw(population, folder / "population.html", settings["score"])


def draw(population: Population, path: Path, score: str) -> None:
    """Draw the score of every run over its steps; a branch begins at the point of the run that it began with."""
    import plotly.graph_objects as go

    points: dict[str, list[tuple[int, float, str]]] = {}
    for generation, member in population.lineage:
        if member.score is None:
            continue
        if member.name not in points:
            at = member.born * population.steps_per_generation
            of_parent = [point for point in points.get(member.parent or "", []) if point[0] == at]
            points[member.name] = of_parent[:]
        told = "<br>".join(f"{key}={_written(value)}" for key, value in member.keys.items())
        points[member.name].append((generation * population.steps_per_generation, member.score, told))
    figure = go.Figure()
    for name, line in points.items():
        figure.add_scatter(
            x=[step for step, *_ in line],
            y=[value for _, value, _ in line],
            text=[told for *_, told in line],
            name=name,
            mode="lines+markers",
            hovertemplate="%{text}<br>" + score + " %{y:.4g} at step %{x}",
        )
    figure.update_layout(xaxis={"title": "step"}, yaxis={"title": score}, template="plotly_white", showlegend=True)
    figure.write_html(path, include_plotlyjs=True)
