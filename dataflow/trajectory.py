"""Trajectories and groups: token-exact records of sampled tokens, their versions and their rewards.

Shape legend: T = all tokens of one trajectory (prompt, sampled and observation tokens), thread after thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
"""Prefix of reward parts: the part `thread/NAME` is the reward of one thread."""

RELATIVE_TOLERANCE = 1e-6
"""Rewards that differ by less, relative to the largest of their group, are equal, as 0.1 + 0.2 and 0.3.

Above the relative rounding error of float32 rewards (of a reward model), 6e-8; below any intended difference.
"""

FinishReason = Literal["stop", "length", "abort"]
Routes = NDArray[np.unsignedinteger[Any]]
"""Experts of tokens in every layer that has any, `[tokens, layers, k]`, in the smallest type that has one more value
than there are experts: the largest value says that they are not known (docs/concepts/routing-replay.md)."""
EpisodeEnd = Literal["done", "max_turns", "max_tokens"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode: the sampled response and the environment's observation that follows."""

    response: str
    """Text of the sampled tokens without special tokens; where `env.reasoning` is set, the answer alone."""
    finish_reason: FinishReason
    """`length` marks a turn that was cut off."""
    num_tokens: int
    """Number of tokens sampled in this turn."""
    observation: str = ""
    """Text of the observation tokens that follow, template and special tokens included; empty after the last turn."""
    num_observation_tokens: int = 0
    """Number of observation tokens."""
    num_interruptions: int = 0
    """How often the turn was aborted or its engine was lost; it was resumed from its tokens."""
    thread: str = MAIN_THREAD
    """Name of the thread in which the turn was sampled."""
    reasoning: str = ""
    """Text before the answer, including the reasoning tags."""
    # Turns are equal if what was said is.
    sampling_s: float = field(default=0.0, compare=False)
    """Seconds from the request to the last token, waits for a slot and interruptions included."""
    environment_s: float = field(default=0.0, compare=False)
    """Seconds from then to the observation: of the environment and its tools."""


@dataclass(frozen=True, slots=True)
class Thread:
    """One token sequence of a trajectory (docs/guides/several-agents.md)."""

    name: str
    num_tokens: int
    """Length of the thread, including the tokens that a fork shares with its parent."""
    opening: str = ""
    """Text of the prompt, special tokens included; for a fork, its first own message."""
    fork_of: str | None = None
    """Name of the parent thread whose tokens it starts with; None if it has its own prompt."""


@dataclass(frozen=True, slots=True)
class Episode:
    """Turns and rewards of a multi-turn trajectory."""

    turns: tuple[Turn, ...]
    """Turns of all threads, in the order of their requests."""
    end: EpisodeEnd
    """`done` if the environment ended the episode; otherwise the exhausted limit."""
    reward: float | None = 0.0
    """Sum of the environment's rewards. It is used only if the reward function includes it. None if the environment is
    an agent program that returned no reward."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Counters of the environment (`tool_calls`, ...), summed over the turns."""
    answer: str | None = None
    """What the environment took as the answer of the policy; None if it does not say."""
    side_turns: tuple[Turn, ...] = ()
    """Turns of an agent program's threads that are not trained (`env.endpoint.threads`): kept to be read, they are no
    part of the trajectory's tokens."""


@dataclass(slots=True, eq=False)
class Alternatives:
    """The other ids that each of n sampled tokens was sampled from (docs/concepts/truncated-sampling.md)."""

    ids: NDArray[np.int32]
    """`[m] int32`, those of the first token, then those of the second, and so on."""
    counts: NDArray[np.int32]
    """`[n] int32`, how many of them belong to each token; 0 if it was the only one left."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Alternatives:
        """From the ids of each token."""
        return cls(np.array(list(chain.from_iterable(rows)), np.int32), np.array([len(row) for row in rows], np.int32))

    @classmethod
    def joined(cls, parts: Iterable[Alternatives | None]) -> Alternatives | None:
        """One after the other, without those that are None; None if nothing is left."""
        found = [one for one in parts if one is not None]
        if not found:
            return None
        return cls(np.concatenate([one.ids for one in found]), np.concatenate([one.counts for one in found]))

    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The ids of each token."""
        ends = np.cumsum(self.counts).tolist()
        ids = self.ids.tolist()
        return tuple([tuple(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)])

    def part(self, start: int, stop: int) -> Alternatives:
        """Those of the tokens `start` ≤ index < `stop`."""
        first, last = int(self.counts[:start].sum()), int(self.counts[:stop].sum())
        return Alternatives(self.ids[first:last], self.counts[start:stop])

    def padded(self) -> NDArray[np.int32]:
        """`[n, max(counts)] int32`, with −1 behind the ids of each token."""
        places = np.arange(self.counts.max(initial=0))
        found = np.full((len(self.counts), len(places)), -1, np.int32)
        found[places < self.counts[:, None]] = self.ids
        return found


def dtype_for(num_experts: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The type of routes over so many experts."""
    return np.dtype(np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16)


def unknown_routes(num_tokens: int, like: Routes) -> Routes:
    """Rows of tokens whose experts are not known."""
    return np.full((num_tokens, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def joined_routes(parts: Iterable[Routes | None]) -> Routes | None:
    """One after the other, without those that are None; None if nothing is left."""
    found = [one for one in parts if one is not None]
    return np.concatenate(found) if found else None


def padded_routes(routes: Routes, num_tokens: int) -> Routes:
    """With unknown rows at the end, for the tokens that no engine has computed."""
    return np.concatenate([routes, unknown_routes(num_tokens - len(routes), routes)])


def signed_routes(routes: Routes) -> NDArray[np.int16]:
    """With −1 for what is not known."""
    return np.where(routes == np.iinfo(routes.dtype).max, -1, routes.astype(np.int16))


# Not frozen: many instances are created, and constructing frozen ones takes three times as long.
@dataclass(slots=True, eq=False)
class Trajectory:
    """One attempt at a task. The reward is set once; all other fields are immutable by convention."""

    trajectory_id: TrajectoryId
    task_id: TaskId
    token_ids: NDArray[np.int32]
    """`[T] int32`, prompt first, in the order the model saw them."""
    loss_mask: NDArray[np.bool_]
    """`[T] bool`, True exactly on the tokens that the policy sampled (I7), in the thread that sampled them."""
    behavior_logprobs: NDArray[np.float32]
    """`[T] float32`, natural log after the sampling transform; 0 for tokens that were not sampled."""
    spans: Spans
    """Version spans of the sampled tokens, in order (I4: they never decrease within a thread)."""
    prompt: str
    """Text of the prompt as the model saw it: after the chat template, special tokens included."""
    response: str
    """Text of the sampled tokens without special tokens, of all turns; where `env.reasoning` is set, the answers alone.
    """
    finish_reason: FinishReason
    """`length` marks a truncated answer, an episode that a limit ended before the environment did, and one whose last
    turn was truncated."""
    reward: float | None = None
    """Scalar used by the advantage; None until scored, and for good if the reward abstained."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Value of each named reward."""
    episode: Episode | None = None
    """The turns; None for a single-turn trajectory."""
    policy_id: PolicyId = POLICY
    """The policy that sampled the trajectory; the spans hold versions of this policy."""
    threads: tuple[Thread, ...] = ()
    """Token sequences, concatenated in all arrays; empty if there is a single sequence, `main`."""
    retried_after: str = ""
    """Summary of the previous attempt's failure; empty for a first attempt."""
    reasoning: str = ""
    """Text before the answer, including the reasoning tags, of all turns; empty unless `env.reasoning` is set."""
    messages: Sequence[Mapping[str, str]] = ()
    """The task's prompt as chat messages; empty if it is plain text."""
    alternatives: Alternatives | None = None
    """Of the sampled tokens; None if they were sampled from the whole vocabulary."""
    routes: Routes | None = None
    """`[T, layers, k]`, experts of all tokens; those of a token are of the pass that predicted the next one. None if no
    engine recorded any."""
    has_abstained: bool = False
    """The reward was called and had no opinion, so that the trajectory is not trained."""
    answer: str | None = None
    """In an evaluation, what the reward read as the answer; None if it does not say."""
    num_sampled_tokens: int = field(init=False)
    """Number of sampled tokens of all threads."""

    def __post_init__(self) -> None:
        mask, threads = self.loss_mask, self.threads
        assert len(self.token_ids) == len(mask) == len(self.behavior_logprobs)
        if threads:
            assert sum(thread.num_tokens for thread in threads) == len(mask)
        self.num_sampled_tokens = labelled = num_tokens(self.spans)
        masked = int(np.count_nonzero(mask))
        if labelled != masked:
            raise StalenessError(
                f"{self.trajectory_id}: its version spans label {labelled} tokens as sampled, its loss mask {masked} "
                "(I4, I7). Tokens would train with a wrong version, or without having been sampled by the policy."
            )
        assert self.alternatives is None or len(self.alternatives.counts) == masked
        assert self.routes is None or len(self.routes) == len(mask)

    def score(self, reward: float | None, parts: Mapping[str, float]) -> None:
        """Set the reward; None if it has no opinion. May be called once."""
        assert not self.is_scored, f"{self.trajectory_id} has a reward already"
        self.reward, self.reward_parts, self.has_abstained = reward, parts, reward is None

    @property
    def is_scored(self) -> bool:
        """Whether the reward was called, even if it had no opinion."""
        return self.reward is not None or self.has_abstained

    @property
    def text(self) -> str:
        """All sampled text: the reasoning and the answer of each turn, in order."""
        if self.episode is None or not self.reasoning:
            return self.reasoning + self.response
        return "".join(turn.reasoning + turn.response for turn in self.episode.turns)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token. Within one thread this is the first token, as spans never decrease."""
        return min(span.version for span in self.spans) if self.threads else self.spans[0].version

    @property
    def newest_version(self) -> int:
        """Version of the newest sampled token."""
        return max(span.version for span in self.spans) if self.threads else self.spans[-1].version

    def thread_reward(self, name: str) -> float | None:
        """Return the reward of a thread if it has its own, otherwise that of the trajectory."""
        return self.reward_parts.get(f"{THREAD_PART}{name}", self.reward)

    def split_threads(self) -> tuple[Trajectory, ...]:
        """Return each thread as a trajectory with its own reward; the trajectory itself if it has no threads.

        The arrays are views. The order of sampled tokens is kept, so concatenating per-thread arrays of sampled tokens
        gives those of the trajectory.
        """
        if not self.threads:
            return (self,)
        separated: list[Trajectory] = []
        turns = self.episode.turns if self.episode is not None else ()
        start, num_before, spans = 0, 0, self.spans
        for thread in self.threads:
            tokens = slice(start, start := start + thread.num_tokens)
            num_sampled = int(np.count_nonzero(self.loss_mask[tokens]))
            thread_turns = [turn for turn in turns if turn.thread == thread.name]
            part = replace(
                self,
                token_ids=self.token_ids[tokens],
                loss_mask=self.loss_mask[tokens],
                behavior_logprobs=self.behavior_logprobs[tokens],
                spans=first_tokens(spans, num_sampled),
                prompt=thread.opening,
                response="".join(turn.response for turn in thread_turns),
                reasoning="".join(turn.reasoning for turn in thread_turns),
                reward=self.thread_reward(thread.name),
                threads=(thread,),
                alternatives=self.alternatives and self.alternatives.part(num_before, num_before + num_sampled),
                routes=None if self.routes is None else self.routes[tokens],
            )
            separated.append(part)
            num_before += num_sampled
            spans = last_tokens(spans, num_tokens(spans) - num_sampled)
        return tuple(separated)


def rewards_by_baseline(members: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Group the rewards of a scored group by the baseline that they share.

    All trajectories share one baseline, named `main`. If threads have their own rewards, the threads of each name share
    one.
    """
    is_by_thread = has_thread_rewards(members)
    compared: dict[str, list[float]] = {}
    for member in members:
        for name in [thread.name for thread in member.threads] if is_by_thread and member.threads else [MAIN_THREAD]:
            reward = member.thread_reward(name) if is_by_thread else member.reward
            assert reward is not None, f"{member.trajectory_id} was scored"
            compared.setdefault(name, []).append(reward)
    return compared


def rounding_error(rewards: NDArray[np.float64] | Sequence[float]) -> float:
    """`1e-6 · max |R|`: rewards that differ by at most this are equal. NaN if any reward is NaN."""
    return RELATIVE_TOLERANCE * float(np.abs(rewards).max())


def are_equal(rewards: NDArray[np.float64] | Sequence[float]) -> bool:
    """Whether `max R − min R ≤ 1e-6 · max |R|`. True for a single reward, False if any reward is not finite.

    The single definition for all that compares the rewards of a group: the filter `zero_variance`, advantages of
    exactly 0, the share of groups without a gradient, and preference pairs.
    """
    return float(np.max(rewards)) - float(np.min(rewards)) <= rounding_error(rewards)


def has_thread_rewards(members: Sequence[Trajectory]) -> bool:
    """Whether any thread of a group has its own reward."""
    return any(is_thread_reward(name) for member in members for name in member.reward_parts)


def is_thread_reward(name: str) -> bool:
    """Whether a reward part is the reward of a thread."""
    return name.startswith(THREAD_PART)


def is_recorded(group_id: GroupId, every: int) -> bool:
    """Whether a group is one of those, one in `every`, whose trajectories are kept for people to read."""
    # Multiples of golden ratio · 2^32: evenly spread, and not in step with task streams that take turns.
    return every > 0 and group_id * 2654435769 % 2**32 < 2**32 / every


@dataclass(frozen=True, slots=True)
class GroupPayload:
    """The token data of a group. It is kept in the object store; the controller holds a `GroupRef`.

    The fields after `trajectories` are set by the trainer. The arrays are `[n] float32` with one value per sampled
    token of the group, trajectories concatenated; None if not computed.
    """

    group_id: GroupId
    trajectories: tuple[Trajectory, ...]
    min_version: int = 0
    """Tokens sampled before this version carry no loss weight."""
    reference: NDArray[np.float32] | None = None
    """Logprobs of the reference policy."""
    teacher: NDArray[np.float32] | None = None
    """Logprobs of the teacher."""
    proximal: NDArray[np.float32] | None = None
    """Logprobs of the policy at the start of the step."""
    values: NDArray[np.float32] | None = None
    """The critic's value estimates before each token."""
    cut_values: NDArray[np.float32] | None = None
    """Of each thread instead: its value estimate after the last token if that was cut off, else 0."""


# Not frozen, for the same reason as `Trajectory`.
@dataclass(slots=True)
class GroupRef:
    """Metadata of a ready group and an opaque handle to its `GroupPayload`. Immutable by convention."""

    group_id: GroupId
    task_id: TaskId
    handle: Any
    """Handle that the trainer resolves to the payload (a Ray ObjectRef, or the payload itself)."""
    spans: tuple[Spans, ...]
    """Version spans of each trajectory, for staleness accounting."""
    rewards: tuple[float, ...]
    """One scalar per trajectory, in order."""
    num_tokens: int
    min_version: int = 0
    """Tokens sampled before this version carry no loss weight (`on_expiry: trim`)."""
    reference: Any = None
    """Handle of the reference logprobs of the sampled tokens, if the loss needs them."""
    teacher: Any = None
    """Handle of the teacher logprobs of the sampled tokens, if the loss needs them."""
    tokens_by_version: dict[int, int] = field(init=False)
    """Number of sampled tokens by version, including trimmed tokens."""
    oldest_version: int = field(init=False)
    """The smallest of these versions."""
    newest_version: int = field(init=False)
    """The largest of these versions."""

    def __post_init__(self) -> None:
        sampled: dict[int, int] = {}
        self.tokens_by_version = sampled
        for version, tokens in chain.from_iterable(self.spans):
            sampled[version] = sampled.get(version, 0) + tokens
        versions = sorted(sampled)
        self.oldest_version, self.newest_version = versions[0], versions[-1]

    @property
    def num_trimmed_tokens(self) -> int:
        """Number of sampled tokens that carry no loss weight because they are too old."""
        return sum(tokens for version, tokens in self.tokens_by_version.items() if version < self.min_version)

    def staleness(self, version: int) -> int:
        """Staleness of the oldest token with loss weight if the group trains at `version`, in versions."""
        return version - max(self.oldest_version, self.min_version)
