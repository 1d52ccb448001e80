"""Weights over NCCL without a GPU: invalid calls of torch's bindings, and messages from main memory, fail here too.

Every rank is a thread with its own group membership, connected by `tests.fake_gpu.FakeNccl`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from penstock.weights.checksum import check_received
from penstock.weights.codec.wire import CODECS
from penstock.weights.config import CodecName
from penstock.weights.layout.algebra import Layout, TensorSpec
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.planner.plan import make_plan
from penstock.weights.planner.relay import relay_tree
from penstock.weights.transport.process_group.endpoints import (
    BucketChecksums,
    DeviceReceiver,
    ReceiverAddress,
    TransferGroupSpec,
    WeightSender,
)
from penstock.weights.transport.process_group.group import TransferGroup, connect, connect_store, serve_store
from penstock.weights.transport.process_group.members import Members
from penstock.weights.transport.process_group.transfer import Transfer
from penstock.weights.transport.shards import ShardTransfer
from tests.fake_gpu import GPU, FakeNccl, GpuTensor, a_machine_with_nccl, in_main_memory, on_a_gpu
from tests.layouts import torch_layout, training_layout
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
TIMEOUT_S = 30.0
NUM_TRAINING = 2
ENGINES = ("engine-0", "engine-1", "engine-2")
MODEL, SPECS = tensors_of("llama")
FULL = numbered(SPECS)
ZERO3 = training_layout(SPECS, num_replicas=NUM_TRAINING, is_partitioned=True)

Flat = dict[str, torch.Tensor]


@pytest.fixture
def backends() -> Iterator[list[FakeNccl]]:
    """The NCCL backends that the test creates; checks that every group of messages was waited for."""
    with a_machine_with_nccl() as made:
        yield made
        assert made
        assert [backend.num_unfinished for backend in made] == [0] * len(made)


def on_every_rank(num_ranks: int, act: Callable[[int], object]) -> list[object]:
    """Results of `act(rank)`, run concurrently on each rank."""

    def run(rank: int) -> object:
        with on_a_gpu():
            return act(rank)

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, range(num_ranks)))


def version_of(version: int) -> dict[str, np.ndarray]:
    """Even numbers, of which a fiftieth changes by one per version."""
    return {name: 2 * values + (values % 50 < version) for name, values in FULL.items()}


def on_device(layout: Layout, rank: int, full: dict[str, np.ndarray]) -> Flat:
    return {name: torch.from_numpy(values).float().to(GPU) for name, values in buffers_of(layout, full)[rank].items()}


def check_equals(received: Flat, full: dict[str, np.ndarray], *, within: float) -> None:
    """Compare with vLLM's slices, which models.py writes out by hand; padding is zero."""
    for name, values in vllm_rank(full, MODEL, 1, 0).items():
        expected = np.where(values == PADDING, 0, values).ravel()
        assert isinstance(received[name], GpuTensor)
        assert np.abs(in_main_memory(received[name]).numpy() - expected).max() <= within, name


def test_messages_are_sent_as_one_group_with_arguments_that_torch_accepts(backends: list[FakeNccl]) -> None:
    store = serve_store(HOST)

    def swap(rank: int) -> list[float]:
        links = connect(connect_store(HOST, store.port, TIMEOUT_S), rank, 2, TIMEOUT_S, GPU, (HOST, store.port))
        received = torch.zeros(3, device=GPU)
        mine = torch.full((3,), float(rank + 1), device=GPU)
        exchange = links.exchange([(1 - rank, mine)], [(1 - rank, received)])
        for pending in (*exchange.receiving, *exchange.sending):
            pending.finish(time.monotonic() + TIMEOUT_S)
        links.close()
        return in_main_memory(received).tolist()

    assert on_every_rank(2, swap) == [[2.0] * 3, [1.0] * 3]


def test_a_message_from_main_memory_is_refused_as_nccl_refuses_it(backends: list[FakeNccl]) -> None:
    store = serve_store(HOST)

    def send(rank: int) -> None:
        links = connect(connect_store(HOST, store.port, TIMEOUT_S), rank, 2, TIMEOUT_S, GPU, (HOST, store.port))
        with pytest.raises(ValueError, match="Tensors must be CUDA and dense"):
            links.exchange([(1 - rank, torch.zeros(3))], [])

    on_every_rank(2, send)


@pytest.mark.some(1)
@pytest.mark.parametrize("codec", [None, "full", "delta", "int8_delta"])
def test_versions_reach_every_engine_of_a_relay(backends: list[FakeNccl], codec: CodecName | None) -> None:
    store, members = serve_store(HOST), Members(NUM_TRAINING, ENGINES)
    layout = engine_layout("llama", 1)
    plan = make_plan(ZERO3, layout, 4, bucket_bytes=32768)
    route = members.to_engines(relay_tree([f"node {name}" for name in ENGINES], fanout=1))

    def publish(rank: int) -> None:
        group = TransferGroup((HOST, store.port), members, rank, timeout_s=TIMEOUT_S, device=GPU)
        transfer = Transfer(group, plan, route, torch.float32, None if codec is None else CODECS[codec])
        is_engine = rank >= NUM_TRAINING
        live = staging_buffers(layout.buffers[0], torch.float32, GPU) if is_engine else {}
        for version in range(1, 4):
            full = version_of(version)
            source = {} if is_engine else on_device(ZERO3, rank, full)
            transfer.run(version, source, live, wants_sums=True)
            if is_engine:
                check_equals(live, full, within=0.5 if codec == "int8_delta" else 0.0)
        group.close()

    on_every_rank(members.world_size, publish)


def make_group_spec(
    port: int, specs: tuple[TensorSpec, ...], *, codec: CodecName, is_in_place: bool
) -> TransferGroupSpec:
    training = TrainingSharding(specs, num_replicas=NUM_TRAINING, is_partitioned=True)
    return TransferGroupSpec(
        transfer=ShardTransfer.between(training, torch_layout(specs), "bfloat16", None),
        num_training=NUM_TRAINING,
        receivers=(ReceiverAddress("engine-0", "node"), ReceiverAddress("engine-1", "node")),
        on_devices=True,
        store_at=(HOST, port),
        generation=1,
        timeout_s=TIMEOUT_S,
        codec=codec,
        is_in_place=is_in_place,
    )


SMALL = (TensorSpec("model.norm.weight", (1001,)), TensorSpec("model.embed_tokens.weight", (300, 7)))


def drawn(version: int) -> Flat:
    draw = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draw) for name, shape in SMALL}


def part_of(version: int, rank: int) -> Flat:
    """A training rank's part under ZeRO-3: its share of each flat tensor, padded to equal shares."""
    shares = {}
    for name, tensor in drawn(version).items():
        size = -(-tensor.numel() // NUM_TRAINING)
        padded = torch.nn.functional.pad(tensor.flatten(), (0, size * NUM_TRAINING - tensor.numel()))
        shares[name] = padded[rank * size : (rank + 1) * size].clone().to(GPU)
    return shares


@pytest.mark.parametrize("codec", ["full", "delta", "int8_delta"])
def test_snapshots_of_the_ranks_are_sent_to_the_version_buffers_of_the_engines(
    backends: list[FakeNccl], codec: CodecName
) -> None:
    store = serve_store(HOST)
    group_spec = make_group_spec(store.port, SMALL, codec=codec, is_in_place=False)

    def publish(rank: int) -> object:
        if rank < NUM_TRAINING:
            sender = WeightSender(rank, GPU)
            sender.join(group_spec)
            sums = []
            for version in range(2):
                held = part_of(version, rank)
                sender.snapshot(held, copies=True)
                for values in held.values():
                    values.zero_()  # training continues
                sums.append(sender.send(version).sums)
            sender.close()
            return sums
        device_receiver = DeviceReceiver(0, GPU)
        buffer = device_receiver.join(group_spec, rank - NUM_TRAINING, None)
        assert buffer is not None
        received = []
        for version in range(2):
            device_receiver.receive(version)
            received.append({name: in_main_memory(values).clone() for name, values in buffer.tensors.items()})
        device_receiver.close()
        return received

    *sent, first, second = on_every_rank(NUM_TRAINING + 2, publish)
    for version in range(2):
        manifest = group_spec.transfer.manifest(version, [part for sums in sent for part in sums[version]])
        for received in (first[version], second[version]):
            check_received(received, manifest.entries, version)
            for name, tensor in drawn(version).items():
                expected = tensor.flatten().bfloat16()
                if codec == "int8_delta" and version:
                    torch.testing.assert_close(received[name], expected, atol=0.05, rtol=0)
                else:
                    assert torch.equal(received[name], expected), name


def test_versions_are_received_in_place_and_compared_with_the_bucket_checksums_of_the_ranks(
    backends: list[FakeNccl],
) -> None:
    store = serve_store(HOST)
    group_spec = make_group_spec(store.port, SMALL, codec="full", is_in_place=True)
    senders = [WeightSender(rank, GPU) for rank in range(NUM_TRAINING)]
    device_receivers = [DeviceReceiver(0, GPU) for _ in group_spec.receivers]
    live = [
        {name: torch.zeros(tensor.numel(), dtype=torch.bfloat16) for name, tensor in drawn(0).items()}
        for _ in device_receivers
    ]

    def join(rank: int) -> BucketChecksums | None:
        if rank >= NUM_TRAINING:
            assert device_receivers[rank - NUM_TRAINING].join(group_spec, rank - NUM_TRAINING, None) is None
            return None
        senders[rank].join(group_spec)
        senders[rank].snapshot(part_of(3, rank), copies=True)
        return senders[rank].bucket_checksums()

    checksums = on_every_rank(NUM_TRAINING + 2, join)
    sums = [one for of_rank in checksums if of_rank is not None for one in of_rank.sums]

    def publish(rank: int) -> None:
        if rank < NUM_TRAINING:
            senders[rank].send(3)
            senders[rank].close()
            return
        place = rank - NUM_TRAINING
        live[place] = {name: values.to(GPU) for name, values in live[place].items()}
        device_receivers[place].receive_in_place(3, sums, live[place])
        device_receivers[place].close()

    on_every_rank(NUM_TRAINING + 2, publish)
    for parameters in live:
        for name, tensor in drawn(3).items():
            assert torch.equal(in_main_memory(parameters[name]), tensor.flatten().bfloat16()), name
