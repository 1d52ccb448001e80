"""The interval of a paired difference: its values by hand, and its coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.platform.metrics.paired import paired_difference

Z = 1.959963984540054


def test_it_is_walds_interval_after_half_a_task_is_added_to_each_count() -> None:
    both, first, second, none = 40, 5, 12, 43
    found = paired_difference([0.0] * (both + none) + [-1.0] * first + [1.0] * second)
    a, b, n = first + 0.5, second + 0.5, 102
    centre, half = (b - a) / n, Z * math.sqrt((a + b) - (b - a) ** 2 / n) / n
    assert found == pytest.approx((0.07, centre - half, centre + half), abs=1e-12)


def test_without_a_changed_task_it_has_a_width_and_with_all_changed_it_stays_within_one() -> None:
    assert paired_difference([0.0] * 98) == pytest.approx((0.0, -Z / 100, Z / 100))
    mean, low, high = paired_difference([1.0] * 5)
    assert (mean, high) == (1.0, 1.0)
    assert low == pytest.approx(5 / 7 - Z * math.sqrt((6 / 7 - 25 / 49) / 7))
    assert paired_difference([-1.0] * 5)[1] == -1.0


def test_it_is_antisymmetric_and_narrows_with_the_level_and_the_number_of_answers() -> None:
    mean, low, high = paired_difference([0.5, -0.25, 0.0, 0.75], 4)
    assert paired_difference([-0.5, 0.25, 0.0, -0.75], 4) == pytest.approx((-mean, -high, -low))
    widths = [high - low for _, low, high in (paired_difference([0.0] * 8, k) for k in (1, 4))]
    assert widths[0] == pytest.approx(2 * widths[1])
    assert paired_difference([0.5, -0.25, 0.0, 0.75], 4, level=0.5)[2] < high


@pytest.mark.some(4)
@pytest.mark.parametrize("num_tasks", [50, 200])
@pytest.mark.parametrize("num_answers", [1, 4, 32])
@pytest.mark.parametrize(("spread", "shift"), [(0.0, 0.0), (0.15, 0.05), (0.1, 0.2)])
def test_it_covers_the_true_difference_in_93_to_97_of_100_pairs(
    num_tasks: int, num_answers: int, spread: float, shift: float
) -> None:
    random = np.random.default_rng([num_tasks, num_answers, round(100 * shift)])

    def policies(number: int) -> tuple[np.ndarray, np.ndarray]:
        first = random.beta(0.7, 0.7, number)
        return first, np.clip(first + random.normal(shift, spread, number), 0.0, 1.0)

    first, second = policies(1_000_000)
    true = float((second - first).mean())
    covered, pairs = 0, 2000
    for _ in range(pairs):
        one, other = (random.binomial(num_answers, share) / num_answers for share in policies(num_tasks))
        _, low, high = paired_difference((other - one).tolist(), num_answers)
        covered += low <= true <= high
    assert 0.93 <= covered / pairs <= 0.97
