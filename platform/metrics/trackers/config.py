"""Configuration of the trackers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

ConsoleForm = Literal["table", "quiet", "json"]
"""What a run prints: a line per step, only how it ended, or a JSON object per line."""


class TrackerSection(BaseModel):
    """Base of the tracker sections: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class JsonlTrackerConfig(TrackerSection):
    """`metrics.jsonl` in the run directory. Always enabled."""


class TensorboardTrackerConfig(TrackerSection):
    """TensorBoard event files in the run directory."""


class WandbTrackerConfig(TrackerSection):
    """Weights & Biases. Without an API key it logs offline into the run directory."""

    project: str
    """Project to which the run is logged."""
    entity: str | None = None
    """Team or user; None is the default of your account."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """`auto` is online with an API key, otherwise offline."""


class TrackerConfig(TrackerSection):
    """The enabled trackers: `tracker=[jsonl,wandb,tensorboard]`."""

    jsonl: JsonlTrackerConfig = JsonlTrackerConfig()
    wandb: WandbTrackerConfig | None = None
    tensorboard: TensorboardTrackerConfig | None = None
