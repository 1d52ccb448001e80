"""The processes of test_weight_group.py: a program, started as STORY RANK PORT FOLDER.

All processes of a story run its scenarios one after the other, since starting processes takes longer than the
scenarios. Each process writes its observations to a file, which the tests read.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.overrides import TorchFunctionMode

from penstock.dataflow.errors import WeightSyncError
from penstock.weights.checksum import tensor_checksum
from penstock.weights.codec.wire import CODECS
from penstock.weights.layout.algebra import Layout
from penstock.weights.planner.plan import Plan, make_plan
from penstock.weights.planner.relay import Hop, relay_tree
from penstock.weights.transport.process_group.group import LostPeerError, TransferGroup, connect_store
from penstock.weights.transport.process_group.members import Members, Route
from penstock.weights.transport.process_group.transfer import Transfer
from tests.layouts import training_layout
from tests.unit.weights.models import (
    PADDING,
    buffers_of,
    engine_layout,
    numbered,
    staging_buffers,
    tensors_of,
    vllm_rank,
)

HOST = "127.0.0.1"
KEPT: list[WeightSyncError] = []
"""Errors that are still referenced must not keep connections open."""
LARGE = 100_000_000
"""Elements of a message that takes a while."""
BUCKET_BYTES = 4096
START_S = 40.0
"""Longest wait for processes that import torch."""
MODEL, TENSORS = tensors_of("llama")
FULL = numbered(TENSORS)
ZERO3 = training_layout(TENSORS, num_replicas=2, is_partitioned=True)
NAMES = ("engine-0", "engine-1", "engine-2")

Flat = dict[str, torch.Tensor]
Story = dict[str, Any]


def engine(tp: int) -> Layout:
    return engine_layout("llama", tp)


def plan_to(tp: int, item_bytes: int = 4) -> Plan:
    return make_plan(ZERO3, engine(tp), item_bytes, bucket_bytes=BUCKET_BYTES)


BACK = make_plan(engine(2), ZERO3, 4, bucket_bytes=BUCKET_BYTES)


def held(layout: Layout, rank: int, version: int) -> Flat:
    """A rank's part of a version: each element is its number plus the version."""
    full = {name: values + version for name, values in FULL.items()}
    return {name: torch.from_numpy(values).float() for name, values in buffers_of(layout, full)[rank].items()}


def differences(received: Flat, reference: dict[str, np.ndarray], version: int) -> list[str]:
    """Buffers that differ from the reference, by elements or by checksum; padding is zero."""
    wrong = [] if received.keys() == reference.keys() else ["names"]
    for name, values in reference.items():
        expected = torch.from_numpy(np.where(values == PADDING, 0, values + version).ravel()).to(received[name].dtype)
        if not torch.equal(received[name], expected) or tensor_checksum(received[name]) != tensor_checksum(expected):
            wrong.append(name)
    return wrong


class Allocations(TorchFunctionMode):
    """Bytes of all storages that torch calls allocate, except `known` ones."""

    def __init__(self, *known: Flat) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for held in known for tensor in held.values()}
        self.made: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in self._known:
            self.made[made.untyped_storage().data_ptr()] = made.untyped_storage().nbytes()
        return made


class Interrupted(dict[str, torch.Tensor]):
    """Buffers that trigger an event in the middle of a transfer."""

    def __init__(self, buffers: Flat, reads: int, event: Callable[[], None]) -> None:
        super().__init__(buffers)
        self._reads, self._event = reads, event

    def __getitem__(self, name: str) -> torch.Tensor:
        self._reads -= 1
        if self._reads == 0:
            self._event()
        return super().__getitem__(name)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except WeightSyncError as error:
        KEPT.append(error)
        return str(error)
    return "no error"


def join(
    store_at: tuple[str, int], members: Members, rank: int, generation: int, timeout_s: float = START_S
) -> TransferGroup:
    return TransferGroup(store_at, members, rank, timeout_s=timeout_s, generation=generation)


def hops_of(members: Members) -> tuple[Hop, ...]:
    return relay_tree([f"node {name}" for name in members.engines], fanout=1)


def publish(group: TransferGroup, version: int, tp: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Publish from ZeRO-3 ranks to relayed engines; returns the differences in this process, and bytes by peer."""
    members = group.members
    plan = plan_to(tp, dtype.itemsize)
    ranks = {members.engine(replica, rank): rank for replica in range(len(members.engines)) for rank in range(tp)}
    source = held(ZERO3, group.rank, version) if group.rank < 2 else {}
    is_engine = group.rank in ranks
    destination = staging_buffers(engine(tp).buffers[ranks[group.rank]], dtype) if is_engine else {}
    with Allocations(source, destination) as allocations:
        transfer = Transfer(group, plan, members.to_engines(hops_of(members)), dtype)
        traffic = transfer.run(version, source, destination)
    reference = vllm_rank(FULL, MODEL, tp, ranks[group.rank]) if is_engine else {}
    return {
        "wrong": differences(destination, reference, version),
        "sent": dict(traffic.sent_bytes),
        "received": dict(traffic.received_bytes),
        "extra_bytes": transfer.extra_bytes,
        "allocated_bytes": sum(allocations.made.values()),
    }


def some_changed(version: int) -> dict[str, np.ndarray]:
    """Even numbers; a fiftieth of them changes by one per version."""
    return {name: 2 * values + (values % 50 <= version) for name, values in FULL.items()}


def publish_coded(group: TransferGroup, codec: str, versions: range) -> list[Story]:
    """Publish several versions through a codec, alternately into two version buffers as engines do."""
    members, layout = group.members, engine(1)
    transfer = Transfer(group, plan_to(1), members.to_engines(hops_of(members)), torch.float32, CODECS[codec])
    is_engine = group.rank >= 2
    buffers = [staging_buffers(layout.buffers[0], torch.float32) if is_engine else {} for _ in range(2)]
    seen = []
    for version in versions:
        full = some_changed(version)
        source = buffers_of(ZERO3, full)[group.rank] if group.rank < 2 else {}
        source = {name: torch.from_numpy(values).float() for name, values in source.items()}
        destination, previous = buffers[version % 2], buffers[(version - 1) % 2]
        traffic = transfer.run(version, source, destination, held=previous, wants_sums=True)
        expected = {
            name: torch.from_numpy(np.where(values == PADDING, 0, values).ravel()).float()
            for name, values in (vllm_rank(full, MODEL, 1, 0) if group.rank >= 2 else {}).items()
        }
        seen.append(
            {
                "off": max((float((destination[name] - expected[name]).abs().max()) for name in expected), default=0.0),
                "sent": dict(traffic.sent_bytes),
                "received": dict(traffic.received_bytes),
                "sums": [list(one) for one in traffic.sums or ()],
                "checksums": {name: tensor_checksum(values) for name, values in destination.items()},
                "changed": [traffic.num_changed, traffic.num_elements],
            }
        )
    return seen


def interrupted_publish(group: TransferGroup, version: int, victim: int, event: Callable[[], None]) -> None:
    """Trigger an event in one engine in about the middle of a transfer."""
    plan = plan_to(1)
    source = held(ZERO3, group.rank, version) if group.rank < 2 else {}
    destination = staging_buffers(engine(1).buffers[0], torch.float32) if group.rank >= 2 else {}
    if group.rank == victim:
        destination = Interrupted(destination, len(list(plan.copies)) // 2, event)
    route = group.members.to_engines(hops_of(group.members))
    Transfer(group, plan, route, torch.float32).run(version, source, destination)


def tell_exact(rank: int, store_at: tuple[str, int], done: Story, write_down: Callable[[], None]) -> None:
    """Two training ranks and one engine over two ranks; then they form a second group."""
    if rank < 2:
        store = distributed.PrefixStore("default", connect_store(*store_at, START_S))
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = join(store_at, Members(2, NAMES[:1], 2), rank, 0)
    done["v1"] = publish(group, 1, 2)
    done["v2"] = publish(group, 2, 2)
    done["bfloat16"] = publish(group, 3, 2, torch.bfloat16)
    source = held(engine(2), rank - 2, 4) if rank >= 2 else {}
    destination = staging_buffers(ZERO3.buffers[rank], torch.float32) if rank < 2 else {}
    traffic = Transfer(group, BACK, Route((2, 3), ((0, 1),)), torch.float32).run(4, source, destination)
    wrong = differences(destination, buffers_of(ZERO3, FULL)[rank], 4) if rank < 2 else []
    done["back"] = {"wrong": wrong, "sent": dict(traffic.sent_bytes)}
    group.close()
    group = join(store_at, Members(2, NAMES[:1], 2), rank, 1, 8.0)
    done["again"] = publish(group, 5, 2)
    if rank < 2:
        ones = torch.ones(1)
        distributed.all_reduce(ones)
        done["default group"] = float(ones)
        distributed.destroy_process_group()
    done["disagreement"] = error_of(lambda: publish(group, 7 if rank else 6, 2))
    done["closed"] = error_of(lambda: publish(group, 8, 2))
    write_down()


def tell_relayed(rank: int, store_at: tuple[str, int], done: Story, write_down: Callable[[], None]) -> None:
    """Two training ranks; engines of one rank join, one dies, one hangs; finally a training rank dies."""
    if rank < 3:
        group = join(store_at, Members(2, NAMES[:1]), rank, 0)
        done["one"] = publish(group, 1, 1)
        group.close()
    group = join(store_at, Members(2, NAMES), rank, 1)
    done["three"] = publish(group, 2, 1)
    for codec in ("full", "delta", "int8_delta"):
        done[codec] = publish_coded(group, codec, range(10, 14))
    group.close()
    done["absent"] = error_of(lambda: join(store_at, Members(2, (*NAMES, "engine-3")), rank, 2, 2.0))
    group = join(store_at, Members(2, NAMES), rank, 3, 8.0)
    done["lost"] = error_of(lambda: interrupted_publish(group, 3, 3, die))
    survivors, rank = Members(2, (NAMES[0], NAMES[2])), min(rank, 3)
    group = join(store_at, survivors, rank, 4, 8.0)
    done["survivors"] = publish(group, 3, 1)
    group.close()
    group = join(store_at, survivors, rank, 5, 1.5)
    done["late"] = error_of(lambda: interrupted_publish(group, 4, 3, lambda: time.sleep(3.0)))
    write_down()
    if rank in {0, 2}:
        group = join(store_at, Members(1, NAMES[:1]), rank // 2, 6, 8.0)
        one_large_message(store_at, group, done, write_down)


def one_large_message(
    store_at: tuple[str, int], group: TransferGroup, done: Story, write_down: Callable[[], None]
) -> None:
    """Kill the sender of a message after its first bytes were received."""
    store = connect_store(*store_at, START_S)
    if group.rank == 0:
        store.set("sender", str(os.getpid()))
        sending = group.links.exchange([(1, torch.ones(LARGE))], []).sending
        sending[0].finish(time.monotonic() + 8.0)
        return
    large = torch.zeros(LARGE)
    receiving = group.links.exchange([], [(0, large)]).receiving
    while not large[0]:
        time.sleep(0.0005)
    os.kill(int(store.get("sender")), signal.SIGKILL)
    try:
        receiving[0].finish(time.monotonic() + 8.0)
    except LostPeerError as lost:
        done["in the middle of a message"] = "late" if lost.is_late else "lost"
    done["all was received"] = bool(large[-1])
    write_down()


PROGRAM = "tests.integration.weight_group_stories"
STORIES = {"exact": (tell_exact, 4), "relayed": (tell_relayed, 5)}


def main() -> None:
    story, rank, port, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    done: Story = {}
    STORIES[story][0](rank, (HOST, port), done, lambda: (folder / f"{story}{rank}").write_text(json.dumps(done)))
