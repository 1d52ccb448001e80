"""Decoded values equal the encoded ones, bit for bit; sizes are counted independently, element by element."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.codec.codec import ReceiverState, SenderState, whole, words
from penstock.weights.codec.delta import DeltaCodec, pack_positions, unpack_positions
from penstock.weights.codec.wire import CODECS, from_wire, to_wire
from tests.tiers import examples
from tests.unit.weights.codec_pair import DTYPES, Pair, from_bits, same_bits, walk

EXACT = ["full", "delta"]
# As bits: quiet and signalling NaN with payloads, infinities, both zeros, smallest denormals, largest numbers, one.
SPECIAL = {
    torch.float32: [
        *(0x7FC00001, 0x7F800001, 0xFFC12345, 0x7F800000, 0xFF800000, 0, 1 << 31),
        *(1, 0x80000001, 0x007FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000),
    ],
    torch.bfloat16: [0x7FC1, 0x7F81, 0xFFC5, 0x7F80, 0xFF80, 0, 1 << 15, 1, 0x8001, 0x007F, 0x7F7F, 0xFF7F, 0x3F80],
}


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Any bits at all, before and after; a drawn share of them changes."""
    dtype = draw(st.sampled_from(DTYPES))
    unsigned = np.uint32 if dtype is torch.float32 else np.uint16
    size = draw(st.integers(0, 300))
    special = st.sampled_from(SPECIAL[dtype]).map(unsigned)
    bits = hnp.arrays(unsigned, size, elements=st.one_of(special, hnp.from_dtype(np.dtype(unsigned))))
    before, after = draw(bits), draw(bits)
    kept = np.random.default_rng(draw(st.integers(0, 9))).random(size) < draw(
        st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])
    )
    return from_bits(before, dtype), from_bits(np.where(kept, before, after), dtype)


@pytest.mark.parametrize("codec", EXACT)
@settings(max_examples=examples(40), deadline=None)
@given(versions=two_versions())
def test_any_bits_are_received_as_they_were_sent(codec: str, versions: tuple[torch.Tensor, torch.Tensor]) -> None:
    before, after = versions
    pair = Pair(codec, before)
    assert same_bits(pair.live, before)
    encoded = pair.publish(after)
    assert same_bits(pair.live, after)
    assert encoded.num_bytes <= after.numel() * after.element_size()
    if codec == "delta":
        assert encoded.num_changed == int((words(before) != words(after)).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
def test_special_values_survive_every_codec(codec: str, dtype: torch.dtype) -> None:
    special = from_bits(SPECIAL[dtype], dtype).repeat(20)
    pair = Pair(codec, torch.zeros_like(special))
    for current in (special, special.flip(0), special):  # int8_delta sends whole if a value is not finite
        pair.publish(current)
        assert same_bits(pair.live, current)


def test_a_zero_that_turns_negative_is_sent_and_a_nan_that_stays_is_not() -> None:
    before = from_bits([0x7FC00001] * 50 + [0] * 50, torch.float32)
    after = before.clone()
    after[70] = -0.0
    encoded = Pair("delta", before).publish(after)
    assert encoded.num_changed == 1
    assert encoded.num_bytes == 4 + 1
    assert torch.signbit(encoded.parts["values"]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [0, 1, 2, 127, 128, 129])
def test_every_size_is_received(codec: str, size: int, dtype: torch.dtype) -> None:
    before = torch.linspace(-1, 1, size).to(dtype)
    pair = Pair(codec, before)
    for current in (before, before + 1, before * 3):
        pair.publish(current)
        torch.testing.assert_close(pair.live, current, rtol=0, atol=4 / 254 + 2**-7)


# --- bytes ---


def size_of_gaps(positions: np.ndarray) -> int:
    """Counted element by element."""
    size, last = 0, -1
    for position in positions:
        size += (int(position) - last - 1) // 255 + 1
        last = int(position)
    return size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_elements", "num_changed", "form"),
    [
        (100_000, 0, "gaps"),
        (100_000, 1, "gaps"),
        (1_000_000, 3, "gaps"),
        (1_000_000, 40, "gaps"),
        (1_000_000, 1000, "gaps"),
        (100_000, 1000, "gaps"),
        (100_000, 10_000, "gaps"),
        (100_000, 13_000, "bitmap"),
        (100_000, 90_000, "bitmap"),
        (100_000, 99_900, "whole"),
        (100_000, 100_000, "whole"),
    ],
)
def test_delta_takes_the_smallest_form(dtype: torch.dtype, num_elements: int, num_changed: int, form: str) -> None:
    positions = np.sort(np.random.default_rng(num_changed).choice(num_elements, num_changed, replace=False))
    before = torch.zeros(num_elements, dtype=dtype)
    after = before.clone()
    after[torch.from_numpy(positions)] = 1.0
    pair = Pair("delta", before)
    encoded = pair.publish(after)
    assert same_bits(pair.live, after)
    assert encoded.form == form
    value_bytes = num_changed * dtype.itemsize
    sizes = {
        "whole": num_elements * dtype.itemsize,
        "bitmap": value_bytes + -(-num_elements // 8),
        "gaps": value_bytes + size_of_gaps(positions),
    }
    assert encoded.num_bytes == sizes[form] == min(sizes.values())
    assert encoded.num_changed == num_changed


@settings(max_examples=examples(100), deadline=None)
@given(
    positions=st.sets(st.integers(0, 200_000), max_size=40),
    num_more=st.integers(1, 70_000),
)
def test_positions_survive_their_coding_with_gaps_of_any_length(positions: set[int], num_more: int) -> None:
    is_changed = torch.zeros(max(positions, default=0) + num_more, dtype=torch.bool)
    is_changed[sorted(positions)] = True
    form, packed = pack_positions(is_changed)
    assert unpack_positions(form, packed, is_changed.numel()).tolist() == sorted(positions)


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 510, 65534, 65535, 65536, 131070])
def test_gaps_around_the_escape(gap: int) -> None:
    for repeats in (1, 20):  # after neighbours, so that gaps are the smaller coding
        positions = [*range(300), *(300 + gap + i for i in range(repeats))]
        is_changed = torch.zeros(positions[-1] + 1, dtype=torch.bool)
        is_changed[positions] = True
        form, packed = pack_positions(is_changed)
        assert unpack_positions(form, packed, is_changed.numel()).tolist() == positions


# --- versions ---


@pytest.mark.parametrize("codec", ["delta", "int8_delta"])
def test_a_receiver_that_missed_a_version_reports_it_and_catches_up(codec: str) -> None:
    pair = Pair(codec, torch.randn(1000))
    values = pair.live.clone()
    missed = CODECS[codec].encode(values + torch.eye(1000)[3], pair.sender, 2)
    late = CODECS[codec].encode(values + torch.eye(1000)[5], pair.sender, 3)
    before = pair.live.clone()
    with pytest.raises(WeightSyncError, match=r"publish v3: w is the difference to v2, .* holds v1: .* `full`"):
        CODECS[codec].decode(late, pair.receiver, pair.live)
    with pytest.raises(WeightSyncError, match="holds no version"):
        CODECS[codec].decode(missed, ReceiverState("w"), pair.live)
    assert same_bits(pair.live, before)
    assert pair.receiver.version == 1
    assert pair.sender.values is not None
    everything = whole(pair.sender.values, "w", 3)
    CODECS[codec].decode(everything, pair.receiver, pair.live)
    assert pair.receiver.version == 3
    pair.version = 3
    pair.publish(values * 1.001)  # continues with the versions of the others


def test_a_version_is_not_applied_twice() -> None:
    pair = Pair("int8_delta", torch.zeros(1000))
    encoded = pair.publish(torch.ones(1000))
    with pytest.raises(WeightSyncError, match="difference to v1, but this receiver holds v2"):
        pair.codec.decode(encoded, pair.receiver, pair.live)


def test_after_full_the_next_delta_is_whole() -> None:
    pair = Pair("delta", torch.zeros(100))
    pair.codec = CODECS["full"]
    pair.publish(torch.ones(100))
    assert pair.sender.values is None, "it keeps no copy that the next could be compared with"
    pair.codec = CODECS["delta"]
    assert pair.publish(torch.ones(100)).form == "whole"
    assert pair.publish(torch.ones(100)).num_bytes == 0


def test_a_form_that_a_codec_cannot_decode_is_named() -> None:
    pair = Pair("delta", torch.zeros(100))
    encoded = pair.codec.encode(torch.eye(100)[0], pair.sender, 2)
    with pytest.raises(WeightSyncError, match=r"was sent as gaps, .* same codec"):
        CODECS["full"].decode(encoded, pair.receiver, pair.live)


def test_a_truncated_part_is_refused() -> None:
    pair = Pair("full", torch.zeros(1000))
    encoded = pair.codec.encode(torch.ones(1000), pair.sender, 2)
    damaged = dataclasses.replace(encoded, parts={"values": torch.ones(1)})
    with pytest.raises(WeightSyncError, match=r"'values' was received with shape \(1,\), but 1000"):
        pair.codec.decode(damaged, pair.receiver, pair.live)
    assert not pair.live.any()


def test_damaged_positions_are_refused_before_anything_is_written() -> None:
    pair = Pair("delta", torch.zeros(1000))
    encoded = pair.codec.encode(torch.eye(1000)[7] + torch.eye(1000)[900], pair.sender, 2)
    positions = torch.tensor([7, 255, 255, 255, 227], dtype=torch.uint8)  # 7, and 1000 = 7 + 1 + 3 * 255 + 227
    damaged = dataclasses.replace(encoded, form="gaps", parts={**encoded.parts, "positions": positions})
    with pytest.raises(WeightSyncError, match=r"2 values for 2 positions in 7\.\.1000 of 1000"):
        pair.codec.decode(damaged, pair.receiver, pair.live)
    assert not pair.live.any()


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_versions_give_the_same_bytes(codec: str) -> None:
    runs = []
    for _ in range(2):
        first, *versions = walk(torch.bfloat16, 5)
        pair = Pair(codec, first)
        runs.append([pair.publish(current) for current in versions])
    for left, right in zip(*runs, strict=True):
        assert left.form == right.form
        assert left.parts.keys() == right.parts.keys()
        for name, part in left.parts.items():
            assert part.dtype == right.parts[name].dtype
            assert torch.equal(part.view(torch.uint8), right.parts[name].view(torch.uint8))


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_encoded_is_not_changed(codec: str) -> None:
    current = torch.linspace(-1, 1, 1000)
    pair = Pair(codec, torch.zeros(1000))
    copy = current.clone()
    pair.publish(current)
    assert same_bits(current, copy)
    if pair.sender.values is not None:
        assert pair.sender.values.data_ptr() != current.data_ptr()


def test_delta_counts_no_base_as_not_measured() -> None:
    assert DeltaCodec().encode(torch.zeros(3), SenderState("w"), 1).num_changed is None


def test_an_invalid_header_is_refused() -> None:
    header, payload = to_wire(CODECS["full"].encode(torch.ones(4), SenderState("w"), 1))
    header[0] = 99
    with pytest.raises(WeightSyncError, match="w was received in form 99"):
        from_wire(header, payload, "w", torch.float32, 4)
