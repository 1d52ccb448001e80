"""Tokens that are selected by comparing all of a batch, against plain loops, and with any order of the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.trainer.algorithms.catalog import entries
from penstock.trainer.algorithms.corrections import M2poConfig, tokens_beyond
from penstock.trainer.algorithms.losses.covariance import ClipCovConfig, KlCovConfig, tokens_to_clip, tokens_to_hold
from penstock.trainer.algorithms.tokens import BatchTokens
from penstock.trainer.batches.packing import TrainingSequence
from tests.algorithms import resolved

SELECTIONS = {entry.name: entry.select for entry in entries() if entry.select is not None}
SETTINGS = {
    "m2po": M2poConfig(max_second_moment=0.1),
    "clip_cov": ClipCovConfig(share=0.05, min_covariance=0.1, max_covariance=2.0),
    "kl_cov": KlCovConfig(share=0.05),
}


def batch_tokens(num_tokens: int = 400, seed: int = 0) -> BatchTokens:
    rng = np.random.default_rng(seed)
    proximal = -rng.exponential(1.5, num_tokens)
    return BatchTokens(proximal, proximal + rng.normal(0, 0.5, num_tokens), rng.normal(0.2, 1, num_tokens), seed=3)


def reordered(tokens: BatchTokens, order: np.ndarray) -> BatchTokens:
    return BatchTokens(tokens.proximal[order], tokens.behavior[order], tokens.advantages[order], tokens.seed)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_a_batch_does_not_matter(name: str, seed: int) -> None:
    tokens = batch_tokens(seed=seed)
    order = np.random.default_rng(seed).permutation(400)
    chosen = SELECTIONS[name](tokens, SETTINGS[name])
    assert 3 < chosen.sum() < 200
    np.testing.assert_array_equal(SELECTIONS[name](reordered(tokens, order), SETTINGS[name]), chosen[order])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("limit", [0.04, 0.2])
def test_m2po_removes_the_largest_until_the_second_moment_of_the_rest_is_low_enough(seed: int, limit: float) -> None:
    tokens = batch_tokens(seed=seed)
    away = {}
    for t in range(400):
        log_weight = tokens.proximal[t] - tokens.behavior[t]
        if (tokens.advantages[t] > 0 and log_weight > 0) or (tokens.advantages[t] < 0 and log_weight < 0):
            away[t] = log_weight**2
    left = sorted(away, key=away.get)
    while left and sum(away[t] for t in left) / len(left) > limit:
        left.pop()
    found = tokens_beyond(tokens, M2poConfig(max_second_moment=limit))
    assert set(np.flatnonzero(found)) == set(away) - set(left)
    assert 0 < found.sum() < len(away)


def test_m2po_leaves_a_batch_below_its_limit_alone_and_tokens_that_the_advantage_pulls_back() -> None:
    log_weights = np.array([0.1, -3.0, 3.0, 0.2])
    tokens = BatchTokens(log_weights, np.zeros(4), np.array([1.0, 1.0, -1.0, 1.0]), 0)
    assert not tokens_beyond(tokens, M2poConfig()).any(), "(0.1² + 0.2²) / 2 = 0.025"
    assert tokens_beyond(tokens, M2poConfig(max_second_moment=0.02)).tolist() == [False, False, False, True]
    assert tokens_beyond(tokens, M2poConfig(max_second_moment=0.005)).tolist() == [True, False, False, True]


def test_m2po_masks_equal_tokens_together() -> None:
    tokens = BatchTokens(np.array([0.1, 0.5, 0.5]), np.zeros(3), np.ones(3), 0)
    # With one of the two, (0.01 + 0.25) / 2 = 0.13 would be low enough.
    assert tokens_beyond(tokens, M2poConfig(max_second_moment=0.15)).tolist() == [False, True, True]


@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_draws_from_the_band_of_covariances_and_again_the_same(seed: int) -> None:
    tokens, config = batch_tokens(seed=seed), SETTINGS["clip_cov"]
    mean_advantage, mean_logprob = sum(tokens.advantages) / 400, sum(tokens.proximal) / 400
    band = {
        t
        for t in range(400)
        if 0.1 < (tokens.advantages[t] - mean_advantage) * (tokens.proximal[t] - mean_logprob) < 2.0
    }
    chosen = tokens_to_clip(tokens, config)
    assert chosen.sum() == 20
    assert set(np.flatnonzero(chosen)) <= band
    np.testing.assert_array_equal(tokens_to_clip(tokens, config), chosen)
    assert (tokens_to_clip(tokens._replace(seed=4), config) != chosen).any(), "another version draws others"
    assert set(np.flatnonzero(tokens_to_clip(tokens, config.model_copy(update={"share": 1.0})))) == band


def test_clip_cov_draws_one_token_of_a_small_batch_and_none_without_candidates() -> None:
    tokens = batch_tokens(12)
    assert tokens_to_clip(tokens, ClipCovConfig(min_covariance=-9.0)).sum() == 1
    assert not tokens_to_clip(tokens, ClipCovConfig(min_covariance=90.0, max_covariance=91.0)).any()


@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_takes_the_largest_covariances(seed: int) -> None:
    tokens = batch_tokens(seed=seed)
    covariance = (tokens.advantages - tokens.advantages.mean()) * (tokens.proximal - tokens.proximal.mean())
    largest = sorted(range(400), key=lambda t: -covariance[t])[:20]
    assert set(np.flatnonzero(tokens_to_hold(tokens, SETTINGS["kl_cov"]))) == set(largest)


@pytest.mark.parametrize(("share", "expected"), [(0.01, 1), (0.25, 1), (0.5, 2), (1.0, 4)])
def test_kl_cov_takes_its_share_and_at_least_one_token_where_covariances_are_equal(share: float, expected: int) -> None:
    """Of (A − 0)(p + 2) = 1 for all four, those of the larger advantage, in any order of the batch."""
    advantages, proximal = np.array([1.0, 2.0, -1.0, -2.0]), np.array([-1.0, -1.5, -3.0, -2.5])
    tokens = BatchTokens(proximal, np.zeros(4), advantages, 0)
    assert tokens.covariances.tolist() == [1.0] * 4
    found = tokens_to_hold(tokens, KlCovConfig(share=share))
    assert sorted(advantages[found], reverse=True) == [2.0, 1.0, -1.0, -2.0][:expected]
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(tokens_to_hold(reordered(tokens, order), KlCovConfig(share=share)), found[order])


@pytest.mark.parametrize("num_tokens", [1, 2, 50])
def test_kl_cov_takes_at_least_one_of_equal_tokens(num_tokens: int) -> None:
    """Equal answers of a group have the same numbers; without a difference in the batch every covariance is 0."""
    equal = np.ones(num_tokens)
    for others in (0, 3):  # tokens of a lower covariance
        advantages, proximal = np.append(equal, -equal[:1].repeat(others)), np.append(equal, np.arange(others) - 3.0)
        tokens = BatchTokens(proximal, proximal, advantages, 0)
        assert tokens_to_hold(tokens, KlCovConfig(share=0.001)).sum() == 1


def sequences(lengths: list[int]) -> list[TrainingSequence]:
    rng = np.random.default_rng(5)
    return [
        TrainingSequence(
            token_ids=np.ones(length + 2, np.int64),
            targets=np.arange(length) + 2,
            behavior_logprobs=rng.normal(-2, 0.6, length).astype(np.float32),
            proximal_logprobs=rng.normal(-2, 0.6, length).astype(np.float32) if length else None,
            advantages=rng.normal(0, 1, length),
            teacher_logprobs=rng.normal(-2, 0.6, length).astype(np.float32),
        )
        for length in lengths
    ]


def test_every_sequence_gets_its_part_of_the_selection_of_the_batch() -> None:
    batch = sequences([5, 0, 1, 30])
    config = resolved(
        loss="kl_cov", kl_cov_share=0.2, correction=["m2po"], proximal="recompute", teacher_coefficient=0.5
    )
    found = config.select(batch, seed=3)
    advantages = [
        one.advantages + 0.5 * (one.teacher_logprobs - one.proximal_logprobs) for one in batch if len(one.targets)
    ]
    columns = [np.concatenate([getattr(one, f"{name}_logprobs") for one in batch if len(one.targets)]).astype(float)
               for name in ("proximal", "behavior")]  # fmt: skip
    tokens = BatchTokens(*columns, np.concatenate(advantages), 3)
    for name, expected in (
        ("m2po", tokens_beyond(tokens, M2poConfig())),
        ("kl_cov", tokens_to_hold(tokens, KlCovConfig(share=0.2))),
    ):
        assert [len(one.selected[name]) for one in found] == [5, 0, 1, 30]
        np.testing.assert_array_equal(np.concatenate([one.selected[name] for one in found]), expected)
        assert expected.any()
    assert [replace(one, selected={}).token_weight for one in found] == [one.token_weight for one in batch]


def test_a_batch_without_tokens_or_without_such_an_algorithm_is_left_as_it_is() -> None:
    config = resolved(loss="kl_cov", proximal="recompute")
    assert all(not one.selected for one in config.select(sequences([0, 0]), seed=0))
    assert all(not one.selected for one in resolved().select(sequences([4]), seed=0))


def test_every_loss_and_correction_of_a_batch_has_a_selection() -> None:
    of_batch = {entry.name for entry in entries() if entry.level == "batch" and entry.kind in ("loss", "correction")}
    assert of_batch == SELECTIONS.keys()
