"""Columns of groups in shared blocks, without Ray: the reference of a block is the block itself."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from penstock.dataflow.columns import BlockRef, ColumnBlock, ColumnHandle, Packing, Piece, plan_read, read
from penstock.dataflow.errors import PenstockError, ShapeError

LENGTHS = [[3, 1], [2], [4, 0, 5]]
"""Tokens per trajectory of three groups of different sizes."""


def generated(lengths: list[list[int]]) -> ColumnBlock:
    packing = Packing.of(lengths)
    ids = np.arange(packing.num_tokens, dtype=np.int32)
    return ColumnBlock(packing, {"token_ids": ids, "loss_mask": ids % 2 == 0}, {})


def scored(lengths: list[list[int]]) -> ColumnBlock:
    packing = Packing.of(lengths)
    return ColumnBlock(packing, {}, {"reward": np.arange(packing.num_trajectories, dtype=np.float32)})


class Store:
    """Hands out a reference per block and counts what is fetched."""

    def __init__(self) -> None:
        self.blocks: list[ColumnBlock] = []

    def put(self, block: ColumnBlock) -> BlockRef:
        self.blocks.append(block)
        return BlockRef(len(self.blocks) - 1, block.names)

    def fetch(self, refs: list[int]) -> list[ColumnBlock]:
        return [self.blocks[ref] for ref in refs]


@pytest.fixture
def store() -> Store:
    return Store()


def handles_of(block: BlockRef, num_groups: int) -> list[ColumnHandle]:
    return [ColumnHandle((Piece(block, index),)) for index in range(num_groups)]


def test_a_group_reads_its_own_tokens_and_rewards_from_blocks_of_many_groups(store: Store) -> None:
    ids, rewards = store.put(generated(LENGTHS)), store.put(scored(LENGTHS))
    handles = [handle.joined([Piece(rewards, index)]) for index, handle in enumerate(handles_of(ids, 3))]
    names = ("token_ids", "loss_mask", "reward")
    refs, cuts = plan_read(handles, names)
    first, second, third = read(store.fetch(refs), cuts, names)
    assert first["token_ids"].tolist() == [0, 1, 2, 3]
    assert second["token_ids"].tolist() == [4, 5]
    assert third["token_ids"].tolist() == list(range(6, 15))
    assert third["loss_mask"].tolist() == [True, False] * 4 + [True]
    assert [group["reward"].tolist() for group in (first, second, third)] == [[0, 1], [2], [3, 4, 5]]
    assert third.token_starts.tolist() == [0, 4, 4, 9]


def test_reading_copies_nothing(store: Store) -> None:
    block = generated(LENGTHS)
    refs, cuts = plan_read(handles_of(store.put(block), 3), ["token_ids"])
    for group in read(store.fetch(refs), cuts, ["token_ids"]):
        assert np.shares_memory(group["token_ids"], block.per_token["token_ids"])


def test_each_block_is_fetched_once_and_only_if_it_has_a_wanted_column(store: Store) -> None:
    ids, rewards = store.put(generated(LENGTHS)), store.put(scored(LENGTHS))
    handles = [handle.joined([Piece(rewards, index)]) for index, handle in enumerate(handles_of(ids, 3))]
    assert plan_read(handles, ["token_ids"])[0] == [ids.ref]
    assert plan_read(handles, ["reward"])[0] == [rewards.ref]
    assert plan_read(handles, ["reward", "loss_mask"])[0] == [ids.ref, rewards.ref]


def test_groups_of_several_calls_are_read_together_in_the_order_asked_for(store: Store) -> None:
    early, late = store.put(generated([[2], [3]])), store.put(generated([[1], [4]]))
    handles = [ColumnHandle((Piece(late, 1),)), ColumnHandle((Piece(early, 0),)), ColumnHandle((Piece(late, 0),))]
    refs, cuts = plan_read(handles, ["token_ids"])
    assert [group["token_ids"].tolist() for group in read(store.fetch(refs), cuts, ["token_ids"])] == [
        [1, 2, 3, 4],
        [0, 1],
        [0],
    ]


def test_only_the_columns_asked_for_are_read(store: Store) -> None:
    refs, cuts = plan_read(handles_of(store.put(generated([[2]])), 1), ["loss_mask"])
    assert set(read(store.fetch(refs), cuts, ["loss_mask"])[0].columns) == {"loss_mask"}


def test_a_column_that_is_not_there_yet_is_named(store: Store) -> None:
    handles = handles_of(store.put(generated(LENGTHS)), 1)
    with pytest.raises(PenstockError, match=r"reward not written yet; this group has token_ids, loss_mask"):
        plan_read(handles, ["token_ids", "reward"])


def test_a_column_cannot_be_written_twice(store: Store) -> None:
    handle = handles_of(store.put(generated(LENGTHS)), 1)[0]
    with pytest.raises(PenstockError, match="loss_mask, token_ids would be written twice"):
        handle.joined([Piece(store.put(generated(LENGTHS)), 0)])


def test_a_block_whose_column_is_too_short_is_refused_with_both_numbers() -> None:
    with pytest.raises(ShapeError, match="reward has 2 entries, its 3 groups have 6"):
        ColumnBlock(Packing.of(LENGTHS), {}, {"reward": np.zeros(2, np.float32)})


def test_two_stages_that_disagree_on_the_lengths_of_a_group_are_refused(store: Store) -> None:
    handle = handles_of(store.put(generated([[3, 1]])), 1)[0].joined([Piece(store.put(scored([[1, 3]])), 0)])
    refs, cuts = plan_read([handle], ["token_ids", "reward"])
    with pytest.raises(ShapeError, match=r"reward are for trajectories of \[1, 3\] tokens, token_ids for \[3, 1\]"):
        read(store.fetch(refs), cuts, ["token_ids", "reward"])


def test_handles_are_small_whatever_they_point_to(store: Store) -> None:
    handles = handles_of(store.put(generated([[100_000]] * 64)), 64)
    assert len(pickle.dumps(handles)) < 64 * 64
