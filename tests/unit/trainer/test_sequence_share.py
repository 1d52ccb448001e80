"""Sequence parallelism: the stretches of a micro-batch together are the micro-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.trainer.batches.collate import collate, sequence_share
from penstock.trainer.batches.packing import EMPTY_MICRO_BATCH, MicroBatchPlan, TrainingSequence

CPU = torch.device("cpu")


def packed_row():
    """Sequences of 7 and 4 tokens with loss tokens at 2..6 and 1, 3: one row of 9 inputs; 3 and 2 alternatives."""
    rng = np.random.default_rng(0)
    sequences = [
        TrainingSequence(
            rng.integers(1, 20, length),
            targets,
            rng.normal(size=len(targets)).astype(np.float32),
            w,
            alternatives=rng.integers(20, 40, (len(targets), width)),
        )
        for length, targets, w, width in ((7, np.arange(2, 7), 0.25, 3), (4, np.array([1, 3]), 0.5, 2))
    ]
    return collate(MicroBatchPlan(((0, 1),), 9), sequences, device=CPU, needs_mask=False)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_loss_token_is_predicted_by_the_rank_that_has_the_token_before_it(size: int) -> None:
    whole = packed_row()
    shares = [sequence_share(whole, rank, size) for rank in range(size)]
    length = -(-9 // size)
    assert {share.inputs.input_ids.shape for share in shares} == {(1, length)}
    assert sum(share.num_tokens for share in shares) == whole.num_tokens == 7
    order = [(sequence, token) for sequence in (0, 1) for token in range((5, 2)[sequence])]
    found = {}
    for share in shares:
        for k in range(share.num_tokens):
            key = (int(share.sequence_index[k]), int(share.token_index[k]))
            at = int(share.inputs.target_index[k])
            found[key] = (
                int(share.inputs.input_ids[0, at]), int(share.inputs.position_ids[0, at]),
                int(share.inputs.target_ids[k]), float(share.behavior_logprobs[k]), float(share.token_weights[k]),
                tuple(share.inputs.alternatives[k].tolist()),
            )  # fmt: skip
    expected = {}
    for key, k in zip(order, range(7), strict=True):
        at = int(whole.inputs.target_index[k])
        expected[key] = (
            int(whole.inputs.input_ids[0, at]), int(whole.inputs.position_ids[0, at]),
            int(whole.inputs.target_ids[k]), float(whole.behavior_logprobs[k]), float(whole.token_weights[k]),
            tuple(whole.inputs.alternatives[k].tolist()),
        )  # fmt: skip
    assert {len(alternatives) - alternatives.count(-1) for *_, alternatives in expected.values()} == {2, 3}
    assert found == expected


def test_positions_go_on_counting_in_the_padding_so_that_it_is_no_new_sequence() -> None:
    shares = [sequence_share(packed_row(), rank, 4) for rank in range(4)]  # 9 tokens, padded to 12
    positions = torch.cat([share.inputs.position_ids for share in shares], dim=1)
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]]
    assert shares[3].inputs.input_ids.tolist() == [[0, 0, 0]]


def test_a_stretch_without_loss_tokens_has_a_dummy_of_no_weight() -> None:
    for share in (sequence_share(packed_row(), 3, 4), sequence_share(collate_nothing(), 1, 2)):
        assert share.num_tokens == len(share.sequence_index) == len(share.token_index) == 0
        assert share.token_weights.tolist() == [0.0]
        assert share.inputs.target_index.tolist() == [0]
        assert share.inputs.input_ids.shape[1] == share.inputs.position_ids.shape[1] >= 1


def collate_nothing():
    return collate(EMPTY_MICRO_BATCH, [], device=CPU, needs_mask=False)
