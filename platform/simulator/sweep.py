"""Runs many seeds of one simulation and summarizes violations (with their replay command), speed and bias."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.simulation import Outcome, simulate
from penstock.platform.simulator.world import LengthTable


@dataclass(slots=True)
class Bias:
    """Comparison of the trained lengths with all lengths."""

    trained: list[int] = field(default_factory=list)
    """Lengths of trained trajectories, simulated tokens."""
    population: list[int] = field(default_factory=list)
    """Lengths of all trajectories of the tasks up to the last one trained."""

    def add(self, outcome: Outcome, config: SimulationConfig) -> None:
        if not outcome.trained.tasks:
            return
        table = LengthTable(config.lengths, config.group_size, outcome.seed, config.grain, config.turns)
        self.trained += outcome.trained.lengths
        for task in range(max(outcome.trained.tasks) + 1):
            self.population += table.group(task)

    @property
    def length_bias(self) -> float | None:
        """Mean trained length ÷ mean length of the population; 1 is unbiased."""
        return float(np.mean(self.trained) / np.mean(self.population)) if self.trained else None

    @property
    def kept_p99(self) -> float | None:
        """How often the longest 1 % is trained, relative to all others; 1 is unbiased."""
        if not self.trained:
            return None
        trained, population = np.array(self.trained), np.array(self.population)
        limit = np.quantile(population, 0.99, method="lower")
        longest = population >= limit if limit == population.max() else population > limit
        kept = trained >= limit if limit == population.max() else trained > limit
        return float((kept.sum() / longest.sum()) / (len(trained) / len(population)))


@dataclass(slots=True)
class Sweep:
    """Totals over the seeds run so far."""

    config: SimulationConfig
    failing: list[tuple[int, str]] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    max_staleness_seen: int = 0
    trimmed_tokens: int = 0
    virtual_s: float = 0.0
    busy_share: list[float] = field(default_factory=list)
    bias: Bias = field(default_factory=Bias)
    hashes: list[str] = field(default_factory=list)
    first: Outcome | None = None

    def add(self, outcome: Outcome) -> None:
        """Add the outcome of one seed."""
        self.first = self.first or outcome
        self.hashes.append(outcome.trace_hash)
        if outcome.violation is not None:
            self.failing.append((outcome.seed, outcome.violation))
            return
        assert outcome.counts is not None, "a completed run has counts"
        self.ended += Counter(asdict(outcome.counts))
        self.max_staleness_seen = max(self.max_staleness_seen, outcome.trained.max_staleness)
        self.trimmed_tokens += outcome.trained.trimmed_tokens
        self.virtual_s += outcome.train_s
        self.busy_share.append(outcome.engines.busy_s / max(outcome.virtual_s * self.config.engines, 1e-9))
        self.bias.add(outcome, self.config)


def run_seeds(
    config: SimulationConfig, seeds: Iterable[int], *, on_seed: Callable[[Outcome], None] = lambda _outcome: None
) -> Sweep:
    """Simulate every seed."""
    sweep = Sweep(config)
    for seed in seeds:
        outcome = simulate(config, seed)
        sweep.add(outcome)
        on_seed(outcome)
    return sweep


def summary(
    sweep: Sweep, overrides: list[str], started: float, simulate: Callable[[Any, int], Outcome] = simulate
) -> dict[str, Any]:
    """The JSON object that `penstock simulate` prints last."""
    config = sweep.config
    first = sweep.failing[0] if sweep.failing else None
    return {
        "seeds": len(sweep.hashes),
        "violations": len(sweep.failing),
        "first_failing_seed": first[0] if first else None,
        "first_violation": first[1] if first else None,
        "replay": replay_command(overrides, first[0]) if first else None,
        "groups": sweep.ended["trained"],
        "trajectories": len(sweep.bias.trained),
        "ended": dict(sweep.ended),
        "max_staleness": config.eta,
        "max_staleness_seen": sweep.max_staleness_seen,
        "speedup_over_synchronous": rounded(speedup_over_synchronous(sweep, simulate)),
        "length_bias": rounded(sweep.bias.length_bias),
        "kept_p99": rounded(sweep.bias.kept_p99),
        "trimmed_token_share": rounded(sweep.trimmed_tokens / max(sum(sweep.bias.trained), 1)),
        "engine_busy_share": rounded(float(np.mean(sweep.busy_share)) if sweep.busy_share else None),
        "slow_parts": sorted(sweep.first.slow_parts) if sweep.first else [],
        "virtual_s": rounded(sweep.virtual_s),
        "trace_hash": sweep.hashes[0] if len(sweep.hashes) == 1 else None,
        "wall_s": rounded(time.monotonic() - started),
    }


def speedup_over_synchronous(sweep: Sweep, simulate: Callable[[Any, int], Outcome]) -> float | None:
    """Steps per second of the first seed over those of the synchronous run of this seed on the same devices.

    None if either did not complete.
    """
    if sweep.first is None or sweep.first.violation is not None:
        return None
    changes = {"eta": 0, "surplus": 0, "on_expiry": "wait"}
    synchronous = simulate(sweep.config.model_copy(update=changes), sweep.first.seed)
    if synchronous.violation is not None:
        return None
    return _steps_per_s(sweep.first) / _steps_per_s(synchronous)


def _steps_per_s(outcome: Outcome) -> float:
    return len(outcome.trained.steps) / max(outcome.train_s, 1e-9)


def replay_command(overrides: list[str], seed: int) -> str:
    """The command that replays one seed."""
    return " ".join(["penstock simulate", *overrides, f"--seeds {seed}:{seed + 1} --trace"])


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
