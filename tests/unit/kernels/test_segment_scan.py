"""Packed scans against loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.dataflow.errors import ShapeError
from penstock.kernels.segment_scan import reverse_scan


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


@pytest.mark.parametrize("bounds", [[0, 3], [1, 5], [0, 4, 2, 5]])
def test_bounds_that_are_not_those_of_the_tokens_are_refused(bounds) -> None:
    with pytest.raises(ShapeError, match="over 5 tokens"):
        reverse_scan(torch.zeros(5), torch.zeros(5), torch.tensor(bounds))


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"values are \[5\], decay \[4\]"):
        reverse_scan(torch.zeros(5), torch.zeros(4), torch.tensor([0, 5]))
