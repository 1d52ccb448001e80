"""The same reward and environment are called once per process on the same tasks, not for every configuration.

A check of a configuration starts the reward's process, which takes 0.5 s, and hundreds of tests check the demo with
one more value. `make test-full` makes every call.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.dataflow.task import Task
from penstock.envs.contract import RewardFunction, TaskSource
from penstock.platform.checks import tasks as checks
from penstock.platform.config.findings import Finding
from penstock.platform.config.schema import RunConfig

_MODULES = re.compile(r'"([\w.]+):\w+"')  # of import paths, whatever key has them
_found: dict[tuple[str, ...], list[Finding]] = {}
call_every_time = checks.check_first_calls


def check_first_calls_once(
    config: RunConfig, source: TaskSource, reward: RewardFunction, train: Sequence[Task], held_out: Sequence[Task] = ()
) -> Iterator[Finding]:
    """What `check_first_calls` of platform/checks/first_calls.py yields."""
    settings = "\n".join(part.model_dump_json() for part in (config.env, config.reward, config.sandbox))
    modules = [sys.modules.get(name) for name in _MODULES.findall(settings)]
    files = [module.__file__ for module in modules if module is not None and module.__file__ is not None]
    key = settings, repr([*train, *held_out]), *(Path(file).read_text() for file in files)
    if key not in _found:
        _found[key] = list(call_every_time(config, source, reward, train, held_out))
    yield from _found[key]
