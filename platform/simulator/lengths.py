"""Response lengths, drawn once per (seed, task, member), so that every policy sees the same ones.

    constant: L = mean      exponential: L ~ Exp(mean)      lognormal: L ~ exp(N(ln mean − σ²/2, σ²))

over all turns of an episode, each rounded up, at least 1 per turn and at most `cap`. Where the cap cuts, the mean of
what is drawn is a little lower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

Shape = Literal["constant", "lognormal", "exponential"]
_BLOCK = 256
"""Tasks drawn at once."""
_HASH = 2_654_435_761


@dataclass(frozen=True, slots=True)
class LengthProfile:
    """A distribution of response lengths, in tokens.

    Attributes:
        sigma: Of the logarithm; lognormal only.
        cap: Longest response; longer draws are cut, as `max_new_tokens` does.
    """

    shape: Shape
    mean: float
    sigma: float
    cap: int


class LengthTable:
    """Lengths by task and member, in simulated tokens (`grain` real tokens each)."""

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
        block, row = divmod(task, _BLOCK)
        table = self._blocks.get(block)
        if table is None:
            table = self._blocks[block] = self._draw(block)
        drawn = table[row][member % self._group_size]
        return drawn if self.mean_turns == 1 else max(drawn, self.turns(task))

    def turns(self, task: int) -> int:
        """Turns of an episode, by its task: 1 to 2 · mean − 1, each as often."""
        return 1 + (task * _HASH >> 16) % (2 * self.mean_turns - 1)

    def turn_end(self, task: int, member: int, position: int) -> int:
        """Where the turn ends that samples the token at `position`: the length, cut evenly into turns."""
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
        shape, profile = (_BLOCK, self._group_size), self._profile
        if profile.shape == "lognormal":
            drawn = np.exp(rng.normal(math.log(profile.mean) - profile.sigma**2 / 2, profile.sigma, shape))
        elif profile.shape == "exponential":
            drawn = rng.exponential(profile.mean, shape)
        else:
            drawn = np.full(shape, profile.mean)
        units = np.ceil(np.minimum(drawn, profile.cap) / self._grain)
        rows: list[list[int]] = np.maximum(units, 1).astype(int).tolist()
        return rows
