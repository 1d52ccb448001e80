"""Scores of a pure reward, remembered by what it depends on."""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from penstock.dataflow.ports import Score
from penstock.dataflow.trajectory import Task, Trajectory
from penstock.envs.contract import RewardFunction


def seen_key(trajectory: Trajectory, fields: Mapping[str, Any]) -> bytes | None:
    """A hash of all that a pure reward may depend on; None if there is none."""
    said = (trajectory.reasoning, trajectory.response, trajectory.finish_reason)
    seen = (trajectory.prompt, said, sorted(fields.items()))
    try:
        return hashlib.blake2b(pickle.dumps(seen), digest_size=16).digest()
    except Exception:  # noqa: BLE001  user data: if it cannot be pickled, sending it will say so
        return None


class PartCache:
    """What the pure parts of a sum returned whose other parts are not pure, the most recently used of each part.

    It lives in the reward process: the sum as a whole is not remembered, so every call comes there.

    Args:
        max_entries: Results of each part; 0 is none.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._returned: dict[str, OrderedDict[bytes, object]] = {}

    def call(self, name: str, function: RewardFunction, trajectory: Trajectory, fields: Mapping[str, Any]) -> object:
        """What `function`, the part `name`, returns; what it raises is not remembered."""
        key = None if trajectory.episode is not None or not self._max_entries else seen_key(trajectory, fields)
        if key is None:
            return function(trajectory, **fields)
        known = self._returned.setdefault(name, OrderedDict())
        if key not in known:
            known[key] = function(trajectory, **fields)
            if len(known) > self._max_entries:
                known.popitem(last=False)
        known.move_to_end(key)
        return known[key]


class RewardCache:
    """The most recently used scores. Failures are never remembered: a retry must be able to succeed.

    Args:
        max_entries: Scores to remember; 0 is none.

    Attributes:
        is_on: Is the reward pure? Unknown, hence False, until its process has loaded it.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._scores: OrderedDict[bytes, Score] = OrderedDict()
        self.is_on = False

    def key_of(self, task: Task, trajectory: Trajectory) -> bytes | None:
        """A hash of all that a pure reward may depend on; None if nothing is remembered."""
        if not self.is_on or self._max_entries == 0 or trajectory.episode is not None:
            return None  # an episode hardly ever happens twice
        return seen_key(trajectory, task.fields)

    def get(self, key: bytes | None) -> Score | None:
        """The score under `key`, if it is remembered."""
        if key is None or key not in self._scores:
            return None
        self._scores.move_to_end(key)
        return self._scores[key]

    def put(self, key: bytes | None, score: Score) -> None:
        """Remember a score, forgetting the one that was not used for longest."""
        if key is None:
            return
        self._scores[key] = score
        if len(self._scores) > self._max_entries:
            self._scores.popitem(last=False)
