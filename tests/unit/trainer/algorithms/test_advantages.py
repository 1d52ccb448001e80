"""Advantages, against numbers worked out here in plain loops."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from penstock.dataflow.errors import ShapeError, TrainingError
from penstock.trainer.algorithms.advantages import RewardBatch, gae_returns, overlong_penalty, token_advantages
from penstock.trainer.algorithms.catalog import find
from penstock.trainer.config import AlgorithmConfig
from tests.algorithms import advantage_config, resolved

REWARDS = np.array([1.0, 0.0, 0.0, 2.0])


def estimate(name: str, rewards, **settings) -> np.ndarray:
    return find("advantage", name).load()(np.asarray(rewards, np.float64), advantage_config(name, **settings))


def reward_batch(**changes) -> RewardBatch:
    """Two groups of two and three; an empty response, a single token; the second group earns all the same."""
    rng = np.random.default_rng(4)
    counts = [3, 1, 4, 0, 2]
    fields = {
        "rewards": np.array([1.0, 0.0, 0.5, 0.5, 0.5]),
        "groups": np.array([0, 0, 1, 1, 1]),
        "penalties": [np.zeros(n) for n in counts],
        "carries_loss": [np.ones(n, dtype=bool) for n in counts],
        "parts": {"right": np.array([1.0, 0.0, 1.0, 0.0, 1.0]), "short": np.array([10.0, 30.0, 20.0, 20.0, 20.0])},
        "values": [rng.normal(size=n) for n in counts],
    }
    return RewardBatch(**(fields | changes))


PENALTIES = [np.array([0.1, -0.2, 0.3]), np.array([0.5]), np.array([0.0, 0.1, 0.2, 0.3]), np.zeros(0), np.ones(2)]


class TestOfAGroup:
    def test_grpo_divides_by_the_sample_deviation(self) -> None:
        # mean 0.75; squared deviations 0.0625 + 0.5625 + 0.5625 + 1.5625 = 2.75
        expected = (REWARDS - 0.75) / (np.sqrt(2.75 / 3) + 1e-4)
        np.testing.assert_allclose(estimate("grpo", REWARDS), expected, rtol=1e-12)

    def test_grpo_with_the_population_deviation(self) -> None:
        expected = (REWARDS - 0.75) / (np.sqrt(2.75 / 4) + 1e-2)
        found = estimate("grpo", REWARDS, advantage_std="population", std_epsilon=1e-2)
        np.testing.assert_allclose(found, expected, rtol=1e-12)

    def test_grpo_without_deviation_is_dr_grpo(self) -> None:
        np.testing.assert_array_equal(estimate("grpo", REWARDS, advantage_std="none"), estimate("dr_grpo", REWARDS))
        np.testing.assert_allclose(estimate("dr_grpo", REWARDS), [0.25, -0.75, -0.75, 1.25])

    def test_rloo_leaves_itself_out_and_is_dr_grpo_stretched(self) -> None:
        np.testing.assert_allclose(estimate("rloo", REWARDS), [1 - 2 / 3, 0 - 1, 0 - 1, 2 - 1 / 3], rtol=1e-12)
        np.testing.assert_allclose(estimate("rloo", REWARDS), 4 / 3 * estimate("dr_grpo", REWARDS), rtol=1e-12)

    @pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "pass_at_k"])
    @pytest.mark.parametrize("std", ["sample", "population", "none"])
    @pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.0, 0.0], [1.0], [1 / 3] * 7])
    def test_a_zero_variance_group_gives_exactly_zero(self, name, std, rewards) -> None:
        assert estimate(name, rewards, advantage_std=std).tolist() == [0.0] * len(rewards)

    @pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
    def test_rounding_of_equal_rewards_gives_exactly_zero_too(self, name: str) -> None:
        rounded = np.array([0.3, 0.1 + 0.2, 0.3])
        assert rounded[1] > rounded[0]
        for scale in (1e-3, 1.0, -1e6):
            assert estimate(name, scale * rounded).tolist() == [0.0] * 3
        assert estimate(name, [0.3, 0.3 + 1e-6, 0.3])[1] > 0, "beyond rounding it counts"

    def test_maxrl_divides_by_the_mean(self) -> None:
        np.testing.assert_allclose(estimate("maxrl", REWARDS), (REWARDS - 0.75) / 0.75, rtol=1e-12)
        found = estimate("maxrl", [1, 0, 0, 0, 0, 0, 0, 0])
        np.testing.assert_allclose(found, [7.0, *[-1.0] * 7], rtol=1e-12)

    def test_maxrl_of_all_groups_is_the_gradient_of_the_truncated_log_of_success(self) -> None:
        """Over all outcomes of G = 4 it is d/dp of −Σ_{k<G} (1 − p)^k / k, with the scores of a Bernoulli(p)."""
        size, p = 4, 0.3
        expected = sum((1 - p) ** (k - 1) for k in range(1, size))
        found = 0.0
        for outcome in product((0.0, 1.0), repeat=size):
            rewards = np.array(outcome)
            probability = np.prod(np.where(rewards == 1, p, 1 - p))
            scores = np.where(rewards == 1, 1 / p, -1 / (1 - p))
            found += probability * float(estimate("maxrl", rewards) @ scores) / size
        assert found == pytest.approx(expected, rel=1e-12)

    def test_maxrl_refuses_negative_rewards_with_the_number(self) -> None:
        with pytest.raises(TrainingError, match=r"a reward of -0\.5, but it divides by the mean reward"):
            estimate("maxrl", [1.0, -0.5])
        assert estimate("maxrl", [-0.5, -0.5]).tolist() == [0.0, 0.0], "nothing is divided"

    def test_pass_at_k_is_what_the_best_answer_adds_to_the_best_of_the_group(self) -> None:
        rewards = np.array([0.2, 0.9, 0.4, 0.0])
        expected = [rewards.max() - np.delete(rewards, one).max() for one in range(4)]
        np.testing.assert_allclose(estimate("pass_at_k", rewards), expected, rtol=1e-12)
        assert estimate("pass_at_k", [1.0, 0.0, 1.0]).tolist() == [0.0] * 3, "two are best"
        assert estimate("pass_at_k", [0.3, 0.1 + 0.2, 0.0]).tolist() == [0.0] * 3, "they differ by rounding"

    def test_every_token_gets_its_trajectorys_advantage(self) -> None:
        found = token_advantages(reward_batch(), resolved(advantage="dr_grpo"))
        assert [one.tolist() for one in found] == [[0.5] * 3, [-0.5], [0.0] * 4, [], [0.0] * 2]

    def test_a_penalty_in_the_reward_is_summed_over_the_answer(self) -> None:
        found = token_advantages(reward_batch(penalties=PENALTIES), resolved(advantage="dr_grpo"))
        sums = np.array([1 - 0.2, 0 - 0.5, 0.5 - 0.6, 0.5, 0.5 - 2.0])
        expected = [sums[0] - sums[:2].mean(), sums[1] - sums[:2].mean(), *(sums[2:] - sums[2:].mean())]
        np.testing.assert_allclose([found[i][0] for i in (0, 1, 2, 4)], [expected[i] for i in (0, 1, 2, 4)], atol=1e-12)

    def test_parts_are_normalised_apart_and_then_summed(self) -> None:
        config = resolved(advantage="grpo", reward_weights={"right": 1.0, "short": -0.25})
        found = token_advantages(reward_batch(), config)
        right = np.array([0.5, -0.5]) / (np.sqrt(0.5) + 1e-4)
        short = np.array([-10.0, 10.0]) / (np.sqrt(200.0) + 1e-4)
        np.testing.assert_allclose([found[0][0], found[1][0]], right - 0.25 * short, rtol=1e-12)
        last = np.array([1.0, 0.0, 1.0]) - 2 / 3
        last /= np.sqrt((last**2).sum() / 2) + 1e-4  # the part `short` is equal in this group: exactly 0
        np.testing.assert_allclose([found[2][0], found[4][0]], last[[0, 2]], rtol=1e-12)


class TestOfABatch:
    def whitened_by_hand(
        self, values: list[list[float]], counted: list[list[bool]], ddof: int = 1
    ) -> list[list[float]]:
        pool = [v for vs, ms in zip(values, counted, strict=True) for v, m in zip(vs, ms, strict=True) if m]
        mean = sum(pool) / len(pool)
        std = (sum((v - mean) ** 2 for v in pool) / (len(pool) - ddof)) ** 0.5
        return [[(v - mean) / (std + 1e-4) for v in vs] for vs in values]

    def test_reinforce_pp_whitens_returns_over_all_tokens(self) -> None:
        found = token_advantages(reward_batch(penalties=PENALTIES), resolved(advantage="reinforce_pp"))
        rewards = [1.0, 0.0, 0.5, 0.5, 0.5]
        to_go = [[r - sum(k[t:]) for t in range(len(k))] for r, k in zip(rewards, PENALTIES, strict=True)]
        expected = self.whitened_by_hand(to_go, [[True] * len(one) for one in to_go])
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12)
        pool = np.concatenate(found)
        assert pool.mean() == pytest.approx(0, abs=1e-12)
        assert pool.std(ddof=1) == pytest.approx(1, abs=1e-3)

    def test_tokens_without_loss_are_not_in_the_statistics(self) -> None:
        masks = [
            np.array([True, False, True]),
            np.ones(1, bool),
            np.zeros(4, bool),
            np.zeros(0, bool),
            np.ones(2, bool),
        ]
        batch = reward_batch(penalties=PENALTIES, carries_loss=masks)
        found = token_advantages(batch, resolved(advantage="reinforce_pp", advantage_std="population"))
        rewards = [1.0, 0.0, 0.5, 0.5, 0.5]
        to_go = [[r - sum(k[t:]) for t in range(len(k))] for r, k in zip(rewards, PENALTIES, strict=True)]
        expected = self.whitened_by_hand(to_go, [mask.tolist() for mask in masks], ddof=0)
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12)

    def test_the_baseline_leaves_groups_of_equal_rewards_at_exactly_zero(self) -> None:
        found = token_advantages(reward_batch(), resolved(advantage="reinforce_pp_baseline"))
        expected = self.whitened_by_hand([[0.5] * 3, [-0.5], [0.0] * 6], [[True] * 3, [True], [True] * 6])
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)
        assert all(value == 0.0 for one in found[2:] for value in one)

    def test_the_baseline_takes_rounding_for_equal_rewards(self) -> None:
        batch = reward_batch(rewards=np.array([1.0, 0.0, 0.3, 0.1 + 0.2, 0.3]))
        found = token_advantages(batch, resolved(advantage="reinforce_pp_baseline"))
        assert all(value == 0.0 for one in found[2:] for value in one)

    @pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
    @pytest.mark.parametrize("std", ["sample", "population", "none"])
    def test_nothing_to_whiten_is_zero_and_never_nan(self, name: str, std: str) -> None:
        config = resolved(advantage=name, advantage_std=std)
        found = token_advantages(reward_batch(rewards=np.full(5, 0.3)), config)
        assert all(value == 0.0 for one in found for value in one)
        one_token = [np.array([True]), *(np.zeros(0, bool) for _ in range(4))]
        single = reward_batch(carries_loss=one_token, penalties=[np.zeros(len(one)) for one in one_token])
        assert [one.tolist() for one in token_advantages(single, config)] == [[0.0], [], [], [], []]

    def test_gae_is_the_discounted_sum_of_surprises(self) -> None:
        config = resolved(advantage="gae", gae_gamma=0.9, gae_lambda=0.8, whiten="none")
        batch = reward_batch(penalties=PENALTIES)
        expected = self.surprises_by_hand(batch)
        for mine, theirs in zip(token_advantages(batch, config), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12)

    def surprises_by_hand(self, batch: RewardBatch) -> list[list[float]]:
        """Of gae with γ = 0.9 and λ = 0.8, term by term."""
        found = []
        for reward, values, penalties in zip(batch.rewards, batch.values, batch.penalties, strict=True):
            n = len(values)
            r = [-penalties[t] + (reward if t == n - 1 else 0.0) for t in range(n)]
            delta = [r[t] + 0.9 * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
            found.append([sum(0.72**j * delta[t + j] for j in range(n - t)) for t in range(n)])
        return found

    @pytest.mark.parametrize(("std", "ddof"), [("sample", 1), ("population", 0)])
    def test_gae_is_whitened_over_the_loss_tokens_of_the_batch(self, std: str, ddof: int) -> None:
        masks = [np.ones(n, bool) for n in (3, 1, 4, 0, 2)]
        masks[0][1], masks[2][:] = False, False
        batch = reward_batch(penalties=PENALTIES, carries_loss=masks)
        config = resolved(advantage="gae", gae_gamma=0.9, gae_lambda=0.8, advantage_std=std)
        found = token_advantages(batch, config)
        raw = self.surprises_by_hand(batch)
        expected = self.whitened_by_hand(raw, [mask.tolist() for mask in masks], ddof)
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12)
        pool = np.concatenate([one[mask] for one, mask in zip(found, masks, strict=True)])
        assert pool.mean() == pytest.approx(0, abs=1e-12)
        assert pool.std(ddof=ddof) == pytest.approx(1, abs=1e-3)
        for returns, advantage, value in zip(
            gae_returns(batch, config.advantage_settings), raw, batch.values, strict=True
        ):
            np.testing.assert_allclose(returns, advantage + value, rtol=1e-12)  # these are not whitened

    def test_gae_whitened_does_not_see_the_scale_of_rewards_and_values(self) -> None:
        batch, config = reward_batch(), resolved(advantage="gae", std_epsilon=1e-12)
        scaled = reward_batch(rewards=1000 * batch.rewards, values=[1000 * one for one in batch.values])
        for mine, theirs in zip(token_advantages(batch, config), token_advantages(scaled, config), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9)

    def test_reinforce_pp_without_whitening_is_the_return(self) -> None:
        config = resolved(advantage="reinforce_pp", whiten="none")
        found = token_advantages(reward_batch(), config)
        assert [one.tolist() for one in found] == [[1.0] * 3, [0.0], [0.5] * 4, [], [0.5] * 2]

    def test_gae_with_lambda_1_is_the_return_minus_the_value(self) -> None:
        values = [np.array([0.5, -1.0, 0.3]), np.zeros(0), np.array([7.0])]
        penalties = [np.array([-0.1, 0.0, 0.0]), np.zeros(0), np.zeros(1)]
        masks = [np.ones(len(one), bool) for one in values]
        batch = RewardBatch(np.array([2.0, 5.0, 1.0]), np.arange(3), penalties, masks, values=values)
        found = token_advantages(batch, resolved(advantage="gae", gae_lambda=1.0, whiten="none"))
        np.testing.assert_allclose(found[0], [2.1 - 0.5, 2.0 + 1.0, 2.0 - 0.3], rtol=1e-12)
        assert [one.tolist() for one in found[1:]] == [[], [-6.0]], "nothing leaks from one trajectory into another"


def test_a_users_own_estimator_is_named_by_path_and_held_to_one_number_per_member() -> None:
    config = resolved(advantage="tests.unit.trainer.algorithms.own:half_of_the_reward")
    assert [one.tolist() for one in token_advantages(reward_batch(), config)][:2] == [[0.5] * 3, [0.0]]
    wrong = resolved(advantage="tests.unit.trainer.algorithms.own:one_number")
    with pytest.raises(ShapeError, match=r"shape \(\) for a group of 2"):
        token_advantages(reward_batch(), wrong)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (60, 0.0), (61, -0.025), (80, -0.5), (100, -1.0), (140, -1.0)]
)
def test_the_overlong_penalty_is_a_ramp_before_the_limit(num_tokens: int, penalty: float) -> None:
    assert overlong_penalty(num_tokens, max_new_tokens=100, ramp_share=0.4) == pytest.approx(penalty, abs=1e-12)


def soft_overlong_punishment(num_tokens: int, longest: int, cache: Fraction) -> Fraction:
    """Equation 13 of DAPO, in exact arithmetic."""
    if num_tokens <= longest - cache:
        return Fraction(0)
    if num_tokens <= longest:
        return ((longest - cache) - num_tokens) / cache
    return Fraction(-1)


@pytest.mark.parametrize("longest", [20480, 512, 96, 7, 1])
@pytest.mark.parametrize("share", [Fraction(1, 5), Fraction(1, 64), Fraction(1)])
def test_the_overlong_penalty_is_that_of_dapo_at_any_limit(longest: int, share: Fraction) -> None:
    for num_tokens in np.unique(np.linspace(0, longest + 5, 300).astype(int)).tolist():
        found = overlong_penalty(num_tokens, longest, float(share))
        assert found == pytest.approx(float(soft_overlong_punishment(num_tokens, longest, share * longest)), abs=1e-9)


def test_the_papers_share_is_the_default() -> None:
    assert Fraction(4096, 20480) == Fraction(str(AlgorithmConfig().overlong.ramp_share))
    assert overlong_penalty(16384, 20480, 0.2) == 0.0
    assert overlong_penalty(16385, 20480, 0.2) == pytest.approx(-1 / 4096, rel=1e-9)
    assert overlong_penalty(20480, 20480, 0.2) == pytest.approx(-1.0, rel=1e-9)
