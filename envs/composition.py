"""One reward from several: weighted, clipped, added up, each recorded on its own."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.dataflow.trajectory import Trajectory, is_thread_part
from penstock.envs.contract import RewardFunction
from penstock.envs.reward_cache import PartCache
from penstock.envs.reward_result import Reply, to_reply


class Call(NamedTuple):
    """How one function that a user named will be called.

    Attributes:
        key: Where the configuration names it: `reward`, `reward.parts.<name>`.
        function: The function itself, without what it is wrapped in.
        arguments: What it gets besides the trajectory.
    """

    key: str
    function: RewardFunction
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WeightedPart:
    """One part of a sum. `clip` bounds its value before weighting."""

    function: RewardFunction
    weight: float
    clip: tuple[float, float] | None

    def contribution(self, value: float) -> float:
        """`weight · min(max(value, lowest), highest)`."""
        if self.clip is not None:
            value = min(max(value, self.clip[0]), self.clip[1])
        return self.weight * value


class BoundReward:
    """A function with some of its keyword arguments set by the configuration; a task's field of that name wins."""

    def __init__(self, function: RewardFunction, args: Mapping[str, Any]) -> None:
        self._function = function
        self._args = dict(args)
        self.is_async = is_async_function(function)
        self.is_pure = is_pure_function(function)

    def __call__(self, trajectory: Trajectory, **fields: Any) -> Any:
        call = self.call(fields, "reward")
        return call.function(trajectory, **call.arguments)

    def call(self, fields: Mapping[str, Any], key: str) -> Call:
        """The call for a task with these fields."""
        return Call(key, self._function, {**self._args, **fields})


class WeightedSum:
    """`Σ weight_i · clip_i(value_i)`.

    A part that fails fails the whole: a reward without one of its parts would be another reward.
    """

    def __init__(self, parts: Mapping[str, WeightedPart], *, cache_entries: int = 0) -> None:
        self._parts = parts
        self._cache = PartCache(cache_entries)
        self.is_pure = all(is_pure_function(part.function) for part in parts.values())

    def calls(self, fields: Mapping[str, Any]) -> Iterator[Call]:
        """The call of each part for a task with these fields."""
        for name, part in self._parts.items():
            yield from calls_of(part.function, fields, f"reward.parts.{name}")

    def combine(self, returned: Mapping[str, object]) -> dict[str, float]:
        """The reward and the value of each part, before clipping and weighting.

        Raises:
            ValueError: If a part returned no number, with its name.
        """
        recorded: dict[str, float] = {}
        contributions, replies = [], {}
        for name, part in self._parts.items():
            reply = to_reply(returned[name])
            if "error" in reply:
                raise ValueError(f"reward.parts.{name}: {reply['error']}")
            contributions.append(part.contribution(reply["reward"]))
            replies[name] = reply
            recorded[name] = reply["reward"]
            recorded |= {f"{name}/{inner}": value for inner, value in reply["parts"].items()}
        return {"reward": math.fsum(contributions), **recorded, **self._of_threads(replies)}

    def _returned(self, name: str, trajectory: Trajectory, fields: Mapping[str, Any]) -> object:
        """What a part returns, which may have to be awaited; of a pure one beside others that are not, remembered."""
        function = self._parts[name].function
        if self.is_pure or not is_pure_function(function) or is_async_function(function):
            return function(trajectory, **fields)
        return self._cache.call(name, function, trajectory, fields)

    def _of_threads(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """The same sum for each thread that a part gives a reward of its own; other parts give theirs to all."""
        found: dict[str, float] = {}
        for thread in sorted({name for reply in replies.values() for name in reply["parts"] if is_thread_part(name)}):
            values = {name: reply["parts"].get(thread, reply["reward"]) for name, reply in replies.items()}
            total = math.fsum(part.contribution(values[name]) for name, part in self._parts.items())
            found[thread] = total
        return found


class SyncWeightedSum(WeightedSum):
    """A sum of synchronous rewards."""

    def __call__(self, trajectory: Trajectory, **fields: Any) -> dict[str, float]:
        return self.combine({name: self._returned(name, trajectory, fields) for name in self._parts})


class AsyncWeightedSum(WeightedSum):
    """A sum of rewards at least one of which is asynchronous; those run at the same time, after the synchronous.

    The first part that fails ends the others.
    """

    async def __call__(self, trajectory: Trajectory, **fields: Any) -> dict[str, float]:
        names = sorted(self._parts, key=lambda name: is_async_function(self._parts[name].function))
        returned = {name: self._returned(name, trajectory, fields) for name in names}
        try:
            async with asyncio.TaskGroup() as group:
                waiting = {
                    name: group.create_task(_wait_for(value))
                    for name, value in returned.items()
                    if inspect.isawaitable(value)
                }
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return self.combine({**returned, **{name: task.result() for name, task in waiting.items()}})


async def _wait_for(value: Awaitable[object]) -> object:
    return await value


def compose(parts: Mapping[str, WeightedPart], *, cache_entries: int = 0) -> RewardFunction:
    """The weighted sum of named rewards.

    Args:
        parts: Name -> reward.
        cache_entries: Results to remember of each pure part, where others are not pure.

    Raises:
        ValueError: If a part is called `reward` or `thread`.
    """
    if "reward" in parts:
        raise ValueError("a part called 'reward' could not be told from the sum in what is recorded. Rename it.")
    if "thread" in parts:
        raise ValueError("a part called 'thread' could not be told from the rewards of threads. Rename it.")
    kind = AsyncWeightedSum if any(is_async_function(part.function) for part in parts.values()) else SyncWeightedSum
    return kind(parts, cache_entries=cache_entries)


def calls_of(function: RewardFunction, fields: Mapping[str, Any], key: str = "reward") -> Iterator[Call]:
    """The calls that score one trajectory of a task with these fields, so that they can be checked before a run."""
    if isinstance(function, SyncWeightedSum | AsyncWeightedSum):
        yield from function.calls(fields)
    elif isinstance(function, BoundReward):
        yield function.call(fields, key)
    else:
        yield Call(key, function, fields)


def is_async_function(function: RewardFunction) -> bool:
    """Does a call return an awaitable?"""
    if isinstance(function, BoundReward):
        return function.is_async
    call = getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is a coroutine function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def is_pure_function(function: RewardFunction) -> bool:
    """Was it declared pure (contract.pure)?"""
    return bool(getattr(function, "is_pure", False))
