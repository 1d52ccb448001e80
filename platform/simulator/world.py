"""State shared by all simulated components of a run: lengths, the encoding of token ids, the trace.

Token ids encode which version really sampled a token, so this survives retries, resumes and all copies:

    sampled token:  ((version + 1) << 12) | (position mod 4096)   > 0
    prompt token:   −1 − task                                     < 0
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from penstock.dataflow.ids import RequestId
from penstock.dataflow.versions import Spans

Shape = Literal["constant", "lognormal", "exponential"]
TASKS_PER_DRAW = 256
HASH = 2_654_435_761
"""Knuth's multiplier: spreads task numbers over 32 bits."""
POSITION_BITS = 12
_POSITIONS = 1 << POSITION_BITS
TAIL_EVENTS = 40
EVALUATION_TASKS = 1_000_000
"""First number of evaluation tasks, above all numbers of training tasks."""


class Trace:
    """A running hash of all events of a run, and its newest events as text."""

    def __init__(self) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_EVENTS)
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, now_s: float, event: str) -> None:
        """Record one event."""
        line = f"{now_s:.6f} {event}"
        self.tail.append(line)
        self._hash.update(line.encode())

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """A distribution of response lengths, in tokens."""

    shape: Shape
    mean: float
    sigma: float
    """σ of the logarithm; lognormal only."""
    cap: int
    """Longest response; longer draws are truncated, as by `max_new_tokens`."""


class LengthTable:
    """Lengths by task and member, in simulated tokens (`grain` real tokens each).

    They are drawn once per (seed, task, member), so that all flow settings get the same lengths:

        constant: L = mean      exponential: L ~ Exp(mean)      lognormal: L ~ exp(N(ln mean − σ²/2, σ²))

    over all turns of an episode, each rounded up, at least 1 per turn and at most `cap`. Where the cap cuts, the mean
    of what is drawn is a little lower.
    """

    def __init__(self, profile: LengthProfile, group_size: int, seed: int, grain: int = 1, mean_turns: int = 1) -> None:
        self.mean_turns = mean_turns
        self.max_length = max(1, math.ceil(profile.cap / grain))
        self._profile = profile
        self._group_size = group_size
        self._seed = seed
        self._grain = grain
        self._blocks: dict[int, list[list[int]]] = {}

    def length(self, task: int, member: int) -> int:
        """Length of one response. Members beyond the group (evaluations) use the row again."""
        block, row = divmod(task, TASKS_PER_DRAW)
        table = self._blocks.get(block)
        if table is None:
            table = self._blocks[block] = self._draw(block)
        drawn = table[row][member % self._group_size]
        return drawn if self.mean_turns == 1 else max(drawn, self.turns(task))

    def turns(self, task: int) -> int:
        """Number of turns of an episode, by its task: uniform over 1 to 2 · mean − 1."""
        return 1 + (task * HASH >> 16) % (2 * self.mean_turns - 1)

    def turn_end(self, task: int, member: int, position: int) -> int:
        """End position of the turn that samples the token at `position`. All turns have about the same length."""
        length = self.length(task, member)
        if self.mean_turns == 1 or (turns := self.turns(task)) == 1:
            return max(length, position + 1)
        ends = (length * turn // turns for turn in range(1, turns + 1))
        return next((end for end in ends if end > position), position + 1)

    def group(self, task: int) -> list[int]:
        """Lengths of all members of one task."""
        return [self.length(task, member) for member in range(self._group_size)]

    def _draw(self, block: int) -> list[list[int]]:
        rng = np.random.Generator(np.random.PCG64([self._seed, block]))
        shape, profile = (TASKS_PER_DRAW, self._group_size), self._profile
        if profile.shape == "lognormal":
            drawn = np.exp(rng.normal(math.log(profile.mean) - profile.sigma**2 / 2, profile.sigma, shape))
        elif profile.shape == "exponential":
            drawn = rng.exponential(profile.mean, shape)
        else:
            drawn = np.full(shape, profile.mean)
        units = np.ceil(np.minimum(drawn, profile.cap) / self._grain)
        rows: list[list[int]] = np.maximum(units, 1).astype(int).tolist()
        return rows


@dataclass(slots=True)
class World:
    """Shared state of one simulated run."""

    lengths: LengthTable
    """Response lengths by task and member."""
    prompt_tokens: int
    """Length of every prompt, simulated tokens."""
    seed: int
    """Seed of all random draws."""
    trace: Trace = field(default_factory=Trace)
    """Its events."""
    environment_s: float = 0.0
    """Seconds that environments were open for training, summed."""

    def rng(self, purpose: str) -> random.Random:
        """An independent random stream, so that draws of one component never affect those of another."""
        return random.Random(f"{self.seed}/{purpose}")

    def num_sampled(self, prompt: tuple[int, ...]) -> int:
        """Number of tokens of a request's prompt that the policy sampled before."""
        return sum(token > 0 for token in prompt)

    def note(self, event: str) -> None:
        """Add an event to the trace."""
        self.trace.add(asyncio.get_running_loop().time(), event)


def sampled_ids(spans: Spans, position: int) -> tuple[int, ...]:
    """Ids of tokens sampled by `spans`, the first at `position` of its trajectory's sampled tokens."""
    ids: list[int] = []
    for version, num_tokens in spans:
        label = (version + 1) << POSITION_BITS
        ids.extend(label | place % _POSITIONS for place in range(position, position + num_tokens))
        position += num_tokens
    return tuple(ids)


def prompt_ids(task: int, num_tokens: int) -> tuple[int, ...]:
    return (-1 - task,) * num_tokens


def task_of(first_id: int) -> int:
    """The task of a prompt."""
    return -1 - first_id


def member_of(request_id: RequestId | str) -> int:
    """The member a request or trajectory belongs to: `17/3` or `17/3#42`."""
    return int(request_id.partition("#")[0].rpartition("/")[2])


def true_reward(task: int, member: int) -> float:
    """The simulated reward: never 0, and different within a group."""
    return 0.25 + 0.125 * ((task * 7 + member * 3) % 5)
