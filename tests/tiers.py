"""Two tiers: what `make test` runs during work, and everything, which `make test-full` runs.

A test that is marked `full` runs only in the second, and so do the cases of a test that is marked `some(n)`, but n of
them, spread over all. A test over many seeds or examples uses fewer in the first.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import product
from typing import Any, TypeVar

import pytest

IS_FULL = os.environ.get("PENSTOCK_TESTS") == "full"
"""Set by `make test-full`."""

_Size = TypeVar("_Size")


def by_tier(default: _Size, full: _Size) -> _Size:
    """A size of the tier that runs."""
    return full if IS_FULL else default


def examples(count: int) -> int:
    """Number of examples of a property; at most 20 in `make test`."""
    return by_tier(min(count, 20), count)


def leave_cases_to_the_full_tier(tests: Iterable[pytest.Item]) -> None:
    """Mark as `full` all cases of a test that is marked `some(n)`, but n of them."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for one in tests:
        if one.get_closest_marker("some") and not one.get_closest_marker("full"):
            cases[one.nodeid.partition("[")[0]].append(one)
    for all_cases in cases.values():
        mark = all_cases[0].get_closest_marker("some")
        assert mark is not None
        count, last = mark.args[0], len(all_cases) - 1
        chosen = {round(index * last / max(1, count - 1)) for index in range(count)}
        for index, one in enumerate(all_cases):
            if index not in chosen:
                one.add_marker(pytest.mark.full)


def each_of(*axes: Collection[Any]) -> list[Any]:
    """The product of the axes as parameters: in both tiers so many that every value is in one, the others in the full.

    A value of an axis is one argument; what is a tuple there becomes one argument too.
    """
    lists = [list(axis) for axis in axes]
    chosen = {tuple(index % len(one) for one in lists) for index in range(max(map(len, lists)))}
    return [
        pytest.param(
            *(one[index] for one, index in zip(lists, indices, strict=True)),
            id="-".join(_label(one[index]) for one, index in zip(lists, indices, strict=True)),
            marks=() if indices in chosen else pytest.mark.full,
        )
        for indices in product(*(range(len(one)) for one in lists))
    ]


def _label(value: Any) -> str:
    return "_".join(map(str, value)) if isinstance(value, tuple) else str(value)
