"""What a user plugs in: a source of tasks, an environment, a reward.

A single-turn task needs a `TaskSource` and a reward function, nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeVar, runtime_checkable

from penstock.dataflow.trajectory import Task, Trajectory
from penstock.envs.sandbox.config import SandboxConfig

Device = Literal["cpu", "cuda"]
RewardResult = float | Mapping[str, float]
RewardFunction = Callable[..., RewardResult | Awaitable[RewardResult]]
"""`fn(trajectory: Trajectory, **task.fields)`. A dict names parts; the reward is its `reward` entry, or their sum."""

_Function = TypeVar("_Function", bound=Callable[..., object])


def pure(function: _Function) -> _Function:
    """Declare that a reward depends on nothing but prompt, reasoning, response, finish reason and the task's fields.

    Its results are then remembered. A class of callables sets `is_pure = True` instead.
    """
    function.is_pure = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, slots=True)
class RewardContext:
    """What a reward may use besides its arguments.

    Attributes:
        sandbox: Where it may run programs.
        timeout_s: Of one call, seconds: `reward.timeout_s`.
        max_concurrency: Calls at a time: `reward.max_concurrency`.
        device: What a model of it runs on: that of `reward.pool`, as torch calls it.
        is_serving: Whether calls follow. False where the configuration is only checked: load nothing heavy then.
    """

    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    timeout_s: float = 10.0
    max_concurrency: int = 256
    device: Device = "cpu"
    is_serving: bool = False


@runtime_checkable
class RewardFactory(Protocol):
    """A class whose objects are rewards that need more than arguments: it is built once in every reward process."""

    @classmethod
    def build(cls, context: RewardContext, **args: Any) -> Self:
        """Make the reward; start nothing that must be stopped.

        Raises:
            ConfigError, TypeError, ValueError: If the arguments do not fit, or the machine cannot run it.
        """
        ...

    def __call__(self, trajectory: Trajectory, **fields: Any) -> RewardResult | Awaitable[RewardResult]: ...


class TaskSource(Protocol):
    """Where tasks come from. Train and held-out tasks must be disjoint."""

    def train(self) -> Iterator[Task]:
        """Endless stream of training tasks, the same for the same seed."""
        ...

    def held_out(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` held-out tasks; the same for every seed of a run, so that runs compare.

        Raises:
            ValueError: If there are fewer, with both numbers.
        """
        ...


class GoldSource(TaskSource, Protocol):
    """A task source that also knows a full correct answer, worked steps included: what `penstock sft` learns from."""

    def gold_response(self, task: Task) -> str: ...
