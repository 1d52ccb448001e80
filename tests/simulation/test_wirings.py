"""Under heavy faults: every way to form groups, the engines' monitor, messages that get lost, ranks that die."""

from __future__ import annotations

import pytest

from penstock.platform.simulator.config import parse_simulation
from penstock.platform.simulator.simulation import simulate
from penstock.platform.simulator.sweep import Sweep, replay_command, run_seeds
from tests.simulation.wirings import simulate_wired
from tests.tiers import by_tier

SMALL = ["profile=short", "sigma=1", "engines=3", "slots=6", "batch=3", "group_size=3", "steps=6"]
SEEDS = range(by_tier(5, full=12))

WIRINGS = {
    "gangs": ["gang=true"],
    "streams with quotas": ["streams=3", "on_expiry=trim"],
    "a filter, sizes by task, survivors": ["filter_share=0.3", "sizing=true", "min_group_size=2", "max_retries=1"],
    "difficulty and stages": ["streams=3", "hooks=true"],
    "bounded bytes": ["max_live=13", "eta=3"],
    "all of it": ["gang=true", "streams=2", "filter_share=0.2", "sizing=true", "max_live=20", "eval_every=2"],
    "adaptive concurrency": ["adaptive_concurrency=true", "kv_tokens=2000"],
    "adaptive concurrency with gangs": ["adaptive_concurrency=true", "kv_tokens=2000", "gang=true"],
}

EPISODES = ["turns=3", "environments=8", "tool_mean_s=2"]
PLAYS = {
    "alone": [],
    "with rolling updates": ["update_mode=multi_version", "eval_every=2"],
    "trimmed and streamed": ["on_expiry=trim", "stream=true", "eta=1"],
    "during training": ["overlap=true", "eta=1"],
    "in gangs": ["gang=true"],
}


def swept(overrides: list[str], seeds: range) -> Sweep:
    """Run seeds. Fails with the command that replays the first violation."""
    sweep = run_seeds(parse_simulation(overrides), seeds)
    assert not sweep.failing, f"{sweep.failing[0][1]}\n  {replay_command(overrides, sweep.failing[0][0])}"
    return sweep


@pytest.mark.parametrize("wiring", WIRINGS)
def test_no_invariant_breaks_however_groups_are_formed_and_engines_are_held_back(wiring: str) -> None:
    overrides = [*SMALL, "faults=heavy", *WIRINGS[wiring]]
    for seed in SEEDS:
        assert simulate_wired(overrides, seed).violation is None, f"seed {seed} of {overrides}"


@pytest.mark.parametrize("mode", ["keep_kv", "multi_version"])
def test_messages_that_are_lost_or_come_twice_and_ranks_that_die_break_nothing(mode: str) -> None:
    faults = swept([*SMALL, "faults=heavy", f"update_mode={mode}", "eval_every=2"], range(30)).faults
    planted = ("acknowledgement lost", "score lost", "completion duplicated", "trainer crash", "bad step")
    assert all(faults[kind] > 0 for kind in (*planted, "clock skewed")), faults


@pytest.mark.parametrize("play", PLAYS)
def test_no_invariant_breaks_over_episodes_whose_environments_raise_and_hang(play: str) -> None:
    faults = swept([*SMALL, "faults=heavy", *EPISODES, *PLAYS[play]], range(by_tier(6, full=12))).faults
    assert faults["environment exception"] > 0
    assert faults["environment hang"] > 0


def test_engines_that_hold_fewer_requests_preempt_less() -> None:
    lengths = ["profile=short", "grain=1", "prompt_tokens=16", "mean_tokens=800"]
    short_of_memory = [*lengths, "engines=2", "slots=32", "batch=16", "steps=8", "kv_tokens=8000"]
    free, held_back = (
        simulate(parse_simulation([*short_of_memory, f"adaptive_concurrency={adapts}"]), 0)
        for adapts in ("false", "true")
    )
    assert free.violation is None
    assert held_back.violation is None
    assert 0 < held_back.engines.preempted < free.engines.preempted / 2
