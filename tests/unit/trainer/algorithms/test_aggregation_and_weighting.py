"""Token weights, staleness and entropy factors, metrics: hand-worked numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.trainer.algorithms.aggregation import (
    Lengths,
    batch_normaliser,
    is_low_entropy,
    staleness_factors,
    token_weights,
)
from penstock.trainer.algorithms.catalog import find, names
from penstock.trainer.algorithms.metrics import OF_ANOTHER_POLICY, TokenMetrics
from penstock.trainer.algorithms.tokens import LossTerms

COUNTS, GROUPS = np.array([3, 1, 0, 4]), np.array([0, 1, 1, 1])
EXPECTED = {
    "prompt_mean": [1 / 6, 1 / 10, 0.0, 1 / 10],
    "token_mean": [1 / 8, 1 / 8, 0.0, 1 / 8],
    "seq_mean_token_mean": [1 / 12, 1 / 4, 0.0, 1 / 16],
    "seq_mean_token_sum": [1 / 4, 1 / 4, 0.0, 1 / 4],
    "constant_length": [1 / 40, 1 / 40, 0.0, 1 / 40],
}


def measure(
    metrics: TokenMetrics,
    loss: float,
    start,
    behavior,
    reference,
    teacher,
    entropies,
    staleness,
    weights,
    masked,
    low,
    high,
) -> None:
    """Add tokens of the first update, where the policy is that of the start."""
    tokens: Any = SimpleNamespace(
        behavior_logprobs=behavior,
        reference_logprobs=reference,
        teacher_logprobs=teacher,
        staleness=staleness,
        token_weights=weights,
    )
    ones, left = torch.ones_like(start), (~masked).double()
    metrics.add(
        torch.tensor(loss), start, start, entropies, tokens, LossTerms(start, masked, low, high, left, ones, ones)
    )


@pytest.mark.parametrize("mode", names("aggregation"))
def test_weights_of_ragged_sequences(mode: str) -> None:
    found = token_weights(Lengths(COUNTS, GROUPS), find("aggregation", mode).function, max_new_tokens=10)
    np.testing.assert_allclose(found, EXPECTED[mode], rtol=1e-12)
    assert token_weights(
        Lengths(np.array([0, 0]), np.array([0, 1])), find("aggregation", mode).function, 10
    ).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", names("aggregation"))
def test_parts_of_a_batch_add_up_to_the_whole(mode: str) -> None:
    parts = [Lengths(COUNTS[:1], GROUPS[:1]), Lengths(COUNTS[1:], GROUPS[1:] - 1)]
    mean = find("aggregation", mode).function
    total = sum(batch_normaliser(part, mean) for part in parts)
    shares = np.concatenate([token_weights(part, mean, 10, normaliser=1.0) for part in parts])
    np.testing.assert_allclose(shares / total, EXPECTED[mode], rtol=1e-12)


def test_staler_tokens_count_less() -> None:
    assert staleness_factors(torch.tensor([0, 1, 3]), 0.5).tolist() == [1.0, 0.5, 0.125]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0])
def test_the_top_tokens_by_entropy_of_each_sequence_are_kept(share: float) -> None:
    rng = np.random.default_rng(3)
    lengths = [5, 1, 0, 10, 4]
    segments = np.repeat(np.arange(5), lengths)
    entropies = np.round(rng.random(20), 1)  # with ties
    order = rng.permutation(20)  # sequences need not lie side by side
    found = is_low_entropy(torch.tensor(entropies[order]), torch.tensor(segments[order]), 5, share).numpy()
    for segment, length in enumerate(lengths):
        own = np.flatnonzero(segments[order] == segment)
        ranked = sorted(own, key=lambda t: (-entropies[order][t], t))
        kept = set(ranked[: math.ceil(round(share * length, 6))])
        assert [t not in kept for t in own] == found[own].tolist()


def test_two_micro_batches_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(5)
    start, behavior, reference, teacher = rng.normal(-2, 0.5, (4, 11))
    entropies, weights = rng.random((2, 11))
    masked, low, high = rng.random((3, 11)) < 0.3
    staleness = np.array([0, 0, 1, 2, 3, 4, 9, 0, 1, 3, 0])
    metrics = TokenMetrics(torch.device("cpu"))
    for part in (slice(0, 4), slice(4, 11)):
        columns = (start, behavior, reference, teacher, entropies, staleness, weights, masked, low, high)
        measure(metrics, 0.25, *(torch.tensor(column[part]) for column in columns))
    w = np.exp(start - behavior)
    expected = {
        "loss/policy": 0.5,
        "loss/entropy": entropies.mean(),
        "loss/reference_kl": (np.exp(reference - start) - (reference - start) - 1).mean(),
        "loss/teacher_kl": (np.exp(teacher - start) - (teacher - start) - 1).mean(),
        "ratio/behavior_mean": w.mean(),
        "ratio/behavior_max": w.max(),
        "ratio/masked_share": masked.mean(),
        "ratio/policy_clip_share": (low.sum() + high.sum()) / 11,
        "ratio/policy_clip_low_share": low.mean(),
        "ratio/policy_clip_high_share": high.mean(),
        "ratio/effective_sample_size": w.sum() ** 2 / (11 * (w**2).sum()),
        "mismatch/abs_logprob_mean": np.abs(start - behavior).mean(),
        "mismatch/abs_logprob_max": np.abs(start - behavior).max(),
        "mismatch/kl_k3": (w - (start - behavior) - 1).mean(),
    }
    buckets = {
        "0": staleness == 0,
        "1": staleness == 1,
        "2_3": (staleness == 2) | (staleness == 3),
        "4_plus": staleness >= 4,
    }
    for name, inside in buckets.items():
        expected[f"ratio/staleness_tokens/{name}"] = inside.sum()
        expected[f"ratio/staleness_behavior_mean/{name}"] = w[inside].mean()
        expected[f"ratio/staleness_behavior_max/{name}"] = w[inside].max()
        expected[f"ratio/staleness_masked_share/{name}"] = masked[inside].mean()
        share = w[inside].sum() ** 2 / (inside.sum() * (w[inside] ** 2).sum())
        expected[f"ratio/staleness_effective_sample_size/{name}"] = share
        expected[f"mismatch/staleness_abs_logprob_mean/{name}"] = np.abs(start - behavior)[inside].mean()
        expected[f"mismatch/staleness_kl_k3/{name}"] = (w - (start - behavior) - 1)[inside].mean()
    sums = metrics.reduce(lambda values, _: values)
    found, kept_share = sums.metrics(), sums.kept_share
    assert found == pytest.approx(expected, rel=1e-9)
    assert kept_share == pytest.approx(weights[~masked].sum() / weights.sum())


def test_a_step_without_tokens_has_metrics_and_no_buckets() -> None:
    sums = TokenMetrics(torch.device("cpu")).reduce(lambda values, _: values)
    found, kept_share = sums.metrics(), sums.kept_share
    assert kept_share == 1.0
    assert not any("/staleness_" in name for name in found)
    assert all(np.isfinite(list(found.values())))


def test_what_another_policy_sampled_is_measured_apart() -> None:
    rng = np.random.default_rng(6)
    start, behavior = rng.normal(-2, 0.5, (2, 8))
    zeros, masked = np.zeros(8), np.arange(8) % 2 == 0
    is_other = np.arange(8) < 3
    staleness = np.where(is_other, OF_ANOTHER_POLICY, 1)
    metrics = TokenMetrics(torch.device("cpu"))
    columns = (start, behavior, start, start, zeros, staleness, zeros, masked, zeros > 0, zeros > 0)
    measure(metrics, 0.0, *map(torch.tensor, columns))
    found = metrics.reduce(lambda values, _: values).metrics()
    w, distance = np.exp(start - behavior), np.abs(start - behavior)
    own = {
        "ratio/behavior_mean": w[~is_other].mean(),
        "ratio/behavior_max": w[~is_other].max(),
        "mismatch/abs_logprob_mean": distance[~is_other].mean(),
        "mismatch/abs_logprob_max": distance[~is_other].max(),
        "mismatch/kl_k3": (w - (start - behavior) - 1)[~is_other].mean(),
        "ratio/staleness_behavior_mean/other_policy": w[is_other].mean(),
        "ratio/staleness_masked_share/other_policy": masked[is_other].mean(),
        "ratio/staleness_tokens/other_policy": 3.0,
        "ratio/staleness_tokens/1": 5.0,
        "ratio/masked_share": 0.5,
    }
    assert {name: found[name] for name in own} == pytest.approx(own, rel=1e-12)
