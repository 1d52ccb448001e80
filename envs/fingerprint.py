"""A short digest of the tasks of a run, so that a later run can tell whether the data has changed.

    digest = blake2b of every task's id, prompt and fields, in the order of the data

A source that stores its tasks is hashed as a whole (`stored()`: training and held-out tasks, in the order of the data);
a source that draws them is hashed by the first training tasks of its seed.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from itertools import islice
from typing import TypedDict

from penstock.envs.config import EnvConfig
from penstock.envs.loading import load_task_source
from penstock.envs.streams import stream_factories

NUM_DRAWN_TASKS = 64


class Fingerprint(TypedDict):
    """The fingerprint of one stream.

    Attributes:
        source: Its factory with the arguments, as JSON.
        num_tasks: Number of tasks; None if they are drawn.
        digest: 16 bytes, hexadecimal.
    """

    source: str
    num_tasks: int | None
    digest: str


def fingerprints(config: EnvConfig, seed: int) -> dict[str, Fingerprint]:
    """Name of the stream -> fingerprint of its tasks; that of `env.factory` has an empty name.

    Raises:
        ConfigError: If a source does not load. Errors while reading its tasks propagate.
    """
    found: dict[str, Fingerprint] = {}
    for name, env in stream_factories(config).items():
        source = load_task_source(env, seed)
        stored = source.stored() if hasattr(source, "stored") else None
        digest = blake2b(digest_size=16)
        for task in islice(source.train(), NUM_DRAWN_TASKS) if stored is None else stored:
            row = [task.task_id, task.prompt, dict(task.fields)]
            digest.update(json.dumps(row, sort_keys=True, default=_kind).encode() + b"\n")
        found[name] = {
            "source": json.dumps([env.factory, env.args], sort_keys=True, default=_kind),
            "num_tasks": None if stored is None else len(stored),
            "digest": digest.hexdigest(),
        }
    return found


def changes(before: dict[str, Fingerprint], now: dict[str, Fingerprint]) -> list[str]:
    """A sentence for each source of both runs whose tasks differ. A source of one run only is not a change."""
    known = {one["source"]: one for one in before.values()}
    return [
        f"{one['source']} had {_size(known[one['source']])}, now {_size(one)}"
        for one in {one["source"]: one for one in now.values()}.values()
        if one["source"] in known and one != known[one["source"]]
    ]


def _kind(value: object) -> str:
    """Stands in for a value that is not JSON, whose text may differ between processes."""
    return type(value).__name__


def _size(one: Fingerprint) -> str:
    number = "drawn tasks" if one["num_tasks"] is None else f"{one['num_tasks']} tasks"
    return f"{number} ({one['digest'][:8]})"
