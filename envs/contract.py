"""The interfaces of user code: a source of tasks, an environment, a reward.

A single-turn task needs a `TaskSource` and a reward function, nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeVar, runtime_checkable

from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.sandbox.config import SandboxConfig

Device = Literal["cpu", "cuda"]
RewardResult = float | Mapping[str, float | str] | None
RewardFunction = Callable[..., RewardResult | Awaitable[RewardResult]]
"""`fn(trajectory: Trajectory, **task.fields)`. A dict names parts; the reward is its `reward` entry, or their sum. Its
entry `answer`, if that is text, is what the reward read as the answer, by which evaluations vote. None is no opinion:
the answer is neither trained nor part of its group's baseline."""

_Function = TypeVar("_Function", bound=Callable[..., object])


def pure(function: _Function) -> _Function:
    """Declare that a reward depends only on prompt, reasoning, response, finish reason and the task's fields.

    Its results are then cached. A class of callables sets `is_pure = True` instead.
    """
    function.is_pure = True  # type: ignore[attr-defined]
    return function


class Judged(float):
    """A reward, and the answer that it judged: the same as a dict `{"reward": …, "answer": …}`, and still a number.

    Evaluations count answers of the same text as one, so write equal answers alike.
    """

    answer: str

    def __new__(cls, reward: float, answer: str) -> Self:
        judged = super().__new__(cls, reward)
        judged.answer = answer
        return judged

    def __getnewargs__(self) -> tuple[float, str]:  # type: ignore[override]
        return float(self), self.answer


@dataclass(frozen=True, slots=True)
class RewardContext:
    """What a reward may use in addition to its arguments."""

    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    """Sandbox for programs."""
    timeout_s: float = 10.0
    """Time limit of one call, seconds: `reward.timeout_s`."""
    max_concurrency: int = 256
    """Concurrent calls: `reward.max_concurrency`."""
    device: Device = "cpu"
    """Device of the reward's model: that of `reward.pool`, by torch's name."""
    is_serving: bool = False
    """Whether calls follow. If False, the configuration is only checked: load nothing heavy."""


@runtime_checkable
class RewardFactory(Protocol):
    """A class of rewards that need more than arguments; it is built once in every reward process.

    Before a run starts, the reward is called on two tasks, unless it sets `is_called_before_start = False`: one that
    needs a service or a large model, which may not be there yet.
    """

    @classmethod
    def build(cls, context: RewardContext, **args: Any) -> Self:
        """Build the reward; start nothing that must be stopped.

        Raises:
            ConfigError, TypeError, ValueError: If the arguments do not fit, or the machine cannot run it.
        """
        ...

    def __call__(self, trajectory: Trajectory, **fields: Any) -> RewardResult | Awaitable[RewardResult]: ...


class TaskSource(Protocol):
    """A source of tasks. Training and held-out tasks must be disjoint."""

    def train(self) -> Iterator[Task]:
        """Endless stream of training tasks, the same for the same seed."""
        ...

    def held_out(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` held-out tasks, all if there are fewer; the same for every seed: runs compare."""
        ...


class GoldSource(TaskSource, Protocol):
    """A task source that also has full correct answers, including worked steps, for `penstock sft` to learn from."""

    def gold_response(self, task: Task) -> str: ...
