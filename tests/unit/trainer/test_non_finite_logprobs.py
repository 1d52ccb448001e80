"""A recorded logprob that is no number: no algorithm trains on its batch, whether it looks at that logprob or not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.trainer.micro_batches import MicroBatchPasses

from .torch_trainer import scored, trainer_of

CHAINS = ["none", "decoupled", "tis_token", "tis_seq", "mis_token", "mis_seq_geo", "opsm", "f_tis", "veto"]
CHAINS += [["mis_seq_geo", "veto"], ["decoupled", "opsm"]]
BY_SEQUENCE = {"aggregation": "seq_mean_token_mean"}  # every chain and every loss goes with it


def weights_of(trainer) -> torch.Tensor:
    return torch.cat([tensor.flatten().clone() for _, tensor in trainer.export_weights()])


def scores(batch, bad: float | None = None) -> list[np.ndarray]:
    """One logprob per sampled token of each group; the last of the first group is `bad`."""
    found = [np.full(sum(one.num_sampled_tokens for one in group.trajectories), -1.0, np.float32) for group in batch]
    found[0][-1] = -1.0 if bad is None else bad
    return found


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_a_behavior_logprob_skips_the_step_under_every_chain(policy, batch, chain, bad) -> None:
    trainer = trainer_of(policy, correction=chain, **BY_SEQUENCE)
    before = weights_of(trainer)
    batch[0].trajectories[0].behavior_logprobs[-1] = bad
    report = trainer.step(batch, 3)
    assert (report.skipped, report.version) == (True, 3)
    assert torch.equal(weights_of(trainer), before)


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_finite_logprobs_are_trained_under_every_chain(policy, batch, chain) -> None:
    assert not trainer_of(policy, correction=chain, **BY_SEQUENCE).step(batch, 3).skipped


@pytest.mark.parametrize(
    ("loss", "proximal"),
    [("reinforce", "target"), ("gspo", "target"), ("cispo", "target"), ("topr", "behavior"), ("sapo", "behavior")],
)
def test_a_behavior_logprob_skips_the_step_under_other_losses(policy, batch, loss, proximal) -> None:
    batch[0].trajectories[0].behavior_logprobs[-1] = np.nan
    assert trainer_of(policy, loss=loss, proximal=proximal, correction="none", **BY_SEQUENCE).step(batch, 3).skipped


@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
def test_a_reference_logprob_skips_the_step_even_if_it_is_only_measured(policy, batch, kl_coefficient) -> None:
    trainer = trainer_of(policy, kl_coefficient=kl_coefficient, correction="none")
    assert not trainer.step(scored(batch, scores(batch)), 0).skipped
    assert trainer.step(scored(batch, scores(batch, np.nan)), 1).skipped


@pytest.mark.parametrize("loss", ["distill", "ppo_clip"])
def test_a_teacher_logprob_skips_the_step(policy, batch, loss) -> None:
    trainer = trainer_of(policy, loss=loss, correction="none")
    assert not trainer.step(scored(batch, teachers=scores(batch)), 0).skipped
    assert trainer.step(scored(batch, teachers=scores(batch, np.inf)), 1).skipped


def test_a_recomputed_proximal_logprob_skips_the_step(policy, batch, monkeypatch) -> None:
    """`reinforce` without a correction does not look at it."""
    trainer = trainer_of(policy, proximal="recompute", correction="none", loss="reinforce")
    per_target = MicroBatchPasses.per_target

    def broken(passes, *of_batch):
        found = per_target(passes, *of_batch)
        found[0][-1] = np.nan
        return found

    assert not trainer.step(batch, 0).skipped
    monkeypatch.setattr(MicroBatchPasses, "per_target", broken)
    assert trainer.step(batch, 1).skipped


def test_a_loss_whose_gradient_is_all_clipped_away_is_skipped_too(policy, batch) -> None:
    """Of behavior logprobs far below, a positive advantage is clipped everywhere."""
    alone = [replace(batch[0], trajectories=batch[0].trajectories[:2])]
    up, down = alone[0].trajectories
    up.behavior_logprobs[up.loss_mask], down.behavior_logprobs[down.loss_mask] = -15.0, -0.01
    trainer = trainer_of(policy, proximal="behavior", correction="none")
    assert trainer.step(alone, 0).metrics["ratio/policy_clip_share"] == 1.0
    up.behavior_logprobs[-1] = np.nan
    assert trainer.step(alone, 0).skipped


def test_a_part_of_a_streamed_batch_skips_the_whole(policy, batch) -> None:
    trainer = trainer_of(policy, correction="none")
    batch[0].trajectories[0].behavior_logprobs[-1] = np.nan
    trainer.accumulate(batch[:2], 0)
    assert trainer.step(batch[2:], 0).skipped


def test_a_token_without_loss_does_not_count(policy, batch) -> None:
    """Trimmed: it is older than the bound, so nothing of it is trained."""
    batch[0].trajectories[0].behavior_logprobs[-1] = np.nan
    assert not trainer_of(policy, correction="none").step(scored(batch, min_versions=[1, 0, 0]), 3).skipped
