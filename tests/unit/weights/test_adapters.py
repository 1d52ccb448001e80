"""Adapters added to the base weights of each engine rank: only its own slice, and always to the base."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.checksum import tensor_checksum
from penstock.weights.layout.sides import EngineLayout
from penstock.weights.transport.adapters import BaseWeights, entries_of
from tests.conftest import TINY_SHAPE
from tests.layouts import read

from .models import PADDING, vllm_rank

CPU = torch.device("cpu")


def slices(tensors: dict[str, torch.Tensor], tp_size: int, rank: int) -> dict[str, torch.Tensor]:
    """A rank's parameters, sliced, fused and padded by a separate implementation."""
    arrays = vllm_rank({name: tensor.numpy() for name, tensor in tensors.items()}, TINY_SHAPE, tp_size, rank)
    return {name: torch.tensor(np.where(array == PADDING, 0, array)).flatten() for name, array in arrays.items()}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_rank_adds_its_own_slice_to_its_base(tp_size: int, publisher_of_tiny, tiny_tensors: Callable) -> None:
    publish = publisher_of_tiny(EngineLayout("vllm", read("tiny").layouts[tp_size]))
    for rank in range(tp_size):
        base = BaseWeights(rank)
        live = slices(tiny_tensors(0), tp_size, rank)
        for seed in (-1, -2, -3):
            manifest = publish(-seed, seed)
            merged = base.merge(manifest, live, CPU)
            live |= merged
            expected = slices(tiny_tensors(seed), tp_size, rank)
            assert live.keys() == expected.keys()
            for name, values in expected.items():
                torch.testing.assert_close(live[name], values, rtol=0, atol=1e-6)
            entries = entries_of(manifest, rank, merged)
            assert {entry.name: entry.checksum for entry in entries} == {
                name: tensor_checksum(values) for name, values in live.items()
            }
    assert manifest.num_bytes < 0.5 * sum(tensor.nbytes for tensor in tiny_tensors(0).values())


def test_a_base_that_differs_from_the_trainers_is_refused(publisher_of_tiny, tiny_tensors: Callable) -> None:
    manifest = publisher_of_tiny(EngineLayout("vllm", read("tiny").layouts[1]))(1, -1)
    live = slices(tiny_tensors(0), 1, 0)
    live["model.norm.weight"] = live["model.norm.weight"] + 1e-6
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight of rank 0 was loaded with other values"):
        BaseWeights(0).merge(manifest, live, CPU)
