"""Adaptive concurrency in simulated runs. All ways to form groups run in tests/simulation/test_fault_seeds.py."""

from __future__ import annotations

import pytest

from penstock.platform.simulator.config import parse_simulation
from penstock.platform.simulator.simulation import simulate


@pytest.mark.full
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
