"""Trajectories and groups as payload: token-exact records of what was sampled, by whom, and its reward.

Shape legend: T = all tokens of one trajectory (prompt, sampled and observation tokens), thread after thread.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.errors import StalenessError
from penstock.dataflow.ids import POLICY, GroupId, PolicyId, TaskId, TrajectoryId
from penstock.dataflow.versions import Spans, first_tokens, last_tokens, num_tokens

MAIN_THREAD = "main"
"""Name of the only thread of an ordinary trajectory."""
THREAD_PART = "thread/"
"""A reward has the reward of one thread as the part `thread/NAME`."""

FinishReason = Literal["stop", "length", "abort"]
EpisodeEnd = Literal["done", "max_turns", "max_tokens"]


@dataclass(frozen=True, slots=True)
class Task:
    """What one group is made from: the prompt, and what the reward needs.

    Attributes:
        task_id: Stable across runs of the same seed.
        prompt: Plain text, or chat messages `[{"role": ..., "content": ...}]` rendered once by the chat template.
        fields: Everything else of the row (`answer`, ...); handed to the reward as keyword arguments.
        environment: Name of the stream whose environment answers the policy turn by turn; None is a single turn.
    """

    task_id: TaskId
    prompt: str | list[dict[str, str]]
    fields: Mapping[str, Any] = field(default_factory=dict)
    environment: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode: what the policy sampled, then what the environment said to it.

    Attributes:
        response: Text of the sampled tokens without special tokens; where `env.reasoning` is set, the answer alone.
        finish_reason: `length` marks a turn that was cut off.
        num_tokens: Sampled in this turn.
        observation: Text of the observation tokens that follow, template included; empty after the last turn.
        num_observation_tokens: How many they are.
        num_interruptions: How often an engine was lost or aborted it; it went on from its tokens.
        thread: Where it was sampled.
        reasoning: Text before the answer, marks included.
    """

    response: str
    finish_reason: FinishReason
    num_tokens: int
    observation: str = ""
    num_observation_tokens: int = 0
    num_interruptions: int = 0
    thread: str = MAIN_THREAD
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Thread:
    """One token sequence of a trajectory (docs/concepts/threads.md).

    Attributes:
        num_tokens: All of it, with what a fork begins with.
        opening: Text of its prompt; of a fork, what was said to it first.
        fork_of: The thread whose tokens it begins with; None: it has a prompt of its own.
    """

    name: str
    num_tokens: int
    opening: str = ""
    fork_of: str | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """What happened beside the tokens of a multi-turn trajectory.

    Attributes:
        turns: Of all threads, in the order in which they were asked for.
        end: `done` if the environment ended it; else the budget that ran out.
        reward: Sum of what the environment gave; it counts only if the reward function says so. None if it was an agent
            program that gave none.
        parts: Named parts of it.
        counts: What the environment counted (`tool_calls`, ...), summed over the turns.
    """

    turns: tuple[Turn, ...]
    end: EpisodeEnd
    reward: float | None = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)  # not frozen: many are made, and frozen costs thrice the time
class Trajectory:
    """One attempt at a task. Its reward is set once; nothing else ever changes.

    Attributes:
        token_ids: `[T] int32`, prompt first, in the order the model saw them.
        loss_mask: `[T] bool`, True exactly on the tokens the policy sampled (I7), in the thread where it did.
        behavior_logprobs: `[T] float32`, natural log after the sampling transform; 0 where not sampled.
        spans: Version spans of the sampled tokens, in order (I4: they never decrease within a thread).
        response: Text of the sampled tokens without special tokens, of all turns; where `env.reasoning` is set, the
            answers alone.
        finish_reason: `length` marks a truncated answer, or an episode that ended before the environment said so.
        reward: Scalar used by the advantage; None until scored.
        reward_parts: Each named reward on its own.
        episode: Its turns; None for a single-turn trajectory.
        policy_id: Who sampled it, and whose versions its spans are.
        threads: Its token sequences, one after another in all arrays; empty: all of it is one, `main`.
        retried_after: Why the attempt before this one failed, in one line; empty for a first attempt.
        reasoning: Text before the answer, marks included, of all turns; empty where `env.reasoning` is not set.
        num_sampled_tokens: Of all its threads.
    """

    trajectory_id: TrajectoryId
    task_id: TaskId
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    spans: Spans
    prompt: str
    response: str
    finish_reason: FinishReason
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    episode: Episode | None = None
    policy_id: PolicyId = POLICY
    threads: tuple[Thread, ...] = ()
    retried_after: str = ""
    reasoning: str = ""
    num_sampled_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        mask, threads = self.loss_mask, self.threads
        assert len(self.token_ids) == len(mask) == len(self.behavior_logprobs)
        if threads:
            assert sum(one.num_tokens for one in threads) == len(mask)
        self.num_sampled_tokens = labelled = num_tokens(self.spans)
        masked = int(np.count_nonzero(mask))
        if labelled != masked:
            raise StalenessError(
                f"{self.trajectory_id}: its version spans label {labelled} tokens as sampled, its loss mask {masked} "
                "(I4, I7). Tokens would train under a wrong version, or none that the policy sampled."
            )

    def score(self, reward: float, parts: Mapping[str, float]) -> None:
        """Set its reward, once."""
        assert self.reward is None, f"{self.trajectory_id} has a reward already"
        self.reward, self.reward_parts = reward, parts

    @property
    def text(self) -> str:
        """All that was sampled, reasoning and answer of one turn after another."""
        if self.episode is None or not self.reasoning:
            return self.reasoning + self.response
        return "".join(turn.reasoning + turn.response for turn in self.episode.turns)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token. Within a thread spans never decrease, so there it is the first."""
        return min(span.version for span in self.spans) if self.threads else self.spans[0].version

    @property
    def newest_version(self) -> int:
        """Version of the newest sampled token."""
        return max(span.version for span in self.spans) if self.threads else self.spans[-1].version

    def thread_reward(self, name: str) -> float | None:
        """That of the thread if it has one, else the trajectory's."""
        return self.reward_parts.get(f"{THREAD_PART}{name}", self.reward)

    def split_threads(self) -> tuple[Trajectory, ...]:
        """Each thread as a trajectory of its own: views of the arrays, its own reward; this one if there are none.

        What is sampled stays in order, so that arrays of all sampled tokens are those of the threads end to end.
        """
        if not self.threads:
            return (self,)
        separated: list[Trajectory] = []
        turns = self.episode.turns if self.episode is not None else ()
        start, spans = 0, self.spans
        for thread in self.threads:
            place = slice(start, start := start + thread.num_tokens)
            num_sampled = int(np.count_nonzero(self.loss_mask[place]))
            own = [turn for turn in turns if turn.thread == thread.name]
            whole = replace(
                self,
                token_ids=self.token_ids[place],
                loss_mask=self.loss_mask[place],
                behavior_logprobs=self.behavior_logprobs[place],
                spans=first_tokens(spans, num_sampled),
                prompt=thread.opening,
                response="".join(turn.response for turn in own),
                reasoning="".join(turn.reasoning for turn in own),
                reward=self.thread_reward(thread.name),
                threads=(thread,),
            )
            separated.append(whole)
            spans = last_tokens(spans, num_tokens(spans) - num_sampled)
        return tuple(separated)


def rewards_by_baseline(members: Sequence[Trajectory]) -> dict[str, list[float]]:
    """The rewards of a scored group that share a baseline: of its trajectories, or, where threads have rewards of their
    own, of the threads of each name.
    """
    is_by_thread = has_thread_rewards(members)
    compared: dict[str, list[float]] = {}
    for member in members:
        for name in [thread.name for thread in member.threads] if is_by_thread and member.threads else [MAIN_THREAD]:
            reward = member.thread_reward(name) if is_by_thread else member.reward
            assert reward is not None, f"{member.trajectory_id} was scored"
            compared.setdefault(name, []).append(reward)
    return compared


def has_thread_rewards(members: Sequence[Trajectory]) -> bool:
    """Whether any thread of a group has a reward of its own."""
    return any(is_thread_reward(name) for member in members for name in member.reward_parts)


def is_thread_reward(name: str) -> bool:
    """Whether a part of a reward is that of a thread."""
    return name.startswith(THREAD_PART)


@dataclass(frozen=True, slots=True)
class GroupPayload:
    """The heavy part of a group. It lives in the object store; the controller holds a `GroupRef`.

    What is below the trajectories is added where the group is trained. The arrays are `[n] float32`: one number for
    each of its n sampled tokens, members one after another; None: there are none.

    Attributes:
        min_version: Tokens sampled before this version carry no loss weight.
        reference: Logprobs of the reference policy.
        teacher: Logprobs of a teacher.
        proximal: Logprobs of the policy at the start of the step.
        values: V of the critic before each token.
    """

    group_id: GroupId
    trajectories: tuple[Trajectory, ...]
    min_version: int = 0
    reference: NDArray[np.float32] | None = None
    teacher: NDArray[np.float32] | None = None
    proximal: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None


@dataclass(slots=True)  # not frozen, as `Trajectory`
class GroupRef:
    """Metadata of a ready group plus an opaque handle to its `GroupPayload`. Nothing of it ever changes.

    Attributes:
        handle: What the trainer's side resolves to the payload (a Ray ObjectRef, or the payload itself).
        spans: Version spans of every member, for staleness accounting.
        rewards: One scalar per member, in member order.
        min_version: Tokens sampled before this version carry no loss weight (`on_expiry: trim`).
        reference: Handle of the reference policy's logprobs of the sampled tokens, if the loss needs them.
        teacher: Likewise, of the teacher's.
        tokens_by_version: Sampled tokens, trimmed or not, by the version that sampled them.
        oldest_version: The smallest of these versions.
        newest_version: The largest.
    """

    group_id: GroupId
    task_id: TaskId
    handle: Any
    spans: tuple[Spans, ...]
    rewards: tuple[float, ...]
    num_tokens: int
    min_version: int = 0
    reference: Any = None
    teacher: Any = None
    tokens_by_version: dict[int, int] = field(init=False)
    oldest_version: int = field(init=False)
    newest_version: int = field(init=False)

    def __post_init__(self) -> None:
        sampled: dict[int, int] = {}
        self.tokens_by_version = sampled
        for version, tokens in chain.from_iterable(self.spans):
            sampled[version] = sampled.get(version, 0) + tokens
        versions = sorted(sampled)
        self.oldest_version, self.newest_version = versions[0], versions[-1]

    @property
    def num_trimmed_tokens(self) -> int:
        """Sampled tokens that carry no loss weight because they are too old."""
        return sum(tokens for version, tokens in self.tokens_by_version.items() if version < self.min_version)

    def staleness(self, version: int) -> int:
        """Of its oldest token that carries loss weight, if trained at `version`; in versions."""
        return version - max(self.oldest_version, self.min_version)


async def iterate_groups(groups: Sequence[GroupRef]) -> AsyncIterator[GroupRef]:
    """Groups that are all there, as the stream that a trainer consumes."""
    for group in groups:
        yield group
