"""What the controller itself costs, by what a clock has no part in: bytes held, and calls made."""

from __future__ import annotations

import cProfile
import pstats

import pytest

from benchmarks.controller_load import GROUP_SIZE, AnsweringClient, held_kib, load_config
from penstock.platform.simulator.engine_processes import EngineClasses
from penstock.platform.simulator.simulation import Parts, simulate


@pytest.mark.full
def test_a_live_group_holds_at_most_24_kib_beyond_what_asyncio_takes() -> None:
    group_kib, bare_kib = held_kib()
    assert group_kib - bare_kib <= 24.0, f"{group_kib:.2f} KiB per group of {GROUP_SIZE}, {bare_kib:.2f} bare"


@pytest.mark.full
def test_a_completion_takes_no_more_calls_with_more_live_groups() -> None:
    calls(100, steps=1)  # what is loaded and cached at the first time is no completion's
    few, many = calls(100, steps=8), calls(400, steps=2)
    assert many <= few, f"{few:.0f} calls per completion with 100 live groups, {many:.0f} with 400"


def calls(live_groups: int, steps: int) -> float:
    """Of Python functions, generators and builtins per completion; the same in every run."""
    few_engines = {"engines": 1, "slots": live_groups * GROUP_SIZE}  # each is some work in every step
    config = load_config(live_groups).model_copy(update={"steps": steps, **few_engines})
    profile = cProfile.Profile()
    with profile:
        outcome = simulate(config, 0, Parts(engines=EngineClasses(client=AnsweringClient)))
    assert outcome.violation is None, outcome.violation
    return pstats.Stats(profile).total_calls / len(outcome.trained.lengths)  # type: ignore[attr-defined]
