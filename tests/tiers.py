"""Two tiers: what `make test` runs while somebody works, and everything, which `make test-full` runs.

A test that is marked `full` is left to the second. A test over many seeds or examples takes fewer of them in the first.
"""

from __future__ import annotations

import os
from typing import TypeVar

IS_FULL = os.environ.get("PENSTOCK_TESTS") == "full"
"""Set by `make test-full`."""

_Size = TypeVar("_Size")


def by_tier(default: _Size, full: _Size) -> _Size:
    """A size of the tier that runs."""
    return full if IS_FULL else default


def examples(count: int) -> int:
    """Examples of a property: 20 at most while somebody works."""
    return by_tier(min(count, 20), count)
