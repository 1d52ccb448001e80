"""Which tasks are asked and how answers are scored."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class StreamConfig(BaseModel):
    """One of several streams of training tasks.

    Attributes:
        factory: As `env.factory`; None is the same.
        args: Keyword arguments that differ from `env.args`, or all of them for another factory.
        weight: Share of admissions, relative to the other streams.
        quota: Largest share of the admission window that its live groups take.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    factory: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    weight: float = Field(default=1.0, ge=0)
    quota: float = Field(default=1.0, gt=0, le=1)


class EnvConfig(BaseModel):
    """The environment: where tasks come from.

    Attributes:
        factory: Import path of a callable `(seed: int, **args) -> TaskSource` (envs/contract.py).
        args: Keyword arguments of the factory.
        streams: Name -> stream of training tasks, mixed by weight; empty: one stream, that of the factory. Held-out
            tasks are always the factory's.
        curriculum: Import path of a `Curriculum` (dataflow/streams.py) that changes the weights; None is off.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    factory: str
    args: dict[str, Any] = Field(default_factory=dict)
    streams: dict[str, StreamConfig] = Field(default_factory=dict)
    curriculum: str | None = None


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
