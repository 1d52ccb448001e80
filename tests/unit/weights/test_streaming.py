"""What streaming through one bucket takes of memory, and what it makes of other bytes than those that were sent."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import BucketSum, TensorEntry
from penstock.weights.checksum import tensor_checksum
from penstock.weights.layout.algebra import View
from penstock.weights.planner.plan import Copy
from penstock.weights.transport.process_group.transfer import ExpectedBuckets, Message, sums_of
from penstock.weights.transport.streaming import Pieces

CPU = torch.device("cpu")
MIB = 1 << 20
SIZES = {"a": 3 * MIB + 5, "b": 1, "c": 2 * MIB, "d": 7}


def shard(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


def entries(tensors: dict[str, torch.Tensor]) -> list[TensorEntry]:
    return [TensorEntry(name, "float32", tuple(one.shape), tensor_checksum(one)) for name, one in tensors.items()]


def peak_bytes(profiled: profile) -> int:
    """Most memory that torch's allocator had given out beyond what it had at the start."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("bucket_bytes", [4, 1 << 20, 5 * MIB, 1 << 40])
def test_whatever_the_bucket_the_shard_arrives_bit_for_bit(bucket_bytes: int) -> None:
    sizes = {name: min(size, 1000) for name, size in SIZES.items()}
    sent = {name: values[: sizes[name]].clone() for name, values in shard(0).items()}
    live = {name: torch.zeros(size) for name, size in sizes.items()}
    pieces = Pieces(sent, entries(sent), 3, bucket_bytes, CPU)
    pieces.apply(live)
    assert all(torch.equal(live[name], sent[name]) for name in sent)
    assert pieces.extra_bytes <= bucket_bytes


def test_no_more_than_a_bucket_and_the_checksums_scratch_is_taken_of_memory() -> None:
    sent, live = shard(0), shard(1)
    announced = entries(sent)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as whole:
        copies = {name: values.clone() for name, values in sent.items()}
    assert peak_bytes(whole) >= 4 * sum(SIZES.values()), "the measure must tell a second shard"
    del copies
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as streamed:
        pieces = Pieces(sent, announced, 3, 2 * MIB, CPU)
        pieces.apply(live)
    assert pieces.extra_bytes == 2 * MIB
    assert 2 * MIB <= peak_bytes(streamed) <= 4 * MIB, "the sums work in blocks of 512 KiB"


def test_a_slot_that_was_written_again_is_found_before_the_piece_is_applied() -> None:
    sent, live = shard(0), {name: torch.zeros(size) for name, size in SIZES.items()}
    pieces = Pieces(sent, entries(sent), 3, MIB, CPU)
    sent["c"][MIB // 4 + 1] += 1
    with pytest.raises(WeightSyncError, match=r"publish v3: elements 262144 to 524288 of c have sum .* serves nothing"):
        pieces.apply(live)
    assert torch.equal(live["a"], sent["a"])
    assert torch.equal(live["c"][: MIB // 4], sent["c"][: MIB // 4])
    assert not live["c"][MIB // 4 :].any(), "nothing from the damaged piece on"


def test_a_bucket_is_compared_with_the_sum_over_all_its_senders() -> None:
    incoming = torch.arange(12, dtype=torch.float32)
    messages = [
        Message(peer, start, start + 6, (Copy("t", (2, 3), peer, View("t", 0, (3, 1)), 1, View(name, 4, (3, 1))),))
        for peer, start, name in ((0, 0, "x"), (1, 6, "x"))
    ]
    sums = [BucketSum(2, *part) for message in messages for part in sums_of(message, incoming)]
    expected = ExpectedBuckets(sums)
    expected.check(9, 2, messages, incoming)
    incoming[7] = 0
    with pytest.raises(WeightSyncError, match=r"weights v9: bucket 3: what arrived of x for rank 1 has sum"):
        expected.check(9, 2, messages, incoming)
