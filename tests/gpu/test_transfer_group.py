"""A version that crosses over NCCL: tests/contract/transfer_group.py between two processes with a GPU each."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from penstock.weights.checksum import check_received
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.transport.process_group.endpoints import (
    DeviceReceiver,
    ReceiverAddress,
    TransferGroupSpec,
    WeightSender,
)
from penstock.weights.transport.process_group.group import serve_store
from penstock.weights.transport.shards import ShardTransfer
from tests.layouts import torch_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes no two processes of one GPU into a group"),
]
TIMEOUT_S = 120.0


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(version)
    shapes = {"model.norm.weight": (1001,), "model.embed_tokens.weight": (300, 7)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def send(group_spec: TransferGroupSpec, answers: Connection) -> None:
    sender = WeightSender(0, torch.device("cuda", 0))
    sender.join(group_spec)
    for version in range(2):
        sender.snapshot({name: tensor.flatten().cuda(0) for name, tensor in tensors_of(version).items()}, copies=True)
        answers.send(sender.send(version).sums)
    sender.close()


@pytest.mark.parametrize("codec", ["full", "delta"])
def test_versions_cross_from_gpu_to_gpu(codec: str) -> None:
    specs = tuple(TensorSpec(name, tuple(tensor.shape)) for name, tensor in tensors_of(0).items())
    training = TrainingSharding(specs, num_replicas=1, is_partitioned=False)
    store = serve_store("127.0.0.1")
    group_spec = TransferGroupSpec(
        transfer=ShardTransfer.between(training, torch_layout(specs), "bfloat16", None),
        num_training=1,
        receivers=(ReceiverAddress("engine-0", "node"),),
        on_devices=True,
        store_at=("127.0.0.1", store.port),
        generation=1,
        timeout_s=TIMEOUT_S,
        codec=codec,  # type: ignore[arg-type]
    )
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    rank = spawn.Process(target=send, args=(group_spec, there), daemon=True)
    rank.start()
    try:
        device_receiver = DeviceReceiver(0, torch.device("cuda", 1))
        buffer = device_receiver.join(group_spec, 0, None)
        for version in range(2):
            device_receiver.receive(version)
            assert here.poll(TIMEOUT_S), "the training rank answers with its sums"
            manifest = group_spec.transfer.manifest(version, here.recv())
            for name, tensor in tensors_of(version).items():
                assert torch.equal(buffer.tensors[name].cpu(), tensor.flatten().bfloat16()), name
            check_received(buffer.tensors, manifest.entries, version)
        device_receiver.close()
    finally:
        rank.kill()
        rank.join(TIMEOUT_S)
