"""The traced layout of code that copies tensors equals what the code does to real tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.layout.algebra import Layout, TensorSpec
from penstock.weights.layout.tracing import Trace

from .models import PADDING, buffers_of, numbered

Given = dict[str, torch.Tensor]
Load = Callable[[Given, torch.Tensor], object]
TENSORS = [TensorSpec("a", (6, 4)), TensorSpec("b", (3, 4)), TensorSpec("c", (2, 4, 3)), TensorSpec("d", ())]


def permuted(given: Given, into: torch.Tensor) -> None:
    """As for stacked experts that are copied and transposed."""
    into.view(-1)[:24].view(2, 4, 3).copy_(given["c"])
    into.view(-1)[24:48].view(2, 3, 4).copy_(given["c"].permute(0, 2, 1).contiguous())


def regrouped(given: Given, into: torch.Tensor) -> None:
    """As for heads whose query, key and value are adjacent."""
    into.view(-1)[:24].copy_(given["a"].view(2, 3, 4).transpose(0, 1).reshape(6, 4).view(-1))


def joined(given: Given, into: torch.Tensor) -> None:
    both = torch.cat([given["b"], given["a"][2:5]], dim=0)
    into.view(-1)[:24].view(6, 4).copy_(both)
    stacked = torch.stack([given["b"], given["a"][:3]], dim=1)
    into.view(-1)[24:36].view(3, 4).copy_(stacked[:, 1])


def overwritten(given: Given, into: torch.Tensor) -> None:
    flat = into.view(-1)
    flat[:24].view(6, 4).copy_(given["a"])
    flat[8:20].view(3, 4).copy_(given["b"])
    flat[2:6].zero_()


def stepped(given: Given, into: torch.Tensor) -> None:
    flat = into.view(-1)
    flat[:12].view(3, 4).copy_(given["a"][::2])
    flat[12:24].view(6, 2).copy_(given["a"][:, 1::2])
    flat[24:36].view(3, 4).copy_(given["b"][:1].expand(3, 4))


def scalar(given: Given, into: torch.Tensor) -> None:
    into.view(-1)[5].copy_(given["d"])
    into.view(-1)[8:11].copy_(given["d"])


def cast(given: Given, into: torch.Tensor) -> None:
    into.view(-1)[:12].copy_(given["b"].to(torch.float64).t().reshape(-1))
    empty = torch.zeros_like(given["a"])
    empty[1:4].copy_(given["b"])
    into.view(-1)[24:].view(6, 4).copy_(empty)


LOADS: list[Load] = [permuted, regrouped, joined, overwritten, stepped, scalar, cast]


@pytest.mark.parametrize("shape", [(48,), (2, 24)])
@pytest.mark.parametrize("load", LOADS)
def test_what_is_traced_is_what_is_loaded(load: Load, shape: tuple[int, ...]) -> None:
    given = {name: torch.from_numpy(values).float() for name, values in numbered(TENSORS).items()}
    held = torch.full(shape, float(PADDING))
    load(given, held)
    parameter = torch.empty(shape, device="meta")
    with Trace(TENSORS, torch.float32) as trace:
        load(trace.sources, parameter)
    shards = trace.shards(0, {"w": parameter})
    layout = Layout({name: tuple(some) for name, some in shards.items()}, ({"w": 48},))
    ours = buffers_of(layout, numbered(TENSORS))[0]["w"]
    copied = held.numpy().ravel()
    is_copied = (copied != PADDING) & ~is_constant(load, copied)
    np.testing.assert_array_equal(ours[is_copied], copied[is_copied])
    assert (ours[~is_copied] == PADDING).all(), "what is no element of a tensor is in no shard"


def is_constant(load: Load, copied: np.ndarray) -> np.ndarray:
    """Elements that the code has set to 0; one source element is also numbered 0."""
    numbers = np.arange(copied.size)
    if load is overwritten:
        return (numbers >= 2) & (numbers < 6)
    return (numbers >= 24) & ((numbers < 28) | (numbers >= 40)) if load is cast else numbers < 0


def test_experts_one_by_one_are_one_box() -> None:
    specs, parameter = [TensorSpec("w", (5, 6, 4))], torch.empty((5, 2, 3, 4), device="meta")
    with Trace(specs, torch.float32) as trace:
        for expert in range(5):
            for half in range(2):
                parameter[expert, half].copy_(trace.sources["w"][expert].chunk(2)[half])
    (shard,) = trace.shards(0, {"w13": parameter})["w"]
    assert shard.box == ((0, 5), (0, 6), (0, 4))
    assert shard.view == ("w13", 0, (24, 4, 1))


def computed(given: Given, into: torch.Tensor) -> None:
    into.view(6, 4).copy_(given["a"] + 1)


def gathered_by_index(given: Given, into: torch.Tensor) -> None:
    into.view(6, 4).copy_(given["a"][torch.tensor([1, 0, 3, 2, 5, 4], device="meta")])


def changed_in_place(given: Given, into: torch.Tensor) -> None:
    into.view(6, 4).copy_(given["a"])
    into.add_(1)


@pytest.mark.parametrize("load", [computed, gathered_by_index, changed_in_place])
def test_computed_elements_are_refused_with_the_operation(load: Load) -> None:
    parameter = torch.empty((6, 4), device="meta")
    with Trace(TENSORS, torch.float32) as trace:
        load(trace.sources, parameter)
    with pytest.raises(WeightSyncError, match=r"writes into w are computed by aten\.\w+.*weights\.transport=gather"):
        trace.shards(0, {"w": parameter})


def test_a_parameter_that_is_not_row_major_is_refused() -> None:
    parameter = torch.empty((4, 6), device="meta").t()
    with Trace(TENSORS, torch.float32) as trace:
        parameter.copy_(trace.sources["a"])
    with pytest.raises(WeightSyncError, match=r"w is not contiguous: strides \(1, 6\) of \(6, 4\)"):
        trace.shards(0, {"w": parameter})
