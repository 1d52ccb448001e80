"""How tokens are sampled: the parameters, and counter-based random numbers.

Each draw is a hash of (seed, group, trajectory index, position). With a stateful generator, a draw would depend on the
other requests of the batch and on earlier draws. A counter-based generator is a pure function of its key. A trajectory
is therefore sampled identically in any batch, at any time and on any engine, and a resumed one continues with the same
draws.

The hash is the output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), folded over the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.ids import GroupId

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_UNIFORM_BITS = 52
"""Not 53: u · total must stay below total after rounding, so that inverse-CDF sampling never runs off the end."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request."""

    max_new_tokens: int
    """Maximum number of sampled tokens."""
    temperature: float = 1.0
    """0 is greedy. Behavior logprobs are those after the temperature."""
    top_k: int = 0
    """Sample from the k most likely tokens only; 0: from all."""
    top_p: float = 1.0
    """Then from the fewest most likely ones whose probability reaches this; 1: from all."""
    min_p: float = 0.0
    """First of all, from tokens with at least this share of the largest probability only; 0: from all."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling stops after any of these; the stop token is included in the output."""
    stop: tuple[str, ...] = ()
    """Sampling stops after the token that completes any of these texts, which is included in the output. The trajectory
    runner applies it (rollout/trajectory/stop_texts.py); an engine has no tokenizer."""
    seed: int | None = None
    """Makes the sampling of one request repeatable; None uses the engine's generator. The torch engine derives each
    draw from (seed, position in the sequence), so a resumed request continues with the same draws."""

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary, which is then recorded with them."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def of(self, group_id: GroupId, member: int) -> SamplingParams:
        """Those of one trajectory, with a seed of its own; the same if the run has no seed."""
        return self if self.seed is None else replace(self, seed=derive_seed(self.seed, group_id, member))


def derive_seed(seed: int, *keys: int) -> int:
    """Hash a seed and a key into another seed, 0 ≤ result < 2⁶³."""
    state = np.array([seed & _MASK], dtype=np.uint64)
    for key in keys:
        state = _mixed(state, np.array([key & _MASK], dtype=np.uint64))
    return int(state[0]) >> 1


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One draw from [0, 1) per (seed, position).

    Args:
        seeds: `[N]`, of each trajectory, below 2⁶⁴.
        positions: `[N]`, of the token to draw, counted from the first token of the trajectory's prompt.

    Returns:
        `[N] float64`, multiples of 2⁻⁵².
    """
    mixed = _mixed(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64))
    return np.asarray((mixed >> np.uint64(64 - _UNIFORM_BITS)) * 2.0**-_UNIFORM_BITS, dtype=np.float64)


def _mixed(state: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`[N] uint64`: SplitMix64's finaliser over a hashed state, advanced `key + 1` steps."""
    return _finalised(_finalised(state) + (key + np.uint64(1)) * np.uint64(_GOLDEN))


def _finalised(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))
