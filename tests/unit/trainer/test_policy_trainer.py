"""A whole step on the plain torch backend, against numbers from an unpacked Hugging Face forward and numpy float64."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import ShapeError, TrainingError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.backends.base import poison_if_not_finite
from penstock.trainer.config import OptimizerConfig
from penstock.trainer.optimizer_steps import learning_rate
from penstock.trainer.policy_trainer import PolicyTrainer

from .torch_trainer import logprobs_of, scored, trainer_of, trajectory


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "constant_length"])
@pytest.mark.parametrize("correction", ["none", "decoupled"])
def test_loss_and_metrics_equal_float64_numpy(policy, batch, aggregation, correction) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    report = trainer_of(policy, aggregation=aggregation, correction=correction, correction_cap=1.5).step(batch, 7)

    members = [one for group in batch for one in group.trajectories]
    counts = [int(one.loss_mask.sum()) for one in members]
    expected_loss, ratios, num_masked = 0.0, [], 0
    for group in batch:
        rewards = np.array([one.reward for one in group.trajectories])
        deviation = rewards.std(ddof=1)
        for one in group.trajectories:
            advantage = 0.0 if deviation == 0 else (one.reward - rewards.mean()) / (deviation + 1e-4)
            for target, behavior in zip(logprobs_of(model, one), one.behavior_logprobs[one.loss_mask], strict=True):
                ratio = np.exp(target - np.float64(behavior))
                ratios.append(ratio)
                factor = ratio if correction == "decoupled" else 1.0
                if correction == "decoupled" and ratio > 1.5:
                    factor, num_masked = 0.0, num_masked + 1
                normaliser = {
                    "token_mean": sum(counts),
                    "seq_mean_token_mean": len(members) * int(one.loss_mask.sum()),
                    "constant_length": len(members) * 30,
                }[aggregation]
                expected_loss += -advantage * factor / normaliser
    assert report.metrics["loss/policy"] == pytest.approx(expected_loss, rel=1e-4, abs=1e-7)
    assert report.metrics["ratio/behavior_mean"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert report.metrics["ratio/behavior_max"] == pytest.approx(np.max(ratios), rel=1e-5)
    assert report.metrics["ratio/masked_share"] == pytest.approx(num_masked / sum(counts))
    assert report.metrics["mismatch/abs_logprob_mean"] == pytest.approx(np.abs(np.log(ratios)).mean(), rel=1e-4)
    assert report.metrics["reward/mean"] == pytest.approx(5.5 / 9)
    assert report.metrics["reward/zero_variance_share"] == pytest.approx(1 / 3)
    assert report.metrics["length/mean_tokens"] == pytest.approx(np.mean(counts))
    assert report.metrics["length/truncated_share"] == pytest.approx(2 / 9)
    assert report.version == 8


def gradient_of(trainer: PolicyTrainer, batch) -> torch.Tensor:
    """Flat gradient of one step, caught before the optimizer uses it."""
    caught = []
    backend = trainer.backend

    def catch(normaliser: float):
        caught.append(torch.cat([p.grad.flatten().clone() for p in backend._model.parameters()]))
        return type(backend).optimizer_step(backend, normaliser)

    backend.optimizer_step = catch
    trainer.step(batch, 0)
    return caught[0]


@pytest.mark.parametrize("max_tokens", [32, 40, 1000])
def test_the_gradient_does_not_depend_on_the_token_budget_or_the_order(policy, batch, max_tokens) -> None:
    reference = gradient_of(trainer_of(policy, 60), batch)
    other = gradient_of(trainer_of(policy, max_tokens), batch[::-1])
    assert float((other - reference).norm() / reference.norm()) < 1e-5


def test_the_learning_rate_warms_up_linearly(policy, batch) -> None:
    trainer = trainer_of(policy, lr=4e-4, warmup_steps=4)
    rates = [trainer.step(batch, version).metrics["loss/lr"] for version in range(6)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 4e-4, 4e-4])


def test_the_learning_rate_decays_along_a_half_cosine_and_stays_there() -> None:
    optimizer = OptimizerConfig(lr=1.0, warmup_steps=2, decay_steps=6, final_lr_ratio=0.2)
    rates = [learning_rate(optimizer, num_steps) for num_steps in range(8)]
    quarters = [0.2 + 0.8 * (1 + math.cos(math.pi * share)) / 2 for share in (0.25, 0.5, 0.75)]
    assert rates == pytest.approx([0.5, 1.0, *quarters, 0.2, 0.2, 0.2])


@pytest.mark.parametrize(
    ("decay", "shares"),
    [
        ("cosine", [0.2 + 0.8 * (1 + math.cos(math.pi * share)) / 2 for share in (0.25, 0.5, 0.75)]),
        ("linear", [0.8, 0.6, 0.4]),
        ("exponential", [0.2**0.25, 0.2**0.5, 0.2**0.75]),
        ("sqrt", [0.6, 1 - 0.8 * 0.5**0.5, 1 - 0.8 * 0.75**0.5]),
    ],
)
def test_the_learning_rate_is_stable_between_warm_up_and_decay_of_each_curve(decay: str, shares: list[float]) -> None:
    optimizer = OptimizerConfig(
        lr=2.0**-3, warmup_steps=2, stable_steps=5, decay_steps=9, decay=decay, final_lr_ratio=0.2
    )
    rates = [8 * learning_rate(optimizer, num_steps) for num_steps in range(11)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, *shares, 0.2, 0.2, 0.2])
    assert rates[1:5] == [1.0] * 4, "exactly, as without a decay"


@pytest.mark.parametrize(("decay", "theirs"), [("cosine", "cosine"), ("linear", "linear"), ("sqrt", "1-sqrt")])
def test_the_learning_rate_is_that_of_transformers_for_the_same_schedule(decay: str, theirs: str) -> None:
    from transformers import get_wsd_schedule

    optimizer = OptimizerConfig(lr=0.01, warmup_steps=4, stable_steps=14, decay_steps=34, decay=decay)
    schedule = get_wsd_schedule(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01),
        num_warmup_steps=4,
        num_stable_steps=10,
        num_decay_steps=20,
        decay_type=theirs,
        min_lr_ratio=0.1,
    )
    (factor,) = schedule.lr_lambdas
    # Theirs warms up from the floor, and numbers steps from 0.
    rates = [learning_rate(optimizer, num_steps) for num_steps in range(3, 40)]
    assert rates == pytest.approx([0.01 * factor(step) for step in range(4, 41)])


def test_a_learning_rate_that_would_fall_before_it_has_risen_is_refused() -> None:
    with pytest.raises(ValueError, match=r"decay_steps=5 .* warmup_steps=10"):
        OptimizerConfig(lr=1.0, warmup_steps=10, decay_steps=5)
    with pytest.raises(ValueError, match=r"stable_steps=5 .* warmup_steps=10"):
        OptimizerConfig(lr=1.0, warmup_steps=10, stable_steps=5, decay_steps=20)
    with pytest.raises(ValueError, match=r"decay_steps=8 .* stable_steps=8: no step is left"):
        OptimizerConfig(lr=1.0, stable_steps=8, decay_steps=8)
    with pytest.raises(ValueError, match=r"stable_steps=8 without decay_steps has no effect"):
        OptimizerConfig(lr=1.0, stable_steps=8)
    with pytest.raises(ValueError, match="final_lr_ratio=0 with decay=exponential"):
        OptimizerConfig(lr=1.0, decay_steps=8, decay="exponential", final_lr_ratio=0)


def test_a_bad_step_is_skipped_and_leaves_weights_and_version(policy, batch) -> None:
    batch[0].trajectories[0].behavior_logprobs[-1] = np.nan
    trainer = trainer_of(policy)
    before = [tensor.clone() for _, tensor in trainer.export_weights()]
    assert [trainer.step(batch, 3).skipped, trainer.step(batch, 3).version] == [True, 3]
    assert all(torch.equal(tensor, old) for old, (_, tensor) in zip(before, trainer.export_weights(), strict=True))


@pytest.mark.parametrize(
    "settings",
    [{}, {"advantage": "dr_grpo"}, {"loss": "cispo"}, {"loss": "online_dpo", "correction": "none"}],
    ids=str,
)
@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_a_bad_step_whatever_the_loss(policy, batch, reward, settings) -> None:
    group = batch[0].trajectories
    batch[0] = dataclasses.replace(batch[0], trajectories=(dataclasses.replace(group[0], reward=reward), *group[1:]))
    trainer = trainer_of(policy, **settings)
    before = [tensor.clone() for _, tensor in trainer.export_weights()]
    sampled = [np.concatenate([one.behavior_logprobs[one.loss_mask] for one in group.trajectories]) for group in batch]
    report = trainer.step(scored(batch, sampled if "online_dpo" in settings.values() else ()), 3)
    assert (report.skipped, report.version) == (True, 3)
    assert all(torch.equal(tensor, old) for old, (_, tensor) in zip(before, trainer.export_weights(), strict=True))


def test_a_non_finite_loss_poisons_gradients_that_would_be_finite() -> None:
    weight = torch.ones(3, requires_grad=True)
    poison_if_not_finite(weight.sum() + torch.tensor(float("inf"))).backward()
    assert weight.grad.isnan().all()
    weight.grad = None
    poison_if_not_finite(2.0 * weight.sum()).backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_unscored_and_empty_batches_are_refused(policy) -> None:
    rng = np.random.default_rng(0)
    unscored = GroupPayload(GroupId(4), (trajectory("4/0", [2], [3], rng, None),))
    with pytest.raises(TrainingError, match="4/0 of group 4 has no reward"):
        trainer_of(policy).step([unscored], 0)
    with pytest.raises(TrainingError, match="0 groups"):
        trainer_of(policy).step([], 0)


def test_a_sequence_over_the_token_budget_is_refused(policy, batch) -> None:
    long = trajectory("9/0", [2] * 20, [3] * 20, np.random.default_rng(0), 1.0)
    with pytest.raises(ShapeError, match="max_tokens_per_micro_batch=32"):
        trainer_of(policy, max_tokens=32).step([GroupPayload(GroupId(9), (long,))], 0)
