"""Every policy loss, value and gradient, against the oracle (oracle.py: plain loops in extended precision)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.platform.checks.load import compose_config
from penstock.trainer.algorithms.aggregation import Lengths, token_weights
from penstock.trainer.algorithms.catalog import entries, find
from penstock.trainer.algorithms.losses.pairs import online_dpo, pair_margins, preference_pairs
from penstock.trainer.algorithms.tokens import LossTokens, clamped_exp
from penstock.trainer.config import CriticConfig
from tests.algorithms import loss_config

from . import oracle
from .micro_batches import LENGTHS, data, far_apart, tokens_of

NAMES = [entry.name for entry in entries() if entry.kind == "loss"]
SETTINGS = {
    "clip_low": 0.15, "clip_high": 0.3, "dual_clip": 1.6, "cispo_low": 0.25, "dppo_delta": 0.05, "dppo_cap": 1.3,
    "pair_beta": 0.3, "value_clip": 0.15, "sapo_tau_positive": 1.0, "sapo_tau_negative": 1.4, "ipo_length": "mean",
    "dpo_length": "sum", "label_smoothing": 0.0, "gmpo_low": 0.2, "gmpo_high": 0.3, "kl_cov_coefficient": 0.7,
}  # fmt: skip
OTHER_SETTINGS = {
    "online_dpo by means": ("online_dpo", {"dpo_length": "mean"}),
    "online_dpo with label smoothing": ("online_dpo", {"label_smoothing": 0.2}),
    "ipo by sums": ("ipo", {"ipo_length": "sum"}),
    "dppo without a cap": ("dppo", {"dppo_cap": 1e9}),
    "dppo at its tightest": ("dppo", {"dppo_cap": 1.0}),
}
CASES = {
    **{f"{shape}-{seed}": data(lengths, seed) for shape, lengths in LENGTHS.items() for seed in range(3)},
    "sequence-advantages": data(LENGTHS["ragged"], 7, advantages="sequence"),
    "zero-variance": data(LENGTHS["ragged"], 8, advantages="zero"),
    "far-apart": far_apart(),
}


def settings_of(name: str, settings: dict) -> Any:
    """The section of a loss; that of the critic's is `critic`."""
    return CriticConfig(value_clip=settings["value_clip"]) if name == "value" else loss_config(name, **settings)


def ours(
    name: str, d: oracle.Data, weights: np.ndarray, dtype: torch.dtype, settings: dict = SETTINGS
) -> tuple[float, np.ndarray, np.ndarray]:
    tokens = tokens_of(d, dtype)
    loss = find("loss", name).load()(tokens, settings_of(name, settings))
    total = (loss.terms * torch.tensor(weights.astype(np.float64), dtype=dtype)).sum()
    total.backward()
    return float(total.detach()), tokens.target.grad.double().numpy(), loss.terms.detach().double().numpy()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", [*NAMES, *OTHER_SETTINGS])
def test_value_and_gradient_are_those_of_the_definition(variant: str, case: str) -> None:
    d = CASES[case]
    name, settings = OTHER_SETTINGS.get(variant, (variant, {}))
    settings = SETTINGS | settings
    config = SimpleNamespace(**settings)
    weights = np.random.default_rng(1).random(len(d.c)).astype(oracle.Real)
    terms = np.array(oracle.LOSSES[name](d.c, d.c, d, config), dtype=np.float64)
    gradient = oracle.gradient(name, d, config, weights).astype(np.float64)
    _, found_gradient, found_terms = ours(name, d, weights, torch.float64, settings)
    np.testing.assert_allclose(found_terms, terms, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found_gradient, gradient, rtol=1e-9, atol=1e-9)
    _, small_gradient, small_terms = ours(name, d, weights, torch.float32, settings)
    assert np.linalg.norm(small_terms - terms) <= 1e-5 * np.linalg.norm(terms) + 1e-12
    assert np.linalg.norm(small_gradient - gradient) <= 1e-5 * np.linalg.norm(gradient) + 1e-12


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("ppo_clip", [0, 0, 0, 1, 0], [1, 0, 0, 0, 0]),
        ("dual_clip", [0, 0, 0, 1, 0], [1, 0, 1, 0, 0]),
        ("gspo", [0, 0, 0, 1, 0], [1, 0, 0, 0, 0]),
        ("cispo", [0, 1, 0, 1, 0], [1, 0, 1, 0, 0]),
        ("dppo", [0, 0, 0, 1, 0], [1, 0, 0, 0, 0]),
        ("gmpo", [0, 0, 0, 1, 0], [1, 0, 0, 0, 0]),
        ("clip_cov", [0, 0, 0, 1, 0], [1, 0, 0, 0, 1]),
    ],
)
def test_low_and_high_clips_are_counted_separately(name: str, low: list[int], high: list[int]) -> None:
    """Ratios 1.5, 0.5, 1.5, 0.5, 1 with advantages of both signs, each token a sequence of its own."""
    behavior = np.log(np.full(5, 0.4))
    target = behavior + np.log([1.5, 0.5, 1.5, 0.5, 1.0])
    d = oracle.Data(target, behavior, behavior, behavior, np.array([2.0, 2.0, -2.0, -2.0, 3.0]), np.arange(5), 5,
                    extra=dict.fromkeys(("teacher", "old_values", "returns"), target),
                    selected={"clip_cov": np.arange(5) == 4})  # fmt: skip
    settings = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.4, "cispo_low": 0.25, "dppo_delta": 0.1}
    loss = find("loss", name).load()(tokens_of(d), settings_of(name, settings))
    assert loss.is_clipped_low.int().tolist() == low
    assert loss.is_clipped_high.int().tolist() == high


def test_the_cases_reach_every_branch() -> None:
    """Low and high clips, dropped and kept tokens, tapered and full sequences, both signs: else a wrong one passes."""
    for name in ("ppo_clip", "dual_clip", "gspo", "gspo_token", "gmpo", "clip_cov", "cispo", "dppo", "value"):
        low = high = free = 0
        for d in CASES.values():
            loss = find("loss", name).load()(tokens_of(d), settings_of(name, SETTINGS))
            low, high = low + int(loss.is_clipped_low.sum()), high + int(loss.is_clipped_high.sum())
            free += int((~loss.is_clipped_low & ~loss.is_clipped_high).sum())
        assert min(low, high, free) > 5, name


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("sft", "value", "distill", "online_dpo", "ipo", "kl_cov")]
)
def test_no_advantage_is_no_gradient(name: str) -> None:
    _, gradient, terms = ours(name, CASES["zero-variance"], np.ones(16), torch.float64)
    assert not gradient.any()
    assert not terms.any() or name == "sapo"


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_micro_batch_has_a_graph_and_no_gradient(name: str) -> None:
    d = data([1], 0)
    _, gradient, _ = ours(name, d, np.zeros(1), torch.float64)
    assert gradient.tolist() == [0.0]


@pytest.mark.parametrize(
    ("target", "behavior", "advantage", "cap", "slope"),
    [
        (0.19, 8e-7, 1.0, 10.0, -10.0),  # a ratio of 237,500 within the trust region: π − μ is below δ = 0.2
        (0.19, 8e-7, 1.0, 3.0, -3.0),
        (0.1, 0.04, 2.0, 3.0, -2.0 * 2.5),  # below the cap the ratio itself
        (0.1, 1e-12, -0.5, 3.0, 1.5),
        (1e-6, 0.15, -2.0, 3.0, 2.0 * 1e-6 / 0.15),
        (0.5, 0.1, 1.0, 3.0, 0.0),  # dropped: π − μ is above δ
        (0.5, 0.1, -1.0, 3.0, 3.0),  # but not where A pushes it back
        (0.1, 0.5, -1.0, 3.0, 0.0),
        (0.1, 0.5, 0.0, 3.0, 0.0),
    ],
)
def test_the_weight_of_dppo_is_capped_where_probabilities_allow_any_ratio(
    target: float, behavior: float, advantage: float, cap: float, slope: float
) -> None:
    c, b = np.log([target]), np.log([behavior])
    d = oracle.Data(c, b, b, b, np.array([advantage]), np.zeros(1, int), 1,
                    extra=dict.fromkeys(("teacher", "old_values", "returns"), c))  # fmt: skip
    value, gradient, _ = ours("dppo", d, np.ones(1), torch.float64, {"dppo_cap": cap})
    assert gradient == pytest.approx([slope], rel=1e-12)
    assert value == pytest.approx(slope, rel=1e-12)


def test_the_preset_of_dppo_caps_at_3() -> None:
    config = compose_config(["experiment=arithmetic", "algorithm=dppo"]).algorithm
    assert (config.loss.delta, config.loss.max_weight) == (0.2, 3.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (18_408.0, -1.0, 0.0),  # a stale token of a bad answer that the policy now gives far more often
        (10.1, -1.0, 0.0),
        (9.9, -1.0, 9.9),
        (0.7, -1.0, 0.0),
        (0.7, 1.0, -0.7),
        (1.27, 1.0, -1.27),
        (1.29, 1.0, 0.0),
    ],
)
def test_the_preset_of_dapo_bounds_the_slope_of_stale_tokens(ratio: float, advantage: float, slope: float) -> None:
    config = compose_config(["experiment=arithmetic", "algorithm=dapo"]).algorithm
    assert config.proximal == "behavior"
    c = np.array([-0.1])
    b = c - np.log(ratio)
    d = oracle.Data(c, b, b, b, np.array([advantage]), np.zeros(1, int), 1,
                    extra=dict.fromkeys(("teacher", "old_values", "returns"), c))  # fmt: skip
    tokens = tokens_of(d)
    find("loss", config.loss.name).load()(tokens, config.loss).terms.sum().backward()
    assert tokens.target.grad.tolist() == pytest.approx([slope], rel=1e-12)


def test_the_preset_of_gspo_takes_four_steps_per_batch() -> None:
    config = compose_config(["experiment=arithmetic", "algorithm=gspo"]).algorithm
    assert (config.updates_per_batch, config.aggregation) == (4, "seq_mean_token_mean")


def test_long_answers_keep_the_digits_of_their_margin() -> None:
    """32,768 tokens of some three nats each, whose sums a pair's margin is the small difference of."""
    length, rng = 32_768, np.random.default_rng(8)
    r = rng.normal(-3.0, 2.0, 2 * length).astype(np.float32)
    c = (r + rng.normal(0.0, 0.05, 2 * length)).astype(np.float32)
    drift = c.astype(np.float64) - r.astype(np.float64)
    for per_token, of_member in ((False, np.sum), (True, np.mean)):
        tokens = LossTokens(
            target=torch.tensor(c, requires_grad=True), proximal=torch.tensor(c), behavior=torch.tensor(c),
            reference=torch.tensor(r), advantages=torch.zeros(2 * length),
            segments=torch.arange(2).repeat_interleave(length), num_segments=2, pairs=torch.tensor([[0, 1]]),
        )  # fmt: skip
        expected = of_member(drift[:length]) - of_member(drift[length:])
        assert float(pair_margins(tokens, per_token=per_token).detach()) == pytest.approx(expected, abs=1e-9)
    loss = online_dpo(tokens, loss_config("online_dpo", pair_beta=0.1)).terms
    assert loss.dtype == torch.float32
    margin = drift[:length].sum() - drift[length:].sum()
    assert 2 * float(loss[0].detach()) == pytest.approx(np.log1p(np.exp(-0.1 * margin)), rel=1e-6)
    (slope,) = torch.autograd.grad(loss.double().sum() / length, tokens.target)
    expected_slope = -0.1 / (1 + np.exp(0.1 * margin))
    np.testing.assert_allclose(slope[:length], np.full(length, expected_slope), rtol=1e-5)
    np.testing.assert_allclose(slope[length:], np.full(length, -expected_slope), rtol=1e-5)


def test_the_preset_of_sapo_averages_the_gate_within_each_answer_first() -> None:
    """The whole loss of a ragged batch by a closed form: σ'(x) = σ(x) σ(−x), each answer weighing the same."""
    config = compose_config(["experiment=arithmetic", "algorithm=sapo"]).algorithm
    d = data([5, 1, 2, 7], 12, advantages="sequence")
    c, b, a = (one.astype(np.float64) for one in (d.c, d.b, d.advantage))
    counts = np.bincount(d.segments)
    ratio, tau = np.exp(c - b), np.where(a > 0, 1.0, 1.05)
    gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    of_answer = [-(4 / tau * gate * a)[d.segments == one].mean() for one in range(4)]
    slopes = -4 * gate * (1 - gate) * ratio * a / counts[d.segments] / 4
    lengths = Lengths(counts, np.zeros(4, np.int64))
    weights = token_weights(lengths, find("aggregation", config.aggregation).function, max_new_tokens=99)[d.segments]
    at_behavior = oracle.Data(d.c, d.b, d.b, d.r, d.advantage, d.segments, 4, extra=d.extra)
    value, gradient, _ = ours("sapo", at_behavior, weights, torch.float64, {})
    assert value == pytest.approx(np.mean(of_answer), rel=1e-9)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-9, atol=1e-12)


class TestIdentities:
    """What the definitions say of each other, for any data."""

    D = data(LENGTHS["ragged"], 11)

    def gradient(self, name: str, d: oracle.Data, **settings) -> np.ndarray:
        tokens = tokens_of(d)
        find("loss", name).load()(tokens, settings_of(name, SETTINGS | settings)).terms.sum().backward()
        return tokens.target.grad.numpy()

    def on_policy(self, **changes) -> oracle.Data:
        fields = {name: getattr(self.D, name) for name in ("c", "r", "advantage", "segments", "num_segments", "pairs")}
        return oracle.Data(p=self.D.c, b=self.D.c, extra=self.D.extra, **(fields | changes))

    @pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "gspo_token", "cispo", "sapo", "dppo", "topr", "kl_cov"])
    def test_on_policy_every_token_loss_is_reinforce(self, name: str) -> None:
        d = self.on_policy()
        np.testing.assert_allclose(self.gradient(name, d), self.gradient("reinforce", d), atol=1e-12)

    @pytest.mark.parametrize("name", ["gspo", "gmpo"])
    def test_on_policy_a_loss_of_sequences_is_reinforce_with_the_mean_advantage(self, name: str) -> None:
        d = data(LENGTHS["ragged"], 3, advantages="sequence")
        d = oracle.Data(d.c, d.c, d.c, d.r, d.advantage, d.segments, d.num_segments, extra=d.extra)
        np.testing.assert_allclose(self.gradient(name, d), self.gradient("reinforce", d), atol=1e-12)

    def test_dual_clip_with_a_high_ceiling_is_ppo_clip(self) -> None:
        both = self.gradient("dual_clip", self.D, dual_clip=1e9), self.gradient("ppo_clip", self.D)
        np.testing.assert_array_equal(*both)

    def test_gmpo_with_wide_bounds_is_gspo_with_wide_bounds(self) -> None:
        d, wide = data(LENGTHS["ragged"], 7), {"gmpo_low": 99.0, "gmpo_high": 99.0, "clip_low": 0.999, "clip_high": 1e9}
        np.testing.assert_allclose(self.gradient("gmpo", d, **wide), self.gradient("gspo", d, **wide), atol=1e-12)

    def test_gspo_and_gspo_token_agree_for_advantages_of_sequences(self) -> None:
        d = data(LENGTHS["ragged"], 7, advantages="sequence")
        np.testing.assert_allclose(self.gradient("gspo", d), self.gradient("gspo_token", d), atol=1e-12)


def test_smoothed_preferences_stop_at_the_margin_where_the_label_is_as_sure() -> None:
    """With ε = 0.1 the slope is 0 at β Δ = log(0.9 / 0.1), where σ(β Δ) = 0.9, and turns around beyond it."""
    slopes = []
    for margin in (2.0, np.log(9.0), 2.4):
        c = np.array([margin, 0.0])
        d = oracle.Data(c, c, c, np.zeros(2), np.zeros(2), np.arange(2), 2, [(0, 1)],
                        extra=dict.fromkeys(("teacher", "old_values", "returns"), c))  # fmt: skip
        settings = {"pair_beta": 1.0, "label_smoothing": 0.1}
        _, gradient, _ = ours("online_dpo", d, np.ones(2), torch.float64, settings)
        slopes.append(gradient[0])
        assert gradient[0] == pytest.approx(1 / (1 + np.exp(-margin)) - 0.9, abs=1e-12)
    assert slopes[0] < 0 < slopes[2]


class TestPairs:
    REWARDS = np.array([0.2, 1.0, 0.0, 1.0, 0.5])

    @pytest.mark.parametrize(
        ("pairs", "margin", "expected"),
        [
            ("best_worst", 0.0, [(1, 2)]),
            ("best_worst", 0.9, [(1, 2)]),
            ("best_worst", 1.0, []),
            ("best_worst", 1.1, []),
            ("all", 0.6, [(1, 0), (1, 2), (3, 0), (3, 2)]),
            ("all", 0.0, [(0, 2), (1, 0), (1, 2), (1, 4), (3, 0), (3, 2), (3, 4), (4, 0), (4, 2)]),
        ],
    )
    def test_which_pairs_there_are(self, pairs: str, margin: float, expected: list[tuple[int, int]]) -> None:
        config = loss_config("online_dpo", pairs=pairs, pair_margin=margin)
        assert preference_pairs(self.REWARDS, range(5), config) == expected

    @pytest.mark.parametrize("pairs", ["best_worst", "all"])
    def test_equal_rewards_and_empty_answers_make_none(self, pairs: str) -> None:
        config = loss_config("online_dpo", pairs=pairs)
        assert preference_pairs(np.ones(4), range(4), config) == []
        assert preference_pairs(self.REWARDS, [1], config) == []
        assert preference_pairs(self.REWARDS, [], config) == []
        assert preference_pairs(self.REWARDS, [0, 4], config) == [(4, 0)]

    @pytest.mark.parametrize("pairs", ["best_worst", "all"])
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
    def test_rounding_makes_no_pair_and_a_difference_beyond_it_does(self, pairs: str, scale: float) -> None:
        config = loss_config("online_dpo", pairs=pairs)
        rounded = scale * np.array([0.3, 0.1 + 0.2])
        assert rounded[1] > rounded[0], "so these differ in the last digit"
        assert preference_pairs(rounded, range(2), config) == []
        assert preference_pairs(scale * np.array([0.3, 0.3 + 1e-6]), range(2), config) == [(1, 0)]


def test_log_ratios_are_clamped_to_20() -> None:
    found = clamped_exp(torch.tensor([99.0, -99.0, 3.0], dtype=torch.float64))
    np.testing.assert_allclose(found, np.exp([20.0, -20.0, 3.0]), rtol=1e-12)
