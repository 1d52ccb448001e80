"""`penstock simulate`, and the comparisons of benchmarks/comparisons.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.comparisons import (
    LONGTAIL,
    MODELS,
    busy_step_s,
    prefix_routing,
    redundant_groups,
    rollout_granularity,
    split,
    step_seconds,
    with_train_share,
)
from penstock.dataflow.errors import ConfigError
from penstock.platform.cli.main import app
from penstock.platform.cli.simulate import parse_seeds
from penstock.platform.simulator.config import parse_simulation

ROOT = Path(__file__).parents[2]
SMALL = ["profile=short", "pools=2x8+1", "batch=2", "group_size=2", "steps=4"]


def run_sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The seeds with faults of `make simulate-faults`."""
    program = [sys.executable, "-m", "tests.simulation.sweep", *arguments]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def test_faults_are_no_key_of_the_command() -> None:
    with pytest.raises(ConfigError, match="faults: unknown key"):
        parse_simulation(["faults=light"])


def test_the_last_line_is_one_json_object_with_what_was_promised() -> None:
    result = CliRunner().invoke(app, ["simulate", *SMALL, "--seeds", "0:3", "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout.splitlines()[-1])
    promised = "seeds violations first_failing_seed groups max_staleness_seen length_bias kept_p99 wall_s"
    assert {*promised.split(), "speedup_over_synchronous"} <= figures.keys()
    assert (figures["seeds"], figures["violations"], figures["groups"]) == (3, 0, 24)


@pytest.mark.full
def test_the_speedup_compares_runs_with_the_same_faults() -> None:
    result = run_sweep(*SMALL, "eta=0", "faults=heavy", "--seeds", "3", "--json")
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["speedup_over_synchronous"] == 1.0
    assert figures["faults"]
    result = CliRunner().invoke(app, ["simulate", *SMALL, "steps=40", "eta=2", "--seeds", "3", "--json"])
    assert json.loads(result.stdout.splitlines()[-1])["speedup_over_synchronous"] > 1.05


def test_a_violation_exits_1_and_prints_the_command_that_replays_it() -> None:
    result = CliRunner().invoke(app, ["simulate", *SMALL, "batch_timeout_s=0.001", "--seeds", "4:6", "--json"])
    assert result.exit_code == 1
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["first_failing_seed"] == 4
    assert figures["replay"].endswith("batch_timeout_s=0.001 --seeds 4:5 --trace")


def test_mistakes_are_named_all_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_simulation(["profil=short", "eta=-1", "pools=3", "steps"])
    assert len(raised.value.violations) == 4
    assert any("Did you mean profile?" in violation for violation in raised.value.violations)


def test_keys_that_contradict_each_other_are_named() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_simulation(["colocated=true", "eta=1", "min_group_size=5", "max_live=15", "engine_speeds=1,1,1,1,2"])
    assert len(raised.value.violations) == 4
    with pytest.raises(ConfigError) as raised:
        parse_simulation(["surplus=auto", "on_expiry=drop", "stream=true"])
    assert len(raised.value.violations) == 2, "as in training"


def test_seeds_are_a_range_or_one_seed() -> None:
    assert parse_seeds("3:5") == range(3, 5)
    assert parse_seeds("7") == range(7, 8)
    with pytest.raises(ConfigError):
        parse_seeds("5:5")


@pytest.mark.full
def test_members_on_the_engine_of_their_prefix_finish_sooner_than_on_any_idle_one() -> None:
    figures = prefix_routing(range(1))
    assert 1.2 <= figures["ratio"] <= figures["ceiling"]
    assert figures["prefix_aware"]["recomputed_prefix_share"] <= 0.3


@pytest.mark.full
def test_redundant_groups_raise_the_useful_rate_under_exponential_stragglers() -> None:
    figures = redundant_groups(range(1))
    assert 1.15 <= figures["b=1"]["ratio"] <= figures["b=4"]["ratio"] <= figures["ceiling"]


@pytest.mark.full
def test_environments_are_busy_without_a_barrier() -> None:
    figures = rollout_granularity(range(1))
    assert 0.8 <= figures["eta=4"]["utilisation"] <= figures["ceiling"]["utilisation"]
    assert figures["eta=4"]["ratio"] >= 2.0


@pytest.mark.full
def test_asynchrony_pays_against_the_best_synchronous_arrangement() -> None:
    """One model, one split and one seed of async-vs-sync, where a streamed split is the best of seven."""
    base = with_train_share({**LONGTAIL, **MODELS["constant step"]})
    synchronous = step_seconds(split(base, 26, eta=0, stream=True), range(1))
    speed = {eta: synchronous / step_seconds(split(base, 26, eta=eta, stream=True), range(1)) for eta in (2, 4)}
    assert speed[2] >= 2.5
    assert speed[4] >= 2.8


@pytest.mark.full
def test_updates_in_flight_pay_against_draining() -> None:
    flight = split(with_train_share({**LONGTAIL, **MODELS["constant step"]}), 24, eta=1)
    drain = flight.model_copy(update={"update_mode": "drain"})
    drain_s = step_seconds(drain, range(1))
    assert 1.5 <= drain_s / step_seconds(flight, range(1)) <= drain_s / busy_step_s(flight)
