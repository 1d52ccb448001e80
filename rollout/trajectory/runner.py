"""One trajectory: a task, engines, the exact tokens; of one turn, or of several with an environment (episodes.py).

The prompt is rendered once; sampled ids are kept as they came and never re-tokenised. A trajectory whose engine is
lost, silent, fenced off or aborts it goes on from its tokens, there or elsewhere. Ray-free: the engine is a port, so
the same code runs in tests and in the simulator.

Consumes: tasks. Waits for: a lease; the next tokens. Unblocked by: the pool; a delta, an error of the engine, or the
silence watch, which looks at all running requests every eighth of its limit, so that a delta costs no timer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.dataflow.errors import ConfigError, EngineLostError, TrajectoryError
from penstock.dataflow.ids import PARTNER, RequestId, TaskId
from penstock.dataflow.ports import Engine, SamplingParams
from penstock.dataflow.trajectory import Task, Trajectory
from penstock.rollout.pool.pool import EnginePool, Interruption, InterruptionKind, Lease
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.conversation import Conversation, PartialTurn, joined
from penstock.rollout.trajectory.episodes import EpisodePlayer
from penstock.rollout.trajectory.group_task import OldestTurn, RolloutContext

LOOKS_PER_LIMIT = 8


@dataclass(slots=True)
class ResumeStats:
    """Absolute counters since the run began.

    Attributes:
        trajectories: Trajectories that were resumed at least once with tokens kept.
        tokens: Sampled tokens kept over resumes, that would have been sampled again.
        interruptions: By kind; also those before the first token.
    """

    trajectories: int = 0
    tokens: int = 0
    interruptions: Counter[InterruptionKind] = field(default_factory=Counter)

    def __add__(self, other: ResumeStats) -> ResumeStats:
        return ResumeStats(
            self.trajectories + other.trajectories,
            self.tokens + other.tokens,
            self.interruptions + other.interruptions,
        )


class RolloutRunner(Protocol):
    """What answers tasks: a `TrajectoryRunner`, or the two of `SharedGroups`."""

    @property
    def pool(self) -> EnginePool: ...

    @property
    def stats(self) -> ResumeStats: ...

    async def run(self, asked: RolloutContext, member: int, sampling: SamplingParams) -> Trajectory: ...


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
        self._aborts: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None

    async def run(self, asked: RolloutContext, member: int, sampling: SamplingParams) -> Trajectory:
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
        if asked.task.environment is not None:
            return await self._play(asked, member, sampling)
        if self.codec not in asked.prompts:
            prompt_ids = self._prompt_ids(asked.task)
            asked.prompts[self.codec] = prompt_ids, self.codec.decode(prompt_ids)
        dialogue = Conversation(*asked.prompts[self.codec], sampling)
        # Engines end it at the context too. Known here, a full one is complete though its engine's last word was lost.
        turn = dialogue.next_turn(self._max_context_tokens or dialogue.num_tokens + sampling.max_new_tokens)
        await self._sample(asked, member, turn)
        dialogue.sampled(turn, self.codec.split(turn.token_ids, dialogue.opening))
        return joined([dialogue], asked.task, asked.trajectory_id(member))

    def _prompt_ids(self, task: Task) -> tuple[int, ...]:
        """The prompt of a task, if the policy can answer it: an engine would refuse it, or worse.

        Raises:
            TrajectoryError: kind `env`, final, if it cannot be encoded, leaves no room, or holds tokens that the policy
                lacks.
        """
        try:
            ids = self.codec.encode_prompt(task.prompt)
        except TrajectoryError as cause:
            raise TrajectoryError(cause.kind, cause.detail, is_final=True) from cause
        except ConfigError as cause:  # of this task: others may give plain text, which needs no chat template
            raise TrajectoryError("env", f"{task.task_id}: {' '.join(cause.violations)}", is_final=True) from cause
        context, vocab_size = self._max_context_tokens, self._vocab_size
        if context is not None and len(ids) >= context:
            raise TrajectoryError(
                "env",
                f"the prompt of {task.task_id} has {len(ids)} tokens; model.max_context_tokens={context} leaves room "
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
        """Sample a turn of nobody's trajectory, greedily or not as it says.

        Raises:
            TrajectoryError, EngineLostError: As `run`.
        """
        await self._sample(RolloutContext(Task(TaskId(name), ""), name), 0, turn)

    async def _play(self, asked: RolloutContext, member: int, sampling: SamplingParams) -> Trajectory:
        assert self.episodes is not None, "tasks with an environment come with what plays them"
        turns = OldestTurn(asked, member)
        one_slot = None if asked.slots is None else asyncio.Lock()  # a gang has a slot for each member, not more

        async def sample(turn: PartialTurn) -> None:
            async with one_slot or nullcontext():
                turn.min_start_version = max(turn.min_start_version, turns.min_version)
                await self._sample(turns.begin(), member, turn)

        return await self.episodes.play(asked.task, asked.trajectory_id(member), sampling, sample)

    def abort(self, engine: Engine, request_id: RequestId) -> None:
        """Tell the engine to stop what nobody waits for; it may hang, so nobody waits for that either."""

        async def abort() -> None:
            with suppress(EngineLostError):
                await engine.abort(request_id)

        task = asyncio.create_task(abort(), name=f"abort {request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _sample(self, asked: RolloutContext, member: int, partial: PartialTurn) -> None:
        """Sample to the end of a turn, over as many engines as it takes."""
        last: Interruption | None = None
        while True:
            avoid = None if last is None or last.kind == "aborted" else last.view.engine_id
            slots = asked.slots or self.pool
            async with slots.lease(partial.remaining(), asked.task.task_id, partial.min_version(), avoid) as lease:
                last = await self._attempt(asked, member, partial, lease)
            if last is None:
                return
            stats = self.stats
            stats.interruptions[last.kind] += 1
            partial.num_interruptions += 1
            if partial.num_interruptions > self.max_resumes:
                raise TrajectoryError(
                    "engine",
                    f"{asked.trajectory_id(member)}: interrupted {partial.num_interruptions} times with "
                    f"{partial.num_tokens} tokens sampled, rollout.max_resumes is {self.max_resumes}; the last time: "
                    f"{last.reason}",
                )
            if partial.num_tokens:
                stats.trajectories += not partial.resumed_with
                stats.tokens += partial.num_tokens
                partial.resumed_with = partial.num_tokens
            if partial.settle():
                return
            if last.may_be_the_requests_fault and not asked.is_answered and last.view not in asked.lost_engines:
                asked.lost_engines.append(last.view)

    async def _attempt(
        self, asked: RolloutContext, member: int, partial: PartialTurn, lease: Lease
    ) -> Interruption | None:
        """Ask the engine of a lease for what is missing; says why it did not finish, if it did not.

        Raises whatever the trajectory does not survive.
        """
        view = lease.view
        assert view is not None, "it was granted"
        request_id = RequestId(f"{asked.trajectory_id(member)}#{lease.serial}")
        group = (asked.name, asked.task.task_id)  # evaluations share a name: there each task counts for itself
        if asked.is_harmful:
            lost = " and ".join(engine.engine_id for engine in asked.lost_engines)
            raise TrajectoryError(
                "engine",
                f"{asked.trajectory_id(member)}: {lost} died or stood still over its prompt of "
                f"{len(partial.prompt_ids)} tokens, and none has answered it. It may be the cause, so it is given to "
                f"no third engine. Look at task {asked.task.task_id}, and at the logs of these engines.",
                is_final=True,
            )
        version = lease.engine.version
        if not partial.num_tokens:
            asked.record_version(member, version)
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(self.silence_timeout_s / LOOKS_PER_LIMIT, self._look)
        lease.hold()  # from now until it is released, the lease may be interrupted
        try:
            async for delta in lease.engine.generate(partial.request(request_id)):
                if not partial.num_tokens and delta.spans:
                    asked.is_answered = True
                    if delta.spans[0].version != version:
                        asked.record_version(member, delta.spans[0].version)
                lease.received(len(delta.token_ids))
                partial.extend(delta)
                if partial.is_cut:
                    if delta.finish_reason is None:  # the engine has not ended it by itself
                        self.abort(lease.engine, request_id)
                    break
        except EngineLostError as error:
            lease.lost(error, group)
            return Interruption("lost", str(error), view)
        except BaseException as error:
            lease.let_go()  # it is over already: if this loss fences the engine, that must not cancel the task
            self.abort(lease.engine, request_id)
            if isinstance(error, asyncio.CancelledError) and lease.was_interrupted():
                assert lease.interruption is not None, "was interrupted"
                if lease.interruption.kind == "silent":
                    lease.lost(EngineLostError(lease.interruption.reason), group)
                return lease.interruption
            if isinstance(error, TrajectoryError) and not error.is_final:
                lease.lost(EngineLostError(error.detail), group)  # if it fails all that it gets, it attracts more
            raise
        if partial.finish_reason in ("stop", "length"):
            return None
        return Interruption("aborted", f"{view.engine_id} ended {request_id}: {partial.finish_reason}", view)

    def _look(self) -> None:
        """Interrupt every request that has been silent for too long, and look again if any runs."""
        loop = asyncio.get_running_loop()
        self._watch = None
        running = [lease for lease in self.pool.leases() if lease.is_held]
        for lease in running:
            if loop.time() - lease.heard_at >= self.silence_timeout_s:
                lease.interrupt("silent", f"{lease.engine.engine_id}: no token for {self.silence_timeout_s:.0f} s")
        if running:
            self._watch = loop.call_later(self.silence_timeout_s / LOOKS_PER_LIMIT, self._look)


class SharedGroups:
    """Groups that two policies answer together: even members are the policy's, odd ones its partner's.

    Trajectories run on the engines of whoever answers them. Version v of either is what it learned from the first v
    batches, and both train every batch: a group is as old as its oldest token, whoever sampled it.
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
        """What was resumed on either's engines."""
        return self._policy.stats + self._partner.stats

    async def run(self, asked: RolloutContext, member: int, sampling: SamplingParams) -> Trajectory:
        """As `TrajectoryRunner.run`."""
        assert asked.slots is None, "a gang is on one engine, and these are of two policies"
        if member % 2 == 0:
            return await self._policy.run(asked, member, sampling)
        return replace(await self._partner.run(asked, member, sampling), policy_id=PARTNER)
