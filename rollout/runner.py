"""One trajectory: a task, engines, the exact tokens; of one turn, or of several with an environment (episodes.py).

The prompt is rendered once; sampled ids are kept as they came and never re-tokenised. A trajectory whose engine is
lost, silent, fenced off or aborts it goes on from its tokens, there or elsewhere. Ray-free: the engine is a port, so
the same code runs in tests and in the simulator.

Consumes: tasks. Waits for: a lease; the next tokens. Unblocked by: the pool; a delta, an error of the engine, or the
silence watch, which looks at all running requests every eighth of its limit, so that a delta costs no timer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.errors import EngineLostError, TrajectoryError
from penstock.dataflow.ids import EngineId, RequestId, TrajectoryId
from penstock.dataflow.ports import Engine, SamplingParams
from penstock.dataflow.trajectory import Task, Trajectory
from penstock.rollout.episodes import EpisodePlayer
from penstock.rollout.lease import Interruption, Lease, LeaseMaker
from penstock.rollout.oldest_turn import OldestTurn, VersionWatcher
from penstock.rollout.partial import PartialTrajectory, ResumeStats
from penstock.rollout.pool import EnginePool
from penstock.rollout.tokenizers import TokenCodec

LOOKS_PER_LIMIT = 8
MAX_PROMPTS = 4096
"""Rendered prompts kept: the members of a group share theirs."""


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

    async def run(
        self,
        task: Task,
        trajectory_id: TrajectoryId,
        sampling: SamplingParams,
        *,
        watcher: VersionWatcher | None = None,
        member: int = 0,
        slots: LeaseMaker | None = None,
    ) -> Trajectory: ...


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
        self._serial = itertools.count()
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._newest: _Prompt | None = None
        self._aborts: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None

    async def run(
        self,
        task: Task,
        trajectory_id: TrajectoryId,
        sampling: SamplingParams,
        *,
        watcher: VersionWatcher | None = None,
        member: int = 0,
        slots: LeaseMaker | None = None,
    ) -> Trajectory:
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
            assert self.episodes is not None, "tasks with an environment come with what plays them"
            turns = OldestTurn(watcher, member)
            one_slot = None if slots is None else asyncio.Lock()  # a gang has a slot for each member, not more
            return await self.episodes.play(
                task, trajectory_id, sampling, lambda turn: self._sample_turn(attempt, turns, one_slot, turn)
            )
        partial = PartialTrajectory(self._rendered(task).token_ids, sampling)
        await self._sample(attempt, partial)
        return self._trajectory(task, trajectory_id, partial)

    async def _sample_turn(
        self, attempt: _Attempt, turns: OldestTurn, one_slot: asyncio.Lock | None, partial: PartialTrajectory
    ) -> None:
        async with one_slot or nullcontext():
            partial.floor = max(partial.floor, turns.floor)
            await self._sample(replace(attempt, watcher=turns, member=turns.begin()), partial)

    async def _sample(self, attempt: _Attempt, partial: PartialTrajectory) -> None:
        """Sample to the end of a turn, over as many engines as it takes."""
        avoid: EngineId | None = None
        while True:
            request_id = RequestId(f"{attempt.trajectory_id}#{next(self._serial)}")
            lease = attempt.slots.lease(partial.remaining, attempt.task.task_id, partial.min_version, avoid)
            await lease.acquire()
            try:
                interruption = await self._generate(lease, request_id, partial, attempt)
                avoid = None if interruption is None or interruption.kind == "aborted" else lease.engine.engine_id
            finally:
                lease.release()
            if interruption is None:
                return
            self._interrupted(partial, request_id, interruption)
            if partial.settle():
                return

    async def _generate(
        self,
        lease: Lease,
        request_id: RequestId,
        partial: PartialTrajectory,
        attempt: _Attempt,
    ) -> Interruption | None:
        """Follow one request to its end, or to what interrupts it."""
        engine, watcher, member = lease.engine, attempt.watcher, attempt.member
        told = engine.version
        if watcher is not None and not partial.num_tokens:
            watcher.member_at(member, told)
        if self._watch is None:
            self._look_later()
        lease.hold()
        try:
            async for delta in engine.generate(partial.request(request_id)):
                if delta.spans and delta.spans[0].version != told and watcher is not None and not partial.num_tokens:
                    watcher.member_at(member, delta.spans[0].version)
                lease.received(len(delta.token_ids))
                partial.extend(delta)
                if partial.is_cut:
                    if delta.finish_reason is None:
                        self._abort(engine, request_id)
                    break
        except EngineLostError as error:
            lease.let_go()  # it is over already: if this loss fences the engine, that must not cancel the task
            lease.lost(error)
            return Interruption("lost", str(error))
        except asyncio.CancelledError:
            self._abort(engine, request_id)
            if lease.was_interrupted():
                return lease.interruption
            raise
        except BaseException:
            self._abort(engine, request_id)
            raise
        finally:
            lease.let_go()
        if partial.finish_reason is None or partial.finish_reason == "abort":
            return Interruption("aborted", f"{engine.engine_id} ended {request_id}: {partial.finish_reason}")
        return None

    def _interrupted(self, partial: PartialTrajectory, request_id: RequestId, interruption: Interruption) -> None:
        """Count it, and give up on a trajectory that has had too many."""
        self.stats.interruptions[interruption.kind] += 1
        partial.num_interruptions += 1
        if partial.num_interruptions > self.max_resumes:
            raise TrajectoryError(
                "engine",
                f"{request_id}: interrupted {partial.num_interruptions} times with {partial.num_tokens} tokens "
                f"sampled, rollout.max_resumes is {self.max_resumes}; the last time: {interruption.reason}",
            )
        if partial.num_tokens:
            self.stats.trajectories += not partial.resumed_with
            self.stats.tokens += partial.num_tokens
            partial.resumed_with = partial.num_tokens

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

    def _trajectory(self, task: Task, trajectory_id: TrajectoryId, partial: PartialTrajectory) -> Trajectory:
        prompt = self._rendered(task)
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
            trajectory_id=trajectory_id,
            task_id=task.task_id,
            token_ids=token_ids,
            loss_mask=loss_mask,
            behavior_logprobs=logprobs,
            spans=partial.spans,
            prompt=prompt.text,
            response=spoken.answer,
            finish_reason=partial.finish_reason,
            reasoning=spoken.reasoning,
        )
