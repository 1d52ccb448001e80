"""Packing groups of any lengths into one block and cutting them out again."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dataflow.columns import BlockRef, ColumnBlock, ColumnHandle, Packing, Piece, plan_read, read

NAMES = ("token_ids", "reward")


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=6), st.randoms())
def test_whatever_the_lengths_and_the_order_of_reading_each_group_is_found_whole(lengths, random) -> None:
    packing = Packing.of(lengths)
    ids = np.arange(packing.num_tokens, dtype=np.int32)
    rewards = np.arange(packing.num_trajectories, dtype=np.float32)
    block = ColumnBlock(packing, {"token_ids": ids}, {"reward": rewards})
    order = random.sample(range(len(lengths)), len(lengths))
    handles = [ColumnHandle((Piece(BlockRef(0, block.names), index),)) for index in order]
    groups = dict(zip(order, read([block], plan_read(handles, NAMES)[1], NAMES), strict=True))
    for index, group_lengths in enumerate(lengths):
        assert np.diff(groups[index].token_starts).tolist() == group_lengths
    assert np.concatenate([groups[index]["token_ids"] for index in range(len(lengths))]).tolist() == ids.tolist()
    assert np.concatenate([groups[index]["reward"] for index in range(len(lengths))]).tolist() == rewards.tolist()
