"""Engines of different tensor-parallel sizes in one run: a version is written once, in the layouts of all of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import WeightManifest
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engines.torch.engine import TorchEngine
from penstock.weights.checksum import PartialSum, combine_checksums, entry_key, tensor_checksum
from penstock.weights.layout.algebra import side_by_side
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.model_config import ModelConfig
from penstock.weights.transport.shards import (
    ShardFiles,
    ShardTransfer,
    ShardWriter,
    forget_mappings,
    manifest_of,
    read_shard,
)
from tests.contract.engine_harness import make_spec
from tests.layouts import read, torch_layout
from tests.unit.weights.models import engine_layout, numbered, tensors_of

_, TENSORS = tensors_of("qwen2")
TRAINING = TrainingSharding(tuple(TENSORS))
FULL = {name: torch.from_numpy(values).to(torch.float32).flatten() for name, values in numbered(TENSORS).items()}


def written(folder: Path, *tp_sizes: int) -> tuple[ShardTransfer, list[PartialSum]]:
    layout = side_by_side([engine_layout("qwen2", tp) for tp in tp_sizes])
    transfer = ShardTransfer.between(TRAINING, EngineLayout("vllm", layout), "float32", str(folder))
    writer = ShardWriter(transfer, 0, ShardFiles(transfer))
    writer.write(1, FULL)
    return transfer, writer.sums(FULL)


@pytest.mark.parametrize(("tp", "shards"), [(1, range(1)), (2, range(1, 3)), (4, range(3, 7))])
def test_each_engine_reads_what_it_would_read_if_it_were_the_only_kind(tmp_path: Path, tp: int, shards: range) -> None:
    together, sums = written(tmp_path / "together", 1, 2, 4)
    alone, sums_alone = written(tmp_path / "alone", tp)
    manifest, expected = manifest_of(together.manifest(1, sums), shards), alone.manifest(1, sums_alone)
    assert manifest.checksum == expected.checksum, "what the engine acknowledges"
    assert (manifest.entries, manifest.num_shards) == (expected.entries, tp)
    live = []
    for rank in range(tp):
        held, wanted = dict(read_shard(manifest, rank, None)), dict(read_shard(expected, rank, None))
        assert held.keys() == wanted.keys()
        assert all(torch.equal(held[name], wanted[name]) for name in wanted)
        live += [(entry_key(rank, name), tensor_checksum(tensor)) for name, tensor in held.items()]
    assert combine_checksums(live) == manifest.checksum


def test_a_version_in_one_layout_is_all_of_an_engine(tmp_path: Path) -> None:
    transfer, sums = written(tmp_path, 2)
    manifest = transfer.manifest(1, sums)
    assert manifest_of(manifest, range(2)) == manifest


def test_an_engine_on_a_node_without_the_files_says_which_one_is_missing(tmp_path: Path) -> None:
    transfer, sums = written(tmp_path, 1, 2)
    manifest = manifest_of(transfer.manifest(1, sums), range(1, 3))
    (transfer.folder(1) / "rank2").unlink()
    with pytest.raises(WeightSyncError, match="rank2 does not exist"):
        list(read_shard(manifest, 1, None))


async def test_a_real_engine_takes_its_ranks_and_refuses_those_of_another_kind(
    tiny_model_config: ModelConfig, publisher_of_tiny: Callable[..., Callable[[int], WeightManifest]]
) -> None:
    of_vllm, of_torch = read("tiny").layouts[2], torch_layout().layout
    publish = publisher_of_tiny(EngineLayout("vllm", side_by_side([of_vllm, of_torch])))
    engine = TorchEngine(make_spec(tiny_model_config, TorchEngineConfig(type="torch", max_num_seqs=4), "keep_kv"))
    await engine.start()
    try:
        manifest = publish(1)
        mine = manifest_of(manifest, range(2, 3))
        ack = await engine.update_weights(mine)
        assert (ack.version, ack.checksum) == (1, mine.checksum), "read back from its live weights"
        with pytest.raises(WeightSyncError):
            await engine.update_weights(manifest_of(publish(2), range(2)))
    finally:
        await engine.shutdown()


def test_an_engine_maps_a_file_once_until_it_is_another_file_or_forgotten(tmp_path: Path) -> None:
    def address(manifest: WeightManifest) -> int:
        return next(iter(dict(read_shard(manifest, 0, None)).values())).data_ptr()

    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]

    forget_mappings()
    transfer, sums = written(tmp_path, 1)
    manifest = transfer.manifest(1, sums)
    first = address(manifest)
    assert address(manifest) == first

    shutil.rmtree(tmp_path)  # the trainer is gone, and another one writes
    transfer, sums = written(tmp_path, 1)
    manifest = transfer.manifest(1, sums)
    assert address(manifest) != first
    held = dict(read_shard(manifest, 0, None))
    assert all(tensor_checksum(held[entry.name]) == entry.checksum for entry in manifest.entries)
    held.clear()
    assert any("(deleted)" in line for line in mapped()), "the memory of the first file is still in use"
    forget_mappings()
    assert mapped() == []
