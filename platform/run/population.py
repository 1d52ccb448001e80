"""Population-based training: several members train side by side, and the worst go on from the best with other keys.

    a generation:  every member trains `steps_per_generation` more steps  ─▶  scores
    exploit:       the lowest quarter (at least one) becomes a branch of one of the highest quarter
    explore:       each searched key of a branch is drawn again with probability 1/4, else multiplied by 0.8 or 1.25

Jaderberg et al., "Population Based Training of Neural Networks", 2017, arXiv:1711.09846 (truncation selection). A
member that dies is tried once more, then replaced by a branch as if it were the worst, so that a population stays full.
So is a branch that cannot begin, e.g. since the disk was full when its parent took its last checkpoint.

Pure but for `Trainable`, which trains one member. All draws depend on the seed, the generation and the member alone, so
a population that was interrupted continues as if it had not been.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.dataflow.errors import ConfigError, PenstockError

SHARE = 4
"""One of so many members is replaced in each generation."""
FACTORS = (0.8, 1.25)
RESAMPLE = 0.25
"""Probability that a key of a branch is drawn from its range."""
NUM_TRIES = 2
"""Of a member in a generation, before it is replaced."""

Keys = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Range:
    """Where a searched key may lie; over a factor of ten and more, draws are uniform in its logarithm."""

    low: float
    high: float

    @staticmethod
    def is_one(text: str) -> bool:
        """Whether a text is two numbers with a colon between them."""
        try:
            return len([float(one) for one in text.split(":")]) == 2
        except ValueError:
            return False

    @classmethod
    def parse(cls, key: str, text: str) -> Range:
        """Read `LOW:HIGH`, two numbers.

        Raises:
            ConfigError: If they are no range.
        """
        low, high = (float(one) for one in text.split(":"))
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError([f"{key}={text}: a searched key has a range LOW:HIGH, the smaller one first."])
        return cls(low, high)

    def at(self, share: float) -> float:
        """The value below which this share of the draws lies."""
        if self.low > 0 and self.high >= 10 * self.low:
            return self.low * (self.high / self.low) ** share
        return self.low + share * (self.high - self.low)

    def clipped(self, value: float) -> float:
        return min(max(value, self.low), self.high)


@dataclass(frozen=True, slots=True)
class Member:
    """What is trained in one place of the population."""

    slot: int
    """The place."""
    name: str
    """Of its run."""
    keys: Keys
    """Values of the searched keys."""
    parent: str | None = None
    """Name of the run that it is a branch of; None of the first generation."""
    born: int = 0
    """Generation in which it began."""
    score: float | None = None
    """After the newest generation that it has completed, finite; None before the first, and of one that died."""


class Trainable(Protocol):
    """Trains members. Its methods may be called in several threads, each for another member."""

    def branch(self, parent: str, name: str, step: int, keys: Keys) -> None:
        """Make a member that begins at this step of another one. Called while nothing trains.

        Raises:
            PenstockError: If the other one cannot be continued from this step.
        """
        ...

    def train(self, name: str, step: int, keys: Keys) -> float:
        """Train a member until it has done so many steps in all; returns its score, of which more is better.

        Called again after a failure, it goes on from what there is.

        Raises:
            PenstockError: If it dies.
        """
        ...


@dataclass(slots=True)
class Population:
    """The members, and how they came to be."""

    ranges: Mapping[str, Range]
    """Searched key -> its range."""
    steps_per_generation: int
    """Steps that every member trains in a generation."""
    seed: int
    """Of all draws."""
    members: list[Member]
    """By slot."""
    generation: int = 0
    """Completed generations."""
    lineage: list[tuple[int, Member]] = field(default_factory=list)
    """Every member after every generation, oldest first."""

    @classmethod
    def begin(cls, num_members: int, ranges: Mapping[str, Range], steps_per_generation: int, seed: int) -> Population:
        """The first members; of each key, one is drawn from each of `num_members` equal parts of its range."""
        rng = random.Random(f"{seed} first")
        drawn: dict[str, list[float]] = {}
        for key, one in ranges.items():
            parts = list(range(num_members))
            rng.shuffle(parts)
            drawn[key] = [one.at((part + rng.random()) / num_members) for part in parts]
        members = [
            Member(slot, f"member{slot}", {key: values[slot] for key, values in drawn.items()})
            for slot in range(num_members)
        ]
        return cls(ranges, steps_per_generation, seed, members)

    @property
    def step(self) -> int:
        """Steps that every member has trained."""
        return self.generation * self.steps_per_generation

    def advance(
        self,
        trainable: Trainable,
        note: Callable[[str], None],
        train_all: Callable[[Callable[[Member], Member], Sequence[Member]], list[Member]],
    ) -> None:
        """Train one generation.

        Args:
            trainable: Trains the members.
            note: Told of every branch and every death.
            train_all: Calls a function for all members, some of them at the same time.

        Raises:
            PenstockError: If every member dies.
        """
        self.members = self.chosen()
        unborn: set[int] = set()
        for member in self.members:
            if member.parent is not None and member.born == self.generation:
                keys = ", ".join(f"{key}={value:.4g}" for key, value in member.keys.items())
                note(f"{member.name} is a branch of {member.parent} at step {self.step}, {keys}")
                try:
                    trainable.branch(member.parent, member.name, self.step, member.keys)
                except PenstockError as failure:
                    note(f"{member.name} could not begin, and is replaced after this generation: {failure}")
                    unborn.add(member.slot)
        until = self.step + self.steps_per_generation

        def trained(member: Member) -> Member:
            if member.slot in unborn:
                return replace(member, score=None)
            for attempt in range(1, NUM_TRIES + 1):
                try:
                    score = trainable.train(member.name, until, member.keys)
                except PenstockError as death:
                    note(f"{member.name} has died, {attempt} of {NUM_TRIES} times: {death}")
                    continue
                if math.isfinite(score):
                    return replace(member, score=score)
                note(f"{member.name} has the score {score}, which no other can be compared with: it counts as dead")
                break
            return replace(member, score=None)

        members = train_all(trained, self.members)
        if all(member.score is None for member in members):
            raise PenstockError(f"population: all {len(members)} members have died in generation {self.generation}.")
        self.members, self.generation = members, self.generation + 1
        self.lineage += [(self.generation, member) for member in members]

    def chosen(self) -> list[Member]:
        """The members of the next generation: those that stay, and branches in place of the worst and the dead."""
        if not self.generation:
            return self.members
        ranked = sorted(self.members, key=lambda one: (one.score is None, -(one.score or 0.0), one.slot))
        alive = [member for member in ranked if member.score is not None]
        share = max(1, len(ranked) // SHARE) if len(ranked) > 1 else 0
        best = alive[:share] or alive
        replaced = {member.slot for member in ranked[len(ranked) - share :] if member not in best}
        replaced |= {member.slot for member in ranked if member.score is None}
        return [self._branch(member, best) if member.slot in replaced else member for member in self.members]

    def _branch(self, member: Member, best: Sequence[Member]) -> Member:
        rng = random.Random(f"{self.seed} {self.generation} {member.slot}")
        parent = rng.choice(list(best))
        keys = {
            key: one.at(rng.random())
            if rng.random() < RESAMPLE
            else one.clipped(parent.keys[key] * rng.choice(FACTORS))
            for key, one in self.ranges.items()
        }
        return Member(member.slot, f"member{member.slot}-{self.generation}", keys, parent.name, self.generation)

    @property
    def best(self) -> Member:
        """The member with the highest score."""
        return max((one for one in self.members if one.score is not None), key=lambda one: one.score or 0.0)
