"""Rows of FSDP2 that are not those of the plan stop the trainer; real ones: test_trainer_backends.py."""

from __future__ import annotations

import pytest
import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.trainer.backends.fsdp2 import check_rows
from penstock.weights.layout.algebra import TensorSpec, strided_box, whole_tensors
from penstock.weights.layout.sides import TrainingSharding

SHAPES = {"score.weight": (1, 4), "model.norm.weight": (7,), "lm_head.weight": (5, 3), "experts.down": (3, 2, 4)}
TENSORS = tuple(TensorSpec(name, shape) for name, shape in SHAPES.items())
FULL = {name: torch.randn(shape) for name, shape in SHAPES.items()}


def sharding_over(num_ranks: int, num_copies: int = 1) -> TrainingSharding:
    return TrainingSharding(TENSORS, num_ranks, is_partitioned=True, by_rows=True, num_copies=num_copies)


def held_by(rank: int, num_shards: int) -> dict[str, torch.Tensor]:
    """What `fully_shard` gives a rank: `torch.chunk`, and nothing to the ranks behind the last chunk."""
    chunks = {name: one.chunk(num_shards) for name, one in FULL.items()}
    return {name: (own[rank] if rank < len(own) else own[0].new_empty(0)).flatten() for name, own in chunks.items()}


@pytest.mark.parametrize(("num_ranks", "num_copies"), [(1, 1), (2, 1), (3, 1), (8, 1), (4, 2), (6, 2), (3, 3)])
def test_the_layout_is_where_torch_chunks_the_first_dimension(num_ranks: int, num_copies: int) -> None:
    sharding, num_shards = sharding_over(num_ranks, num_copies), num_ranks // num_copies
    held = [held_by(rank % num_shards, num_shards) for rank in range(num_ranks)]
    for rank in range(num_ranks):
        check_rows(held[rank], sharding, rank)
    layout = sharding.layout()
    for name, shards in layout.shards.items():
        assert len(shards) >= num_copies, "no element is missing"
        for shard in shards:
            index = tuple(slice(*range_) for range_ in shard.box)
            shape = FULL[name][index].shape
            assert torch.equal(strided_box(held[shard.rank][name], tuple(shape), shard.view), FULL[name][index])
    first_copy = [of_rank if rank < num_shards else {} for rank, of_rank in enumerate(held)]
    for name, found in whole_tensors(layout, first_copy).items():
        assert torch.equal(found, FULL[name])


def test_another_size_is_named_with_both_numbers() -> None:
    held = held_by(1, 2) | {"model.norm.weight": torch.zeros(4)}
    with pytest.raises(
        WeightSyncError, match=r"rank 1: FSDP2 holds 4 elements of model\.norm\.weight, and 3 .*over 2 ranks\)"
    ):
        check_rows(held, sharding_over(2), 1)
