"""DPO and Bradley-Terry steps against unpacked Hugging Face forwards and numpy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.trainer.algorithms.metrics import TokenMetrics
from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batches.collate import collate
from penstock.trainer.batches.examples import Preference, preference_sequences
from penstock.trainer.batches.packing import MicroBatchPlan
from penstock.trainer.build import save_policy
from penstock.trainer.optimizer_steps import OpenOptimizerStep
from tests.algorithms import resolved

from .torch_trainer import VOCAB, logprobs_of, trainer_of, trajectory

PAIRS = {"loss": "online_dpo", "correction": "none"}


def make_pairs(count: int, seed: int = 0) -> list[Preference]:
    """The chosen answer ends in 3, the rejected in 4; ragged, some of a single token."""
    rng = np.random.default_rng(seed)

    def some(low: int, high: int) -> list[int]:
        return rng.integers(5, VOCAB, int(rng.integers(low, high))).tolist()

    return [Preference(tuple(some(2, 6)), (*some(0, 7), 3), (*some(0, 7), 4)) for _ in range(count)]


def dpo_margins(path: str, pairs: list[Preference]) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model, rng = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), np.random.default_rng(0)
    margins = []
    for pair in pairs:
        worth = []
        for answer in (pair.chosen, pair.rejected):
            one = trajectory("x", list(pair.prompt), list(answer), rng, None)
            one.loss_mask[len(pair.prompt) :] = True
            worth.append(logprobs_of(model, one).sum())
        margins.append(worth[0] - worth[1])
    return np.array(margins)


def scores(path: str, pairs: list[Preference]) -> np.ndarray:
    """`[P, 2]` by Hugging Face itself: a sequence classifier of one label."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return np.array(
            [[float(model(torch.tensor([[*p.prompt, *a]])).logits) for a in (p.chosen, p.rejected)] for p in pairs]
        )


@pytest.mark.parametrize("max_tokens", [40, 400])
def test_the_dpo_loss_is_that_of_the_margins_over_the_reference(policy, max_tokens) -> None:
    pairs = make_pairs(7)
    trainer = trainer_of(policy, max_tokens, **PAIRS, pair_beta=0.5)
    expected = dpo_margins(policy, pairs)
    np.testing.assert_allclose(trainer.preference_margins(pairs), expected, atol=1e-5)
    rng = np.random.default_rng(4)
    answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
    references = [rng.normal(-2, 1, len(answer)).astype(np.float32) for answer in answers]
    sums = np.array([one.sum(dtype=np.float64) for one in references])
    drifts = expected - (sums[0::2] - sums[1::2])
    found = trainer.preference_step(pairs, references)["preference/loss"]
    assert found == pytest.approx(np.log1p(np.exp(-0.5 * drifts)).mean(), rel=1e-5)


def test_means_per_token_smoothed_labels_and_the_anchor_are_in_the_loss_and_the_margins(policy) -> None:
    """(1 − ε) log(1 + e^−x) + ε log(1 + e^x) + 0.3 · mean −c of the chosen answer, x = β Δ of means."""
    from transformers import AutoModelForCausalLM

    pairs, rng = make_pairs(7, seed=3), np.random.default_rng(6)
    trainer = trainer_of(
        policy, 40, **PAIRS, pair_beta=2.0, dpo_length="mean", label_smoothing=0.2, nll_coefficient=0.3
    )
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    references, terms, margins = [], [], []
    for pair in pairs:
        logprobs = []
        for answer in (pair.chosen, pair.rejected):
            one = trajectory("x", list(pair.prompt), list(answer), rng, None)
            one.loss_mask[len(pair.prompt) :] = True
            logprobs.append(logprobs_of(model, one))
            references.append(rng.normal(-2, 1, len(answer)).astype(np.float32))
        margins.append(logprobs[0].mean() - logprobs[1].mean())
        x = 2.0 * (margins[-1] - references[-2].mean(dtype=np.float64) + references[-1].mean(dtype=np.float64))
        terms.append(0.8 * np.log1p(np.exp(-x)) + 0.2 * np.log1p(np.exp(x)) - 0.3 * logprobs[0].mean())
    np.testing.assert_allclose(trainer.preference_margins(pairs), margins, atol=1e-5)
    assert trainer.preference_step(pairs, references)["preference/loss"] == pytest.approx(np.mean(terms), rel=1e-5)


def test_pairs_of_long_answers_are_compared_token_by_token() -> None:
    """32,768 tokens each: with the reference's margin as one float32 number and sums in float32, Δ is 0.4 nat off."""
    length, rng = 32_768, np.random.default_rng(3)
    pairs = [Preference((7,), (8,) * length, (9,) * (length - 5))]
    references = [rng.normal(-3, 2, len(one)).astype(np.float32) for one in (pairs[0].chosen, pairs[0].rejected)]
    algorithm = resolved(**PAIRS)
    sequences = preference_sequences(pairs, "policy", algorithm, references)
    rows = MicroBatchPlan(((0,), (1,)), length)
    micro_batch = collate(rows, sequences, device=torch.device("cpu"), needs_mask=False)
    policy = [(one + rng.normal(0, 0.01, len(one))).astype(np.float32) for one in references]
    target = torch.tensor(np.concatenate(policy))
    drifts = [(mine.astype(np.float64) - theirs).sum() for mine, theirs in zip(policy, references, strict=True)]
    update = OpenOptimizerStep(TokenMetrics(target.device))
    loss = Objective(algorithm)(target, torch.zeros_like(target), micro_batch, update)
    margin = drifts[0] - drifts[1]
    assert abs(margin) > 0.1
    found = -np.log(np.expm1(float(loss))) / algorithm.loss_settings.beta  # Δ of −log σ(β Δ)
    assert found == pytest.approx(margin, abs=2e-4)


def test_dpo_raises_the_margin_over_the_frozen_reference(policy) -> None:
    pairs = make_pairs(16)
    trainer = trainer_of(policy, 200, lr=3e-3, **PAIRS)
    reference, references = trainer.preference_margins(pairs), trainer.preference_logprobs(pairs)
    losses = [trainer.preference_step(pairs, references)["preference/loss"] for _ in range(8)]
    assert losses[0] == pytest.approx(np.log(2), rel=1e-5)
    assert losses[-1] < 0.6
    assert (trainer.preference_margins(pairs) > reference).mean() == 1.0


def test_a_reward_model_learns_held_out_pairs_and_is_what_hugging_face_loads(policy, tmp_path) -> None:
    trainer = trainer_of(policy, 400, lr=3e-3, kind="reward", **PAIRS, pair_beta=1.0)
    held_out = make_pairs(64, seed=1)
    first = trainer.preference_step(make_pairs(32, seed=2))["preference/loss"]
    assert first == pytest.approx(np.log(2), rel=1e-6), "a head of zeros prefers nothing"
    for seed in range(3, 15):
        trainer.preference_step(make_pairs(32, seed=seed))
    margins = trainer.preference_margins(held_out)
    assert (margins > 0).mean() > 0.9
    save_policy(trainer, str(tmp_path / "judge"), policy)
    found = scores(str(tmp_path / "judge"), held_out)
    np.testing.assert_allclose(found[:, 0] - found[:, 1], margins, atol=1e-4)
    loss = trainer.preference_step(held_out)["preference/loss"]
    assert loss == pytest.approx(np.log1p(np.exp(found[:, 1] - found[:, 0])).mean(), rel=1e-4)
