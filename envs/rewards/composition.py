"""One reward from several parts: a weighted sum of clipped values, with each value recorded."""

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
from penstock.envs.rewards.peer_styles import PeerReward
from penstock.envs.workers.reward_cache import LruCache, cache_key


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

    If a part fails, the sum fails: without that part it would be a different reward. A part that returns None has no
    opinion on the answer: it adds nothing and is not recorded. If that is true of all parts with a weight, the sum has
    none either. The answer that it judged is that of the first part that gives one.

    Args:
        parts: Name -> reward.
        cache_entries: Results to cache for each pure part if other parts are not pure, so that the sum cannot be
            cached.

    Raises:
        ValueError: If a part is called `reward` or `thread`.
    """

    def __init__(self, parts: Mapping[str, WeightedPart], *, cache_entries: int = 0) -> None:
        if "reward" in parts:
            raise ValueError("a part named 'reward' could not be told apart from the recorded sum. Rename it.")
        if "thread" in parts:
            raise ValueError("a part named 'thread' could not be told apart from the rewards of threads. Rename it.")
        self.parts = parts
        self.is_async = any(is_async_function(part.function) for part in parts.values())
        self.is_pure = all(is_pure_function(part.function) for part in parts.values())
        self._caches: dict[str, LruCache[object]] = {name: LruCache(cache_entries) for name in parts}

    def __call__(
        self, trajectory: Trajectory, /, **fields: Any
    ) -> dict[str, float | str] | Coroutine[Any, Any, dict[str, float | str] | None] | None:
        """The reward and its parts, or None; awaitable if a part is asynchronous."""
        if self.is_async:
            return self._gather(trajectory, fields)
        return self._combine({name: self._returned(name, trajectory, fields) for name in self.parts})

    async def _gather(self, trajectory: Trajectory, fields: Mapping[str, Any]) -> dict[str, float | str] | None:
        """Run the synchronous parts, then the asynchronous ones concurrently. The first failure cancels the others."""
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
        """The value of a part, possibly awaitable or cached. Exceptions are not cached."""
        function = self.parts[name].function
        is_cached = not self.is_pure and is_pure_function(function) and not is_async_function(function)
        key = cache_key(trajectory, fields) if is_cached else None
        if key is not None and (cached := self._caches[name].get(key)) is not None:
            return cached
        returned = function(trajectory, **fields)
        if key is not None:
            self._caches[name].put(key, returned)
        return returned

    def _combine(self, returned: Mapping[str, object]) -> dict[str, float | str] | None:
        """The reward and the value of each part, before clipping and weighting; None without an opinion.

        Raises:
            ValueError: If a part did not return a number, with its name.
        """
        recorded: dict[str, float] = {}
        contributions: list[float] = []
        replies: dict[str, Reply] = {}
        for name, part in self.parts.items():
            reply = to_reply(returned[name])
            if "error" in reply:
                raise ValueError(f"reward.parts.{name}: {reply['error']}")
            if "abstains" in reply:
                continue
            contributions.append(part.contribution(reply["reward"]))
            replies[name] = reply
            recorded[name] = reply["reward"]
            recorded |= {f"{name}/{inner}": value for inner, value in reply["parts"].items()}
        weighted = {name for name, part in self.parts.items() if part.weight} or self.parts.keys()
        if weighted.isdisjoint(replies):
            return None
        answer = next((reply["answer"] for reply in replies.values() if "answer" in reply), None)
        # A part of that name keeps its place.
        judged = {} if answer is None or "answer" in recorded else {"answer": answer}
        return {"reward": math.fsum(contributions), **recorded, **self._of_threads(replies), **judged}

    def _of_threads(self, replies: Mapping[str, Reply]) -> dict[str, float]:
        """The sum for each thread that has a reward of its own in a part; the other parts contribute their reward."""
        found: dict[str, float] = {}
        for thread in sorted({name for reply in replies.values() for name in reply["parts"] if is_thread_reward(name)}):
            values = {name: reply["parts"].get(thread, reply["reward"]) for name, reply in replies.items()}
            found[thread] = math.fsum(self.parts[name].contribution(value) for name, value in values.items())
        return found


async def _wait_for(value: Awaitable[object]) -> object:
    return await value


def calls_of(
    function: RewardFunction, fields: Mapping[str, Any], key: str = "reward"
) -> Iterator[tuple[str, RewardFunction, Mapping[str, Any]]]:
    """The calls that score one trajectory of a task with these fields, so that they can be checked before a run.

    Each is (configuration key of the function, function, its keyword arguments).
    """
    if isinstance(function, WeightedSum):
        for name, part in function.parts.items():
            yield from calls_of(part.function, fields, f"reward.parts.{name}")
    elif isinstance(function, partial):
        yield key, function.func, {**function.keywords, **fields}
    else:
        yield key, function, fields


def is_async_function(function: RewardFunction) -> bool:
    """Whether a call returns an awaitable."""
    if isinstance(function, partial):
        return is_async_function(function.func)
    if isinstance(function, WeightedSum | PeerReward):
        return function.is_async
    call = getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is a coroutine function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def is_pure_function(function: RewardFunction) -> bool:
    """Whether it was declared pure (contract.pure)."""
    return (
        is_pure_function(function.func) if isinstance(function, partial) else bool(getattr(function, "is_pure", False))
    )
