"""The values in nested mappings, by their path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def value_at(tree: Any, keys: Iterable[str]) -> Any:
    """The value that these keys lead to; None if there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def leaves(tree: Mapping[str, Any], separator: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of every leaf; lists are leaves, and so is an empty mapping."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value


def scalars(tree: Any, without: str = "", path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every number, text and null, also in lists, whose items have the key of the list.

    Args:
        tree: As read from JSON.
        without: Name of sections that are left out.
        path: Dotted key of `tree`.
    """
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key != without:
                yield from scalars(value, without, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for value in tree:
            yield from scalars(value, without, path)
    else:
        yield path, tree
