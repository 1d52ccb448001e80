"""Tasks: what a group attempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.dataflow.ids import TaskId


@dataclass(frozen=True, slots=True)
class Task:
    """The task of one group: the prompt and the data that the reward needs."""

    task_id: TaskId
    """Stable across runs of the same seed."""
    prompt: str | list[dict[str, str]]
    """Plain text, or chat messages `[{"role": ..., "content": ...}]` rendered once by the chat template."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Everything else of the row (`answer`, ...); handed to the reward as keyword arguments."""
    environment: str | None = None
    """Name of the stream whose environment answers the policy turn by turn; None is a single turn."""
    evaluation_set: str = ""
    """Name of the evaluation set that a held-out task belongs to; empty if there is only one."""
    is_trained_on: bool = False
    """Of a task that is evaluated: it is among the training tasks, too."""
