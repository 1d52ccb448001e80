"""Fake CUDA streams and events that record the order they enforce, and a check that every access is in it.

Operations on tensors of `tests.fake_gpu` are attributed to the current stream of the thread's process (a test plays
several). An operation comes after the operations before it on its stream, after what its stream
has waited for, and after what the host had waited for when it launched it. Anything else may still be running on a GPU:

    read        comes after the last write to the memory
    write       comes after the last write and after every read since

Vector clocks hold this order (Mattern 1988): clock[s][r] is the number of operations of stream r that come before the
next operation of s. A violation raises `RaceError` at the later access. Storages are taken as a whole. Freed memory
that an allocator reuses is not modelled.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from penstock.weights.transport import staging
from tests import fake_gpu

Clock = Counter[str]
_VIEWS_OF_NOTHING = {"empty", "empty_like", "new_empty"}
_READ_BY_HOST = {"item", "tolist", "numpy", "equal", "cpu", "__int__", "__index__", "__float__", "__bool__"}
_WRITES = {"__iadd__", "__isub__", "__imul__", "__setitem__"}


class RaceError(AssertionError):
    """An access that may happen before, or while, the one that it depends on."""


@dataclass
class _Memory:
    """The accesses to one storage that a later one has to come after: stream -> number of the operation."""

    storage: torch.UntypedStorage
    written: Clock = field(default_factory=Counter)
    read: Clock = field(default_factory=Counter)


class Order:
    """What is known to come before what.

    Attributes:
        num_accesses: Checked so far.
    """

    def __init__(self) -> None:
        self.num_accesses = 0
        self._here = threading.local()
        self._lock = threading.RLock()
        self._clocks: defaultdict[str, Clock] = defaultdict(Counter)
        self._hosts: defaultdict[str, Clock] = defaultdict(Counter)
        self._memory: dict[int, _Memory] = {}
        self._num_streams = 0

    @property
    def process(self) -> str:
        """What this thread plays."""
        return getattr(self._here, "process", "engine")

    @property
    def stream(self) -> str:
        """The current stream."""
        return getattr(self._here, "stream", None) or f"{self.process}: default stream"

    @contextmanager
    def within(self, process: str) -> Iterator[None]:
        """Run the body as another process. It knows what the host of this one has waited for, as from a message."""
        before = self.process
        self._hosts[process] |= self._hosts[before]
        self._here.process = process
        yield
        self._here.process = before
        self._hosts[before] |= self._hosts[process]

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before = getattr(self._here, "stream", None)
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def new_stream(self) -> str:
        with self._lock:
            self._num_streams += 1
            return f"{self.process}: stream {self._num_streams}"

    def clock(self, stream: str) -> Clock:
        """A copy: what the next operation of the stream comes after."""
        return Counter(self._clocks[stream])

    def stream_waits(self, stream: str, clock: Clock) -> None:
        self._clocks[stream] |= clock

    def host_waits(self, *streams: str) -> None:
        for stream in streams:
            self._hosts[self.process] |= self._clocks[stream]

    def synchronize(self) -> None:
        """The host waits for all streams of its process."""
        self.host_waits(*(stream for stream in list(self._clocks) if stream.startswith(f"{self.process}: ")))

    def access(self, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """An operation on the current stream.

        Raises:
            RaceError: If it may come too early.
        """
        with self._lock:
            self._access(what, reads, writes)

    def _access(self, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        stream = self.stream
        clock = self._clocks[stream] = self._clocks[stream] | self._hosts[self.process]
        clock[stream] += 1
        self.num_accesses += 1
        for tensor in reads:
            memory = self._of(tensor)
            self._check(what, "reads", memory.written, clock, stream)
            memory.read[stream] = clock[stream]
        for tensor in writes:
            memory = self._of(tensor)
            self._check(what, "overwrites", memory.written | memory.read, clock, stream)
            memory.written, memory.read = Counter({stream: clock[stream]}), Counter()

    def _of(self, tensor: torch.Tensor) -> _Memory:
        storage = fake_gpu.in_main_memory(tensor).untyped_storage()
        return self._memory.setdefault(storage.data_ptr(), _Memory(storage))  # held, so no address is used twice

    def _check(self, what: str, does: str, before: Clock, clock: Clock, stream: str) -> None:
        for other, number in before.items():
            if clock[other] < number:
                raise RaceError(
                    f"{what} on {stream!r} {does} memory that {other!r} may still use: nothing waits for it"
                )

    def message(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Callable[[], None]:
        """A group of messages: on NCCL's stream, which waits for the current one. Returns what waits for its end."""
        current, nccl = self.stream, f"{self.process}: stream of NCCL"
        self.stream_waits(nccl, self.clock(current) | self._hosts[self.process])
        with self.on(nccl):
            self.access("a message", sent, received)
        done = self.clock(nccl)

        def wait() -> None:
            self.stream_waits(current, done)
            self._hosts[self.process] |= done

        return wait

    def observe(self, function: Any, args: Any, kwargs: dict[str, Any], results: Any) -> None:
        """An operation of torch on tensors of the fake GPU, as `tests.fake_gpu` reports it."""
        name = getattr(function, "__name__", "")
        inputs = _on_gpu((args, kwargs))
        known = {_place(tensor) for tensor in inputs}
        made = [tensor for tensor in _on_gpu(results) if _place(tensor) not in known]
        is_write = name in _WRITES or (name.endswith("_") and not name.startswith("__"))
        written = [args[0]] if is_write and isinstance(args[0], fake_gpu.GpuTensor) else []
        written += _on_gpu(kwargs.get("out"))
        comes_to_host = bool(inputs) and (name in _READ_BY_HOST or _on_host(results) or (is_write and not written))
        if name in _VIEWS_OF_NOTHING or not (made or written or comes_to_host):
            return
        overwritten = {_place(tensor) for tensor in written} if name in ("copy_", "zero_", "fill_") else set()
        read = [tensor for tensor in inputs if _place(tensor) not in overwritten]
        self.access(name, read, [*written, *made])
        if comes_to_host:
            self.host_waits(self.stream)


def _on_gpu(tree: Any) -> list[torch.Tensor]:
    """Tensors of the fake GPU, but empty ones, which all have the same address."""
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, fake_gpu.GpuTensor))
    return [leaf for leaf in leaves if fake_gpu.in_main_memory(leaf).numel()]


def _on_host(tree: Any) -> bool:
    """Whether a tensor in main memory is among the results."""
    return any(
        isinstance(leaf, torch.Tensor) and not isinstance(leaf, fake_gpu.GpuTensor) for leaf in tree_leaves(tree)
    )


def _place(tensor: torch.Tensor) -> int:
    return fake_gpu.in_main_memory(tensor).untyped_storage().data_ptr()


@contextmanager
def recorded_streams() -> Iterator[Order]:
    """Replace torch's streams and events, for tensors of the fake GPU."""
    order = Order()

    class Stream:
        def __init__(self, device: Any = None, *, name: str | None = None) -> None:
            self.name = name or order.new_stream()

        def wait_stream(self, other: Stream) -> None:
            order.stream_waits(self.name, order.clock(other.name))

        def wait_event(self, event: Event) -> None:
            order.stream_waits(self.name, event.recorded)

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            order.host_waits(self.name)

    class Event:
        def __init__(self, **options: Any) -> None:
            self.recorded: Clock = Counter()

        def record(self, stream: Stream | None = None) -> None:
            self.recorded = order.clock(order.stream if stream is None else stream.name)

        def wait(self, stream: Stream | None = None) -> None:
            order.stream_waits(order.stream if stream is None else stream.name, self.recorded)

    @contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        with order.on(order.stream if stream is None else stream.name):
            yield

    kept: dict[str, Stream] = {}  # the processes of a test are one

    def own_stream(device_index: int) -> Stream:
        if order.process not in kept:
            kept[order.process] = Stream()
        return kept[order.process]

    patches: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", Event),
        (torch.cuda, "stream", on),
        (staging, "_own_stream", own_stream),
        (torch.cuda, "current_stream", lambda device=None: Stream(name=order.stream)),
        (torch.cuda, "synchronize", lambda device=None: order.synchronize()),
        (torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(uuid="GPU-0")),
        (fake_gpu, "observe", order.observe),
        (fake_gpu, "observe_messages", order.message),
    )
    with ExitStack() as stack:
        for where, name, value in patches:
            stack.enter_context(mock.patch.object(where, name, value))
        yield order
