"""Checksums detect every changed, moved or lost element; golden value by independent integer arithmetic."""

from __future__ import annotations

from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.weights import checksum
from penstock.weights.checksum import combine_checksums, strided_sum, tensor_checksum
from penstock.weights.transport.shared_memory import read_version, write_version


@pytest.mark.parametrize(("dtype", "word"), [(torch.float32, np.int32), (torch.bfloat16, np.int16)])
def test_checksum_equals_python_integers(dtype: torch.dtype, word: type) -> None:
    tensor = torch.randn(7, 5).to(dtype)
    words = tensor.flatten().view(torch.int32 if dtype is torch.float32 else torch.int16).numpy().astype(word)
    expected = sum(int(value) * (2 * index + 1) for index, value in enumerate(words)) % 2**64
    assert tensor_checksum(tensor) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("columns", [3, 15, 16, 65, 1000])
def test_a_part_of_a_buffer_adds_its_words_at_their_addresses(dtype: torch.dtype, columns: int) -> None:
    """Rows shorter and longer than those that are summed by compiled code, dense and with a gap, in any direction."""
    whole = (100 * torch.randn(9, columns + 5)).to(dtype)
    words = whole.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[whole.element_size()]).tolist()
    for part, rows in ((whole[2:, :columns], [row[:columns] for row in words[2:]]), (whole, words)):
        for address, strides in ((0, (columns + 5, 1)), (2**40 + 7, (1, 5000)), (3, (2**20, 2))):
            expected = sum(
                word * (2 * (address + row * strides[0] + column * strides[1]) + 1)
                for row, line in enumerate(rows)
                for column, word in enumerate(line)
            )
            assert strided_sum(part, address, strides) == expected % 2**64


def test_checksum_sees_order_and_single_elements() -> None:
    tensor = torch.arange(12, dtype=torch.float32)
    changed, swapped = tensor.clone(), tensor.clone()
    changed[5] += 1e-6
    swapped[[2, 3]] = swapped[[3, 2]]
    assert len({tensor_checksum(t) for t in (tensor, changed, swapped)}) == 3


def test_checksum_of_a_slice_is_that_of_its_copy() -> None:
    tensor = torch.randn(6, 4)
    assert tensor_checksum(tensor[2:5]) == tensor_checksum(tensor[2:5].clone())


def test_combined_checksum_binds_values_to_names() -> None:
    assert combine_checksums([("a", 1), ("b", 2)]) == combine_checksums([("b", 2), ("a", 1)])
    assert combine_checksums([("a", 1), ("b", 2)]) != combine_checksums([("a", 2), ("b", 1)])


def test_a_version_survives_the_trip_through_shared_memory(tmp_path: Path) -> None:
    tensors = {"x.weight": torch.randn(3, 4), "y.bias": torch.randn(5)}
    manifest = write_version(tensors.items(), 7, "bfloat16", tmp_path)
    received = dict(read_version(manifest))
    assert manifest.version == 7
    assert manifest.num_bytes == (12 + 5) * 2
    for entry in manifest.entries:
        assert torch.equal(received[entry.name], tensors[entry.name].to(torch.bfloat16))
        assert tensor_checksum(received[entry.name]) == entry.checksum


def test_a_missing_version_is_named(tmp_path: Path) -> None:
    manifest = write_version([("x", torch.zeros(2))], 3, "float32", tmp_path)
    Path(manifest.location).unlink()
    with pytest.raises(WeightSyncError, match=r"publish v3: .* does not exist"):
        list(read_version(manifest))


def test_without_a_folder_for_the_compiled_sum_it_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = numba.njit

    def njit(function: object, *, nogil: bool, cache: bool = False) -> object:
        if cache:
            raise RuntimeError("cannot cache function '_weighted_sum': no locator available for file")
        return compiled(function, nogil=nogil)

    monkeypatch.setattr(numba, "njit", njit)
    checksum._native_sum.cache_clear()
    words = torch.arange(32.0)
    try:
        found = tensor_checksum(words)
    finally:
        checksum._native_sum.cache_clear()
    monkeypatch.undo()
    assert found == tensor_checksum(words)
