"""Results of pure rewards, remembered by what they depend on."""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from penstock.dataflow.trajectory import Trajectory

_Value = TypeVar("_Value")


class LastUsed(Generic[_Value]):
    """The most recently used values.

    Args:
        max_entries: How many; 0 is none.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._values: OrderedDict[str | bytes, _Value] = OrderedDict()

    def get(self, key: str | bytes) -> _Value | None:
        """The value under `key`, if it is remembered."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: str | bytes, value: _Value) -> None:
        """Remember a value, forgetting the one that was not used for longest."""
        self._values[key] = value
        if len(self._values) > self._max_entries:
            self._values.popitem(last=False)


def seen_key(trajectory: Trajectory, fields: Mapping[str, Any]) -> bytes | None:
    """A hash of all that a pure reward may depend on; None if there is none, or it hardly ever happens twice."""
    if trajectory.episode is not None:
        return None
    said = (trajectory.reasoning, trajectory.response, trajectory.finish_reason)
    seen = (trajectory.prompt, said, sorted(fields.items()))
    try:
        return hashlib.blake2b(pickle.dumps(seen), digest_size=16).digest()
    except Exception:  # noqa: BLE001  user data: if it cannot be pickled, sending it will say so
        return None
