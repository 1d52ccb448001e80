"""The number of redundant groups that is adapted: what it settles on, and that it is a function of its inputs."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.staleness import FlowLimits
from penstock.dataflow.surplus import AdaptiveSurplus


def played(
    search: AdaptiveSurplus,
    seconds: dict[int, float],
    *,
    steps: int,
    seed: int = 0,
    spread: float = 0.2,
    waits: float = 1.0,
) -> tuple[list[int], float]:
    """The numbers that were used, and mean seconds of a version; `seconds` is m(s)."""
    rng, used, total = random.Random(seed), [], 0.0
    for _ in range(steps):
        used.append(search.surplus)
        step_s = seconds[search.surplus] * rng.gammavariate(1 / spread**2, spread**2)
        total += step_s
        search.observe(step_s, waits * step_s)
    return used, total / steps


@pytest.mark.parametrize(
    ("largest", "levels"),
    [(0, (0,)), (1, (0, 1)), (2, (0, 1, 2)), (3, (0, 1, 2, 3)), (8, (0, 1, 2, 4, 8)), (9, (0, 1, 2, 4, 8, 9))],
)
def test_levels_are_doubled_up_to_the_largest(largest: int, levels: tuple[int, ...]) -> None:
    assert AdaptiveSurplus(largest, 0).levels == levels


LANDSCAPES = {
    "stragglers": {0: 1.0, 1: 0.8, 2: 0.72, 4: 0.65, 8: 0.6},
    "full engines": {0: 1.0, 1: 1.04, 2: 1.08, 4: 1.15, 8: 1.3},
    "both": {0: 1.0, 1: 0.9, 2: 0.87, 4: 0.9, 8: 1.0},
}


@pytest.mark.parametrize("name", LANDSCAPES)
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_versions_are_nearly_as_fast_as_with_the_best_number(name: str, max_staleness: int) -> None:
    """Over whole runs, the tries included; the mean of twenty seeds."""
    seconds = LANDSCAPES[name]
    found = [played(AdaptiveSurplus(8, max_staleness), seconds, steps=200, seed=seed)[1] for seed in range(20)]
    assert sum(found) / len(found) < 1.05 * min(seconds.values())


def test_of_numbers_that_are_as_fast_the_smallest_is_used() -> None:
    used, _ = played(AdaptiveSurplus(8, 0), dict.fromkeys(LANDSCAPES["both"], 1.0), steps=300, spread=0.02)
    assert used[0] == 8
    assert sum(used[100:]) / 200 < 0.5


def test_nothing_is_tried_while_the_trainer_does_not_wait() -> None:
    """Not even a number that would look faster by chance."""
    used, _ = played(AdaptiveSurplus(8, 0), dict.fromkeys(LANDSCAPES["both"], 1.0), steps=300, spread=0.02, waits=0.0)
    assert used.index(0) < 20
    assert set(used[50:]) == {0}


def test_it_follows_lengths_that_change() -> None:
    search = AdaptiveSurplus(8, 0)
    played(search, LANDSCAPES["full engines"], steps=200, spread=0.1)
    used, _ = played(search, LANDSCAPES["stragglers"], steps=300, spread=0.1)
    assert sum(used[200:]) / 100 > 4


def test_a_version_that_took_for_ever_does_not_decide_for_long() -> None:
    seconds, search = LANDSCAPES["stragglers"], AdaptiveSurplus(8, 0)
    played(search, seconds, steps=100, spread=0.05)
    search.observe(1000.0, 1000.0)
    used, _ = played(search, seconds, steps=150, spread=0.05)
    assert set(used[:60]) <= {2, 4, 8}, "not far from the best"
    assert used[-60:].count(8) > 50


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_a_search_that_was_saved_goes_on_as_the_one_that_was_not(max_staleness: int) -> None:
    rng = random.Random(1)
    whole, resumed = AdaptiveSurplus(6, max_staleness), AdaptiveSurplus(6, max_staleness)
    for number in range(150):
        step_s = rng.lognormvariate(0, 0.4)
        whole.observe(step_s, step_s / 3)
        resumed.observe(step_s, step_s / 3)
        assert whole.surplus == resumed.surplus
        if number % 5 == 0:
            saved, resumed = json.loads(json.dumps(resumed.state_dict())), AdaptiveSurplus(6, max_staleness)
            resumed.load_state_dict(saved)
    assert vars(whole) == vars(resumed)


def test_a_search_with_another_largest_number_begins_again() -> None:
    saved = AdaptiveSurplus(4, 0)
    played(saved, {0: 1.0, 1: 1.1, 2: 1.2, 4: 1.3}, steps=50)
    search = AdaptiveSurplus(6, 0)
    search.load_state_dict(saved.state_dict())
    assert vars(search) == vars(AdaptiveSurplus(6, 0))


@pytest.mark.parametrize(("max_staleness", "per_try"), [(0, 2), (3, 5), (50, 6)])
def test_a_try_lasts_some_versions(max_staleness: int, per_try: int) -> None:
    used, _ = played(AdaptiveSurplus(8, max_staleness), LANDSCAPES["both"], steps=120)
    changes = [number for number, (one, other) in enumerate(pairwise(used)) if one != other]
    assert changes[0] == per_try - 1
    assert min(later - earlier for earlier, later in pairwise(changes)) == per_try


def test_the_core_admits_and_drops_as_many_as_were_chosen() -> None:
    core = Dataflow(FlowLimits(2, 0, 100, 3, adapts_surplus=True), GroupRules(2, 2, 1))
    assert (core.surplus, core.free_credits) == (3, 5)
    assert core.surplus_search is not None
    while core.surplus:
        core.adapt_surplus(1.0, 0.0)
    assert core.free_credits == 2
    other = Dataflow(core.limits, core.rules)
    other.load_state_dict(json.loads(json.dumps(core.state_dict())), {})
    assert (other.surplus, other.free_credits) == (0, 2)
