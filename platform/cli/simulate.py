"""`penstock simulate`: runs the production controller in virtual time, for many seeds."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import TYPE_CHECKING

import typer

from penstock.dataflow.errors import ConfigError

if TYPE_CHECKING:
    from penstock.platform.simulator.simulation import Outcome


def run_simulate(overrides: list[str], seeds: str, *, as_json: bool, shows_trace: bool) -> int:
    """Simulate seeds and print results; returns 1 if a run failed, else 0."""
    from penstock.platform.simulator.config import parse_simulation
    from penstock.platform.simulator.sweep import replay_command, run_seeds, summary

    logger = logging.getLogger("penstock")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what is simulated needs no warning

    def report(outcome: Outcome) -> None:
        if outcome.violation is not None:
            typer.echo(f"seed {outcome.seed}: {outcome.violation}", err=True)
            typer.echo(f"  replay: {replay_command(overrides, outcome.seed)}", err=True)
        if shows_trace:
            typer.echo("\n".join(outcome.tail), err=True)

    try:
        config, chosen, started = parse_simulation(overrides), parse_seeds(seeds), time.monotonic()
        figures = summary(run_seeds(config, chosen, on_seed=report), overrides, started)
    finally:
        logger.setLevel(level)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        width = max(len(name) for name in figures)
        for name, value in figures.items():
            if value is not None:
                typer.echo(f"{name:<{width}}  {json.dumps(value) if isinstance(value, dict | list) else value}")
    return int(bool(figures.get("violations")))


def parse_seeds(text: str, key: str = "--seeds ") -> range:
    """Parse `FIRST:END` as in a slice, or a single seed. `key` is the option that the text belongs to.

    Raises:
        ConfigError: If the text is neither.
    """
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    if match is None or (match[1] is not None and int(match[1]) >= int(match[2])):
        raise ConfigError([f"{key}{text}: write {key}FIRST:END with FIRST < END, e.g. {key}0:3, or one seed."])
    return range(int(match[2]), int(match[2]) + 1) if match[1] is None else range(int(match[1]), int(match[2]))
