"""What a check has to say about a configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "absent", "warning"]
Command = Literal["train", "sft", "rm", "dpo", "eval", "sample"]
WITHOUT_ENGINES: tuple[Command, ...] = ("sft", "rm", "dpo")
"""Commands that learn from given answers: they start no engine and no reward."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about a configuration.

    Attributes:
        message: Where, what is wrong with both numbers, why it matters, what to do.
        keys: Configuration keys it was computed from, dotted.
        severity: `error` refuses to start; `absent` (something this machine lacks: a model, a driver, a dataset,
            memory) refuses to start but is a warning in a dry run; `warning` never refuses.
    """

    message: str
    keys: tuple[str, ...]
    severity: Severity = "error"

    def refuses(self, *, dry_run: bool) -> bool:
        """Whether a run (or a dry run) must not go on."""
        return self.severity == "error" or (self.severity == "absent" and not dry_run)

    def touches(self, paths: Iterable[str]) -> bool:
        """Whether it was computed from one of `paths`, or from something inside or around one."""
        return any(_overlap(key, path) for key in self.keys for path in paths)


def error(message: str, *keys: str) -> Finding:
    """A reason not to start."""
    return Finding(message, keys)


def absent(message: str, *keys: str) -> Finding:
    """Something this machine lacks."""
    return Finding(message, keys, "absent")


def warning(message: str, *keys: str) -> Finding:
    """Something to know before starting."""
    return Finding(message, keys, "warning")


def _overlap(left: str, right: str) -> bool:
    return left == right or left.startswith(f"{right}.") or right.startswith(f"{left}.")
