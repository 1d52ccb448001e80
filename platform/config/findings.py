"""Findings of the configuration checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Severity = Literal["error", "absent", "warning", "note"]
Command = Literal["train", "sft", "rm", "dpo", "eval", "sample"]
WITHOUT_ENGINES: tuple[Command, ...] = ("sft", "rm", "dpo")
"""Commands that train on given answers. They start no engines and no reward workers."""
_NAMED_KEYS = re.compile(r"[a-z_]+(?:\.[a-z_]+)+|[a-z_]+(?==)|^[a-z_]+")
"""Matches `model.path` anywhere in a sentence, `num_kv_heads=4` without a section, and a first word as in `env: …`."""


class Fit(NamedTuple):
    """A value that fits where the configured one does not.

    It takes the place of a default (compose.py, `Composition.settle`), instead of a refusal.
    """

    key: str
    """Dotted key."""
    value: Any
    """The value."""
    why: str
    """What it follows from, for the line that says so."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about a configuration."""

    message: str
    """Where, what is wrong with both numbers, why it matters, what to do."""
    other_keys: tuple[str, ...] = ()
    """Dotted configuration keys that it was computed from, in addition to those in the message."""
    severity: Severity = "error"
    """`error` prevents the start. `absent` means that this machine lacks something (a model, a driver, a dataset,
    memory); it prevents the start, but is a warning in a dry run. `warning` never prevents the start. `note` is what
    a check has found in order, which only a dry run shows."""
    fits: tuple[Fit, ...] = ()
    """Each of these alone mends what a finding refuses; the first one whose key the user has not set is used."""

    @property
    def keys(self) -> list[str]:
        """All keys that it was computed from, in the order of the message."""
        return [*_NAMED_KEYS.findall(self.message), *self.other_keys]

    def refuses(self, *, dry_run: bool) -> bool:
        """Whether a run (or a dry run) must not start."""
        return self.severity == "error" or (self.severity == "absent" and not dry_run)

    def touches(self, paths: Iterable[str]) -> bool:
        """Whether it was computed from one of `paths`, or from a parent or child key of one."""
        return any(
            key == path or key.startswith(f"{path}.") or path.startswith(f"{key}.") or path.endswith(f".{key}")
            for key in self.keys
            for path in paths
        )


def error(message: str, *other_keys: str, fits: Sequence[Fit] = ()) -> Finding:
    """Create a finding that prevents the start, unless a default can give way to one of `fits`."""
    return Finding(message, other_keys, fits=tuple(fits))


def absent(message: str, *other_keys: str, fits: Sequence[Fit] = ()) -> Finding:
    """Create a finding about something that this machine lacks; `fits` as of `error`."""
    return Finding(message, other_keys, "absent", tuple(fits))


def warning(message: str, *other_keys: str) -> Finding:
    """Create a finding that does not prevent the start."""
    return Finding(message, other_keys, "warning")


def note(message: str, *other_keys: str, fits: Sequence[Fit] = ()) -> Finding:
    """Create a finding that only a dry run shows; `fits` as of `error`."""
    return Finding(message, other_keys, "note", tuple(fits))
