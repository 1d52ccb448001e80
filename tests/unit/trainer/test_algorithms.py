"""Golden values. Expected numbers are worked out here in numpy float64 from the published formulas,
token by token with plain loops, not with the functions under test.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.trainer.algorithms.advantages import advantage_estimator, dr_grpo, grpo, rloo
from penstock.trainer.algorithms.aggregation import token_weights
from penstock.trainer.algorithms.corrections import behavior_correction, decoupled, no_correction
from penstock.trainer.algorithms.metrics import TokenMetrics
from penstock.trainer.algorithms.policy_loss import clamped_exp, policy_loss, ppo_clip
from penstock.trainer.config import AlgorithmConfig

REWARDS = np.array([1.0, 0.0, 0.0, 2.0])


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


class TestAdvantages:
    def test_grpo_divides_by_the_sample_deviation(self) -> None:
        # mean 0.75; squared deviations 0.0625 + 0.5625 + 0.5625 + 1.5625 = 2.75
        expected = (REWARDS - 0.75) / (np.sqrt(2.75 / 3) + 1e-4)
        np.testing.assert_allclose(grpo(REWARDS), expected, rtol=1e-12)

    def test_grpo_with_the_population_deviation(self) -> None:
        expected = (REWARDS - 0.75) / (np.sqrt(2.75 / 4) + 1e-2)
        np.testing.assert_allclose(grpo(REWARDS, std="population", epsilon=1e-2), expected, rtol=1e-12)

    def test_grpo_without_deviation_is_dr_grpo(self) -> None:
        np.testing.assert_array_equal(grpo(REWARDS, std="none"), dr_grpo(REWARDS))
        np.testing.assert_allclose(dr_grpo(REWARDS), [0.25, -0.75, -0.75, 1.25])

    def test_rloo_leaves_itself_out_of_its_baseline(self) -> None:
        np.testing.assert_allclose(rloo(REWARDS), [1 - 2 / 3, 0 - 1, 0 - 1, 2 - 1 / 3], rtol=1e-12)

    @pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
    @pytest.mark.parametrize("std", ["sample", "population", "none"])
    @pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.0, 0.0], [1.0], [1 / 3] * 7])
    def test_a_zero_variance_group_gives_exactly_zero(self, name, std, rewards) -> None:
        estimate = advantage_estimator(AlgorithmConfig(advantage=name, advantage_std=std))
        assert estimate(np.array(rewards)).tolist() == [0.0] * len(rewards)


class TestPolicyLoss:
    def test_ppo_clip_keeps_the_pessimistic_branch(self) -> None:
        # ratios 1.5, 0.5, 1.5, 0.5, 1.0 with advantages of both signs; bounds 0.8 and 1.3
        ratios = np.array([1.5, 0.5, 1.5, 0.5, 1.0])
        advantages = np.array([2.0, 2.0, -2.0, -2.0, 3.0])
        expected = [-2.0 * 1.3, -2.0 * 0.5, 2.0 * 1.5, 2.0 * 0.8, -3.0]
        proximal = np.array([-1.0, -2.0, -0.5, -3.0, -0.1])
        target = tensor(proximal + np.log(ratios)).requires_grad_()
        terms, is_clipped = ppo_clip(target, tensor(proximal), tensor(proximal), tensor(advantages), 0.2, 0.3)
        np.testing.assert_allclose(terms.detach(), expected, rtol=1e-6)
        assert is_clipped.tolist() == [True, False, False, True, False]
        terms.sum().backward()
        np.testing.assert_allclose(target.grad, [0.0, -2.0 * 0.5, 2.0 * 1.5, 0.0, -3.0], rtol=1e-6, atol=1e-7)

    def test_at_the_proximal_policy_the_gradient_is_minus_advantage(self) -> None:
        target = tensor([-1.0, -0.2]).requires_grad_()
        advantages = tensor([0.7, -1.3])
        loss = policy_loss(AlgorithmConfig())
        terms, is_clipped = loss(target, target.detach(), tensor([-9.0, -9.0]), advantages)
        terms.sum().backward()
        assert torch.equal(target.grad, -advantages)
        assert not is_clipped.any()

    def test_log_ratios_are_clamped_to_20(self) -> None:
        np.testing.assert_allclose(clamped_exp(tensor([99.0, -99.0])), np.exp([20.0, -20.0]), rtol=1e-5)


class TestCorrections:
    def test_decoupled_weighs_by_the_ratio_and_masks_above_the_cap(self) -> None:
        proximal = tensor([-1.0, -1.0, -0.5, -2.0]).requires_grad_()
        behavior = tensor([-1.0, -2.0, -3.0, -1.0])
        factors, is_masked = decoupled(proximal, behavior, cap=5.0)
        np.testing.assert_allclose(factors, [1.0, np.exp(1.0), 0.0, np.exp(-1.0)], rtol=1e-6)
        assert is_masked.tolist() == [False, False, True, False]
        assert not factors.requires_grad

    def test_none_is_one_everywhere(self) -> None:
        factors, is_masked = no_correction(tensor([-1.0]), tensor([-9.0]))
        assert factors.tolist() == [1.0]
        assert not is_masked.any()

    def test_on_policy_decoupled_is_none(self) -> None:
        logprobs = tensor([-0.3, -1.2, -4.0])
        for name in ("none", "decoupled"):
            correction = behavior_correction(AlgorithmConfig(correction=name))
            assert torch.equal(correction(logprobs, logprobs).factors, torch.ones(3))


class TestAggregation:
    COUNTS = np.array([3, 1, 0, 4])

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("token_mean", [1 / 8, 1 / 8, 0.0, 1 / 8]),
            ("seq_mean_token_mean", [1 / 12, 1 / 4, 0.0, 1 / 16]),
            ("constant_length", [1 / 40, 1 / 40, 0.0, 1 / 40]),
        ],
    )
    def test_weights_of_ragged_sequences(self, mode, expected) -> None:
        np.testing.assert_allclose(token_weights(self.COUNTS, mode, max_new_tokens=10), expected, rtol=1e-12)

    def test_a_batch_without_loss_tokens_weighs_nothing(self) -> None:
        assert token_weights(np.array([0, 0]), "token_mean", 10).tolist() == [0.0, 0.0]


class TestTokenMetrics:
    def test_two_micro_batches_add_up_to_the_whole(self) -> None:
        rng = np.random.default_rng(5)
        proximal, behavior, reference = rng.normal(-2, 0.5, (3, 11))
        entropies, masked, clipped = rng.random(11), rng.random(11) < 0.3, rng.random(11) < 0.3
        metrics = TokenMetrics(torch.device("cpu"))
        for part in (slice(0, 4), slice(4, 11)):
            metrics.add(
                tensor(0.25),
                tensor(proximal[part]),
                tensor(behavior[part]),
                tensor(reference[part]),
                tensor(entropies[part]),
                torch.tensor(masked[part]),
                torch.tensor(clipped[part]),
            )
        weights = np.exp(proximal - behavior)
        expected = {
            "loss/policy": 0.5,
            "loss/entropy": entropies.mean(),
            "loss/reference_kl": (np.exp(reference - proximal) - (reference - proximal) - 1).mean(),
            "ratio/behavior_mean": weights.mean(),
            "ratio/behavior_max": weights.max(),
            "ratio/masked_share": masked.mean(),
            "ratio/policy_clip_share": clipped.mean(),
            "ratio/effective_sample_size": weights.sum() ** 2 / (11 * (weights**2).sum()),
            "mismatch/abs_logprob_mean": np.abs(proximal - behavior).mean(),
            "mismatch/abs_logprob_max": np.abs(proximal - behavior).max(),
            "mismatch/kl_k3": (weights - (proximal - behavior) - 1).mean(),
        }
        assert metrics.reduce(lambda values, _: values) == pytest.approx(expected, rel=1e-5)
