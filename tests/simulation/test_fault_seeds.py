"""The shipping controller under random faults, and the bound over η, policies and tails. Each seed is a bug report."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from tests.simulation.config import parse_faulty
from tests.simulation.configurations import CONFIGURATIONS, EPISODES, SMALL, seeds_of, violation
from tests.simulation.simulation import simulate
from tests.simulation.sweep import Sweep, replay_command, run_seeds
from tests.tiers import by_tier, each_of

ROOT = Path(__file__).parents[2]
NUM_SEEDS = by_tier(68, full=1000)
"""`make soak` runs 10,000."""
FAULTS = {
    "engine crash",
    "engine hang",
    "engine slow",
    "process hang",
    "all engines lost",
    "engine killed for memory",
    "engine start failed",
    "catch-up refused",
    "publish refused",
    "engines joined",
    "engines left",
    "node drained",
    "reward exception",
    "reward hang",
    "trainer crash",
    "rank hang",
    "bad step",
    "message lost",
    "acknowledgement lost",
    "completion delayed",
    "completion duplicated",
    "reward worker death",
    "reward worker hang",
    "stray report",
    "environment exception",
    "environment hang",
    "driver crash",
    "stall of the driver",
    "full disk",
    "poison prompt",
    "driver crash at the disk",
    "clock skewed",
}


@pytest.mark.some(6)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_invariant_breaks_under_faults(name: str) -> None:
    found = [found for seed in seeds_of(name, NUM_SEEDS) if (found := violation(name, seed)) is not None]
    assert not found, "\n".join(found[:3])


def test_the_fault_seeds_are_shared_out_over_the_configurations() -> None:
    assert sum(len(seeds_of(name, 1000)) for name in CONFIGURATIONS) == 1000


@pytest.mark.full
def test_every_kind_of_fault_is_planted() -> None:
    """A fault that never happens proves nothing."""
    sweep = run_seeds(parse_faulty([*EPISODES, "eval_every=2"]), range(1000, 1024))
    assert not sweep.failing, sweep.failing[0]
    assert sweep.faults.keys() >= FAULTS, FAULTS - sweep.faults.keys()
    assert sweep.ignored_reports > 0


def clean(overrides: list[str], seeds: range) -> Sweep:
    """Run seeds without a violation, or fail with the command that replays the first."""
    sweep = run_seeds(parse_faulty(overrides), seeds)
    failing = [f"{violation}\n  {replay_command(overrides, seed)}" for seed, violation in sweep.failing]
    assert not failing, "\n".join(failing[:3])
    assert sweep.ended["trained"] == len(seeds) * sweep.config.steps * sweep.config.batch
    return sweep


@pytest.mark.some(1)
@pytest.mark.parametrize(("eta", "policy"), each_of([0, 1, 2, 4, 8], ["wait", "trim", "drop"]))
def test_trained_staleness_never_exceeds_eta(eta: int, policy: str) -> None:
    small = ["batch=3", "group_size=2", "engines=2", "slots=8", "steps=20", f"eta={eta}", f"on_expiry={policy}"]
    seen = [clean([*small, f"sigma={sigma}"], range(3)) for sigma in (0.5, 1.0, 1.5)]
    assert max(sweep.max_staleness_seen for sweep in seen) <= eta


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    config = parse_faulty([*SMALL, "faults=heavy"])
    first, second, other = simulate(config, 7), simulate(config, 7), simulate(config, 8)
    assert first.trace_hash == second.trace_hash
    assert first.num_turns == second.num_turns
    assert other.trace_hash != first.trace_hash


@pytest.mark.full
def test_the_trace_does_not_depend_on_how_python_hashes_strings() -> None:
    script = (
        "from tests.simulation.config import parse_faulty\n"
        "from tests.simulation.simulation import simulate\n"
        f"print(simulate(parse_faulty({[*SMALL, 'faults=heavy']!r}), 7).trace_hash)"
    )
    runs = [
        Popen(
            [sys.executable, "-c", script], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=PIPE, text=True
        )
        for seed in ("1", "4242")
    ]
    traces = {run.communicate()[0].strip() for run in runs}
    assert traces == {simulate(parse_faulty([*SMALL, "faults=heavy"]), 7).trace_hash}


def test_every_policy_sees_the_same_lengths() -> None:
    runs = [simulate(parse_faulty([*SMALL, f"eta={eta}"]), 3) for eta in (0, 2)]
    assert sorted(runs[0].trained.lengths) == sorted(runs[1].trained.lengths)


LONG_RUN = ["batch=4", "group_size=4", "engines=2", "slots=16", "steps=60", "sigma=1"]


@pytest.mark.some(1)
@pytest.mark.parametrize("eta", [1, 2])
@pytest.mark.parametrize("policy", ["wait", "trim"])
def test_waiting_and_trimming_train_the_lengths_that_are_there(policy: str, eta: int) -> None:
    sweep = run_seeds(parse_faulty([*LONG_RUN, f"on_expiry={policy}", f"eta={eta}"]), range(1))
    assert sweep.bias.length_bias is not None
    assert sweep.bias.kept_p99 is not None
    assert sweep.bias.length_bias == pytest.approx(1.0, abs=0.05)
    assert sweep.bias.kept_p99 >= 0.95
    if policy == "wait":
        assert (sweep.bias.length_bias, sweep.bias.kept_p99) == pytest.approx((1.0, 1.0))


@pytest.mark.full
def test_dropping_is_biased_to_short_answers() -> None:
    bias = run_seeds(parse_faulty([*LONG_RUN, "on_expiry=drop", "eta=1"]), range(1)).bias
    assert bias.length_bias is not None
    assert bias.kept_p99 is not None
    assert bias.length_bias < 0.98
    assert bias.kept_p99 < 0.95
