"""Bytes of the tensors that exist at once, counted while code runs: on the CPU, or of tensors without memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations of this thread create inside the context, until they are freed.

    Memory that an operation takes and returns within itself is not seen, nor what an allocator rounds up.

    Attributes:
        now: Bytes of the live ones.
        peak: Largest value of `now` since `reset_peak`.
        largest: Most elements of one new tensor since `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.largest = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for one in tree_leaves(results):
            if isinstance(one, torch.Tensor):
                self.count(one)
        return results

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, unless it is counted already, or has no bytes: on the meta device, or a DTensor's,
        whose local tensor has them.
        """
        is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
        if tensor.device.type == "meta" or is_wrapper:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        self._seen[key] = 0
        self.resized(tensor)
        self.largest = max(self.largest, tensor.numel())
        weakref.finalize(storage, self._freed, key)

    def resized(self, tensor: torch.Tensor) -> None:
        """Count the memory that the storage of a tensor has now."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            self.now += size - self._seen[key]
            self._seen[key] = size
            self.peak = max(self.peak, self.now)

    def reset_peak(self) -> None:
        self.peak, self.largest = self.now, 0

    def _freed(self, key: int) -> None:
        self.now -= self._seen.pop(key)
