"""Columns through real Ray: stages that write, a trainer side that reads, and workers that fail."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from penstock.actors.cluster import ray_session
from penstock.actors.column_stage import ColumnWriters, SourceWorker, StageWorker
from penstock.dataflow.columns import ColumnBlock, ColumnHandle, GroupColumns, Packing, Piece, plan_read, read
from penstock.dataflow.errors import PenstockError

pytestmark = [pytest.mark.integration, pytest.mark.full]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BIG = 50_000
"""Tokens: more than Ray returns inline, so the block lies in the object store."""


class Counting:
    """Begins groups of two trajectories, `order` and BIG tokens long."""

    def begin(self, orders: Sequence[int]) -> tuple[ColumnBlock, list[int]]:
        packing = Packing.of([[order, BIG] for order in orders])
        return ColumnBlock(packing, {"token_ids": np.arange(packing.num_tokens, dtype=np.int32)}, {}), list(orders)


class Doubling:
    """Writes twice each id; fails at a group of 13."""

    reads = ("token_ids",)

    def extend(self, groups: Sequence[GroupColumns]) -> tuple[ColumnBlock, list[int]]:
        lengths = [np.diff(group.token_starts).tolist() for group in groups]
        if any(13 in group for group in lengths):
            raise ValueError("thirteen")
        doubled = np.concatenate([group["token_ids"] * 2 for group in groups])
        return ColumnBlock(Packing.of(lengths), {"doubled": doubled}, {}), [len(group) for group in lengths]


@pytest.fixture(scope="module")
async def writers() -> AsyncIterator[tuple[ColumnWriters, ColumnWriters, list[Any]]]:
    async with ray_session("local"):
        actors = [ray.remote(SourceWorker).options(num_cpus=0).remote(Counting()) for _ in range(2)]
        stage = ray.remote(StageWorker).options(num_cpus=0).remote(Doubling())
        yield (
            ColumnWriters("counting", actors, (), 60.0),
            ColumnWriters("doubling", [stage], Doubling.reads, 60.0),
            actors,
        )


async def begin_for_ever(writers: Any) -> None:
    """Ray kills in the background, so a dead worker may still answer a call or two."""
    while True:
        await writers.begin([5])


@pytest.mark.asyncio(loop_scope="module")
async def test_stages_add_columns_that_outlive_their_writers_and_failures_name_the_stage(writers: Any) -> None:
    """One story, because a start of Ray is slow: write, extend, read, fail, lose a worker."""
    counting, doubling, actors = writers
    begun = [*await counting.begin([1, 2, 3]), *await counting.begin([4])]
    assert [note for _, note in begun] == [1, 2, 3, 4]
    handles = [ColumnHandle((piece,)) for piece, _ in begun]
    order = [3, 0, 2]
    doubled = await doubling.extend([handles[index] for index in order])
    both = [handles[index].joined([piece]) for index, (piece, _) in zip(order, doubled, strict=True)]

    names = ("token_ids", "doubled")
    refs, cuts = plan_read(both, names)
    assert len(refs) == 3, "two calls began the groups, one extended them"
    groups = read(ray.get(refs, timeout=60), cuts, names)
    assert [np.diff(group.token_starts).tolist() for group in groups] == [[4, BIG], [1, BIG], [3, BIG]]
    for group in groups:
        assert np.array_equal(group["doubled"], group["token_ids"] * 2)
        assert not group["token_ids"].flags.writeable, "views of the store"

    with pytest.raises(PenstockError, match="doubling: ValueError: thirteen"):
        await doubling.extend([ColumnHandle((piece,)) for piece, _ in await counting.begin([13])])

    for actor in actors:
        ray.kill(actor)
    with pytest.raises(PenstockError, match="counting: the worker died"):
        await asyncio.wait_for(begin_for_ever(counting), 60)
    survivors = await doubling.extend(handles)
    assert [note for _, note in survivors] == [2, 2, 2, 2], "what a dead worker wrote is still there"
    assert all(isinstance(piece, Piece) for piece, _ in survivors)


def test_our_side_of_the_dataflow_benchmark_reads_every_byte_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = {"num_groups": 32, "group_size": 2, "num_tokens": 64, "batch_groups": 8, "call_groups": 4}
    (tmp_path / "spec.json").write_text(json.dumps({"works": [work], "memory": True}))
    command = [sys.executable, BENCHMARKS / "dataflow_penstock.py", tmp_path / "spec.json", tmp_path / "out.json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())["results"][0]
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("dataflow_work")
    assert result["checksum"] == module.expected_checksum(module.Work(**work))
    assert result["peak_bytes"] > 0
