"""In-place updates through one bucket: their memory, and how they detect bytes that differ from those sent."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import BucketSum, TensorEntry
from penstock.weights.checksum import tensor_checksum
from penstock.weights.layout.algebra import View
from penstock.weights.planner.plan import PlannedCopy
from penstock.weights.transport.in_place import ShardChunks
from penstock.weights.transport.process_group.transfer import ExpectedBuckets, Message, sums_of

CPU = torch.device("cpu")
MIB = 1 << 20
SIZES = {"a": 3 * MIB + 5, "b": 1, "c": 2 * MIB, "d": 7}


def shard(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


def entries(tensors: dict[str, torch.Tensor]) -> list[TensorEntry]:
    return [TensorEntry(name, "float32", tuple(one.shape), tensor_checksum(one)) for name, one in tensors.items()]


def peak_bytes(profiled: profile) -> int:
    """Peak of the memory allocated by torch, beyond that at the start."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("bucket_bytes", [4, 1 << 20, 5 * MIB, 1 << 40])
def test_the_shard_is_applied_bit_for_bit_with_a_bucket_of_any_size(bucket_bytes: int) -> None:
    sizes = {name: min(size, 1000) for name, size in SIZES.items()}
    sent = {name: values[: sizes[name]].clone() for name, values in shard(0).items()}
    live = {name: torch.zeros(size) for name, size in sizes.items()}
    chunks = ShardChunks(sent, entries(sent), 3, bucket_bytes, CPU)
    chunks.apply(live)
    assert all(torch.equal(live[name], sent[name]) for name in sent)
    assert chunks.extra_bytes <= bucket_bytes


def test_an_update_allocates_no_more_than_a_bucket_and_the_scratch_memory_of_checksums() -> None:
    sent, live = shard(0), shard(1)
    announced = entries(sent)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as whole:
        copies = {name: values.clone() for name, values in sent.items()}
    assert peak_bytes(whole) >= 4 * sum(SIZES.values()), "the measurement must detect a second shard"
    del copies
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as in_place:
        chunks = ShardChunks(sent, announced, 3, 2 * MIB, CPU)
        chunks.apply(live)
    assert chunks.extra_bytes == 2 * MIB
    assert 2 * MIB <= peak_bytes(in_place) <= 4 * MIB, "checksums use blocks of 512 KiB"


def test_an_overwritten_version_buffer_is_detected_before_the_chunk_is_applied() -> None:
    sent, live = shard(0), {name: torch.zeros(size) for name, size in SIZES.items()}
    chunks = ShardChunks(sent, entries(sent), 3, MIB, CPU)
    sent["c"][MIB // 4 + 1] += 1
    with pytest.raises(WeightSyncError, match=r"publish v3: elements 262144 to 524288 of c have checksum .* nothing"):
        chunks.apply(live)
    assert torch.equal(live["a"], sent["a"])
    assert torch.equal(live["c"][: MIB // 4], sent["c"][: MIB // 4])
    assert not live["c"][MIB // 4 :].any(), "nothing from the damaged chunk on"


def test_a_bucket_is_compared_with_the_checksum_over_all_its_senders() -> None:
    incoming = torch.arange(12, dtype=torch.float32)
    messages = [
        Message(
            peer, start, start + 6, (PlannedCopy("t", (2, 3), peer, View("t", 0, (3, 1)), 1, View(name, 4, (3, 1))),)
        )
        for peer, start, name in ((0, 0, "x"), (1, 6, "x"))
    ]
    sums = [BucketSum(2, *part) for message in messages for part in sums_of(message, incoming)]
    expected = ExpectedBuckets(sums)
    expected.check(9, 2, messages, incoming)
    incoming[7] = 0
    with pytest.raises(WeightSyncError, match=r"weights v9: bucket 3: x for rank 1 was received with checksum"):
        expected.check(9, 2, messages, incoming)
