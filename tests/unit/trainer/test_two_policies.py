"""What another policy of the run has sampled: trained on, with its own behavior logprobs, and without a staleness."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.dataflow.ids import PARTNER, POLICY
from penstock.trainer.algorithms.metrics import OF_ANOTHER_POLICY
from penstock.trainer.batches.samples import policy_sequences
from tests.algorithms import resolved

from .torch_trainer import trainer_of


def shared(batch):
    """Odd members are the partner's."""
    return [
        replace(
            payload,
            trajectories=tuple(
                replace(one, policy_id=PARTNER if index % 2 else POLICY)
                for index, one in enumerate(payload.trajectories)
            ),
        )
        for payload in batch
    ]


@pytest.mark.parametrize(("trained", "others"), [(POLICY, {1}), (PARTNER, {0, 2})])
def test_tokens_of_the_other_have_no_staleness(batch, trained, others) -> None:
    sequences = policy_sequences(shared(batch), resolved(), 30, version=3, policy_id=trained)
    for index, sequence in enumerate(sequences):
        assert set(np.unique(sequence.staleness)) == {OF_ANOTHER_POLICY if index % 3 in others else 3}


def test_advantages_are_those_of_the_whole_group(batch) -> None:
    alone = policy_sequences(batch, resolved(), 30, version=3)
    both = policy_sequences(shared(batch), resolved(), 30, version=3)
    for mine, theirs in zip(alone, both, strict=True):
        np.testing.assert_array_equal(mine.advantages, theirs.advantages)
        assert mine.token_weight == theirs.token_weight


def test_f_tis_masks_bad_answers_that_the_policy_would_hardly_give(policy, batch) -> None:
    """The behavior policy of `batch` knows its answers by -3 nat per token: this one knows them about as well."""
    far = [
        replace(
            payload,
            trajectories=tuple(
                replace(one, behavior_logprobs=np.where(one.loss_mask, -0.01, 0.0).astype(np.float32))
                if one.policy_id == PARTNER
                else one
                for one in payload.trajectories
            ),
        )
        for payload in shared(batch)
    ]
    report = trainer_of(policy, correction=["f_tis"]).step(far, version=0)
    metrics = report.metrics
    assert metrics["ratio/staleness_behavior_mean/other_policy"] < 0.2
    assert metrics["ratio/staleness_masked_share/other_policy"] > 0.1
    assert metrics["mismatch/abs_logprob_mean"] < 1.0, "own samples only"
    untouched = trainer_of(policy, correction=["f_tis"]).step(shared(batch), version=0).metrics
    assert untouched["mismatch/abs_logprob_mean"] == pytest.approx(metrics["mismatch/abs_logprob_mean"])
