"""Runs one trajectory on the engine pool: a single turn, or an episode with an environment (episodes.py).

The prompt is rendered once, and sampled token ids are kept exactly; nothing is tokenized again. When its engine is
lost, silent or fenced, or aborts the request, a trajectory resumes from its tokens on the same or another engine. The
engine is a port, so the same code runs with Ray, in tests and in the simulator.

Consumes: tasks. Waits for: a lease, then the next tokens. Unblocked by: the pool; a delta, an error of the engine, or
the silence check, which visits all running requests every eighth of the time-out so that a delta needs no timer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace

from penstock.dataflow.errors import ConfigError, EngineLostError, TrajectoryError
from penstock.dataflow.ids import PARTNER, RequestId, TaskId
from penstock.dataflow.ports import Engine
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.rollout.engine_pool.pool import LATE_S, EnginePool, Interruption, InterruptionKind, Lease
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.conversation import Conversation, PartialTurn, build_trajectory
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.rollout_context import OldestTurn, RolloutContext
from penstock.rollout.trajectory.stop_texts import end_at_stop_texts

CHECKS_PER_TIMEOUT = 8


@dataclass(slots=True)
class ResumeStats:
    """Absolute counters since the run began."""

    trajectories: int = 0
    """Trajectories that resumed at least once with tokens."""
    tokens: int = 0
    """Sampled tokens that were kept over resumes and not sampled again."""
    received_tokens: int = 0
    """All tokens received from the engines, those of evaluations included."""
    interruptions: Counter[InterruptionKind] = field(default_factory=Counter)
    """Interruptions by kind, including those before the first token."""

    def __add__(self, other: ResumeStats) -> ResumeStats:
        return ResumeStats(
            self.trajectories + other.trajectories,
            self.tokens + other.tokens,
            self.received_tokens + other.received_tokens,
            self.interruptions + other.interruptions,
        )


class TrajectoryRunner:
    """Runs trajectories on a pool of engines.

    Attributes:
        episodes: Plays tasks that have an environment; None if there are none.
        silence_timeout_s: Longest wait for the next tokens of one request before its engine counts as silent.
        max_resumes: Interruptions in a row, without a new token between them, that one trajectory survives.
        stats: Counters of resumes since the run began.

    Args:
        max_context_tokens: Limit of prompt and answer together, as in the engines; None skips the check.
        vocab_size: Vocabulary of the policy; None skips the check.
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
        self._aborts: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._silent_since = 0.0

    async def run(self, context: RolloutContext, member: int, sampling: SamplingParams) -> Trajectory:
        """Sample one answer, or play one episode.

        Args:
            context: Shared by the trajectories of a group.
            member: Index of the trajectory in its group.
            sampling: Sampling parameters.

        Raises:
            TrajectoryError: kind `env`, if the environment fails or the prompt does not fit the policy; kind `engine`,
                if the engine rejects the request, after more than `max_resumes` interruptions in a row, if two engines
                were lost on the prompt, or if no engine reaches a new enough version in time.
            EngineLostError: If no engine is left in service.
        """
        if context.task.environment is not None:
            return await self._play(context, member, sampling)
        if self.codec not in context.prompts:
            prompt_ids = self._prompt_ids(context.task)
            context.prompts[self.codec] = prompt_ids, self.codec.decode_prompt(prompt_ids)
        conversation = Conversation(*context.prompts[self.codec], sampling)
        # Engines also stop at the context limit. The turn gets the same limit here, so that a turn that fills the
        # context counts as complete even if the engine's final message was lost.
        turn = conversation.next_turn(self._max_context_tokens or conversation.num_tokens + sampling.max_new_tokens)
        if sampling.stop:
            end_at_stop_texts(turn, self.codec)
        if (saved := context.saved_tokens.pop(member, None)) is not None:
            turn.extend(saved)
        context.turns[member] = turn
        if not (saved and turn.finish_if_complete()):
            await self._sample(context, member, turn)
        conversation.add_turn(turn, self.codec.split(turn.token_ids, conversation.opening))
        trajectory = build_trajectory([conversation], context.task, context.trajectory_id(member))
        # Without a wait from here to the caller, so that a checkpoint finds the turn or the trajectory.
        del context.turns[member]
        return trajectory

    def _prompt_ids(self, task: Task) -> tuple[int, ...]:
        """Encode the prompt of a task and check that the policy can answer it.

        Raises:
            TrajectoryError: Final; kind `long_prompt`, if it leaves no space for an answer; kind `env`, if it cannot be
                encoded, or holds token ids that the policy lacks.
        """
        try:
            ids = self.codec.encode_prompt(task.prompt)
        except TrajectoryError as cause:
            raise TrajectoryError(cause.kind, cause.detail, is_final=True) from cause
        except ConfigError as cause:
            # A missing chat template fails this task only: other tasks may have plain text.
            raise TrajectoryError("env", f"{task.task_id}: {' '.join(cause.violations)}", is_final=True) from cause
        context, vocab_size = self._max_context_tokens, self._vocab_size
        if context is not None and len(ids) >= context:
            raise TrajectoryError(
                "long_prompt",
                f"the prompt of {task.task_id} has {len(ids)} tokens; model.max_context_tokens={context} leaves space "
                f"for at most {context - 1} and one new token, so nothing can be sampled. Its group fails and is "
                "replaced. Leave such tasks out, or use a larger context.",
                is_final=True,
            )
        if vocab_size is not None and max(ids) >= vocab_size:
            raise TrajectoryError(
                "env",
                f"the prompt of {task.task_id} holds the token id {max(ids)}; model.shape.vocab_size={vocab_size}, so "
                "the policy has no embedding for it. Its group fails and is replaced. Use the policy's own tokenizer.",
                is_final=True,
            )
        return ids

    async def sample_turn(self, name: str, turn: PartialTurn) -> None:
        """Sample a turn that belongs to no trajectory.

        Raises:
            TrajectoryError, EngineLostError: As `run`.
        """
        await self._sample(RolloutContext(Task(TaskId(name), ""), name), 0, turn)

    async def _play(self, context: RolloutContext, member: int, sampling: SamplingParams) -> Trajectory:
        assert self.episodes is not None, "tasks with an environment need an episode player"
        turns = OldestTurn(context, member)

        async def sample(turn: PartialTurn) -> None:
            turn.min_start_version = max(turn.min_start_version, turns.min_version)
            await self._sample(turns.begin(), member, turn)

        return await self.episodes.play(context.task, context.trajectory_id(member), sampling, sample)

    def abort(self, engine: Engine, request_id: RequestId) -> None:
        """Tell the engine to stop a request, without waiting: a hung engine would not answer."""

        async def abort() -> None:
            with suppress(EngineLostError):
                await engine.abort(request_id)

        task = asyncio.create_task(abort(), name=f"abort {request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _sample(self, context: RolloutContext, member: int, partial: PartialTurn) -> None:
        """Sample a turn to its end, resuming on other engines as needed."""
        if partial.sampling.stop and partial.on_delta is None:
            end_at_stop_texts(partial, self.codec)
        last: Interruption | None = None
        num_in_vain = 0
        while True:
            num_tokens = partial.num_tokens
            avoid = None if last is None or last.kind == "aborted" else last.view.engine_id
            prefix = context.task.task_id
            async with self.pool.lease(partial.remaining(), prefix, partial.min_version(), avoid) as lease:
                last = await self._attempt(context, member, partial, lease)
            if last is None:
                return
            stats = self.stats
            stats.interruptions[last.kind] += 1
            partial.num_interruptions += last.is_charged
            # An attempt that added a token is progress. So a long answer survives any number of preemptions, and still
            # ends, since its tokens are bounded. An engine that leaves is counted neither way.
            if partial.num_tokens > num_tokens:
                num_in_vain = 0
            elif last.is_charged:
                num_in_vain += 1
            if num_in_vain > self.max_resumes:
                raise TrajectoryError(
                    "engine",
                    f"{context.trajectory_id(member)}: interrupted {num_in_vain} times in a row without a new token, "
                    f"after {partial.num_tokens} tokens; rollout.max_resumes is {self.max_resumes}; the last time: "
                    f"{last.reason}",
                )
            if partial.num_tokens:
                stats.trajectories += not partial.resumed_with
                stats.tokens += partial.num_tokens
                partial.resumed_with = partial.num_tokens
            if partial.finish_if_complete():
                return
            if last.may_be_caused_by_request and not context.is_answered and last.view not in context.lost_engines:
                context.lost_engines.append(last.view)

    async def _attempt(
        self, context: RolloutContext, member: int, partial: PartialTurn, lease: Lease
    ) -> Interruption | None:
        """Generate the missing tokens on the engine of a lease. Returns why it did not finish; None if it did.

        Errors that the trajectory cannot survive are raised.
        """
        view = lease.view
        assert view is not None, "it was granted"
        request_id = RequestId(f"{context.trajectory_id(member)}#{lease.serial}")
        # All tasks of an evaluation share one name, so each task counts as a group of its own there.
        group = (context.name, context.task.task_id)
        if context.is_suspect:
            lost = " and ".join(engine.engine_id for engine in context.lost_engines)
            raise TrajectoryError(
                "engine",
                f"{context.trajectory_id(member)}: {lost} died or hung on its prompt of "
                f"{len(partial.prompt_ids)} tokens, and no engine has answered it. The prompt may be the cause, so "
                f"it is not sent to a third engine. Look at task {context.task.task_id} and the logs of these engines.",
                is_final=True,
            )
        version = lease.engine.version
        if not partial.num_tokens:
            context.record_version(member, version)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(
                self.silence_timeout_s / CHECKS_PER_TIMEOUT, self._check_silence
            )
        lease.start_interruptible()
        try:
            async for delta in lease.engine.generate(partial.request(request_id)):
                if not partial.num_tokens and delta.spans:
                    context.is_answered = True
                    if delta.spans[0].version != version:
                        context.record_version(member, delta.spans[0].version)
                lease.received(len(delta.token_ids))
                self.stats.received_tokens += len(delta.token_ids)
                partial.extend(delta)
                if partial.is_cut:
                    if delta.finish_reason is None:
                        self.abort(lease.engine, request_id)
                    break
        except EngineLostError as error:
            lease.lost(error, group)
            return Interruption("lost", str(error), view)
        except BaseException as error:
            # The request is over. If reporting this loss fences the engine, that must not cancel the current task.
            lease.stop_interruptible()
            self.abort(lease.engine, request_id)
            if isinstance(error, asyncio.CancelledError) and lease.was_interrupted():
                assert lease.interruption is not None, "was interrupted"
                if lease.interruption.kind == "silent":
                    lease.lost(EngineLostError(lease.interruption.reason), group)
                return lease.interruption
            if isinstance(error, TrajectoryError) and not error.is_final:
                # An engine that fails every request at once would look idle and attract all new ones.
                lease.lost(EngineLostError(error.detail), group)
            raise
        if partial.finish_reason in ("stop", "length"):
            return None
        return Interruption("aborted", f"{view.engine_id} ended {request_id}: {partial.finish_reason}", view)

    def _check_silence(self) -> None:
        """Interrupt the requests that have been silent for too long; schedule the next check while requests run.

        With other engines in service the requests go there, and losses fence this one in time (`EnginePool.lost`). The
        only engine would get them back, so it is restarted as soon as none of its requests got a token in that time. If
        a prompt was the cause, that costs two restarts (`RolloutContext.is_suspect`). Without a restart it stays in
        service: only a message may have been lost.
        """
        assert self._watch is not None, "called by its timer"
        loop = asyncio.get_running_loop()
        due, self._watch = self._watch.when(), None
        if loop.time() - due > LATE_S:
            # This loop stood still, so the tokens of that time are still unread: every request gets a fresh period.
            self._silent_since = loop.time()
        running = [lease for lease in self.pool.leases() if lease.is_interruptible]
        limit_s, since = self.silence_timeout_s, loop.time() - self.silence_timeout_s
        silent = [lease for lease in running if max(lease.last_token_at, self._silent_since) <= since]
        for lease in silent:
            lease.interrupt("silent", f"{lease.engine.engine_id}: no token for {limit_s:.0f} s")
        views = self.pool.views()
        if len(views) == 1 and any(
            lease.view is views[0] and views[0].last_token_at <= lease.last_token_at for lease in silent
        ):
            reason = f"no token for {limit_s:.0f} s to any of its requests"
            self.pool.fence(views[0].engine_id, reason, only_if_restarted=True)
        if running:
            self._watch = loop.call_later(self.silence_timeout_s / CHECKS_PER_TIMEOUT, self._check_silence)


class SharedGroups:
    """Groups that two policies answer together: the policy samples even members, its partner odd members.

    Each policy samples on its own engines. Both train on every batch, so version v of either has learned from the first
    v batches, and the staleness of a group is that of its oldest token, whichever policy sampled it.
    """

    def __init__(self, policy: RolloutRunner, partner: RolloutRunner) -> None:
        self._policy = policy
        self._partner = partner

    @property
    def pool(self) -> EnginePool:
        """Engines of the policy."""
        return self._policy.pool

    @property
    def stats(self) -> ResumeStats:
        """Sum over the engines of both policies."""
        return self._policy.stats + self._partner.stats

    async def run(self, context: RolloutContext, member: int, sampling: SamplingParams) -> Trajectory:
        """As `TrajectoryRunner.run`."""
        if member % 2 == 0:
            return await self._policy.run(context, member, sampling)
        return replace(await self._partner.run(context, member, sampling), policy_id=PARTNER)


RolloutRunner = TrajectoryRunner | SharedGroups
"""Answers tasks."""
