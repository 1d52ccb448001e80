"""The entropy bonus against its definition; coefficients that follow a target against sequences worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.kernels.linear_logprob import linear_logprobs
from penstock.trainer.algorithms.controllers import (
    Controllers,
    EntropyConfig,
    next_entropy_coefficient,
    next_kl_coefficient,
)
from penstock.trainer.algorithms.kl import KlConfig
from penstock.trainer.algorithms.objective import Objective
from tests.algorithms import algorithm_config, resolved
from tests.unit.trainer.torch_trainer import scored, trainer_of

from .micro_batches import LENGTHS, data
from .test_objective import micro_batch

MASKS_ALL = {"correction": ["mis_seq_geo"], "geo_low": 0.999999, "geo_high": 1.000001}


def test_the_bonus_has_the_gradient_of_the_entropy_of_the_whole_vocabulary() -> None:
    """Of logits x with log-probabilities l: dH/dx_v = −p_v (l_v + H), in numpy. Masked tokens have the bonus too."""
    rng = np.random.default_rng(3)
    d = data(LENGTHS["ragged"], 2)
    hidden, weight, weights = rng.normal(size=(16, 6)), rng.normal(size=(11, 6)), rng.random(16)
    targets, temperature, eta = rng.integers(0, 11, 16), 0.7, 0.03
    given = torch.tensor(hidden, requires_grad=True)
    scores = linear_logprobs(given, torch.tensor(weight), torch.tensor(targets), temperature=temperature)
    without, bonus = (
        Objective(resolved(**MASKS_ALL, entropy_coefficient=coefficient))
        .terms(scores.logprobs, scores.entropies, micro_batch(d, np.zeros(16, np.int64)))
        .terms
        for coefficient in (0.0, eta)
    )
    ((bonus - without) @ torch.tensor(weights)).backward()

    logits = hidden @ weight.T / temperature
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    entropies = -(np.exp(logprobs) * logprobs).sum(1, keepdims=True)
    of_logits = -np.exp(logprobs) * (logprobs + entropies)
    expected = -eta * weights[:, None] * of_logits @ weight / temperature
    np.testing.assert_allclose((bonus - without).detach(), -eta * entropies[:, 0], rtol=1e-9)
    np.testing.assert_allclose(given.grad, expected, rtol=1e-9)


def test_the_bonus_raises_the_entropy_where_rewards_teach_nothing(policy, batch) -> None:
    equal = [
        replace(group, trajectories=tuple(replace(one, reward=1.0) for one in group.trajectories)) for group in batch
    ]
    entropies, silent = {}, {}
    for coefficient in (0.0, 0.5):
        trainer = trainer_of(policy, entropy_coefficient=coefficient)
        reports = [trainer.step(equal, version).metrics for version in range(4)]
        entropies[coefficient] = [one["loss/entropy"] for one in reports]
        silent[coefficient] = sum(one["trainer/silent_updates"] for one in reports)
        assert {one.get("loss/entropy_coefficient") for one in reports} == {coefficient or None}
    assert silent == {0.0: 4, 0.5: 0}
    assert len(set(entropies[0.0])) == 1, "nothing was trained"
    assert entropies[0.5] == sorted(entropies[0.5])
    assert entropies[0.5][-1] > entropies[0.0][0] + 1e-4


def test_weights_and_coefficients_are_the_same_for_any_split_into_micro_batches(policy, batch, references) -> None:
    trained, states = [], []
    for max_tokens in (40, 1000):
        trainer = trainer_of(
            policy, max_tokens, lr=1.0, adam_epsilon=1.0, entropy_coefficient=0.2, entropy_target=9.0,
            entropy_step=0.1, entropy_max_coefficient=1.0, kl_coefficient=0.1, kl_target=0.01,
        )  # fmt: skip
        for version in range(2):
            trainer.step(scored(batch, references), version)
        trained.append(torch.cat([tensor.flatten() for _, tensor in trainer.export_weights()]))
        states.append(trainer._controllers.state)
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-6)
    assert states[0] == pytest.approx(states[1], rel=1e-6)
    assert states[0]["entropy_coefficient"] == pytest.approx(0.4)
    assert states[0]["kl_coefficient"] == pytest.approx(0.1 * 1.02**2)


def test_the_entropy_coefficient_rises_below_the_target_and_falls_above_it() -> None:
    config = EntropyConfig(coefficient=0.001, target=0.2, step=0.0004, max_coefficient=0.0021)
    coefficient, found = config.coefficient, []
    for entropy in (0.15, 0.19, 0.1, 0.2, 0.3, 0.1):
        coefficient = next_entropy_coefficient(coefficient, entropy, config)
        found.append(coefficient)
    assert found == pytest.approx([0.0014, 0.0018, 0.0021, 0.0017, 0.0013, 0.0017])
    assert next_entropy_coefficient(0.0002, 5.0, config) == 0.0


def test_a_batch_after_one_above_the_target_has_no_bonus() -> None:
    controllers = Controllers(algorithm_config(entropy_coefficient=0.002, entropy_target=0.2, entropy_step=0.001))
    applied = [controllers.algorithm.entropy.coefficient]
    for entropy in (0.1, 0.3, 0.1, 0.2):
        controllers.observe({"loss/entropy": entropy})
        applied.append(controllers.algorithm.entropy.coefficient)
    assert applied == pytest.approx([0.002, 0.003, 0.0, 0.003, 0.002])


def test_a_controller_goes_on_where_it_was_unless_its_coefficient_is_configured_otherwise() -> None:
    entropy, kl = {"entropy_coefficient": 0.002, "entropy_target": 0.2}, {"kl_coefficient": 0.1, "kl_target": 0.01}
    first = Controllers(algorithm_config(**entropy, **kl))
    first.observe({"loss/entropy": 0.1, "loss/reference_kl": 0.1})
    assert first.state["entropy_coefficient"] == pytest.approx(0.0021)
    for changed in ({}, {"kl_coefficient": 0.5}, {"entropy_coefficient": 0.003}):
        again = Controllers(algorithm_config(**{**entropy, **kl, **changed}))
        again.restore(first.state)
        expected = {"entropy_coefficient": first.state["entropy_coefficient"], "kl_coefficient": 0.1 * 1.02}
        assert {name: again.state[name] for name in expected} == pytest.approx({**expected, **changed})


def test_a_batch_without_a_loss_token_has_no_means_and_moves_no_coefficient(policy, batch, references) -> None:
    cut = [
        replace(group, trajectories=tuple(replace(one, finish_reason="length") for one in group.trajectories))
        for group in batch
    ]
    targets = {"entropy_coefficient": 0.002, "entropy_target": 0.2, "kl_coefficient": 0.1, "kl_target": 0.01}
    trainer = trainer_of(policy, overlong="mask", **targets)
    before = dict(trainer._controllers.state)
    metrics = trainer.step(scored(cut, references), 0).metrics
    assert trainer._controllers.state == before
    assert not {"loss/entropy", "loss/reference_kl", "mismatch/abs_logprob_mean"} & metrics.keys()


def test_the_divergence_coefficient_moves_by_a_tenth_of_the_clipped_relative_error() -> None:
    """Ziegler et al., section 2.2, with K = 0.1: errors of −0.5, 0.1, 0 and 4 are clipped to ±0.2."""
    config, coefficient, found = KlConfig(coefficient=0.2, target=0.02), 0.2, []
    for divergence in (0.01, 0.022, 0.02, 0.1):
        coefficient = next_kl_coefficient(coefficient, divergence, config)
        found.append(coefficient)
    assert found == pytest.approx([0.2 * 0.98, 0.2 * 0.98 * 1.01, 0.2 * 0.98 * 1.01, 0.2 * 0.98 * 1.01 * 1.02])


@pytest.mark.parametrize("apply_to", ["loss", "reward"])
def test_the_adapted_coefficient_is_the_one_that_trains(policy, batch, references, apply_to) -> None:
    """The second step of an adaptive run is that of a run whose fixed coefficient changes by hand between the steps."""
    of_kl = {"kl_in": apply_to, "kl_estimator": "k2" if apply_to == "loss" else "k1"}
    adaptive = trainer_of(policy, kl_coefficient=0.3, kl_target=1e-6, kl_gain=1.0, **of_kl)
    by_hand = trainer_of(policy, kl_coefficient=0.3, **of_kl)
    groups = scored(batch, references)
    reports = []
    for version in range(2):
        reports.append(adaptive.step(groups, version).metrics)
        by_hand.step(groups, version)
        by_hand._use(algorithm_config(kl_coefficient=0.36, **of_kl))
    assert [one["loss/kl_coefficient"] for one in reports] == pytest.approx([0.3, 0.36])
    mine, theirs = (dict(one.export_weights()) for one in (adaptive, by_hand))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_skipped_step_moves_no_coefficient(policy, batch, references) -> None:
    trainer = trainer_of(policy, kl_coefficient=0.3, kl_target=0.5, entropy_target=0.1)
    before = dict(trainer._controllers.state)
    bad = [
        replace(group, trajectories=tuple(replace(one, reward=float("nan")) for one in group.trajectories))
        for group in batch
    ]
    assert trainer.step(scored(bad, references), 0).skipped
    assert trainer._controllers.state == before
    trainer.step(scored(batch, references), 0)
    assert trainer._controllers.state != before
