"""Slots in device memory, within one process; between processes: tests/contract/test_device_memory.py."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.engine import TrainingSide
from penstock.weights.transport.allocator import expandable_segments
from penstock.weights.transport.device_memory import (
    DeviceSlot,
    OpenedSlots,
    SlotHandle,
    arguments_here,
    index_here,
    slot_for,
)
from penstock.weights.transport.shards import IN_DEVICE_MEMORY, ShardTransfer, read_shard
from tests.layouts import torch_side

CPU = torch.device("cpu")
SIZES = {"first": 5, "second": 100}


def test_a_writer_changes_what_the_owner_reads():
    slot = DeviceSlot(SIZES, torch.bfloat16, CPU)
    (handle,) = slot.handles(1)
    writer = OpenedSlots([handle], [SIZES], [0])
    writer.buffers(3, 0)["second"][7] = 1.5
    writer.complete()
    assert slot.buffers["second"][7] == 1.5
    assert not slot.buffers["first"].any()
    assert slot.buffers["second"].data_ptr() % 64 == slot.buffers["first"].data_ptr() % 64


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


def test_torchs_arguments_are_where_they_are_changed():
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    changed = dict(zip(names, arguments_here(names, 3), strict=True))
    assert {name for name in names if changed[name] != name} == {"storage_device", "event_sync_required"}
    assert (changed["storage_device"], changed["event_sync_required"]) == (3, False)


def test_a_slot_that_cannot_be_opened_is_refused_with_the_reason():
    slot = DeviceSlot(SIZES, torch.float32, CPU)
    (handle,) = slot.handles(1)
    damaged = handle._replace(rebuild=handle.rebuild[:-9] + bytes([handle.rebuild[-9] ^ 1]) + handle.rebuild[-8:])
    with pytest.raises(WeightSyncError, match=r"slot of rank 0 on cpu: its handle was damaged"):
        OpenedSlots([damaged], [SIZES], [0])
    with pytest.raises(WeightSyncError, match="128 elements, the plan needs 16"):
        OpenedSlots([handle], [{"first": 5}], [0])
    if not torch.cuda.is_available():
        with pytest.raises(WeightSyncError, match=r"rank 0 on GPU-a: this process has no GPU"):
            OpenedSlots([SlotHandle("GPU-a", handle.rebuild, handle.checksum)], [SIZES], [0])
    del slot
    with pytest.raises(WeightSyncError, match=r"slot of rank 0 on cpu cannot be opened: .*is gone"):
        OpenedSlots([handle], [SIZES], [0])


def test_a_trainer_that_starts_anew_gets_new_handles_of_the_same_memory():
    slot = DeviceSlot(SIZES, torch.float32, CPU)
    assert slot_for(slot, SIZES, torch.float32, CPU) is slot
    assert slot_for(slot, SIZES, torch.bfloat16, CPU) is not slot
    assert slot_for(slot, {"first": 5}, torch.float32, CPU) is not slot


def test_an_engine_without_a_slot_takes_no_version_that_was_written_into_one():
    manifest = WeightManifest(4, IN_DEVICE_MEMORY, (TensorEntry("first", "float32", (5,), 0),), 20, 0, 1)
    with pytest.raises(WeightSyncError, match=r"publish v4: .* rank 0, which has none"):
        list(read_shard(manifest, 0, None))
    slot = DeviceSlot({"second": 5}, torch.float32, CPU)
    with pytest.raises(WeightSyncError, match=r"publish v4: .* no buffer first"):
        list(read_shard(manifest, 0, slot))


def test_what_several_ranks_hold_comes_from_the_one_on_the_engines_device():
    tensors = (TensorSpec("model.norm.weight", (640,)),)
    sides = TrainingSide(tensors, num_replicas=2), torch_side(tensors)
    for at, source in (("GPU-a", 0), ("GPU-b", 1)):
        transfer = ShardTransfer.between(*sides, "float32", None, ["GPU-a", "GPU-b"], [at])
        assert {copy.src_rank for copy in transfer.plan.copies} == {source}


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused(name):
    assert "pidfd_getfd" in expandable_segments({name: "max_split_size_mb:512, expandable_segments:True"})
    assert not expandable_segments({name: "expandable_segments:False"})
    assert not expandable_segments({})
