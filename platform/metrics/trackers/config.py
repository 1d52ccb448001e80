"""Configuration of the trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from penstock.dataflow.settings import Settings

NO_FACTORY = "no_factory"
"""Type of pydantic's error about a tracker that is neither one of ours nor has a factory."""
ConsoleForm = Literal["table", "quiet", "json"]
"""What a run prints: a line per step, only how it ended, or a JSON object per line."""


class JsonlTrackerConfig(Settings):
    """`metrics.jsonl` in the run directory. Always enabled."""


class TensorboardTrackerConfig(Settings):
    """TensorBoard event files in the run directory."""


class WandbTrackerConfig(Settings):
    """Weights & Biases. Without an API key it logs offline into the run directory."""

    project: str
    """Project to which the run is logged."""
    entity: str | None = None
    """Team or user; None is the default of your account."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """`auto` is online with an API key, otherwise offline."""


class MlflowTrackerConfig(Settings):
    """MLflow, with the extra `mlflow`: `MLFLOW_TRACKING_URI`, or a database in the run directory."""

    experiment: str
    """Experiment to which the run is logged."""


class TrackioTrackerConfig(Settings):
    """Trackio, with the extra `trackio`: its own folder, or what `TRACKIO_SPACE_ID` or `TRACKIO_SERVER_URL` names."""

    project: str
    """Project to which the run is logged."""


class FactoryTrackerConfig(Settings):
    """A tracker of yours, under a name of yours."""

    factory: str
    """Import path of a function that opens it: `(run_dir, run_name, config, **args) -> Tracker`, called in a thread of
    its own. The tracker has the methods log(step, metrics), log_summary(summary) and close()."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function. They are saved with the run: keep keys in environment variables."""

    @model_validator(mode="before")
    @classmethod
    def _has_factory(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not value.get("factory"):
            raise PydanticCustomError(NO_FACTORY, "no factory")
        return value


class TrackerConfig(Settings):
    """The enabled trackers: `tracker=[jsonl,wandb,tensorboard,mlflow,trackio]`, and your own under other names."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, FactoryTrackerConfig] = Field(init=False)

    jsonl: JsonlTrackerConfig = JsonlTrackerConfig()
    wandb: WandbTrackerConfig | None = None
    tensorboard: TensorboardTrackerConfig | None = None
    mlflow: MlflowTrackerConfig | None = None
    trackio: TrackioTrackerConfig | None = None

    @property
    def own(self) -> dict[str, FactoryTrackerConfig]:
        """The user's trackers by their names."""
        return self.__pydantic_extra__
