"""The composition of loss, divergence, correction and masks, against the oracle put together by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import ConfigError, ShapeError
from penstock.trainer.algorithms.aggregation import Lengths, token_weights
from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.algorithms.catalog import find
from penstock.trainer.algorithms.metrics import TokenMetrics
from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batches.collate import MicroBatch, ModelInputs
from penstock.trainer.config import AlgorithmConfig
from tests.algorithms import algorithm_config, resolved

from . import oracle
from .micro_batches import LENGTHS, data
from .oracle import Real


def micro_batch(d: oracle.Data, staleness: np.ndarray, nll_factors: np.ndarray | None = None) -> MicroBatch:
    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array.astype(np.float64))

    index = torch.zeros(len(d.c), dtype=torch.int64)
    return MicroBatch(
        inputs=ModelInputs(index, index, None, index, index),
        behavior_logprobs=tensor(d.b),
        advantages=tensor(d.advantage),
        token_weights=torch.ones(len(d.c), dtype=torch.float64),
        reference_logprobs=tensor(d.r),
        staleness=torch.tensor(staleness),
        segments=torch.tensor(d.segments),
        pairs=torch.zeros(0, 2, dtype=torch.int64),
        sequence_index=d.segments,
        token_index=np.zeros_like(d.segments),
        num_segments=d.num_segments,
        num_tokens=len(d.c),
        proximal_logprobs=tensor(d.p),
        teacher_logprobs=tensor(d.extra["teacher"]) if d.extra else None,
        nll_factors=None if nll_factors is None else tensor(nll_factors),
    )


def composed(d: oracle.Data, config: AlgorithmConfig, staleness: np.ndarray, entropies: np.ndarray, nll_factors=None):
    target = torch.tensor(d.c.astype(np.float64), requires_grad=True)
    found = Objective(Algorithm(config)).terms(target, torch.tensor(entropies), micro_batch(d, staleness, nll_factors))
    found.terms.sum().backward()
    return found, target.grad.numpy()


@pytest.mark.parametrize("proximal", ["target", "behavior"])
@pytest.mark.parametrize("chain", [(), ("decoupled", "opsm"), ("tis_seq",), ("mis_token",), ("f_tis",)])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_term_is_the_corrected_loss_plus_the_weighed_divergence(
    proximal: str, chain: tuple[str, ...], estimator: str
) -> None:
    d = data(LENGTHS["ragged"], 2)
    d = oracle.Data(d.c, d.c if proximal == "target" else d.b, d.b, d.r, d.advantage, d.segments, d.num_segments)
    rng = np.random.default_rng(6)
    staleness, entropies = rng.integers(0, 4, 16), rng.random(16)
    flat = {
        "correction_cap": 1.5, "tis_cap": 2.0, "mis_low": 0.5, "mis_high": 5.0, "opsm_delta": 0.05,
        "f_tis_max_kl": 0.05, "tis_low": 0.0, "clip_low": 0.2, "clip_high": 0.2, "geo_low": 0.99, "geo_high": 1.01,
        "veto_min": 1e-4,
    }  # fmt: skip
    found, gradient = composed(
        d,
        algorithm_config(
            **flat, proximal=proximal, correction=chain, staleness_decay=0.7, entropy_top_share=0.6,
            kl_coefficient=0.3, kl_estimator=estimator,
        ),
        staleness,
        entropies,
    )  # fmt: skip
    config = SimpleNamespace(**flat)

    weights, is_masked, factors = np.ones(16), np.zeros(16, bool), 0.7**staleness
    for name in chain:
        weights *= [float(w) for w, _ in oracle.corrected(name, d, config)]
        is_masked |= [bool(masked) for _, masked in oracle.corrected(name, d, config)]
    for segment in range(d.num_segments):
        own = d.tokens_of(segment)
        for rank, t in enumerate(sorted(own, key=lambda t: -entropies[t])):
            factors[t] *= rank < np.ceil(0.6 * len(own))
    c, r = d.c.astype(np.float64), d.r.astype(np.float64)
    divergence = {"k2": (c - r) ** 2 / 2, "k3": np.exp(r - c) - (r - c) - 1}[estimator]
    slope = {"k2": c - r, "k3": 1 - np.exp(r - c)}[estimator]
    inside = proximal == "behavior"  # ρ carries the step from b in the loss, and the divergence gets it on its own
    weight = np.minimum(np.exp(np.clip(c - d.b.astype(np.float64), -20, 20)), config.tis_cap) if inside else 1.0
    held = 0.3 * np.where(is_masked, 1.0, weights * weight) * factors  # masks leave the divergence alone
    factors = np.where(is_masked, 0.0, weights) * factors
    policy = np.array(oracle.ppo_clip(d.c, d.c, d, config), dtype=np.float64)
    policy_slope = oracle.gradient("ppo_clip", d, config, np.ones(16)).astype(np.float64)
    np.testing.assert_allclose(found.terms.detach(), policy * factors + held * divergence, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(gradient, policy_slope * factors + held * slope, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("loss", ["dppo", "topr", "sft", "online_dpo", "ipo"])
def test_divergence_of_stale_tokens_has_a_weight_of_its_own_under_a_loss_that_takes_none(loss: str) -> None:
    d = data(LENGTHS["ragged"], 2)
    args = (np.zeros(16, np.int64), np.ones(16))
    keys = {"loss": loss, "correction": "none", "aggregation": "seq_mean_token_mean"}
    _, without = composed(d, algorithm_config(**keys), *args)
    _, with_divergence = composed(d, algorithm_config(**keys, kl_coefficient=0.3, kl_max_weight=1.2), *args)
    c, b, r = (array.astype(np.float64) for array in (d.c, d.b, d.r))
    weight = np.minimum(np.exp(c - b), 1.2)
    assert 0 < (weight == 1.2).sum() < 16
    np.testing.assert_allclose(with_divergence - without, 0.3 * weight * (c - r), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("chain", "kept"),
    [
        (("decoupled",), [1, 1, 0, 1, 1]),
        (("mis_token",), [1, 1, 0, 0, 1]),
        (("tis_token", "veto"), [1, 1, 1, 0, 0]),
        (("decoupled", "opsm"), [1, 1, 0, 0, 0]),
        (("decoupled", "mis_seq_geo"), [1, 1, 0, 0, 0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_masks_reject_the_policy_loss_and_leave_the_divergence(chain, kept: list[int], estimator: str) -> None:
    """Two answers, the second bad and left by the policy; rejected tokens have the divergence at weight 1."""
    w = np.array([1.1, 0.9, 6.0, 0.05, 0.7])
    c, advantage = np.array([-1.0, -2.0, -0.5, -4.0, -3.0]), np.array([1.0, 1.0, 1.0, -1.0, -1.0])
    r = c + np.array([0.3, -0.4, 0.5, -0.6, 12.0])
    d = oracle.Data(c, c, c - np.log(w), r, advantage, np.array([0, 0, 0, 1, 1]), 2)
    config = algorithm_config(correction=chain, geo_low=0.5, geo_high=3.0, veto_min=0.1, kl_coefficient=0.5,
                             kl_estimator=estimator)  # fmt: skip
    found, gradient = composed(d, config, np.zeros(5, np.int64), np.ones(5))
    assert found.is_masked.tolist() == [not one for one in kept]
    weight = np.minimum(w, 2.0) if "tis_token" in chain else w
    slope = {"k2": c - r, "k3": np.where(np.abs(r - c) > 10, 0.0, 1 - np.exp(r - c))}[estimator]
    expected = np.where(kept, -advantage * weight, 0.0) + 0.5 * np.where(kept, weight, 1.0) * slope
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)


def test_decoupled_is_ppo_clip_where_the_behavior_policy_is_the_proximal_one() -> None:
    d = data(LENGTHS["ragged"], 2)
    same = oracle.Data(d.c, d.c, d.c, d.r, d.advantage, d.segments, d.num_segments)
    args = (np.zeros(16, np.int64), np.ones(16))
    _, plain = composed(same, algorithm_config(correction="none"), *args)
    _, decoupled = composed(same, algorithm_config(correction="decoupled"), *args)
    np.testing.assert_array_equal(plain, decoupled)


def test_weighing_by_w_at_the_target_is_the_ratio_against_behavior_where_nothing_is_clipped() -> None:
    """w · ∇c and ∇exp(c − b) are the two forms of an importance-weighted gradient."""
    d = data(LENGTHS["ragged"], 2)
    args = (np.zeros(16, np.int64), np.ones(16))
    wide = {"clip_low": 0.999, "clip_high": 1e9}
    _, weighed = composed(d, algorithm_config(correction="decoupled", correction_cap=1e9, **wide), *args)
    _, ratio = composed(d, algorithm_config(correction="none", proximal="behavior", **wide), *args)
    np.testing.assert_allclose(weighed, ratio, rtol=1e-12)


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo", "reinforce", "gspo"])
def test_the_teacher_is_an_advantage_of_every_token(loss: str) -> None:
    """As with A + 0.4 (log π_teacher − c) given as the advantage; c of the term has no gradient."""
    d = data(LENGTHS["ragged"], 5)
    keys = {"loss": loss, "correction": "none", "aggregation": "seq_mean_token_mean"}
    added = oracle.Data(d.c, d.p, d.b, d.r, d.advantage + Real(0.4) * (d.extra["teacher"] - d.c), d.segments,
                        d.num_segments)  # fmt: skip
    args = (np.zeros(16, np.int64), np.ones(16))
    found, gradient = composed(d, algorithm_config(**keys, teacher_coefficient=0.4), *args)
    expected, expected_gradient = composed(added, algorithm_config(**keys), *args)
    np.testing.assert_allclose(found.terms.detach(), expected.terms.detach(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-14)


def test_the_logprobs_of_imitated_answers_are_added_whatever_masks_and_factors_do() -> None:
    d = data(LENGTHS["ragged"], 5)
    keys = {"correction": "mis_token", "staleness_decay": 0.5, "entropy_top_share": 0.4}
    args = (np.arange(16) % 3, np.linspace(0, 1, 16))
    factors = 2.5 * (d.segments == 3)
    plain, without = composed(d, algorithm_config(**keys), *args)
    found, gradient = composed(d, algorithm_config(**keys, nll_coefficient=0.3), *args, nll_factors=factors)
    c = d.c.astype(np.float64)
    np.testing.assert_allclose((found.terms - plain.terms).detach(), -0.3 * c * factors, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(gradient - without, -0.3 * factors, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("renormalize", "left"), [("none", "kept"), ("kept", "kept"), ("weights", "factors")])
def test_what_is_left_of_a_token_is_one_or_its_weight(renormalize: str, left: str) -> None:
    d = data(LENGTHS["ragged"], 5)
    d = oracle.Data(d.c, d.c, d.b, d.r, d.advantage, d.segments, d.num_segments)
    settings = {"correction_cap": 1.2, "renormalize": renormalize}
    found, _ = composed(d, algorithm_config(**settings), np.zeros(16, np.int64), np.ones(16))
    w = np.exp((d.c - d.b).astype(np.float64))
    assert 0 < (w > 1.2).sum() < 16
    expected = {"kept": w <= 1.2, "factors": np.where(w > 1.2, 0.0, w)}[left]
    np.testing.assert_allclose(found.left, expected, rtol=1e-12)


def share_left(config: AlgorithmConfig, log_weights: list[list[float]], micro_batches: list[list[int]]) -> float:
    """By what the gradient is divided, of sequences with these p − b, in these micro-batches."""
    lengths = Lengths(np.array([len(one) for one in log_weights]), np.arange(len(log_weights)))
    weights = token_weights(lengths, find("aggregation", config.aggregation).function, max_new_tokens=16)
    metrics = TokenMetrics(torch.device("cpu"))
    for chosen in micro_batches:
        d = data([len(log_weights[index]) for index in chosen], 3)
        b = d.c - np.concatenate([log_weights[index] for index in chosen])
        d = oracle.Data(d.c, d.c, b, d.r, d.advantage, d.segments, d.num_segments)
        per_token = torch.tensor(np.repeat(weights[chosen], lengths.num_loss_tokens[chosen]))
        tokens = replace(micro_batch(d, np.zeros(len(d.c), np.int64)), token_weights=per_token)
        target = torch.tensor(d.c.astype(np.float64))
        terms = Objective(Algorithm(config)).terms(target, target, tokens)
        metrics.add(terms.terms.sum(), target, target, target, tokens, terms)
    return metrics.reduce(lambda values, _: values).kept_share


HALF, TWO = [-math.log(2) / 8] * 8, [math.log(2)]
"""p − b of an answer of eight tokens whose weight is 0.5, and of one of one token whose weight is 2."""
LONG, SHORT, SINGLE = [0.5] * 8, [0.3, -0.3], [0.05]
"""Geometric means of the weights: e^0.5, 1 and e^0.05; a band of 0.9 to 1.1 rejects the first."""
OF_KEPT = (math.exp(0.3) + math.exp(-0.3) + math.exp(0.05)) / 3
PER_TOKEN = (8 * 2 ** (-1 / 8) + 2) / 9


@pytest.mark.parametrize(
    ("chain", "aggregation", "renormalize", "log_weights", "expected"),
    [
        ("tis_seq", "seq_mean_token_sum", "weights", [HALF, TWO], 1.25),  # (0.5 + 2) / 2
        ("tis_seq", "constant_length", "weights", [HALF, TWO], 1.25),
        ("tis_seq", "seq_mean_token_mean", "weights", [HALF, TWO], 1.25),
        ("tis_seq", "seq_mean_token_sum", "weights", [HALF, TWO, []], 1.25),  # an empty answer has no weight
        ("tis_seq", "constant_length", "kept", [HALF, TWO], 1.0),
        # A weight of tokens is averaged as the aggregation averages their terms.
        ("tis_token", "token_mean", "weights", [HALF, TWO], PER_TOKEN),
        ("tis_token", "seq_mean_token_sum", "weights", [HALF, TWO], PER_TOKEN),
        ("tis_token", "constant_length", "weights", [HALF, TWO], PER_TOKEN),
        ("tis_token", "seq_mean_token_mean", "weights", [HALF, TWO], (2 ** (-1 / 8) + 2) / 2),
        ("tis_token", "prompt_mean", "weights", [HALF, TWO], (2 ** (-1 / 8) + 2) / 2),  # each is a group of its own
        # Rejected sequences are no longer among the sequences, or the tokens, of which the mean is.
        ("mis_seq_geo", "seq_mean_token_sum", "kept", [LONG, SHORT, SINGLE], 2 / 3),
        ("mis_seq_geo", "constant_length", "weights", [LONG, SHORT, SINGLE], 2 / 3),
        ("mis_seq_geo", "seq_mean_token_mean", "kept", [LONG, SHORT, SINGLE], 2 / 3),
        ("mis_seq_geo", "token_mean", "kept", [LONG, SHORT, SINGLE], 3 / 11),
        # Both: sequences first, then the tokens of those that are left.
        (["tis_token", "mis_seq_geo"], "seq_mean_token_sum", "kept", [LONG, SHORT, SINGLE], 2 / 3),
        (["tis_token", "mis_seq_geo"], "seq_mean_token_sum", "weights", [LONG, SHORT, SINGLE], 2 / 3 * OF_KEPT),
        (["tis_token", "mis_seq_geo"], "token_mean", "weights", [LONG, SHORT, SINGLE], 3 / 11 * OF_KEPT),
        (["tis_seq", "mis_seq_geo"], "constant_length", "weights", [LONG, SHORT, SINGLE], (1 + math.exp(0.05)) / 3),
        (["decoupled"], "seq_mean_token_sum", "kept", [LONG, SHORT, SINGLE], 2 / 11),  # 8 and 1 tokens are above 1.2
        ("veto", "seq_mean_token_sum", "kept", [LONG, SHORT], 1.0),
        ("veto", "seq_mean_token_sum", "kept", [[*LONG, -9.3], SHORT], 0.5),  # e^−9.3 is below 1e-4
        ("mis_seq_geo", "seq_mean_token_sum", "kept", [LONG], 0.0),
    ],
)
def test_renormalising_divides_by_the_mean_over_what_the_correction_weighs(
    chain: str | list[str], aggregation: str, renormalize: str, log_weights: list[list[float]], expected: float
) -> None:
    """A weight of a whole sequence is averaged over sequences, however many tokens they have."""
    settings = {"tis_cap": 4.0, "geo_low": 0.9, "geo_high": 1.1, "correction_cap": 1.2}
    config = algorithm_config(correction=chain, aggregation=aggregation, renormalize=renormalize, **settings)
    everything = list(range(len(log_weights)))
    for micro_batches in ([everything], [[one] for one in reversed(everything) if log_weights[one]]):
        assert share_left(config, log_weights, micro_batches) == pytest.approx(expected, rel=1e-12)


class TestOwnLoss:
    OWN = "tests.unit.trainer.algorithms.own"

    def test_it_is_named_by_import_path(self) -> None:
        d = data(LENGTHS["ragged"], 2)
        config = algorithm_config(loss=f"{self.OWN}:squared", correction="none")
        _, gradient = composed(d, config, np.zeros(16, np.int64), np.ones(16))
        np.testing.assert_allclose(gradient, (2 * d.advantage * d.c).astype(np.float64), rtol=1e-12)

    def test_what_is_not_a_policy_loss_is_refused(self) -> None:
        d = data(LENGTHS["ragged"], 2)
        config = algorithm_config(loss=f"{self.OWN}.a_tensor", correction="none")
        with pytest.raises(ShapeError, match="it returned Tensor for 16 tokens"):
            composed(d, config, np.zeros(16, np.int64), np.ones(16))

    @pytest.mark.parametrize(
        ("name", "words"), [("squard", "Did you mean 'squared'"), ("NOT_A_FUNCTION", "is not callable, but a int")]
    )
    def test_what_does_not_resolve_is_named(self, name: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            Objective(resolved(loss=f"{self.OWN}:{name}"))
