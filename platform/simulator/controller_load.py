"""What the controller itself costs: many live groups of short answers, so that little but the platform's code runs.

Real seconds of one process on one core, over the shipping flow, core, pool and runner; the simulated parts are in it.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable
from typing import Any

from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.simulation import simulate
from penstock.platform.simulator.sweep import rounded

LIVE_GROUPS = (1_000, 10_000)
ENGINES = 64
STEPS = 4


def load_config(live_groups: int, group_size: int = 8) -> SimulationConfig:
    """`live_groups` under way at η = 1, every one of them in a slot; answers of one delta."""
    return SimulationConfig(
        profile="constant",
        mean_tokens=64,
        cap_tokens=64,
        grain=1,
        prompt_tokens=8,
        engines=ENGINES,
        slots=live_groups * group_size // ENGINES + group_size,
        kv_tokens=1_000_000_000,
        batch=live_groups // 2,
        group_size=group_size,
        eta=1,
        steps=STEPS,
        train_s_per_token=1e-9,
        reward_mean_s=0.0,
    )


def controller_load(seeds: Iterable[int]) -> dict[str, Any]:
    """Completions per second of CPU time, by number of live groups."""
    figures: dict[str, Any] = {"unit": "trajectory completions per CPU second, one core, groups of 8"}
    for live_groups in LIVE_GROUPS:
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        costs_s, completions = [], 0
        for seed in seeds:
            started = time.process_time()
            outcome = simulate(load_config(live_groups), seed, is_checked=False)
            assert outcome.violation is None, outcome.violation
            completions = len(outcome.trained.lengths)
            costs_s.append((time.process_time() - started) / completions)
        after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        figures[f"{live_groups} live groups"] = {
            "completions": completions,
            "completions_per_s": rounded(1 / min(costs_s)),
            "us_per_completion": rounded(1e6 * min(costs_s)),
            "peak_kib_per_live_group": rounded((after_kib - before_kib) / live_groups),
        }
    return figures
