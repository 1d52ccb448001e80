"""Copies of weights on the streams of a GPU come after what they depend on; without any one of the waits they do not.

On the fake GPU, whose streams and events record the order that they enforce (`tests.fake_streams`).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.trainer.checkpoint import Counters, Fragment, TrainerSnapshot
from penstock.weights.checksum import tensor_checksum
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.transport import device_memory
from penstock.weights.transport.adapters import BaseWeights
from penstock.weights.transport.device_memory import OpenedVersionBuffers, VersionBuffer
from penstock.weights.transport.process_group import endpoints
from penstock.weights.transport.process_group.endpoints import (
    DeviceReceiver,
    ReceiverAddress,
    TransferGroupSpec,
    WeightSender,
)
from penstock.weights.transport.process_group.group import TransferGroup, serve_store
from penstock.weights.transport.shards import ShardTransfer, ShardWriter
from penstock.weights.transport.staging import on_own_stream, stage
from tests.fake_gpu import GPU, a_machine_with_nccl, in_main_memory, on_a_gpu
from tests.fake_streams import Order, RaceError, recorded_streams
from tests.layouts import torch_layout

SPECS = (TensorSpec("model.norm.weight", (1001,)), TensorSpec("model.embed_tokens.weight", (300, 7)))
TIMEOUT_S = 30.0


@pytest.fixture
def order() -> Iterator[Order]:
    with a_machine_with_nccl(), recorded_streams() as recorded, on_a_gpu():
        yield recorded


def nothing(*args: object, **kwargs: object) -> None:
    pass


@contextmanager
def without_synchronizing(device: torch.device) -> Iterator[None]:
    """`on_own_stream` without its wait."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def weights(version: int) -> dict[str, torch.Tensor]:
    """A training rank's weights, flat, on its device."""
    draw = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draw).flatten().to(GPU) for name, shape in SPECS}


def test_an_access_that_nothing_orders_is_found(order: Order) -> None:
    other = torch.cuda.Stream()

    def written_after(event: torch.cuda.Event) -> torch.Tensor:
        values = torch.zeros(8, device=GPU)
        event.record()
        return values

    values = written_after(event := torch.cuda.Event())
    other.wait_event(event)
    with torch.cuda.stream(other):
        values.sum()
    with pytest.raises(RaceError, match=r"copy_ on 'engine: default stream' overwrites memory that 'engine: stream 1'"):
        values.copy_(torch.ones(8))
    torch.cuda.current_stream().wait_stream(other)
    values.copy_(torch.ones(8))
    with torch.cuda.stream(other), pytest.raises(RaceError, match=r"sum on 'engine: stream 1' reads memory"):
        values.sum()  # the event was recorded before this write
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        assert float(values.sum()) == 8.0


def publish_to_version_buffers(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions from a training rank to an engine of the same node: device to device, staged, applied, read back."""
    training, engine = TrainingSharding(SPECS), torch_layout(SPECS)
    transfer = ShardTransfer.between(training, engine, "bfloat16", None)
    monkeypatch.setattr(VersionBuffer, "_rebuild", lambda self: b"")
    buffer = VersionBuffer(transfer.buffers[0], torch.bfloat16, GPU)
    handles = buffer.handles(1)
    monkeypatch.setattr(device_memory, "open_version_buffer", lambda handle, rank: buffer._flat)
    live = {name: torch.zeros(size, dtype=torch.bfloat16, device=GPU) for name, size in transfer.buffers[0].items()}
    for version in (1, 2):
        with order.within("trainer"):
            writer = ShardWriter(transfer, 0, OpenedVersionBuffers(handles, transfer.buffers, [0]))
            held = weights(version)
            manifest = transfer.manifest(version, writer.sums(held))  # before: reading them back is a wait, too
            writer.write(version, held)
        with ThreadPoolExecutor(1) as thread:  # during decoding, which reads the live parameters
            job = thread.submit(stage_on_gpu, manifest, live, buffer)
            for parameter in live.values():
                parameter.sum()
            staged = job.result(TIMEOUT_S)
        for name, values in staged.values.items():
            live[name].copy_(values)
        assert [tensor_checksum(live[entry.name]) for entry in manifest.entries] == [
            entry.checksum for entry in manifest.entries
        ]


def stage_on_gpu(manifest, live, buffer):
    with on_a_gpu():
        return stage(manifest, 0, GPU, BaseWeights(0), live, buffer)


def test_all_versions_of_a_device_are_staged_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 77)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: SimpleNamespace(synchronize=nothing))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(used.append(stream)))
    for _ in range(3):
        with on_own_stream(torch.device("cuda", 77)):
            pass
    assert [one is used[0] for one in used] == [True] * 3


def test_versions_in_device_memory_are_written_read_and_overwritten_in_order(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_to_version_buffers(order, monkeypatch)
    assert order.num_accesses > 50


@pytest.mark.parametrize("missing", ["handles", "complete"])
def test_without_a_wait_of_the_version_buffers_they_are_not(
    missing: str, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "complete":
        monkeypatch.setattr(OpenedVersionBuffers, "complete", nothing)
    else:
        plain = VersionBuffer.handles

        def handles(self: VersionBuffer, num_writers: int) -> object:
            with monkeypatch.context() as patch:
                patch.setattr(device_memory, "_synchronize", nothing)
                return plain(self, num_writers)

        monkeypatch.setattr(VersionBuffer, "handles", handles)
    race = r"that '(trainer|engine): default stream' may still use"
    with pytest.raises((RaceError, WeightSyncError), match=race):
        publish_to_version_buffers(order, monkeypatch)


def group_spec_at(port: int, *, is_in_place: bool = False) -> TransferGroupSpec:
    """A training rank and an engine, over NCCL."""
    return TransferGroupSpec(
        transfer=ShardTransfer.between(TrainingSharding(SPECS), torch_layout(SPECS), "bfloat16", None),
        num_training=1,
        receivers=(ReceiverAddress("engine-0", "node"),),
        on_devices=True,
        store_at=("127.0.0.1", port),
        generation=1,
        timeout_s=TIMEOUT_S,
        codec="full",
        is_in_place=is_in_place,
    )


def publish_over_nccl(order: Order) -> None:
    """Two versions to an engine's device; the training rank overwrites its weights after each snapshot."""
    store = serve_store("127.0.0.1")
    group_spec = group_spec_at(store.port)

    def train() -> None:
        with on_a_gpu(), order.within("trainer"):
            sender = WeightSender(0, GPU)
            sender.join(group_spec)
            live = weights(0)
            for version in (1, 2):
                for name, values in weights(version).items():
                    live[name].copy_(values)
                sender.snapshot(live, copies=True)
                sender.send(version)
            sender.close()

    def serve() -> None:
        with on_a_gpu():
            receiver = DeviceReceiver(0, GPU)
            buffer = receiver.join(group_spec, 0, None)
            try:
                for version in (1, 2):
                    receiver.receive(version)
                    for name, values in weights(version).items():
                        live = torch.empty(values.shape, dtype=torch.bfloat16, device=GPU)
                        live.copy_(buffer.tensors[name])
                        assert torch.equal(in_main_memory(live), in_main_memory(values).bfloat16())
                    torch.cuda.synchronize()  # as reading the checksums back does
            finally:
                receiver.close()

    with ThreadPoolExecutor(2) as threads:
        try:
            for part in as_completed([threads.submit(train), threads.submit(serve)], 2 * TIMEOUT_S):
                part.result()
        except Exception:
            for barrier in range(3):  # so that the other one does not wait for this one until it is too late
                TransferGroup.interrupt(store, 1, barrier, group_spec.members, "of a race")
            raise


def test_versions_over_nccl_are_packed_sent_and_unpacked_in_order(order: Order) -> None:
    publish_over_nccl(order)
    assert order.num_accesses > 50


@pytest.mark.parametrize("missing", ["snapshot", "own stream", "message"])
def test_without_a_wait_of_a_transfer_they_are_not(missing: str, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "snapshot":
        monkeypatch.setattr(torch.cuda, "synchronize", nothing)
    elif missing == "own stream":
        monkeypatch.setattr(endpoints, "on_own_stream", without_synchronizing)
    else:
        monkeypatch.setattr("tests.fake_gpu.observe_messages", lambda *parts: order.message(*parts) and nothing)
    with pytest.raises((RaceError, WeightSyncError), match="nothing waits for it"):
        publish_over_nccl(order)


def snapshot_during_training(order: Order) -> None:
    """A checkpoint copies the state to host memory after the step before; the next step waits for the copy."""
    state = torch.zeros(64, device=GPU)
    for step in range(2):
        state.copy_(torch.full((64,), float(step)))
        moments = {"exp_avg": torch.zeros(64, device=GPU), "exp_avg_sq": torch.zeros(64, device=GPU)}
        fragment = Fragment.of("w", (64,), state, {**moments, "step": torch.tensor(1.0)})
        snapshot = TrainerSnapshot({"model": [fragment]}, Counters(step, {"model": step}, 1))
        snapshot.wait()
        (copied,) = snapshot.fragments["model"]
        assert torch.equal(copied.values["value"], torch.full((64,), float(step)))


def test_a_checkpoint_copies_after_the_step_before_and_not_while_the_next_one_writes(
    order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_during_training(order)
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", nothing)
    with pytest.raises(RaceError, match="reads memory that 'engine: default stream' may still use"):
        snapshot_during_training(order)
