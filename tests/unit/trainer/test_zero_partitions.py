"""Sizes of ZeRO-3 partitions that are not those of the plan stop the trainer; real ones: test_trainer_backends.py."""

from __future__ import annotations

import pytest

from penstock.dataflow.errors import CheckpointError, WeightSyncError
from penstock.trainer.backends.deepspeed import check_partitions, of_deepspeed
from penstock.weights.layout.algebra import TensorSpec
from tests.layouts import training_layout

TENSORS = (TensorSpec("model.norm.weight", (7,)), TensorSpec("lm_head.weight", (5, 3)))
SIZES = {"model.norm.weight": 7, "lm_head.weight": 15}


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_what_the_plan_reads_from_passes(num_replicas: int) -> None:
    layout = training_layout(TENSORS, num_replicas=num_replicas, is_partitioned=True)
    for rank in range(num_replicas):
        check_partitions(layout.buffers[rank], SIZES, num_replicas, rank)


@pytest.mark.parametrize("found", [4, 7, 2], ids=["padded further", "not partitioned", "over more ranks"])
def test_another_size_is_named_with_both_numbers(found: int) -> None:
    held = {"lm_head.weight": 5, "model.norm.weight": found}
    with pytest.raises(
        WeightSyncError, match=rf"rank 1: ZeRO-3 holds {found} elements of model.norm.weight, and 3 were .*7 over 3"
    ):
        check_partitions(held, SIZES, 3, 1)


def test_a_version_of_deepspeed_without_a_private_name_is_refused_when_a_checkpoint_needs_it() -> None:
    assert of_deepspeed(TENSORS[0], "shape") == (7,)
    with pytest.raises(
        CheckpointError, match=r"TensorSpec of DeepSpeed \d.* has no `_hp_mapping`.*Install a version that pyproject"
    ):
        of_deepspeed(TENSORS[0], "_hp_mapping")
