"""One trajectory: a task, engines, the exact tokens; of one turn, or of several with an environment (episodes.py).

The prompt is rendered once; sampled ids are kept as they came and never re-tokenised. A trajectory whose engine is
lost, silent, fenced off or aborts it goes on from its tokens, there or elsewhere. Ray-free: the engine is a port, so
the same code runs in tests and in the simulator.

Consumes: tasks. Waits for: a lease; the next tokens. Unblocked by: the pool; a delta, an error of the engine, or the
silence watch, which looks at all running requests every eighth of its limit, so that a delta costs no timer.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.errors import EngineLostError, TrajectoryError
from penstock.dataflow.ids import RequestId, TaskId, TrajectoryId
from penstock.dataflow.ports import Engine, SamplingParams, TokenDelta
from penstock.dataflow.trajectory import Task, Trajectory
from penstock.rollout.episodes import EpisodePlayer
from penstock.rollout.lease import Interruption, Lease, LeaseMaker
from penstock.rollout.oldest_turn import OldestTurn, VersionWatcher
from penstock.rollout.partial import PartialTrajectory, PartialTurn, ResumeStats
from penstock.rollout.pool import EnginePool
from penstock.rollout.tokenizers import TokenCodec

LOOKS_PER_LIMIT = 8
MAX_PROMPTS = 4096
"""Rendered prompts kept: the members of a group share theirs."""

_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Attempt:
    """One trajectory, or one turn of an episode, on its way."""

    task: Task
    trajectory_id: TrajectoryId
    watcher: VersionWatcher | None
    member: int
    slots: LeaseMaker


@dataclass(frozen=True, slots=True)
class _Prompt:
    task: Task
    token_ids: tuple[int, ...]
    text: str
    array: NDArray[np.int32]


class Runs(Protocol):
    """What answers tasks: a `TrajectoryRunner`, or two (rollout/shared_groups.py)."""

    @property
    def pool(self) -> EnginePool: ...

    @property
    def stats(self) -> ResumeStats: ...

    def run(
        self,
        task: Task,
        trajectory_id: TrajectoryId,
        sampling: SamplingParams,
        *,
        watcher: VersionWatcher | None = None,
        member: int = 0,
        slots: LeaseMaker | None = None,
    ) -> Coroutine[Any, Any, Trajectory]: ...


class TrajectoryRunner:
    """Runs trajectories on a pool of engines.

    Attributes:
        episodes: Plays tasks that have an environment; None where there are none.
        silence_timeout_s: Longest wait for the next tokens of one request before its engine counts as silent.
        max_resumes: Interruptions that one trajectory survives.
        stats: What was resumed since the run began.
    """

    def __init__(
        self,
        pool: EnginePool,
        codec: TokenCodec,
        silence_timeout_s: float,
        max_resumes: int = 3,
        episodes: EpisodePlayer | None = None,
    ) -> None:
        self.pool = pool
        self.episodes = episodes
        self.codec = codec
        self.silence_timeout_s = silence_timeout_s
        self.max_resumes = max_resumes
        self.stats = ResumeStats()
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._newest: _Prompt | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None

    def run(
        self,
        task: Task,
        trajectory_id: TrajectoryId,
        sampling: SamplingParams,
        *,
        watcher: VersionWatcher | None = None,
        member: int = 0,
        slots: LeaseMaker | None = None,
    ) -> Coroutine[Any, Any, Trajectory]:
        """Sample one answer, or play one episode.

        Args:
            task: What is asked. Trajectories of one task share a prefix, and so prefer one engine.
            trajectory_id: Name of this attempt's place in its group.
            sampling: How tokens are drawn.
            watcher: Told of the versions that sample it, as `member`.
            member: Its place in its group.
            slots: A gang to lease from; default is the pool.

        Raises:
            TrajectoryError: kind `env`, if its environment fails; kind `engine`, after more than `max_resumes`
                interruptions, or if no engine that may go on with it comes up in time.
            EngineLostError: If no engine is left in service.
        """
        attempt = _Attempt(task, trajectory_id, watcher, member, slots or self.pool)
        if task.environment is not None:
            return self._play(attempt, sampling)
        partial = PartialTrajectory(self._rendered(task).token_ids, sampling)
        return self._sample(attempt, partial, TrajectoryRunner._trajectory)

    def sample_turn(self, name: str, turn: PartialTurn) -> Coroutine[Any, Any, None]:
        """Sample a turn of nobody's trajectory, greedily or not as it says.

        Raises:
            TrajectoryError, EngineLostError: As `run`.
        """
        attempt = _Attempt(Task(TaskId(name), ""), TrajectoryId(name), None, 0, self.pool)
        return self._sample(attempt, turn, _nothing)

    def _play(self, attempt: _Attempt, sampling: SamplingParams) -> Coroutine[Any, Any, Trajectory]:
        assert self.episodes is not None, "tasks with an environment come with what plays them"
        turns = OldestTurn(attempt.watcher, attempt.member)
        one_slot = None if attempt.slots is self.pool else asyncio.Lock()  # a gang has a slot for each member, not more
        return self.episodes.play(
            attempt.task,
            attempt.trajectory_id,
            sampling,
            lambda turn: self._sample_turn(attempt, turns, one_slot, turn),
        )

    async def _sample_turn(
        self, attempt: _Attempt, turns: OldestTurn, one_slot: asyncio.Lock | None, partial: PartialTurn
    ) -> None:
        async with one_slot or nullcontext():
            partial.floor = max(partial.floor, turns.floor)
            await self._sample(replace(attempt, watcher=turns, member=turns.begin()), partial, _nothing)

    async def _sample(
        self,
        attempt: _Attempt,
        partial: PartialTrajectory,
        finished: Callable[[TrajectoryRunner, _Attempt, PartialTrajectory], _Result],
    ) -> _Result:
        """Sample to the end of a turn, over as many engines as it takes; returns what `finished` makes of it.

        One coroutine, not one in another: as many of them wait as there are live trajectories.
        """
        interruption: Interruption | None = None
        while True:
            lease = self._lease(attempt, partial, interruption)
            await lease.acquire()
            try:
                async for delta in self._deltas(lease, attempt, partial):
                    if self._keep(delta, lease, attempt, partial):
                        break
                interruption = self._ending(lease, attempt, partial)
            except BaseException as error:  # noqa: BLE001 - raised again, unless the trajectory survives it
                interruption = self._interruption(error, lease, attempt)
            finally:
                lease.release()
            if interruption is None or self._is_settled(interruption, attempt, partial):
                return finished(self, attempt, partial)

    def _lease(self, attempt: _Attempt, partial: PartialTrajectory, last: Interruption | None) -> Lease:
        """A slot for what is missing, not where it has just been lost."""
        avoid = None if last is None or last.kind == "aborted" else last.engine_id
        return attempt.slots.lease(partial.remaining, attempt.task.task_id, partial.min_version, avoid)

    def _deltas(self, lease: Lease, attempt: _Attempt, partial: PartialTrajectory) -> AsyncIterator[TokenDelta]:
        """Ask for what is missing. From now until it is released, the lease may be interrupted."""
        engine = lease.engine
        lease.dispatched_at = engine.version
        if attempt.watcher is not None and not partial.num_tokens:
            attempt.watcher.member_at(attempt.member, engine.version)
        if self._watch is None:
            self._look_later()
        lease.hold()
        return engine.generate(partial.request(_request_id(lease, attempt)))

    def _keep(self, delta: TokenDelta, lease: Lease, attempt: _Attempt, partial: PartialTrajectory) -> bool:
        """Keep new tokens; says whether they were cut, so that no more are wanted."""
        if delta.spans and not partial.num_tokens and attempt.watcher is not None:
            first = delta.spans[0].version
            if first != lease.dispatched_at:
                attempt.watcher.member_at(attempt.member, first)
        lease.received(len(delta.token_ids))
        partial.extend(delta)
        if partial.is_cut and delta.finish_reason is None:
            self._abort(lease.engine, _request_id(lease, attempt))
        return partial.is_cut

    def _ending(self, lease: Lease, attempt: _Attempt, partial: PartialTrajectory) -> Interruption | None:
        """How a stream of tokens ended that did not fail: None if the turn is complete."""
        if partial.finish_reason not in (None, "abort"):
            return None
        engine_id, request_id = lease.engine.engine_id, _request_id(lease, attempt)
        return Interruption("aborted", f"{engine_id} ended {request_id}: {partial.finish_reason}", engine_id)

    def _interruption(self, error: BaseException, lease: Lease, attempt: _Attempt) -> Interruption:
        """What ended a request before its time; raises whatever the trajectory does not survive."""
        lease.let_go()  # it is over already: if this loss fences the engine, that must not cancel the task
        engine = lease.engine
        if isinstance(error, EngineLostError):
            lease.lost(error)
            return Interruption("lost", str(error), engine.engine_id)
        self._abort(engine, _request_id(lease, attempt))
        if isinstance(error, asyncio.CancelledError) and lease.was_interrupted():
            assert lease.interruption is not None, "was interrupted"
            return lease.interruption
        raise error

    def _is_settled(self, interruption: Interruption, attempt: _Attempt, partial: PartialTrajectory) -> bool:
        """Count it, and give up on a trajectory that has had too many; says whether nothing is missing after all."""
        self.stats.interruptions[interruption.kind] += 1
        partial.num_interruptions += 1
        if partial.num_interruptions > self.max_resumes:
            raise TrajectoryError(
                "engine",
                f"{attempt.trajectory_id}: interrupted {partial.num_interruptions} times with {partial.num_tokens} "
                f"tokens sampled, rollout.max_resumes is {self.max_resumes}; the last time: {interruption.reason}",
            )
        if partial.num_tokens:
            self.stats.trajectories += not partial.resumed_with
            self.stats.tokens += partial.num_tokens
            partial.resumed_with = partial.num_tokens
        return partial.settle()

    def _abort(self, engine: Engine, request_id: RequestId) -> None:
        """Tell the engine to stop what nobody waits for; it may hang, so nobody waits for that either."""

        async def abort() -> None:
            with suppress(EngineLostError):
                await engine.abort(request_id)

        task = asyncio.create_task(abort(), name=f"abort {request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._watch = loop.call_later(self.silence_timeout_s / LOOKS_PER_LIMIT, self._look)

    def _look(self) -> None:
        """Interrupt every request that has been silent for too long."""
        now = asyncio.get_running_loop().time()
        self._watch = None
        running = [lease for lease in self.pool.leases() if lease.is_held]
        for lease in running:
            if now - lease.heard_at >= self.silence_timeout_s:
                lease.interrupt("silent", f"{lease.engine.engine_id}: no token for {self.silence_timeout_s:.0f} s")
        if running:
            self._look_later()

    def _rendered(self, task: Task) -> _Prompt:
        """The prompt of a task, rendered once for all its trajectories."""
        if self._newest is not None and self._newest.task is task:
            return self._newest  # members of a group come one after another
        known = self._prompts.get(id(task))
        if known is not None:
            self._newest = known
            return known
        token_ids = self.codec.encode_prompt(task.prompt)
        prompt = self._prompts[id(task)] = _Prompt(
            task, token_ids, self.codec.decode(token_ids), np.array(token_ids, np.int32)
        )
        if len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return prompt

    def _trajectory(self, attempt: _Attempt, partial: PartialTrajectory) -> Trajectory:
        prompt = self._rendered(attempt.task)
        num_prompt, sampled = len(prompt.token_ids), partial.token_ids
        num_tokens = num_prompt + len(sampled)
        token_ids = np.empty(num_tokens, np.int32)
        token_ids[:num_prompt] = prompt.array
        token_ids[num_prompt:] = sampled
        loss_mask = np.zeros(num_tokens, np.bool_)
        loss_mask[num_prompt:] = True
        logprobs = np.zeros(num_tokens, np.float32)
        logprobs[num_prompt:] = partial.logprobs
        assert partial.finish_reason is not None, "it ended"
        spoken = self.codec.split(sampled, prompt.text)
        return Trajectory(
            trajectory_id=attempt.trajectory_id,
            task_id=attempt.task.task_id,
            token_ids=token_ids,
            loss_mask=loss_mask,
            behavior_logprobs=logprobs,
            spans=partial.spans,
            prompt=prompt.text,
            response=spoken.answer,
            finish_reason=partial.finish_reason,
            reasoning=spoken.reasoning,
        )


def _request_id(lease: Lease, attempt: _Attempt) -> RequestId:
    """Of its only request; no two leases of a pool have the same serial."""
    return RequestId(f"{attempt.trajectory_id}#{lease.serial}")


def _nothing(_runner: TrajectoryRunner, _attempt: _Attempt, _partial: PartialTrajectory) -> None:
    """A turn is kept by its dialogue."""
