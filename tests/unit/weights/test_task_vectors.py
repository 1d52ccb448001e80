"""Each way to add task vectors against a reference written by hand in float64, element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from penstock.weights.task_vectors import dare, linear, threshold, ties

SHAPE = (7, 11)


def tensors(seed: int, count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """A base, and experts near it."""
    drawn = torch.Generator().manual_seed(seed)
    base = torch.randn(SHAPE, generator=drawn)
    experts = [base + 0.1 * torch.randn(SHAPE, generator=drawn) for _ in range(count)]
    return [one.to(dtype).float() for one in (base, *experts)]


def elements(tensor: torch.Tensor) -> list[float]:
    return [float(value) for value in tensor.flatten()]


def kept_by_hand(vector: Sequence[float], density: float) -> list[float]:
    smallest = sorted(map(abs, vector), reverse=True)[max(1, round(density * len(vector))) - 1]
    return [value if abs(value) >= smallest else 0.0 for value in vector]


def ties_by_hand(base: torch.Tensor, experts: list[torch.Tensor], weights: list[float], density: float) -> list[float]:
    start = elements(base)
    vectors = [
        [
            weight * value
            for value in kept_by_hand([e - b for e, b in zip(elements(expert), start, strict=True)], density)
        ]
        for expert, weight in zip(experts, weights, strict=True)
    ]
    merged = []
    for index, value in enumerate(start):
        column = [vector[index] for vector in vectors]
        sign = np.sign(math.fsum(column))
        agreeing = [one for one in column if sign != 0 and np.sign(one) == sign]
        merged.append(value + (sum(agreeing) / len(agreeing) if agreeing else 0.0))
    return merged


@pytest.mark.parametrize("weights", [[0.5, 0.5], [1.0, 1.0], [0.3, -0.4], [0.7, 0.0], [0.0, 0.0], [0.2, 0.3, 0.4]])
def test_linear_is_the_base_and_the_weighted_task_vectors(weights: list[float]) -> None:
    base, *experts = tensors(0, len(weights))
    by_hand = [
        b + sum(weight * (e - b) for weight, e in zip(weights, of_experts, strict=True))
        for b, *of_experts in zip(*map(elements, (base, *experts)), strict=True)
    ]
    np.testing.assert_allclose(elements(linear(base, experts, weights)), by_hand, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_with_one_expert_and_coefficient_1_is_that_expert_to_the_bit(dtype: torch.dtype) -> None:
    base, expert = (100 * one for one in tensors(1, 1, dtype))
    expert[0, 0], base[0, 1], expert[0, 2] = -0.0, 3e38, 1e-42
    merged = linear(base, [expert], [1.0])
    assert torch.equal(merged.view(torch.int32), expert.view(torch.int32))
    assert not torch.equal(base + (expert - base), expert), "the plain formula is not exact"
    assert torch.equal(linear(base, [expert, base], [1.0, 0.0]), expert)


def test_linear_with_coefficients_that_add_up_to_1_leaves_the_base_out() -> None:
    base, *experts = tensors(2, 3)
    weights = [0.7, 0.2, 0.1]
    assert sum(weights) != 1.0, "as floats they do not, added one after the other"
    assert torch.equal(linear(base, experts, weights), linear(1e6 * base, experts, weights))


@pytest.mark.parametrize("density", [1.0, 0.5, 0.2, 0.001])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.5, 0.75, -0.25]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_trims_elects_and_merges(weights: list[float], density: float, dtype: torch.dtype) -> None:
    base, *experts = tensors(3, 3, dtype)
    by_hand = ties_by_hand(base, experts, weights, density)
    np.testing.assert_allclose(elements(ties(base, experts, weights, density)), by_hand, rtol=0, atol=1e-6)


def test_ties_on_the_cases_that_the_paper_names() -> None:
    """Both agree, the larger mass decides, one was trimmed; and they balance, or neither has changed."""
    base = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    first = base + torch.tensor([4.0, 3.0, 0.5, -2.0, 0.0])
    second = base + torch.tensor([2.0, -5.0, 3.0, 2.0, 0.0])
    assert elements(ties(base, [first, second], [1.0, 1.0], 0.6)) == [4.0, -4.0, 4.0, 1.0, 1.0]
    assert elements(ties(base, [first, second], [1.0, 1.0], 1.0)) == [4.0, -4.0, 2.75, 1.0, 1.0]


def test_the_threshold_is_the_smallest_of_the_largest_magnitudes() -> None:
    vector = torch.tensor([[1.0, -3.0], [2.0, -2.0]])
    assert [threshold(vector, density) for density in (1e-9, 0.25, 0.5, 0.75, 1.0)] == [3.0, 3.0, 2.0, 2.0, 0.0]
    assert threshold(torch.tensor(-2.0), 0.1) == 0.0, "a single element is always kept"
    assert threshold(torch.zeros(0), 0.5) == 0.0
    assert threshold(torch.tensor([0.1, -1e-40, 5.0], dtype=torch.float64), 0.6) == 0.1


def test_dare_drops_elements_and_rescales_the_others() -> None:
    base, *experts = tensors(4, 2)
    weights, density = [0.5, 0.8], 0.3
    merged = elements(dare(base, experts, weights, density, name="w", seed=0))
    found = {0: 0, 1: 0, 2: 0, 3: 0}
    for value, b, *of_experts in zip(merged, *map(elements, (base, *experts)), strict=True):
        steps = [weight * (e - b) / density for weight, e in zip(weights, of_experts, strict=True)]
        candidates = [b, b + steps[0], b + steps[1], b + sum(steps)]
        nearest = min(range(4), key=lambda index: abs(candidates[index] - value))
        assert abs(candidates[nearest] - value) < 1e-5
        found[nearest] += 1
    expected = {0: 0.7 * 0.7, 1: 0.3 * 0.7, 2: 0.7 * 0.3, 3: 0.3 * 0.3}
    for case, share in expected.items():
        assert abs(found[case] / len(merged) - share) < 4 * math.sqrt(share * (1 - share) / len(merged))


def test_dare_keeps_the_expected_share_and_the_expected_sum() -> None:
    base = torch.zeros(200_000)
    expert = torch.ones(200_000)
    for density in (0.1, 0.5, 1.0):
        merged = dare(base, [expert], [1.0], density, name="w", seed=3)
        assert set(elements(merged)) <= {0.0, float(np.float32(1 / density))}
        assert abs(float(merged.mean()) - 1.0) < 4 * math.sqrt((1 - density) / density / 200_000) + 1e-6


def test_the_draw_of_dare_depends_on_seed_name_and_expert_and_not_on_order() -> None:
    base, *experts = tensors(5, 2)

    def merged(order: Sequence[int], name: str = "w", seed: int = 0) -> torch.Tensor:
        return dare(base, [experts[one] for one in order], [0.5, 0.5], 0.5, name=name, seed=seed)

    assert torch.equal(merged([0, 1]), merged([0, 1]))
    torch.testing.assert_close(merged([0, 1]), merged([1, 0]))
    assert not torch.equal(merged([0, 1]), merged([0, 1], seed=1))
    assert not torch.equal(merged([0, 1]), merged([0, 1], name="v"))
    kept = [dare(base, [expert], [1.0], 0.5, name="w", seed=0) != base for expert in experts]
    assert not torch.equal(*kept), "the experts' draws are independent"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_in_a_narrower_dtype_are_merged_in_that_of_the_base(dtype: torch.dtype) -> None:
    base, *experts = tensors(7, 2)
    narrow = [expert.to(dtype) for expert in experts]
    wide = [expert.float() for expert in narrow]
    assert torch.equal(linear(base, narrow, [0.5, 0.7]), linear(base, wide, [0.5, 0.7]))
    assert torch.equal(linear(base, narrow[:1], [1.0]), wide[0])
    assert torch.equal(ties(base, narrow, [0.5, 0.7], 0.5), ties(base, wide, [0.5, 0.7], 0.5))
    assert torch.equal(
        dare(base, narrow, [1, 1], 0.5, name="w", seed=0), dare(base, wide, [1, 1], 0.5, name="w", seed=0)
    )


def test_no_argument_is_changed() -> None:
    base, *experts = tensors(6, 2)
    before = [one.clone() for one in (base, *experts)]
    linear(base, experts, [0.5, 0.7])
    ties(base, experts, [0.5, 0.7], 0.5)
    dare(base, experts, [0.5, 0.7], 0.5, name="w", seed=0)
    assert all(torch.equal(one, other) for one, other in zip((base, *experts), before, strict=True))
