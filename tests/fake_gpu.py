"""A fake GPU and a fake NCCL for machines without a GPU: tensors that report `cuda`, and a backend for only those.

The elements are in main memory, and torch's own operations run on them. Errors of a GPU are reproduced: operands on
different devices, and messages from or to main memory. The order of streams is checked by `tests.fake_streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from penstock.kernels.gpu import dispatch

GPU = torch.device("cuda", 0)
_BETWEEN_DEVICES = {torch.Tensor.copy_, torch.Tensor.to, torch.Tensor.cpu}
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class GpuTensor(torch.Tensor):
    """A tensor that reports to be on `cuda:0`."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(function, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """Makes `torch.empty(..., device="cuda")` and similar functions return a `GpuTensor`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(function, args, kwargs or {})


def _compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
    if function == _DEVICE and ours:
        return GPU
    if function is torch.device:
        return function(*args, **kwargs)
    if function is torch.Tensor.to and isinstance(args[1], str):
        args = (args[0], torch.device(args[1]), *args[2:])
    between = function in _BETWEEN_DEVICES
    if ours and not between and any(tensor.ndim for tensor in tensors if not isinstance(tensor, GpuTensor)):
        raise RuntimeError(f"{function}: Expected all tensors to be on the same device, but found cuda:0 and cpu!")
    named = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.device)]
    named += [torch.device(kwargs["device"])] if isinstance(kwargs.get("device"), str) else []
    is_ours = named[0].type == "cuda" if named else bool(ours) and function is not torch.Tensor.cpu

    def here(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return in_main_memory(leaf) if isinstance(leaf, GpuTensor) else leaf

    if isinstance(kwargs.get("device"), str):
        kwargs = {**kwargs, "device": "cpu"}
    results = function(*tree_map(here, args), **tree_map(here, kwargs))
    if function is torch.Tensor.copy_:
        observe(function, args, kwargs, args[0])
        return args[0]
    results = tree_map(
        lambda one: one.as_subclass(GpuTensor) if is_ours and isinstance(one, torch.Tensor) else one, results
    )
    observe(function, args, kwargs, results)
    return results


def observe(function: Any, args: Any, kwargs: dict[str, Any], results: Any) -> None:
    """Called for every operation; `tests.fake_streams` puts its own in this place."""


def in_main_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a plain CPU tensor."""
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(torch.Tensor)


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Allow this thread to create tensors on the GPU."""
    with _Factories():
        yield


def observe_messages(sent: list[torch.Tensor], received: list[torch.Tensor]) -> Callable[[], None]:
    """Called for every group of messages, likewise; the result is called when its end was waited for."""
    return lambda: None


class FakeNccl:
    """The Python interface of `ProcessGroupNCCL`: grouped messages, from and to GPU memory.

    Every argument passes through torch's own binding of `Backend`, which raises for invalid calls.

    Attributes:
        num_unfinished: Groups of messages that were not waited for.
    """

    class Options(Backend.Options):
        def __init__(self) -> None:
            super().__init__("nccl")

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        over_gloo = ProcessGroupGloo._Options()
        over_gloo._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        over_gloo._timeout = options._timeout
        self._gloo = ProcessGroupGloo(store, rank, size, over_gloo)
        self._begun: list[Any] | None = None
        self._sent: list[torch.Tensor] = []
        self._received: list[torch.Tensor] = []
        self.num_unfinished = 0

    def eager_connect_single_device(self, *args: Any) -> None:
        Backend.eager_connect_single_device(self._gloo, *args)

    def send(self, tensors: list[torch.Tensor], *args: Any) -> None:
        self._messages().append(Backend.send(self._gloo, _of_gpu(tensors), *args))
        self._sent += tensors

    def recv(self, tensors: list[torch.Tensor], *args: Any) -> None:
        self._messages().append(Backend.recv(self._gloo, _of_gpu(tensors), *args))
        self._received += tensors

    def _start_coalescing(self, *args: Any) -> None:
        _takes(Backend._start_coalescing, self._gloo, *args)
        assert self._begun is None, "a group in a group"
        self._begun = []

    def _end_coalescing(self, *args: Any) -> SimpleNamespace:
        _takes(Backend._end_coalescing, self._gloo, *args)
        works, self._begun = self._messages(), None
        self.num_unfinished += 1
        wait_for_order = observe_messages(self._sent, self._received)
        self._sent, self._received = [], []

        def wait(timeout: timedelta) -> None:
            for work in works:
                work.wait(timeout)
            wait_for_order()
            self.num_unfinished -= 1

        return SimpleNamespace(wait=wait)

    def abort(self) -> None:
        self._gloo = None

    def _messages(self) -> list[Any]:
        assert self._begun is not None, "a message outside of a group"
        return self._begun


def _of_gpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in tensors:
        if tensor.device.type != "cuda" or not tensor.is_contiguous():
            raise ValueError("Tensors must be CUDA and dense")  # as ProcessGroupNCCL does
    return [in_main_memory(tensor) for tensor in tensors]


def _takes(method: Any, *args: Any) -> None:
    """Check that the binding accepts these arguments: gloo raises for the unsupported call only after that."""
    with pytest.raises(RuntimeError, match="does not implement"):
        method(*args)


@contextmanager
def a_machine_with_nccl() -> Iterator[list[FakeNccl]]:
    """Make torch in this process find a GPU driver and NCCL, and no Triton; yields the list of created backends."""
    made: list[FakeNccl] = []

    class Listed(FakeNccl):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    stream = SimpleNamespace(synchronize=lambda: None)
    with ExitStack() as patches:
        for where, name, value in (
            (distributed_c10d, "ProcessGroupNCCL", Listed),
            (torch.cuda, "current_device", lambda: GPU.index),
            (torch.cuda, "synchronize", lambda _device=None: None),
            (torch.cuda, "device", lambda _device: nullcontext()),
            (torch.cuda, "Stream", lambda _device=None: stream),
            (torch.cuda, "stream", lambda _stream: nullcontext()),
            (dispatch, "has_triton", lambda: False),
        ):
            patches.enter_context(mock.patch.object(where, name, value, create=True))
        yield made
