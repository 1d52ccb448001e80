"""Where the metrics of a run go."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class TrackerSection(BaseModel):
    """Unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class JsonlTrackerConfig(TrackerSection):
    """`metrics.jsonl` in the run directory. Always on."""


class TensorboardTrackerConfig(TrackerSection):
    """TensorBoard event files in the run directory."""


class WandbTrackerConfig(TrackerSection):
    """Weights & Biases. Without an API key it logs offline into the run directory.

    Attributes:
        project: Project that the run is logged to.
        entity: Team or user; None is your default.
        mode: `auto` is online with an API key, else offline.
    """

    project: str
    entity: str | None = None
    mode: Literal["auto", "online", "offline"] = "auto"


class TrackerConfig(TrackerSection):
    """Which metric sinks are on: `tracker=[jsonl,wandb,tensorboard]`."""

    jsonl: JsonlTrackerConfig = JsonlTrackerConfig()
    wandb: WandbTrackerConfig | None = None
    tensorboard: TensorboardTrackerConfig | None = None
