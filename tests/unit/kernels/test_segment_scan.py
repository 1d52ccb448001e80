"""Packed scans against loops in float64. Runs on the torch version, and interpreted on the Triton one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.dataflow.errors import ShapeError
from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.segment_scan import generalised_advantages, reverse_scan
from tests.tiers import examples


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)


def random_columns(num_columns: int, lengths: list[int], seed: int) -> list[Tensor]:
    return list(torch.randn(num_columns, sum(lengths), generator=torch.Generator().manual_seed(seed)))


def scan_by_loop(values: Tensor, decay: Tensor, lengths: list[int]) -> Tensor:
    result, start = torch.zeros(len(values), dtype=torch.float64), 0
    for length in lengths:
        following = 0.0
        for token in reversed(range(start, start + length)):
            result[token] = following = float(values[token]) + float(decay[token]) * following
        start += length
    return result


def advantages_by_loop(
    rewards: Tensor, values: Tensor, is_sampled: Tensor, lengths: list[int], discount: float, trace_decay: float
) -> Tensor:
    """Over the sampled tokens of each sequence alone, as if the others were not there."""
    result, start = torch.zeros(len(values), dtype=torch.float64), 0
    for length in lengths:
        steps = [token for token in range(start, start + length) if is_sampled[token]]
        next_value, advantage = 0.0, 0.0
        for token in reversed(steps):
            error = float(rewards[token]) + discount * next_value - float(values[token])
            result[token] = advantage = error + discount * trace_decay * advantage
            next_value = float(values[token])
        start += length
    return result


LENGTHS = {
    "ragged": [5, 1, 17, 2],
    "empty ones": [0, 3, 0, 0, 9, 0],
    "longer than a short block": [600, 1, 2, 3],
    "longer than a long block": [1100, 1500],
    "one token": [1],
    "a block exactly": [256, 256],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_scan_equals_the_loop_and_does_not_cross_sequences(lengths) -> None:
    values, decay = random_columns(2, lengths, seed=0)
    decay = decay.sigmoid()
    actual = reverse_scan(values, decay, bounds_of(lengths))
    torch.testing.assert_close(actual.double(), scan_by_loop(values, decay, lengths), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_advantages_equal_the_loop_over_sampled_tokens(lengths) -> None:
    rewards, values, coin = random_columns(3, lengths, seed=1)
    result = generalised_advantages(rewards, values, coin > 0, bounds_of(lengths), discount=0.97, trace_decay=0.9)
    wanted = advantages_by_loop(rewards, values, coin > 0, lengths, 0.97, 0.9)
    torch.testing.assert_close(result.advantages.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.returns.double(), wanted + (values * (coin > 0)).double(), rtol=1e-5, atol=1e-5)


def test_observations_between_sampled_tokens_change_nothing() -> None:
    """Worked by hand: γ = λ = ½, V = 1, 2; δ₂ = 4 − 2 = 2, δ₁ = 0 + 1 − 1 = 0, A₁ = 0 + ¼ · 2."""
    is_sampled = torch.tensor([False, True, False, False, True, False])
    values = torch.tensor([9.0, 1.0, 9.0, 9.0, 2.0, 9.0])
    rewards = torch.tensor([7.0, 0.0, 7.0, 7.0, 4.0, 7.0])
    result = generalised_advantages(rewards, values, is_sampled, bounds_of([6]), discount=0.5, trace_decay=0.5)
    assert result.advantages.tolist() == [0.0, 0.5, 0.0, 0.0, 2.0, 0.0]
    assert result.returns.tolist() == [0.0, 1.5, 0.0, 0.0, 4.0, 0.0]


@settings(max_examples=examples(25), deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=8), seed=st.integers(0, 999))
def test_any_packing_gives_the_advantages_of_the_loop(lengths, seed) -> None:
    rewards, values, coin = random_columns(3, lengths, seed)
    result = generalised_advantages(rewards, values, coin > -0.5, bounds_of(lengths), discount=1.0, trace_decay=0.95)
    wanted = advantages_by_loop(rewards, values, coin > -0.5, lengths, 1.0, 0.95)
    torch.testing.assert_close(result.advantages.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(runs_on_triton(torch.zeros(0)), reason="bounds are not read back from a GPU to check them")
@pytest.mark.parametrize("bounds", [[0, 3], [1, 5], [0, 4, 2, 5]])
def test_bounds_that_are_not_those_of_the_tokens_are_refused(bounds) -> None:
    with pytest.raises(ShapeError, match="over 5 tokens"):
        reverse_scan(torch.zeros(5), torch.zeros(5), torch.tensor(bounds))


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"values are \[5\], decay \[4\]"):
        reverse_scan(torch.zeros(5), torch.zeros(4), torch.tensor([0, 5]))
