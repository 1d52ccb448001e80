"""A cache for results of pure rewards, keyed by everything that they depend on."""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from penstock.dataflow.trajectory import Trajectory

_Value = TypeVar("_Value")


class LruCache(Generic[_Value]):
    """A cache that evicts the least recently used value.

    Args:
        max_entries: Largest number of values; 0 caches none.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._values: OrderedDict[str | bytes, _Value] = OrderedDict()

    def get(self, key: str | bytes) -> _Value | None:
        """The value of `key`, if it is cached."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: str | bytes, value: _Value) -> None:
        """Cache a value, and evict the least recently used one if there are too many."""
        self._values[key] = value
        if len(self._values) > self._max_entries:
            self._values.popitem(last=False)


def cache_key(trajectory: Trajectory, fields: Mapping[str, Any]) -> bytes | None:
    """A hash of everything that a pure reward may depend on; None for episodes, which hardly ever repeat, and for
    fields that cannot be hashed.
    """
    if trajectory.episode is not None:
        return None
    turn = (trajectory.reasoning, trajectory.response, trajectory.finish_reason)
    inputs = (trajectory.prompt, turn, sorted(fields.items()))
    try:
        return hashlib.blake2b(pickle.dumps(inputs), digest_size=16).digest()
    except Exception:  # noqa: BLE001  user data: if it cannot be pickled, sending it reports the error
        return None
