"""What a check has to say about a configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "absent", "warning"]
Command = Literal["train", "sft", "rm", "dpo", "eval", "sample"]
WITHOUT_ENGINES: tuple[Command, ...] = ("sft", "rm", "dpo")
"""Commands that learn from given answers: they start no engine and no reward."""
_NAMED_KEYS = re.compile(r"[a-z_]+(?:\.[a-z_]+)+|[a-z_]+(?==)|^[a-z_]+")
"""`model.path` anywhere in a sentence; `num_kv_heads=4`, whose section is left out; its first word, as in `env: …`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about a configuration.

    Attributes:
        message: Where, what is wrong with both numbers, why it matters, what to do.
        other_keys: Configuration keys it was computed from, dotted, beside those that the sentence names.
        severity: `error` refuses to start; `absent` (something this machine lacks: a model, a driver, a dataset,
            memory) refuses to start but is a warning in a dry run; `warning` never refuses.
    """

    message: str
    other_keys: tuple[str, ...] = ()
    severity: Severity = "error"

    @property
    def keys(self) -> list[str]:
        """Everything it was computed from, in the order of the sentence."""
        return [*_NAMED_KEYS.findall(self.message), *self.other_keys]

    def refuses(self, *, dry_run: bool) -> bool:
        """Whether a run (or a dry run) must not go on."""
        return self.severity == "error" or (self.severity == "absent" and not dry_run)

    def touches(self, paths: Iterable[str]) -> bool:
        """Whether it was computed from one of `paths`, or from something inside or around one."""
        return any(
            key == path or key.startswith(f"{path}.") or path.startswith(f"{key}.") or path.endswith(f".{key}")
            for key in self.keys
            for path in paths
        )


def error(message: str, *other_keys: str) -> Finding:
    """A reason not to start."""
    return Finding(message, other_keys)


def absent(message: str, *other_keys: str) -> Finding:
    """Something this machine lacks."""
    return Finding(message, other_keys, "absent")


def warning(message: str, *other_keys: str) -> Finding:
    """Something to know before starting."""
    return Finding(message, other_keys, "warning")
