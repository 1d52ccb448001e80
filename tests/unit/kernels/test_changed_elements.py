"""Changed words against numpy, and the wire's bytes. Runs on the torch version, and interpreted on the Triton one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dataflow.errors import ShapeError
from penstock.kernels.changed_elements import FlaggedChanges, find_changes
from penstock.weights.codec.codec import ReceiverState, SenderState
from penstock.weights.codec.delta import DeltaCodec, pack_positions
from tests.tiers import examples


def changed_pair(num_elements: int, density: float, dtype: torch.dtype, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two buffers of words that differ in about that share of them."""
    rng = np.random.default_rng(seed)
    kind = {torch.int16: np.int16, torch.int32: np.int32}[dtype]
    previous = rng.integers(-30000, 30000, num_elements).astype(kind)
    flips = rng.random(num_elements) < density
    return np.where(flips, previous ^ 1, previous).astype(kind), previous


@settings(max_examples=examples(25), deadline=None)
@given(
    num_elements=st.integers(0, 1500),
    density=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    dtype=st.sampled_from([torch.int16, torch.int32]),
    seed=st.integers(0, 999),
)
def test_bitmap_positions_and_values_are_those_of_numpy(num_elements, density, dtype, seed) -> None:
    current, previous = changed_pair(num_elements, density, dtype, seed)
    changes = find_changes(torch.from_numpy(current), torch.from_numpy(previous))
    is_changed = current != previous
    assert changes.num_elements == num_elements
    assert changes.num_changed == is_changed.sum()
    assert changes.positions().dtype == torch.int64
    assert changes.positions().tolist() == np.flatnonzero(is_changed).tolist()
    assert changes.values().dtype == dtype
    assert changes.values().tolist() == current[is_changed].tolist()
    assert changes.bitmap().tolist() == np.packbits(is_changed, bitorder="little").tolist()


@pytest.mark.parametrize("density", [0.5, 0.05, 0.004, 0.0005])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_delta_codec_sends_the_same_bytes_and_restores_what_changed(density, dtype) -> None:
    words = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    current, previous = (torch.from_numpy(each).view(dtype) for each in changed_pair(6007, density, words, seed=3))
    sender, receiver = SenderState("b"), ReceiverState("b")
    live = torch.empty_like(previous)
    for version, buffer in enumerate((previous, current)):
        encoded = DeltaCodec().encode(buffer, sender, version)
        DeltaCodec().decode(encoded, receiver, live)
    is_changed = current.view(words) != previous.view(words)
    form, packed = pack_positions(
        FlaggedChanges(current, is_changed, int(is_changed.sum()))
    )  # whatever found the changes above
    assert encoded.form == form
    assert torch.equal(encoded.parts["positions"], packed)
    assert torch.equal(encoded.parts["values"].view(words), current.view(words)[is_changed])
    assert torch.equal(live.view(words), current.view(words))


def test_bits_are_compared_and_not_numbers() -> None:
    previous = torch.tensor([float("nan"), 0.0, 1.0]).view(torch.int32)
    current = torch.tensor([float("nan"), -0.0, 1.0]).view(torch.int32)
    assert find_changes(current, previous).positions().tolist() == [1]


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"current is \[3\] torch.int16, previous \[3\] torch.int32"):
        find_changes(torch.zeros(3, dtype=torch.int16), torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ShapeError, match=r"torch\.float32"):
        find_changes(torch.zeros(3), torch.zeros(3))
