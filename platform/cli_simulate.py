"""`penstock simulate`: the shipping controller in virtual time, over many seeds, with faults."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.dataflow.errors import ConfigError

if TYPE_CHECKING:
    from penstock.platform.simulator.simulation import Outcome

EXIT_OK, EXIT_VIOLATION = 0, 1


def run_simulate(overrides: list[str], seeds: str, *, as_json: bool, shows_trace: bool, calibrate: Path | None) -> int:
    """Simulate, compare or calibrate; returns the exit code."""
    with _without_warnings():  # a fenced engine is what is being simulated
        return _run(overrides, seeds, as_json=as_json, shows_trace=shows_trace, calibrate=calibrate)


def _run(overrides: list[str], seeds: str, *, as_json: bool, shows_trace: bool, calibrate: Path | None) -> int:
    if calibrate is not None:
        return _calibrate(calibrate, as_json=as_json)
    names = [override.partition("=")[2] for override in overrides if override.startswith("compare=")]
    if names:
        rest = [override for override in overrides if not override.startswith("compare=")]
        return _compare(names[-1], rest, parse_seeds(seeds), as_json=as_json)
    return _sweep(overrides, parse_seeds(seeds), as_json=as_json, shows_trace=shows_trace)


@contextmanager
def _without_warnings() -> Iterator[None]:
    logger = logging.getLogger("penstock")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def parse_seeds(text: str) -> range:
    """`FIRST:END` as in a slice, or the number of one seed.

    Raises:
        ConfigError: If it is neither.
    """
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    if match is None or (match[1] is not None and int(match[1]) >= int(match[2])):
        raise ConfigError([f"--seeds {text}: write FIRST:END with FIRST < END, e.g. 0:1000, or one seed."])
    return range(int(match[2]), int(match[2]) + 1) if match[1] is None else range(int(match[1]), int(match[2]))


def _sweep(overrides: list[str], seeds: range, *, as_json: bool, shows_trace: bool) -> int:
    from penstock.platform.simulator.config import parse_simulation
    from penstock.platform.simulator.sweep import replay_command, run_seeds, summary

    config = parse_simulation(overrides)
    started = time.monotonic()

    def report(outcome: Outcome) -> None:
        if outcome.violation is not None:
            typer.echo(f"seed {outcome.seed}: {outcome.violation}", err=True)
            typer.echo(f"  replay: {replay_command(overrides, outcome.seed)}", err=True)
        if shows_trace:
            typer.echo("\n".join(outcome.tail), err=True)

    sweep = run_seeds(config, seeds, on_seed=report)
    _print(summary(sweep, overrides, started), as_json=as_json)
    return EXIT_VIOLATION if sweep.failing else EXIT_OK


def _compare(name: str, overrides: list[str], seeds: range, *, as_json: bool) -> int:
    from penstock.platform.simulator.comparisons import COMPARISONS

    if name not in COMPARISONS:
        raise ConfigError([f"compare={name}: unknown comparison. Choices: {', '.join(COMPARISONS)}."])
    if overrides:
        raise ConfigError([f"compare={name} states its own costs; {' '.join(overrides)} would have no effect."])
    _print(COMPARISONS[name](seeds), as_json=as_json)
    return EXIT_OK


def _calibrate(run: Path, *, as_json: bool) -> int:
    from penstock.platform.simulator.calibration import calibrate

    _print(calibrate(run), as_json=as_json)
    return EXIT_OK


def _print(figures: dict[str, Any], *, as_json: bool) -> None:
    """One line per figure for people, or one JSON object on the last line."""
    if as_json:
        typer.echo(json.dumps(figures))
        return
    width = max(len(name) for name in figures)
    for name, value in figures.items():
        if value is None:
            continue
        typer.echo(f"{name:<{width}}  {json.dumps(value) if isinstance(value, dict | list) else value}")
