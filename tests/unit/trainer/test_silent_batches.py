"""Batches that there is nothing to learn from: no step, no movement, and they count as trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.trainer import policy_trainer

from .torch_trainer import scored, trainer_of


def weights_of(trainer) -> torch.Tensor:
    return torch.cat([tensor.flatten().clone() for _, tensor in trainer.export_weights()])


def equal_rewards(batch):
    return [replace(one, trajectories=tuple(replace(m, reward=1.0) for m in one.trajectories)) for one in batch]


def scores(batch) -> list[np.ndarray]:
    return [np.full(sum(m.num_sampled_tokens for m in one.trajectories), -1.0, np.float32) for one in batch]


@pytest.mark.parametrize(
    "algorithm", [{}, {"loss": "topr", "aggregation": "seq_mean_token_mean", "correction": "none"}]
)
def test_nothing_moves_though_the_optimizer_has_momentum(policy, batch, algorithm) -> None:
    trainer = trainer_of(policy, warmup_steps=10, **algorithm)
    rate = trainer.step(batch, 0).metrics["loss/lr"]
    before = weights_of(trainer)
    report = trainer.step(equal_rewards(batch), 1)
    assert (report.version, report.skipped) == (2, False), "it is trained and published, and is no bad step"
    assert torch.equal(weights_of(trainer), before)
    assert (report.metrics["trainer/silent_updates"], report.metrics["loss/grad_norm"]) == (1, 0)
    assert np.isfinite(list(report.metrics.values())).all()
    report = trainer.step(batch, 2)
    assert report.metrics["trainer/silent_updates"] == 0
    assert report.metrics["loss/lr"] == pytest.approx(2 * rate), "it is no step of the warm-up"
    assert not torch.equal(weights_of(trainer), before)


def test_rewards_that_differ_by_rounding_are_counted_as_equal(policy, batch) -> None:
    rounded = [
        replace(one, trajectories=tuple(map(with_reward, one.trajectories, (0.3, 0.1 + 0.2, 0.3)))) for one in batch
    ]
    metrics = trainer_of(policy).step(rounded, 0).metrics
    assert (metrics["trainer/silent_updates"], metrics["reward/zero_variance_share"]) == (1, 1)


def with_reward(member, reward: float):
    return replace(member, reward=reward)


def test_its_tokens_are_measured_as_ever(policy, batch) -> None:
    """A divergence of coefficient 1e-30 makes it a step that has the same metrics."""
    silent = trainer_of(policy).step(equal_rewards(batch), 0).metrics
    step = trainer_of(policy, kl_coefficient=1e-30).step(scored(equal_rewards(batch), scores(batch)), 0).metrics
    for name in silent:
        if name.startswith(("ratio/", "mismatch/", "loss/entropy", "reward/")):
            assert silent[name] == pytest.approx(step[name], rel=1e-5), name


def test_a_divergence_or_a_teacher_is_something_to_learn_from(policy, batch) -> None:
    held = trainer_of(policy, kl_coefficient=0.1).step(scored(equal_rewards(batch), scores(batch)), 0)
    taught = trainer_of(policy, loss="distill", correction="none").step(
        scored(equal_rewards(batch), teachers=scores(batch)), 0
    )
    assert [one.metrics["trainer/silent_updates"] for one in (held, taught)] == [0, 0]
    assert min(one.metrics["loss/grad_norm"] for one in (held, taught)) > 0


def test_no_pair_is_nothing_to_learn_from(policy, batch) -> None:
    trainer = trainer_of(policy, loss="online_dpo", correction="none", kl_coefficient=0.0)
    before = weights_of(trainer)
    report = trainer.step(scored(equal_rewards(batch), scores(batch)), 0)
    assert (report.version, report.metrics["trainer/silent_updates"]) == (1, 1)
    assert torch.equal(weights_of(trainer), before)
    assert trainer.step(scored(batch, scores(batch)), 1).metrics["trainer/silent_updates"] == 0


def test_bad_numbers_make_it_a_bad_step(policy, batch) -> None:
    silent = equal_rewards(batch)
    silent[0].trajectories[0].behavior_logprobs[-1] = np.nan
    report = trainer_of(policy, correction="none").step(silent, 4)
    assert (report.version, report.skipped, report.metrics["trainer/silent_updates"]) == (4, True, 0)


@pytest.mark.parametrize("silent_part", [0, 1, 2])
def test_a_silent_part_of_a_streamed_batch_adds_nothing(policy, batch, silent_part) -> None:
    batch = [equal_rewards([one])[0] if index == silent_part else one for index, one in enumerate(batch)]
    batch[1] = replace(
        batch[1], trajectories=(replace(batch[1].trajectories[0], reward=0.0), *batch[1].trajectories[1:])
    )
    whole, streamed = trainer_of(policy, lr=1.0, adam_epsilon=1.0), trainer_of(policy, lr=1.0, adam_epsilon=1.0)
    whole.step(batch, 0)
    streamed.accumulate(batch[:1], 0)
    streamed.accumulate(batch[1:2], 0)
    assert streamed.step(batch[2:], 0).metrics["trainer/silent_updates"] == 0
    assert float((weights_of(streamed) - weights_of(whole)).abs().max()) < 1e-5


def test_a_last_part_without_a_sequence_completes_the_gradient(policy, batch, monkeypatch) -> None:
    """All its answers were cut off and are dropped, and DeepSpeed and FSDP2 reduce what is complete."""
    cut = replace(batch[1], trajectories=tuple(replace(m, finish_reason="length") for m in batch[1].trajectories))
    trainer = trainer_of(policy, overlong="drop")
    calls = count_backwards(trainer, monkeypatch)
    trainer.accumulate(batch[:1], 0)
    metrics = trainer.step([cut], 0).metrics
    assert calls == [False, True]
    assert metrics["trainer/silent_updates"] == 0


def test_a_silent_batch_in_parts_moves_nothing(policy, batch) -> None:
    trainer = trainer_of(policy)
    before = weights_of(trainer)
    trainer.accumulate(equal_rewards(batch[:2]), 0)
    report = trainer.step(equal_rewards(batch[2:]), 0)
    assert (report.version, report.metrics["trainer/silent_updates"]) == (1, 1)
    assert torch.equal(weights_of(trainer), before)


def test_a_silent_mini_batch_takes_no_step_and_the_others_do(policy, batch) -> None:
    trainer = trainer_of(policy, mini_batches=3, proximal="recompute")
    metrics = trainer.step(batch, 0).metrics
    assert (metrics["trainer/updates"], metrics["trainer/silent_updates"]) == (3, 1)


def with_a_silent_group(batch):
    """The second group has equal rewards, and the answers are long, so that leaving it out saves micro-batches."""
    return [batch[0], *equal_rewards([batch[1]]), batch[2]]


def count_backwards(trainer, monkeypatch) -> list[bool]:
    """Gets one entry per backward pass: whether it completes the gradient."""
    calls, backward = [], trainer.backend.backward

    def counted(loss, *, is_last: bool) -> None:
        calls.append(is_last)
        backward(loss, is_last=is_last)

    monkeypatch.setattr(trainer.backend, "backward", counted)
    return calls


def test_a_silent_group_gets_no_backward_pass_and_the_step_stays_the_same(policy, batch, monkeypatch) -> None:
    batch = with_a_silent_group(batch)
    # At this rate of AdamW with epsilon 1 the change of a weight is about its gradient.
    split = trainer_of(policy, max_tokens=32, lr=1.0, adam_epsilon=1.0, record_every=1)
    of_split = count_backwards(split, monkeypatch)
    measured = split.step(batch, 0)
    monkeypatch.setattr(policy_trainer, "split_by_signal", lambda sequences, _algorithm: (list(sequences), []))
    whole = trainer_of(policy, max_tokens=32, lr=1.0, adam_epsilon=1.0, record_every=1)
    of_whole = count_backwards(whole, monkeypatch)
    expected = whole.step(batch, 0)
    assert len(of_split) < len(of_whole)
    assert float((weights_of(split) - weights_of(whole)).abs().max()) < 1e-6
    same = [name for name in expected.metrics if name.startswith(("ratio/", "mismatch/", "loss/", "reward/"))]
    for name in same:
        assert measured.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5, abs=1e-7), name
    assert measured.trained_tokens.keys() == expected.trained_tokens.keys()
    for name, (logprobs, _) in expected.trained_tokens.items():
        np.testing.assert_allclose(measured.trained_tokens[name][0], logprobs, atol=1e-5)


def test_a_divergence_at_selected_tokens_of_a_silent_group_is_in_the_step_however_it_is_split(policy, batch) -> None:
    """`kl_cov` selects tokens by their covariance, which may be large where the advantage is 0.

    Its divergence acts from the second update on; leaving the group out would save one of the micro-batches of 32.
    """
    settings = {
        "loss": "kl_cov",
        "kl_cov_share": 1.0,
        "proximal": "recompute",
        "epochs": 2,
        "lr": 1.0,
        "adam_epsilon": 1.0,
    }
    steps = {}
    for max_tokens in (32, 1000):
        trainer = trainer_of(policy, max_tokens, **settings)
        trainer.step(with_a_silent_group(batch), 0)
        steps[max_tokens] = weights_of(trainer)
    moved = float((steps[1000] - weights_of(trainer_of(policy))).abs().max())
    assert float((steps[32] - steps[1000]).abs().max()) < 1e-5 * moved


def test_a_silent_group_whose_loss_is_not_finite_makes_it_a_bad_step(policy, batch, monkeypatch) -> None:
    trainer = trainer_of(policy, max_tokens=32)
    objective = trainer._objective

    def broken(*arguments) -> torch.Tensor:
        loss = objective(*arguments)
        return loss if torch.is_grad_enabled() else loss * torch.nan

    monkeypatch.setattr(trainer, "_objective", broken)
    report = trainer.step(with_a_silent_group(batch), 4)
    assert (report.version, report.skipped) == (4, True)
