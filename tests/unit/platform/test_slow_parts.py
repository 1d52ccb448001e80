"""Who is named as slow, and who is not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import EngineLoad
from penstock.platform.run.engine_monitor import LEAST_BUSY_S, SPEED_WINDOW_S, WARM_UP_S, EngineSpeed
from penstock.platform.run.slow_parts import PRODUCT, SlowParts, Speed, slow_ones
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.simulation import simulate
from penstock.platform.simulator.trainer import RATE_SIGMA


class Ranks:
    """Rates of ranks as a run measures them, step by step."""

    def __init__(self, num_ranks: int, seed: int) -> None:
        self.speeds = [1.0] * num_ranks
        self.parts = SlowParts()
        self.step = 0
        self._rng = random.Random(seed)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            rates = {
                f"{PRODUCT}{rank}": speed * self._rng.lognormvariate(0.0, RATE_SIGMA)
                for rank, speed in enumerate(self.speeds)
            }
            self.parts.observe(self.step, rates, {}, equal_engines=True)


@pytest.mark.some(1)
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("healthy_steps", [0, 25, 300])
def test_a_rank_at_half_its_speed_is_named_within_20_steps(num_ranks: int, healthy_steps: int) -> None:
    if num_ranks == 1 and not healthy_steps:
        pytest.skip("nothing to compare it to")
    for seed in range(50):
        ranks = Ranks(num_ranks, seed)
        ranks.train(healthy_steps)
        ranks.speeds[-1] = 0.5
        ranks.train(20)
        assert list(ranks.parts.named) == [f"trainer rank {num_ranks - 1}"]


@pytest.mark.some(1)
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_of_10_000_healthy_steps_hardly_any_names_a_rank(num_ranks: int) -> None:
    runs = [Ranks(num_ranks, seed) for seed in range(100)]
    for ranks in runs:
        ranks.train(100)
    assert sum(len(ranks.parts.named) for ranks in runs) <= 10_000 * 0.01 / 100


def test_it_is_said_once_with_both_numbers() -> None:
    said: list[str] = []
    parts = SlowParts(said.append)
    for version in range(30):
        parts.observe(version, {f"{PRODUCT}0": 60.0, f"{PRODUCT}1": 30.0}, {}, equal_engines=True)
    (sentence,) = said
    assert sentence == parts.named["trainer rank 1"]
    assert "30 TFLOP/s" in sentence
    assert "0.50 of the median of the other ranks (60)" in sentence


@pytest.mark.full
def test_a_simulated_rank_of_half_the_speed_is_named_and_slows_every_step() -> None:
    healthy, slowed = (
        simulate(SimulationConfig(steps=20, rank_speeds=speeds, train_s_per_token=1e-2), 0)
        for speeds in ((1.0,), (1.0, 1.0, 1.0, 0.5))
    )
    assert healthy.slow_parts == {}
    assert list(slowed.slow_parts) == ["trainer rank 3"]
    assert slowed.train_s > 1.5 * healthy.train_s


LOADED, LIGHT = Speed((400.0, 10.0), (400.0, 10.0)), Speed((60.0, 30.0), (60.0, 30.0))
SLOW = Speed((130.0, 3.3), (400.0, 10.0))


def test_an_engine_is_slow_if_both_its_rates_are_low() -> None:
    assert list(slow_ones({"a": LOADED, "b": LOADED, "c": SLOW}, depends_on_work=True)) == ["c"]
    assert list(slow_ones({"a": LOADED, "b": SLOW}, depends_on_work=True)) == ["b"]
    assert not slow_ones({"a": LOADED, "b": LIGHT, "c": LIGHT}, depends_on_work=True), "they have less to do"


def test_engines_of_unequal_pools_are_compared_to_what_they_were() -> None:
    old = Speed((100.0, 2.0), (100.0, 2.0))
    assert not slow_ones({"new": LOADED, "old": old}, depends_on_work=True, are_equal=False)
    slowed = Speed((30.0, 0.6), (100.0, 2.0))
    assert list(slow_ones({"new": LOADED, "old": slowed}, depends_on_work=True, are_equal=False)) == ["old"]


def test_longer_prompts_make_all_engines_slower_and_name_none() -> None:
    assert not slow_ones({"a": SLOW, "b": SLOW, "c": SLOW}, depends_on_work=True)
    assert set(slow_ones({"a": SLOW, "b": SLOW}, depends_on_work=False)) == {"a", "b"}, "a product is the same for all"


def test_the_speed_of_an_engine_is_that_of_its_newest_busy_minute() -> None:
    speed = EngineSpeed()
    load = EngineLoad(0, 4, 0, 0.5, tokens_generated=0, busy_s=0.0)
    seen = []
    for second in range(300):
        fast = second < 200
        tokens = load.tokens_generated + (100 if fast else 25)
        load = replace(load, tokens_generated=tokens, busy_s=second + 1.0, request_s=4.0 * (second + 1))
        speed.observe(float(second), load)
        seen.append(speed.measured())
    first = next(second for second, one in enumerate(seen) if one is not None)
    assert first == WARM_UP_S + SPEED_WINDOW_S - 1, "seconds, all of them busy"
    assert seen[first] == Speed((100.0, 25.0), None)
    assert seen[-1] == Speed((25.0, 6.25), pytest.approx((100.0, 25.0), rel=0.2))
    alone = {EngineId("a"): seen[-1]}
    assert not slow_ones(alone, depends_on_work=True), "its answers may have become shorter"
    assert list(slow_ones(alone, depends_on_work=False)) == ["a"]


def test_an_engine_that_is_often_idle_is_measured_over_a_longer_time() -> None:
    speed = EngineSpeed()
    busy = LEAST_BUSY_S / SPEED_WINDOW_S / 2
    for second in range(1000):
        tokens, busy_s = 100 * second, WARM_UP_S + busy * second
        speed.observe(float(second), EngineLoad(0, 1, 0, 0.5, tokens, busy_s, request_s=busy_s))
        assert (speed.measured() is None) == (second < 2 * SPEED_WINDOW_S), second
    assert len(speed._polls) <= 2 * SPEED_WINDOW_S + 2
    for second in range(1000, 2000):  # nothing to do for long
        speed.observe(float(second), EngineLoad(0, 0, 0, 0.0, tokens, busy_s, request_s=busy_s))
    assert len(speed._polls) <= 2 * SPEED_WINDOW_S + 2
