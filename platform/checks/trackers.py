"""Checks of the trackers: what they need is installed, and those of the user can be opened as configured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec

from penstock.dataflow.errors import ConfigError
from penstock.envs.import_path import call_problem, load_object
from penstock.platform.config.findings import Finding, absent, error
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.trackers.config import FactoryTrackerConfig
from penstock.platform.metrics.trackers.wandb import resolve_mode

_OF_EXTRAS = {"mlflow": ("mlflow", "sqlalchemy", "alembic"), "trackio": ("trackio",)}
"""Tracker, which is also the name of the extra -> packages that it imports."""


def check_trackers(config: RunConfig) -> Iterator[Finding]:
    """Check the packages and the key of our trackers and the functions of the user's; none of them is opened."""
    if config.tracker.wandb is not None:
        try:
            resolve_mode(config.tracker.wandb)
        except ConfigError as problem:
            yield from (absent(violation) for violation in problem.violations)
    for name, packages in _OF_EXTRAS.items():
        missing = [package for package in packages if find_spec(package) is None]
        if getattr(config.tracker, name) is not None and missing:
            yield absent(
                f"tracker.{name}: {sys.executable} has no {', '.join(missing)}, so nothing would be logged there. "
                f"Install the extra: pip install 'penstock[{name}]', or choose another tracker."
            )
    for name, own in config.tracker.own.items():
        yield from _check_factory(f"tracker.{name}", own)


def _check_factory(key: str, own: FactoryTrackerConfig) -> Iterator[Finding]:
    where = f"{key}.factory={own.factory!r}"
    try:
        factory = load_object(own.factory, f"{key}.factory")
    except ConfigError as problem:
        yield from (error(violation, key) for violation in problem.violations)
        return
    if not callable(factory):
        yield error(
            f"{where} is a {type(factory).__name__}, which cannot be called. Name a function "
            "(run_dir, run_name, config, **args) that returns a tracker.",
            key,
        )
        return
    given = ("run_dir", "run_name", "config")
    call = ", ".join([*given, *(f"{name}=…" for name in own.args)])
    if wrong := call_problem(factory, f"({call})", *given, **own.args):
        yield error(f"{where} {wrong}. Change its parameters, or {key}.args.", key)
