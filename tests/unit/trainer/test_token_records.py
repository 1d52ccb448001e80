"""What the trainer reports of the tokens of recorded trajectories: exact logprobs and advantages at their places."""

import numpy as np
import pytest
import torch

from penstock.dataflow.trajectory import GroupPayload, is_recorded
from tests.unit.trainer.test_threads import joined, thread_trajectories
from tests.unit.trainer.torch_trainer import VOCAB, logprobs_of, trainer_of, trajectory


@pytest.fixture
def before(policy):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)


def groups_of(rng, num_groups=4, size=3):
    return [
        GroupPayload(
            group,
            tuple(
                trajectory(
                    f"{group}/{index}",
                    rng.integers(2, VOCAB, 4).tolist(),
                    rng.integers(2, VOCAB, 3 + 2 * index).tolist(),
                    rng,
                    float(rng.normal()),
                )
                for index in range(size)
            ),
        )
        for group in range(num_groups)
    ]


@pytest.mark.parametrize("max_tokens", [32, 400])
def test_reported_logprobs_are_those_of_the_policy_before_the_step(policy, before, max_tokens):
    groups = groups_of(np.random.default_rng(0))
    report = trainer_of(policy, max_tokens=max_tokens, record_every=1).step(groups, 0)
    everyone = [one for group in groups for one in group.trajectories]
    assert set(report.trained_tokens) == {one.trajectory_id for one in everyone}
    for one in everyone:
        logprobs, advantages = report.trained_tokens[one.trajectory_id]
        assert logprobs.shape == advantages.shape == one.token_ids.shape
        np.testing.assert_allclose(logprobs[one.loss_mask], logprobs_of(before, one), atol=1e-4)
        assert np.isnan(logprobs[~one.loss_mask]).all()
        assert np.isnan(advantages[~one.loss_mask]).all()
    for group in groups:
        rewards = np.array([one.reward for one in group.trajectories])
        told = np.array([np.nanmean(report.trained_tokens[one.trajectory_id][1]) for one in group.trajectories])
        assert np.corrcoef(rewards, told)[0, 1] == pytest.approx(1.0, abs=1e-5)
        assert told.sum() == pytest.approx(0.0, abs=1e-5)


def test_only_recorded_groups_are_reported_and_none_by_default(policy):
    groups = groups_of(np.random.default_rng(1), num_groups=8)
    report = trainer_of(policy, record_every=3).step(groups, 0)
    told = {int(name.partition("/")[0]) for name in report.trained_tokens}
    assert told == {group.group_id for group in groups if is_recorded(group.group_id, 3)}
    assert 0 < len(told) < 8
    assert trainer_of(policy).step(groups, 0).trained_tokens == {}


def test_a_batch_of_several_updates_reports_each_token_once(policy, before):
    groups = groups_of(np.random.default_rng(2))
    trainer = trainer_of(policy, record_every=1, mini_batches=2, epochs=2, proximal="recompute")
    report = trainer.step(groups, 0)
    differences = []
    for group in groups:
        for one in group.trajectories:
            logprobs = report.trained_tokens[one.trajectory_id][0][one.loss_mask]
            assert np.isfinite(logprobs).all()
            differences.append(np.abs(logprobs - logprobs_of(before, one)).max())
    # The first mini-batch saw the policy of the start, the second the one after an update.
    assert min(differences) < 1e-4 < max(differences)


def test_a_batch_in_parts_reports_all_of_them(policy):
    groups = groups_of(np.random.default_rng(3))
    trainer, whole = (trainer_of(policy, record_every=1) for _ in range(2))
    trainer.accumulate(groups[:1], 0)
    trainer.accumulate(groups[1:3], 0)
    parts, together = trainer.step(groups[3:], 0).trained_tokens, whole.step(groups, 0).trained_tokens
    assert set(parts) == set(together)
    for name, (logprobs, _) in together.items():
        np.testing.assert_allclose(parts[name][0], logprobs, atol=1e-4)


def test_threads_are_reported_at_their_places_in_the_trajectory(policy, before):
    rng = np.random.default_rng(4)
    members = tuple(joined(thread_trajectories(f"0/{index}", rng, float(index))) for index in range(3))
    report = trainer_of(policy, record_every=1).step([GroupPayload(0, members)], 2)
    for one in members:
        logprobs, _ = report.trained_tokens[one.trajectory_id]
        assert len(logprobs) == len(one.token_ids)
        expected = np.concatenate([logprobs_of(before, thread) for thread in one.split_threads()])
        np.testing.assert_allclose(logprobs[one.loss_mask], expected, atol=1e-4)
