"""One reward from several: weighted, clipped, added up, each recorded on its own."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.dataflow.trajectory import Trajectory, is_thread_reward
from penstock.envs.contract import RewardFunction
from penstock.envs.reward_result import Reply, to_reply
from penstock.envs.workers.reward_cache import LastUsed, seen_key


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


class WeightedSum:
    """`Σ weight_i · clip_i(value_i)`.

    A part that fails fails the whole: a reward without one of its parts would be another reward.

    Args:
        parts: Name -> reward.
        cache_entries: Results to remember of each pure part, where others are not pure: the sum as a whole is not
            remembered then.

    Raises:
        ValueError: If a part is called `reward` or `thread`.
    """

    def __init__(self, parts: Mapping[str, WeightedPart], *, cache_entries: int = 0) -> None:
        if "reward" in parts:
            raise ValueError("a part called 'reward' could not be told from the sum in what is recorded. Rename it.")
        if "thread" in parts:
            raise ValueError("a part called 'thread' could not be told from the rewards of threads. Rename it.")
        self.parts = parts
        self.is_async = any(is_async_function(part.function) for part in parts.values())
        self.is_pure = all(is_pure_function(part.function) for part in parts.values())
        self._known: dict[str, LastUsed[object]] = {name: LastUsed(cache_entries) for name in parts}

    def __call__(
        self, trajectory: Trajectory, **fields: Any
    ) -> dict[str, float] | Coroutine[Any, Any, dict[str, float]]:
        """The reward and its parts; they have to be awaited if a part is asynchronous."""
        if self.is_async:
            return self._gather(trajectory, fields)
        return self._combine({name: self._returned(name, trajectory, fields) for name in self.parts})

    async def _gather(self, trajectory: Trajectory, fields: Mapping[str, Any]) -> dict[str, float]:
        """Asynchronous parts run at the same time, after the synchronous ones. The first that fails ends the others."""
        names = sorted(self.parts, key=lambda name: is_async_function(self.parts[name].function))
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
        return self._combine({**returned, **{name: task.result() for name, task in waiting.items()}})

    def _returned(self, name: str, trajectory: Trajectory, fields: Mapping[str, Any]) -> object:
        """What a part returns, which may have to be awaited, or is remembered; what it raises is not remembered."""
        function = self.parts[name].function
        is_kept = not self.is_pure and is_pure_function(function) and not is_async_function(function)
        key = seen_key(trajectory, fields) if is_kept else None
        if key is not None and (known := self._known[name].get(key)) is not None:
            return known
        returned = function(trajectory, **fields)
        if key is not None:
            self._known[name].put(key, returned)
        return returned

    def _combine(self, returned: Mapping[str, object]) -> dict[str, float]:
        """The reward and the value of each part, before clipping and weighting.

        Raises:
            ValueError: If a part returned no number, with its name.
        """
        recorded: dict[str, float] = {}
        contributions, replies = [], {}
        for name, part in self.parts.items():
            reply = to_reply(returned[name])
            if "error" in reply:
                raise ValueError(f"reward.parts.{name}: {reply['error']}")
            contributions.append(part.contribution(reply["reward"]))
            replies[name] = reply
            recorded[name] = reply["reward"]
            recorded |= {f"{name}/{inner}": value for inner, value in reply["parts"].items()}
        return {"reward": math.fsum(contributions), **recorded, **self._of_threads(replies)}

    def _of_threads(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """The same sum for each thread that a part gives a reward of its own; other parts give theirs to all."""
        found: dict[str, float] = {}
        for thread in sorted({name for reply in replies.values() for name in reply["parts"] if is_thread_reward(name)}):
            values = {name: reply["parts"].get(thread, reply["reward"]) for name, reply in replies.items()}
            found[thread] = math.fsum(part.contribution(values[name]) for name, part in self.parts.items())
        return found


async def _wait_for(value: Awaitable[object]) -> object:
    return await value


def calls_of(
    function: RewardFunction, fields: Mapping[str, Any], key: str = "reward"
) -> Iterator[tuple[str, RewardFunction, Mapping[str, Any]]]:
    """The calls that score one trajectory of a task with these fields, so that they can be checked before a run.

    Of each: where the configuration names the function, the function, and what it gets besides the trajectory.
    """
    if isinstance(function, WeightedSum):
        for name, part in function.parts.items():
            yield from calls_of(part.function, fields, f"reward.parts.{name}")
    elif isinstance(function, partial):
        yield key, function.func, {**function.keywords, **fields}
    else:
        yield key, function, fields


def is_async_function(function: RewardFunction) -> bool:
    """Does a call return an awaitable?"""
    if isinstance(function, partial):
        return is_async_function(function.func)
    if isinstance(function, WeightedSum):
        return function.is_async
    call = getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is a coroutine function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def is_pure_function(function: RewardFunction) -> bool:
    """Was it declared pure (contract.pure)?"""
    return (
        is_pure_function(function.func) if isinstance(function, partial) else bool(getattr(function, "is_pure", False))
    )
