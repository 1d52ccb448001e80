"""One trajectory: a task, engines, the exact tokens; of one turn, or of several with an environment (episodes.py).

The prompt is rendered once; sampled ids are kept as they came and never re-tokenised. A trajectory whose engine is
lost, silent, fenced off or aborts it goes on from its tokens, there or elsewhere. Ray-free: the engine is a port, so
the same code runs in tests and in the simulator.

Consumes: tasks. Waits for: a lease; the next tokens. Unblocked by: the pool; a delta, an error of the engine, or the
silence watch, which looks at all running requests every eighth of its limit, so that a delta costs no timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from penstock.dataflow.errors import ConfigError, EngineLostError, TrajectoryError
from penstock.dataflow.ids import RequestId, TaskId
from penstock.dataflow.ports import Engine, SamplingParams, TokenDelta
from penstock.dataflow.trajectory import FinishReason, Task, Trajectory
from penstock.rollout.episodes import EpisodePlayer
from penstock.rollout.group_task import GroupTask
from penstock.rollout.lease import Interruption, Lease
from penstock.rollout.oldest_turn import OldestTurn
from penstock.rollout.partial import PartialTrajectory, PartialTurn, ResumeStats
from penstock.rollout.pool import EnginePool
from penstock.rollout.prompts import Prompt
from penstock.rollout.tokenizers import TokenCodec

LOOKS_PER_LIMIT = 8
_COMPLETE: tuple[FinishReason, ...] = ("stop", "length")

_Result = TypeVar("_Result")
_Finish = Callable[[GroupTask, int, PartialTrajectory], _Result]
"""What becomes of the complete turn of a member."""


class Runs(Protocol):
    """What answers tasks: a `TrajectoryRunner`, or two (rollout/shared_groups.py)."""

    @property
    def pool(self) -> EnginePool: ...

    @property
    def stats(self) -> ResumeStats: ...

    def run(self, asked: GroupTask, member: int, sampling: SamplingParams) -> Coroutine[Any, Any, Trajectory]: ...


class TrajectoryRunner:
    """Runs trajectories on a pool of engines.

    Attributes:
        episodes: Plays tasks that have an environment; None where there are none.
        silence_timeout_s: Longest wait for the next tokens of one request before its engine counts as silent.
        max_resumes: Interruptions that one trajectory survives.
        stats: What was resumed since the run began.

    Args:
        max_context_tokens: Of prompt and answer together, as the engines have it; None is not known here.
        vocab_size: Of the policy; None is not known here.
    """

    def __init__(
        self,
        pool: EnginePool,
        codec: TokenCodec,
        silence_timeout_s: float,
        max_resumes: int = 3,
        episodes: EpisodePlayer | None = None,
        *,
        max_context_tokens: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.pool = pool
        self.episodes = episodes
        self.codec = codec
        self.silence_timeout_s = silence_timeout_s
        self.max_resumes = max_resumes
        self.stats = ResumeStats()
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._newest: Task | None = None
        self._refused: TrajectoryError | None = None
        self._prompt = Prompt(codec, ())
        self._finish: _Finish[Trajectory] = self._prompt.trajectory
        self._aborts: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None

    def run(self, asked: GroupTask, member: int, sampling: SamplingParams) -> Coroutine[Any, Any, Trajectory]:
        """Sample one answer, or play one episode.

        Args:
            asked: What the members of a group have in common.
            member: Its place in its group.
            sampling: How tokens are drawn.

        Raises:
            TrajectoryError: kind `env`, if its environment fails, or no policy of this size can answer its prompt; kind
                `engine`, if its engine refuses it, after more than `max_resumes` interruptions, or two engines lost
                over its prompt, or if no engine that may go on with it comes up in time.
            EngineLostError: If no engine is left in service.
        """
        task = asked.task
        if task.environment is not None:
            return self._play(asked, member, sampling)
        if self._newest is not task:  # members of a group come one after another, and share what follows
            self._newest, self._refused = task, None
            try:
                self._prompt = Prompt(self.codec, self._prompt_ids(task))
            except TrajectoryError as refused:
                self._refused = refused
            self._finish = self._prompt.trajectory
        if self._refused is not None:
            raise TrajectoryError(self._refused.kind, self._refused.detail, is_final=True) from self._refused
        prompt_ids, context = self._prompt.token_ids, self._max_context_tokens
        if context is not None and len(prompt_ids) + sampling.max_new_tokens > context:
            # Engines end it there too. Known here, a full context is complete though its engine's last word was lost.
            sampling = replace(sampling, max_new_tokens=context - len(prompt_ids))
        return self._sample(asked, member, PartialTrajectory(prompt_ids, sampling), self._finish)

    def _prompt_ids(self, task: Task) -> tuple[int, ...]:
        """The prompt of a task, if the policy can answer it: an engine would refuse it, or worse.

        Raises:
            TrajectoryError: kind `env`, if it cannot be encoded, leaves no room, or holds tokens that the policy lacks.
        """
        try:
            ids = self.codec.encode_prompt(task.prompt)
        except ConfigError as cause:  # of this task: others may give plain text, which needs no chat template
            raise TrajectoryError("env", f"{task.task_id}: {' '.join(cause.violations)}") from cause
        context, vocab_size = self._max_context_tokens, self._vocab_size
        if context is not None and len(ids) >= context:
            raise TrajectoryError(
                "env",
                f"the prompt of {task.task_id} has {len(ids)} tokens; model.max_context_tokens={context} leaves room "
                f"for at most {context - 1} and one new token, so nothing can be sampled. Its group fails and is "
                "replaced. Leave such tasks out, or use a larger context.",
            )
        if vocab_size is not None and max(ids) >= vocab_size:
            raise TrajectoryError(
                "env",
                f"the prompt of {task.task_id} holds the token id {max(ids)}; model.shape.vocab_size={vocab_size}, so "
                "the policy has no embedding for it. Its group fails and is replaced. Use the policy's own tokenizer.",
            )
        return ids

    def sample_turn(self, name: str, turn: PartialTurn) -> Coroutine[Any, Any, None]:
        """Sample a turn of nobody's trajectory, greedily or not as it says.

        Raises:
            TrajectoryError, EngineLostError: As `run`.
        """
        return self._sample(GroupTask(Task(TaskId(name), ""), name), 0, turn, _kept)

    def _play(self, asked: GroupTask, member: int, sampling: SamplingParams) -> Coroutine[Any, Any, Trajectory]:
        assert self.episodes is not None, "tasks with an environment come with what plays them"
        turns = OldestTurn(asked, member)
        one_slot = None if asked.slots is None else asyncio.Lock()  # a gang has a slot for each member, not more
        return self.episodes.play(
            asked.task,
            asked.trajectory_id(member),
            sampling,
            lambda turn: self._sample_turn(member, turns, one_slot, turn),
        )

    async def _sample_turn(
        self, member: int, turns: OldestTurn, one_slot: asyncio.Lock | None, partial: PartialTurn
    ) -> None:
        async with one_slot or nullcontext():
            partial.floor = max(partial.floor, turns.floor)
            await self._sample(turns.begin(), member, partial, _kept)

    def abort(self, engine: Engine, request_id: RequestId) -> None:
        """Tell the engine to stop what nobody waits for; it may hang, so nobody waits for that either."""

        async def abort() -> None:
            with suppress(EngineLostError):
                await engine.abort(request_id)

        task = asyncio.create_task(abort(), name=f"abort {request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def _look_out(self) -> None:
        """Look for silent requests some time from now."""
        self._watch = self.pool.loop.call_later(self.silence_timeout_s / LOOKS_PER_LIMIT, self._look)

    def _look(self) -> None:
        """Interrupt every request that has been silent for too long."""
        now = self.pool.loop.time()
        self._watch = None
        running = [lease for lease in self.pool.leases() if lease.is_held]
        for lease in running:
            if now - lease.heard_at >= self.silence_timeout_s:
                lease.interrupt("silent", f"{lease.engine.engine_id}: no token for {self.silence_timeout_s:.0f} s")
        if running:
            self._look_out()

    async def _sample(
        self, asked: GroupTask, member: int, partial: PartialTrajectory, finish: _Finish[_Result]
    ) -> _Result:
        """Sample to the end of a turn, over as many engines as it takes.

        One coroutine, not one in another, and no object beside it: as many wait here as there are live trajectories.
        """
        interruption: Interruption | None = None
        while True:
            lease = self._lease(asked, partial, interruption)
            if not lease.take():
                await lease.wait()
            try:
                async for delta in self._deltas(asked, member, partial, lease):
                    if _keep(asked, member, partial, delta, lease):
                        self._stop(asked, member, delta, lease)
                        break
                interruption = None
                if partial.finish_reason not in _COMPLETE:
                    interruption = _aborted(asked, member, partial, lease)
            except BaseException as error:  # noqa: BLE001 - raised again, unless the trajectory survives it
                interruption = self._interruption(asked, member, error, lease)
            finally:
                lease.release()
            if interruption is None or self._is_settled(asked, member, partial, interruption):
                return finish(asked, member, partial)
            lost = asked.lost_engines
            if lost is not None and interruption.may_be_the_requests_fault and interruption.view not in lost:
                asked.lost_engines = (*lost, interruption.view)

    def _lease(self, asked: GroupTask, partial: PartialTrajectory, last: Interruption | None) -> Lease:
        """A slot for what is missing, not where it has just been lost."""
        avoid = None if last is None or last.kind == "aborted" else last.view.engine_id
        slots = asked.slots or self.pool
        return slots.lease(partial.remaining(), asked.task.task_id, partial.min_version(), avoid)

    def _deltas(
        self, asked: GroupTask, member: int, partial: PartialTrajectory, lease: Lease
    ) -> AsyncIterator[TokenDelta]:
        """Ask for what is missing. From now until it is released, the lease may be interrupted."""
        assert lease.view is not None, "it was granted"
        if asked.is_harmful:
            raise _harmful(asked, member, partial)
        engine = lease.view.engine  # `lease.engine`, without calling a property
        lease.dispatched_at = version = engine.version
        if not partial.num_tokens:
            asked.member_at(member, version)
        if self._watch is None:
            self._look_out()
        lease.hold()
        return engine.generate(partial.request(_request_id(asked, member, lease)))

    def _stop(self, asked: GroupTask, member: int, delta: TokenDelta, lease: Lease) -> None:
        """Stop the engine of a turn that was cut, unless it has ended it by itself."""
        if delta.finish_reason is None:
            self.abort(lease.engine, _request_id(asked, member, lease))

    def _interruption(self, asked: GroupTask, member: int, error: BaseException, lease: Lease) -> Interruption:
        """What ended a request before its time; raises whatever the trajectory does not survive."""
        lease.let_go()  # it is over already: if this loss fences the engine, that must not cancel the task
        assert lease.view is not None, "not released yet"
        group = (asked.name, asked.task.task_id)  # evaluations share a name: there each task counts for itself
        if isinstance(error, EngineLostError):
            lease.lost(error, group)
            return Interruption("lost", str(error), lease.view)
        self.abort(lease.engine, _request_id(asked, member, lease))
        if isinstance(error, asyncio.CancelledError) and lease.was_interrupted():
            assert lease.interruption is not None, "was interrupted"
            if lease.interruption.kind == "silent":
                lease.lost(EngineLostError(lease.interruption.reason), group)
            return lease.interruption
        if isinstance(error, TrajectoryError) and not error.is_final:  # if it fails all that it gets, it attracts more
            lease.lost(EngineLostError(error.detail), group)
        raise error

    def _is_settled(
        self, asked: GroupTask, member: int, partial: PartialTrajectory, interruption: Interruption
    ) -> bool:
        """Count it, and give up on a trajectory that has had too many; says whether nothing is missing after all."""
        stats, max_resumes = self.stats, self.max_resumes
        stats.interruptions[interruption.kind] += 1
        partial.num_interruptions += 1
        if partial.num_interruptions > max_resumes:
            raise TrajectoryError(
                "engine",
                f"{asked.trajectory_id(member)}: interrupted {partial.num_interruptions} times with "
                f"{partial.num_tokens} tokens sampled, rollout.max_resumes is {max_resumes}; the last time: "
                f"{interruption.reason}",
            )
        if partial.num_tokens:
            stats.trajectories += not partial.resumed_with
            stats.tokens += partial.num_tokens
            partial.resumed_with = partial.num_tokens
        return partial.settle()


def _keep(asked: GroupTask, member: int, partial: PartialTrajectory, delta: TokenDelta, lease: Lease) -> bool:
    """Keep new tokens; says whether they were cut, so that no more are wanted."""
    if not partial.num_tokens and (spans := delta.spans):
        asked.lost_engines = None
        first = spans[0].version
        if first != lease.dispatched_at:
            asked.member_at(member, first)
    lease.received(len(delta.token_ids))
    return partial.extend(delta)


def _request_id(asked: GroupTask, member: int, lease: Lease) -> RequestId:
    """Of a lease's only request; no two leases of a pool have the same serial."""
    return RequestId(f"{asked.name}/{member}#{lease.serial}")


def _aborted(asked: GroupTask, member: int, partial: PartialTrajectory, lease: Lease) -> Interruption:
    """A stream of tokens ended that did not fail, and the turn is not complete."""
    assert lease.view is not None, "not released yet"
    ended = f"{lease.view.engine_id} ended {_request_id(asked, member, lease)}: {partial.finish_reason}"
    return Interruption("aborted", ended, lease.view)


def _harmful(asked: GroupTask, member: int, partial: PartialTrajectory) -> TrajectoryError:
    lost = " and ".join(view.engine_id for view in asked.lost_engines or ())
    return TrajectoryError(
        "engine",
        f"{asked.trajectory_id(member)}: {lost} died or stood still over its prompt of {len(partial.prompt_ids)} "
        f"tokens, and none has answered it. It may be the cause, so it is given to no third engine. Look at task "
        f"{asked.task.task_id}, and at the logs of these engines.",
        is_final=True,
    )


def _kept(_asked: GroupTask, _member: int, _partial: PartialTrajectory) -> None:
    """A turn of a dialogue, which keeps it."""
