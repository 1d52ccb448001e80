"""Version buffers in device memory, within one process; between processes: tests/contract/test_device_memory.py."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.transport.allocator import expandable_segments
from penstock.weights.transport.device_memory import (
    OpenedVersionBuffers,
    VersionBuffer,
    VersionBufferHandle,
    arguments_here,
    index_here,
    version_buffer_for,
)
from penstock.weights.transport.shards import IN_DEVICE_MEMORY, ShardTransfer, read_shard
from tests.layouts import torch_layout

CPU = torch.device("cpu")
SIZES = {"first": 5, "second": 100}


def test_a_writer_changes_what_the_owner_reads():
    buffer = VersionBuffer(SIZES, torch.bfloat16, CPU)
    (handle,) = buffer.handles(1)
    writer = OpenedVersionBuffers([handle], [SIZES], [0])
    writer.tensors(3, 0)["second"][7] = 1.5
    writer.complete()
    assert buffer.tensors["second"][7] == 1.5
    assert not buffer.tensors["first"].any()
    assert buffer.tensors["second"].data_ptr() % 64 == buffer.tensors["first"].data_ptr() % 64


@pytest.mark.parametrize(
    ("device", "visible", "current", "expected"),
    [
        ("GPU-b", ["GPU-a", "GPU-b"], 0, 1),  # the exporter, started with CUDA_VISIBLE_DEVICES=1, calls it 0
        ("GPU-b", ["GPU-b"], 0, 0),  # the exporter sees both and calls it 1
        ("GPU-c", ["GPU-a", "GPU-b"], 1, 1),  # not visible here: mapped from the own one
    ],
)
def test_a_device_is_found_by_its_identity_not_by_the_exporters_number(device, visible, current, expected):
    assert index_here(device, visible, current) == expected


def test_the_changed_arguments_are_torchs_device_and_event():
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    changed = dict(zip(names, arguments_here(names, 3), strict=True))
    assert {name for name in names if changed[name] != name} == {"storage_device", "event_sync_required"}
    assert (changed["storage_device"], changed["event_sync_required"]) == (3, False)


def test_a_version_buffer_that_cannot_be_opened_is_refused_with_the_reason():
    buffer = VersionBuffer(SIZES, torch.float32, CPU)
    (handle,) = buffer.handles(1)
    damaged = handle._replace(rebuild=handle.rebuild[:-9] + bytes([handle.rebuild[-9] ^ 1]) + handle.rebuild[-8:])
    with pytest.raises(WeightSyncError, match=r"version buffer of rank 0 on cpu: its handle was damaged"):
        OpenedVersionBuffers([damaged], [SIZES], [0])
    with pytest.raises(WeightSyncError, match="128 elements, the plan needs 16"):
        OpenedVersionBuffers([handle], [{"first": 5}], [0])
    if not torch.cuda.is_available():
        with pytest.raises(WeightSyncError, match=r"rank 0 on GPU-a: this process has no GPU"):
            OpenedVersionBuffers([VersionBufferHandle("GPU-a", handle.rebuild, handle.checksum)], [SIZES], [0])
    del buffer
    with pytest.raises(WeightSyncError, match=r"version buffer of rank 0 on cpu cannot be opened: .*is gone"):
        OpenedVersionBuffers([handle], [SIZES], [0])


def test_a_version_buffer_is_reused_only_for_the_same_sizes_and_dtype():
    buffer = VersionBuffer(SIZES, torch.float32, CPU)
    assert version_buffer_for(buffer, SIZES, torch.float32, CPU) is buffer
    assert version_buffer_for(buffer, SIZES, torch.bfloat16, CPU) is not buffer
    assert version_buffer_for(buffer, {"first": 5}, torch.float32, CPU) is not buffer


def test_an_engine_without_a_version_buffer_refuses_a_version_in_device_memory():
    manifest = WeightManifest(4, IN_DEVICE_MEMORY, (TensorEntry("first", "float32", (5,), 0),), 20, 0, 1)
    with pytest.raises(WeightSyncError, match=r"publish v4: .* rank 0 has no version buffer"):
        list(read_shard(manifest, 0, None))
    buffer = VersionBuffer({"second": 5}, torch.float32, CPU)
    with pytest.raises(WeightSyncError, match=r"publish v4: .* no tensor first"):
        list(read_shard(manifest, 0, buffer))


def test_a_tensor_that_several_ranks_hold_is_copied_from_the_one_on_the_engines_device():
    tensors = (TensorSpec("model.norm.weight", (640,)),)
    layouts = TrainingSharding(tensors, num_replicas=2), torch_layout(tensors)
    for at, source in (("GPU-a", 0), ("GPU-b", 1)):
        transfer = ShardTransfer.between(*layouts, "float32", None, ["GPU-a", "GPU-b"], [at])
        assert {copy.src_rank for copy in transfer.plan.copies} == {source}


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused(name):
    assert "pidfd_getfd" in expandable_segments({name: "max_split_size_mb:512, expandable_segments:True"})
    assert not expandable_segments({name: "expandable_segments:False"})
    assert not expandable_segments({})
