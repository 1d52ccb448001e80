"""Populations: who is replaced by whom, with which keys; full at the end, and better than independent runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.platform.checks.load import compose_config
from penstock.platform.cli import child
from penstock.platform.cli import population as population_command
from penstock.platform.cli.population import Runs, check_members, obstacles, run_population, searched
from penstock.platform.metrics.trackers.jsonl import JsonlTracker
from penstock.platform.run.population import Keys, Member, Population, Range
from penstock.platform.run.run_dir import locked

RATE = {"lr": Range(1e-5, 1e-1)}


def one_after_the_other(train: Callable[[Member], Member], members: Sequence[Member]) -> list[Member]:
    return [train(member) for member in members]


class Scored:
    """Members whose score is given by their name; it records what it is asked for."""

    def __init__(self, scores: dict[str, float] | None = None, deaths: Counter[str] | None = None) -> None:
        self.scores = scores or {}
        self.deaths = deaths or Counter()
        self.branches: list[tuple[str, str, int]] = []
        self.trained: list[tuple[str, int]] = []

    def branch(self, parent: str, name: str, step: int, keys: Keys) -> None:
        self.branches.append((parent, name, step))

    def train(self, name: str, step: int, keys: Keys) -> float:
        if self.deaths[name] > 0:
            self.deaths[name] -= 1
            raise PenstockError("planted")
        self.trained.append((name, step))
        return self.scores.get(name, 0.5)


def advance(population: Population, trainable: Scored, times: int = 1) -> list[str]:
    notes: list[str] = []
    for _ in range(times):
        population.advance(trainable, notes.append, one_after_the_other)
    return notes


def test_the_first_members_cover_the_range() -> None:
    values = sorted(member.keys["lr"] for member in Population.begin(4, RATE, 10, seed=3).members)
    assert [value < bound for value, bound in zip(values, (1e-4, 1e-3, 1e-2, 1e-1), strict=True)] == [True] * 4
    assert [value >= bound for value, bound in zip(values, (1e-5, 1e-4, 1e-3, 1e-2), strict=True)] == [True] * 4


def test_the_worst_goes_on_from_the_best_at_their_step_with_other_keys() -> None:
    population = Population.begin(4, RATE, 10, seed=0)
    trainable = Scored({"member2": 0.9, "member1": 0.1})
    advance(population, trainable, 2)
    assert trainable.branches == [("member2", "member1-1", 10)]
    assert sorted(trainable.trained) == sorted(
        [(f"member{slot}", 10) for slot in range(4)]
        + [(f"member{slot}", 20) for slot in (0, 2, 3)]
        + [("member1-1", 20)]
    )
    new, parent = population.members[1], population.members[2]
    assert new.keys["lr"] != parent.keys["lr"]
    assert 1e-5 <= new.keys["lr"] <= 1e-1
    assert population.best.name == "member2"


def test_a_perturbed_key_is_a_factor_away_or_drawn_anew() -> None:
    factors = []
    for seed in range(400):
        population = Population.begin(2, RATE, 1, seed)
        advance(population, Scored({"member0": 1.0}))
        kept, new = population.chosen()
        assert new.parent == kept.name
        factors.append(new.keys["lr"] / kept.keys["lr"])
    num_perturbed = sum(min(abs(factor - 0.8), abs(factor - 1.25)) < 1e-9 for factor in factors)
    assert 0.68 < num_perturbed / len(factors) <= 0.80  # 3/4, less those at an end of the range


def test_a_member_that_dies_once_goes_on_and_one_that_dies_again_is_replaced() -> None:
    population = Population.begin(4, RATE, 5, seed=0)
    trainable = Scored({"member3": 0.9, "member0": 0.2}, Counter(member0=1, member1=2))
    notes = advance(population, trainable)
    assert [member.score for member in population.members] == [0.2, None, 0.5, 0.9]
    assert sum("has died" in note for note in notes) == 3
    advance(population, trainable)
    assert [member.score is not None for member in population.members] == [True] * 4, "it is full again"
    assert {name for _, name, _ in trainable.branches} == {"member1-1"}, "the dead one took the place of the worst"


def test_a_branch_that_cannot_begin_counts_as_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    population = Population.begin(4, RATE, 10, seed=0)
    trainable = Scored({"member2": 0.9, "member1": 0.1})
    advance(population, trainable)

    def failing(parent: str, name: str, step: int, keys: Keys) -> None:
        raise PenstockError("there is no checkpoint of step 10")

    with monkeypatch.context() as patch:
        patch.setattr(trainable, "branch", failing)
        notes = advance(population, trainable)
    assert "member1-1 could not begin" in notes[-1]
    assert [member.score for member in population.members] == [0.5, None, 0.9, 0.5]
    advance(population, trainable)
    assert trainable.branches == [("member2", "member1-2", 20)]
    assert {name for name, _ in trainable.trained} == {"member0", "member1", "member2", "member3", "member1-2"}


def test_a_score_that_is_not_finite_is_none_and_begins_no_branch() -> None:
    population = Population.begin(4, RATE, 10, seed=0)
    trainable = Scored({"member0": math.nan, "member2": 0.9, "member3": math.inf})
    notes = advance(population, trainable)
    assert [member.score for member in population.members] == [None, 0.5, 0.9, None]
    assert "member0 has the score nan" in notes[0]
    assert population.best.name == "member2"
    assert len(trainable.trained) == 4, "it would have the same score again"
    advance(population, trainable)
    assert {(parent, name) for parent, name, _ in trainable.branches} == {
        ("member2", "member0-1"),
        ("member2", "member3-1"),
    }


def test_the_end_of_a_population_is_no_death_of_its_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_PROGRAM", "import time; time.sleep(60)")
    runs = Runs([], tmp_path, None, "reward/mean", 60.0, 1.0)
    population = Population.begin(3, RATE, 10, seed=0)
    notes: list[str] = []

    def interrupted(train: Callable[[Member], Member], members: Sequence[Member]) -> list[Member]:
        def one(member: Member) -> Member:
            if member.slot == 0:
                raise KeyboardInterrupt
            return train(member)

        return child.run_side_by_side(one, members, 3, runs.ending, first_alone=False)

    with pytest.raises(KeyboardInterrupt):
        population.advance(runs, notes.append, interrupted)
    assert notes == []


def test_it_ends_only_when_all_have_died() -> None:
    population = Population.begin(2, RATE, 5, seed=0)
    with pytest.raises(PenstockError, match="all 2 members have died in generation 0"):
        advance(population, Scored(deaths=Counter(member0=9, member1=9)))


def quadratic(folder: Path, seed: int, generations: int, *, out: Console | None = None) -> None:
    done = run_population(
        ["lr=1e-3:1"],
        num_members=4,
        generations=generations,
        steps_per_generation=10,
        seed=seed,
        score="minus_loss",
        trainable="examples.quadratic_member:Quadratic",
        folder=folder,
        side_by_side=1 + seed % 2,
        timeout_s=10.0,
        dry_run=False,
        config_dir=None,
        console=out or Console(quiet=True),
    )
    assert done == 0


@pytest.mark.full
def test_a_population_beats_independent_members_at_equal_steps(tmp_path: Path) -> None:
    from examples.quadratic_member import Quadratic

    wins = 0
    for seed in range(10):
        folder, alone = tmp_path / f"{seed}", tmp_path / f"{seed}-alone"
        alone.mkdir()
        quadratic(folder, seed, 12)
        state = json.loads((folder / "population.json").read_text())
        first = Population.begin(4, {"lr": Range(1e-3, 1.0)}, 10, seed).members
        independent = max(Quadratic(alone).train(member.name, 120, member.keys) for member in first)
        wins += max(member["score"] for member in state["members"]) > independent
    assert wins >= 8


def test_an_interrupted_population_continues_as_if_it_had_not_been(tmp_path: Path) -> None:
    quadratic(tmp_path / "whole", 4, 6)
    quadratic(tmp_path / "cut", 4, 3)
    quadratic(tmp_path / "cut", 4, 6)
    assert (tmp_path / "whole" / "population.md").read_text() == (tmp_path / "cut" / "population.md").read_text()
    table = (tmp_path / "whole" / "population.md").read_text()
    assert table.startswith("| step | member | begins with | lr | minus_loss |")
    assert table.count("\n| 60 | ") == 4
    assert "step 10 |" in table
    assert "plotly" in (tmp_path / "whole" / "population.html").read_text()
    with pytest.raises(ConfigError, match="it holds a population whose seed is 4, and this one has 6"):
        quadratic(tmp_path / "cut", 6, 6)


def test_a_branch_that_changes_the_directory_does_not_move_the_population(tmp_path: Path, monkeypatch) -> None:
    from examples.quadratic_member import Quadratic

    def branch(self: Quadratic, *parent: Any) -> None:
        os.chdir("/")
        of_class(self, *parent)

    quadratic(tmp_path / "whole", 4, 3)
    of_class = Quadratic.branch
    monkeypatch.setattr(Quadratic, "branch", branch)
    monkeypatch.chdir(tmp_path)
    quadratic(Path("relative"), 4, 3)
    assert (tmp_path / "whole" / "population.md").read_text() == (tmp_path / "relative" / "population.md").read_text()


def test_a_member_ends_with_a_population_that_is_killed(tmp_path: Path) -> None:
    program = """
from penstock.platform.cli import child
child._PROGRAM = child._PROGRAM.replace("\\nmain()", "\\nimport time; print('begun', flush=True); time.sleep(60)")
with child.process_of([], 1.0) as process:
    print(process.pid, flush=True)
    process.wait()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as population:
        assert population.stdout is not None
        member = psutil.Process(int(population.stdout.readline()))
        assert population.stdout.readline() == "begun\n"
        population.kill()
    member.wait(10)


def test_a_population_that_ends_in_its_first_generation_is_known_by_its_settings(tmp_path: Path, monkeypatch) -> None:
    from examples.quadratic_member import Quadratic

    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Quadratic, "train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quadratic(tmp_path, 4, 1)
    with pytest.raises(ConfigError, match="it holds a population whose seed is 4, and this one has 6"):
        quadratic(tmp_path, 6, 1)
    quadratic(tmp_path, 4, 1)


def test_two_populations_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(ConfigError, match=rf"--folder {tmp_path} is in use by process {os.getpid()} on"),
    ):
        quadratic(tmp_path, 4, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("score", "of_set", "found"),
    [("eval/accuracy", "", 0.7), ("eval/accuracy/long", "/long", 0.7), ("reward/mean", "", 0.3)],
)
def test_an_evaluation_of_an_older_policy_is_no_score(
    tmp_path: Path, monkeypatch, score: str, of_set: str, found: float
) -> None:
    run_dir = tmp_path / "member0"
    tracker = JsonlTracker(run_dir)
    tracker.log(20, {"reward/mean": 0.3})
    tracker.log(20, {f"eval/accuracy{of_set}": 0.9, f"eval/version_min{of_set}": 10})  # it ended while v20 was reached
    commands = []

    def run(words: list[str], *_: object) -> None:
        commands.append(words)
        tracker.log(20, {f"eval/accuracy{of_set}": 0.7, f"eval/version_min{of_set}": 20})

    monkeypatch.setattr(population_command, "run_penstock", run)
    assert Runs([], tmp_path, None, score, 10.0, 25.0).train("member0", 20, {"lr": 0.1}) == found
    assert len(commands) == (score != "reward/mean")


def test_members_of_an_unknown_population_are_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "member1").mkdir()
    with pytest.raises(ConfigError, match=r"it holds member1, and no population\.json"):
        quadratic(tmp_path, 4, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["experiment=arithmetic"], "Nothing is searched"),
        (["trainer.optimizer.lr=1e-4:1e-6"], "has a range LOW:HIGH"),
        (["trainer.optimizer.lr=1e-4:inf"], "has a range LOW:HIGH"),
        (["trainer.optimizer.lr=1e-4:x"], "Nothing is searched"),
        (["trainer.optimizer.lr=1e-6:1e-4", "name=mine"], "a population sets name for each member"),
    ],
)
def test_what_is_no_search_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        searched(words)


def test_what_would_leave_members_without_score_or_checkpoint_is_refused_before_the_first(tmp_path: Path) -> None:
    words = ["experiment=arithmetic", "trainer.optimizer.lr=1e-6:1e-4", "evaluation.patience=2"]
    ranges, fixed = searched([*words, "checkpoint.every_minutes=0"])
    with pytest.raises(ConfigError) as refused:
        check_members(
            Population.begin(4, ranges, 10, 0), fixed, tmp_path, None, "eval/acuracy", dry_run=True, note=print
        )
    misspelt, ends_early, without_checkpoint = refused.value.violations
    assert "no run logs such a metric. Did you mean eval/accuracy?" in misspelt
    assert "evaluation.patience=2: a member that ends before its generation has no score" in ends_early
    assert "no checkpoint with which a branch could begin" in without_checkpoint


def test_only_a_score_of_evaluations_needs_them() -> None:
    config = compose_config(["experiment=arithmetic", "evaluation.num_tasks=0"])
    assert list(obstacles(config, "reward/mean")) == []
    (unmeasured,) = obstacles(config, "eval/accuracy")
    assert "never measured with evaluation.num_tasks=0" in unmeasured
    assert list(obstacles(compose_config(["experiment=arithmetic"]), "eval/accuracy")) == []


def test_words_with_a_colon_that_are_no_ranges_are_overrides() -> None:
    words = ["reward.fn=module:function", "env.args.url=http://host:80", "env.args.server=10.0.0.1:8000"]
    ranges, fixed = searched([*words, "trainer.optimizer.lr=1e-6:1e-4"])
    assert (list(ranges), fixed) == (["trainer.optimizer.lr"], words)
