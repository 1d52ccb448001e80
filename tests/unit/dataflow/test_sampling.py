from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from penstock.dataflow.ids import GroupId
from penstock.dataflow.sampling import SamplingParams, derive_seed, uniforms

MASK = (1 << 64) - 1


def splitmix64(state: int) -> Iterator[int]:
    """The generator as published, in plain integers (Steele, Lea and Flood, OOPSLA 2014)."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        yield finalise(state)


def finalise(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_draws_are_a_splitmix64_stream_per_seed() -> None:
    assert next(splitmix64(1234567)) == 6457827717110365317  # the generator's usual first test value
    for seed in (0, 1, 1234567, MASK):
        expected = [(word >> 12) * 2.0**-52 for word in islice(splitmix64(finalise(seed)), 50)]
        assert uniforms([seed] * 50, range(50)).tolist() == expected


def test_a_draw_does_not_depend_on_other_draws() -> None:
    together = uniforms([5, 6, 7], [30, 2, 11])
    assert [uniforms([seed], [position])[0] for seed, position in [(5, 30), (6, 2), (7, 11)]] == together.tolist()


def test_draws_of_neighbouring_keys_look_independent_and_uniform() -> None:
    seeds = [derive_seed(0, group, member) for group in range(64) for member in range(8)]
    draws = np.array([uniforms(seeds, [position] * len(seeds)) for position in range(64)])  # [positions, trajectories]
    counts = np.histogram(draws, bins=64, range=(0, 1))[0]
    expected = draws.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi-square, 63 degrees of freedom: p = 1e-5
    for other in (np.roll(draws, 1, axis=0), np.roll(draws, 1, axis=1), np.roll(draws, 8, axis=1)):
        assert abs(np.corrcoef(draws.ravel(), other.ravel())[0, 1]) < 0.025  # 4.5 sigma of 32,768 pairs


def test_every_part_of_the_key_and_their_order_matter() -> None:
    seeds = {derive_seed(*key) for key in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (0, 1), (0, 1, 2, 0), (0, 0, 0)]}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_trajectory_gets_its_own_seed_unless_the_run_has_none() -> None:
    unseeded = SamplingParams(max_new_tokens=4)
    assert unseeded.of(GroupId(3), 1) is unseeded
    seeded = SamplingParams(max_new_tokens=4, seed=9)
    assert seeded.of(GroupId(3), 1).seed == derive_seed(9, 3, 1)
