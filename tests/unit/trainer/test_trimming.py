"""Tokens that are too old carry no loss weight (`on_expiry: trim`): no gradient, no share of the normaliser."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.dataflow.trajectory import GroupPayload
from penstock.dataflow.versions import Span
from penstock.trainer.batches.samples import is_new_enough, policy_sequences
from tests.algorithms import resolved

from .torch_trainer import scored, trainer_of


@pytest.fixture
def aged(batch: list[GroupPayload]) -> list[GroupPayload]:
    """The batch with the first half of every trajectory at version 3, the rest at version 5."""

    def age(one):
        old = one.num_sampled_tokens // 2
        return replace(one, spans=tuple(s for s in (Span(3, old), Span(5, one.num_sampled_tokens - old)) if s[1]))

    return [GroupPayload(payload.group_id, tuple(map(age, payload.trajectories))) for payload in batch]


def test_only_tokens_of_the_minimum_version_or_newer_are_loss_tokens(aged: list[GroupPayload]) -> None:
    for one in (member for payload in aged for member in payload.trajectories):
        sampled = np.flatnonzero(one.loss_mask)
        assert sampled[is_new_enough(one, 3)].tolist() == sampled.tolist()
        assert sampled[is_new_enough(one, 4)].tolist() == sampled[len(sampled) // 2 :].tolist()
        assert sampled[is_new_enough(one, 6)].tolist() == []


def test_the_normaliser_counts_what_is_trained(aged: list[GroupPayload]) -> None:
    sequences = policy_sequences(scored(aged, min_versions=[4, 0, 6]), resolved(aggregation="token_mean"), 30)
    num_tokens = sum(len(sequence.targets) for sequence in sequences)
    assert sum(sequence.token_weight * len(sequence.targets) for sequence in sequences) == pytest.approx(1.0)
    assert all(sequence.token_weight == pytest.approx(1 / num_tokens) for sequence in sequences[:6])
    assert all(sequence.num_inputs == 0 for sequence in sequences[6:]), "a trimmed trajectory costs no forward"


def test_advantages_are_those_of_the_whole_group(aged: list[GroupPayload]) -> None:
    whole = policy_sequences(aged, resolved(), 30)
    trimmed = policy_sequences(scored(aged, min_versions=[4, 4, 4]), resolved(), 30)
    trained = [(before, after) for before, after in zip(whole, trimmed, strict=True) if len(after.targets)]
    assert trained
    for before, after in trained:
        assert set(after.advantages) == set(before.advantages)


def test_what_was_trimmed_changes_no_weight(policy: str, aged: list[GroupPayload]) -> None:
    """Other behavior logprobs on trimmed tokens give the same new weights; on trained tokens they do not."""

    def disturbed(below: int) -> list[GroupPayload]:
        def shift(one):
            sampled, is_kept = np.flatnonzero(one.loss_mask), is_new_enough(one, 4)
            logprobs = one.behavior_logprobs.copy()
            logprobs[sampled[~is_kept if below else is_kept]] -= 0.2
            return replace(one, behavior_logprobs=logprobs)

        return [GroupPayload(payload.group_id, tuple(map(shift, payload.trajectories))) for payload in aged]

    def weights(payloads: list[GroupPayload]) -> torch.Tensor:
        trainer = trainer_of(policy)
        trainer.step(scored(payloads, min_versions=[4, 4, 4]), 5)
        return torch.cat([tensor.flatten() for _, tensor in trainer.export_weights()])

    assert torch.equal(weights(aged), weights(disturbed(below=True)))
    assert not torch.equal(weights(aged), weights(disturbed(below=False)))
