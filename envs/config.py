"""Which tasks are asked and how answers are scored."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class EnvConfig(BaseModel):
    """The environment: where tasks come from.

    Attributes:
        factory: Import path of a callable `(seed: int, **args) -> TaskSource` (envs/contract.py).
        args: Keyword arguments of the factory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    factory: str
    args: dict[str, Any] = Field(default_factory=dict)


class RewardConfig(BaseModel):
    """The reward.

    Attributes:
        fn: Import path of a function `fn(trajectory, **task_fields) -> float | dict[str, float]`, sync or async.
        num_workers: Reward worker processes.
        timeout_s: Longest time for one call, seconds; then the trajectory fails (kind reward), never reward 0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fn: str
    num_workers: int = Field(default=1, ge=1)
    timeout_s: float = Field(default=10.0, gt=0)
