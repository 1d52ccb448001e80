"""Digests of the tasks of a run (`data.json`), so that a later run can tell what has changed.

    rows  = sum over the tasks of blake2b(prompt, fields), modulo 2^128: the same in every order
    order = blake2b of every task's id and row digest, in the order of the data

A source that stores its tasks has both for every split (`stored()`). A source that draws them is known by the first
training tasks of one fixed seed. So the seed of the run changes no digest; it is recorded next to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice
from typing import TypedDict

from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig
from penstock.envs.loading import load_task_source
from penstock.envs.streams import stream_factories

DRAWN = "drawn"
"""Name of the only split of a source that draws its tasks."""
NUM_DRAWN_TASKS = 64
_SEED = 0


class SplitDigest(TypedDict):
    """The tasks of one split."""

    num_tasks: int
    """Number of tasks; of drawn tasks, of the first ones."""
    rows: str
    """16 bytes, hexadecimal, the same for the same tasks in another order."""
    order: str
    """16 bytes, hexadecimal."""


class Fingerprint(TypedDict):
    """The fingerprint of one stream."""

    source: str
    """Its factory with the arguments, as JSON."""
    seed: int
    """Seed of the run, in whose order the tasks are taken."""
    splits: dict[str, SplitDigest]
    """Name of the split -> its tasks."""


def fingerprints(config: EnvConfig, seed: int) -> dict[str, Fingerprint]:
    """Name of the stream -> fingerprint of its tasks; that of `env.factory` has an empty name.

    Raises:
        ConfigError: If a source does not load. Errors while reading its tasks propagate.
    """
    found: dict[str, Fingerprint] = {}
    for name, env in stream_factories(config).items():
        source = load_task_source(env, _SEED)
        stored = getattr(source, "stored", None)
        splits = {DRAWN: islice(source.train(), NUM_DRAWN_TASKS)} if stored is None else stored()
        found[name] = {
            "source": json.dumps([env.factory, env.args], sort_keys=True, default=_kind),
            "seed": seed,
            "splits": {split: _digest(tasks) for split, tasks in splits.items()},
        }
    return found


def changes(before: dict[str, Fingerprint], now: dict[str, Fingerprint], *, includes_order: bool = False) -> list[str]:
    """A sentence for each split of a source of both runs that has changed. A changed seed is no change of the data.

    Args:
        before: Of the earlier run. Fingerprints of versions that did not record splits are not compared.
        now: Of this run.
        includes_order: Whether the same tasks in another order are a change, as for a position in them.
    """
    known = {one["source"]: one["splits"] for one in before.values() if "splits" in one}
    sentences = []
    for source, splits in {one["source"]: one["splits"] for one in now.values()}.items():
        for split in known.get(source, {}) | splits if source in known else ():
            old, new = known[source].get(split), splits.get(split)
            where = source if split == DRAWN else f"{source}, {split}:"
            if old is None or new is None or old["rows"] != new["rows"]:
                sentences.append(f"{where} other tasks, had {_size(old)}, now {_size(new)}")
            elif includes_order and old["order"] != new["order"]:
                sentences.append(f"{where} the same {new['num_tasks']} tasks are in another order")
    return sentences


def _digest(tasks: Iterable[Task]) -> SplitDigest:
    num_tasks, total, order = 0, 0, blake2b(digest_size=16)
    for task in tasks:
        row = json.dumps([task.prompt, dict(task.fields)], sort_keys=True, default=_kind).encode()
        digest = blake2b(row, digest_size=16).digest()
        num_tasks += 1
        total += int.from_bytes(digest, "big")
        order.update(str(task.task_id).encode() + b"\n" + digest)
    return {"num_tasks": num_tasks, "rows": f"{total % 2**128:032x}", "order": order.hexdigest()}


def _kind(value: object) -> str:
    """Stands in for a value that is not JSON, whose text may differ between processes."""
    return type(value).__name__


def _size(one: SplitDigest | None) -> str:
    return "none" if one is None else f"{one['num_tasks']} tasks ({one['rows'][:8]})"
