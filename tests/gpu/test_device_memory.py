"""Slots of a GPU, written by training ranks in other processes: tests/contract/test_device_memory.py on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.weights.checksum import check_received
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.transport.device_memory import VersionBuffer
from penstock.weights.transport.shards import ShardTransfer
from tests.contract.test_device_memory import NUM_RANKS, written
from tests.contract.version_buffer_stories import Story
from tests.layouts import torch_layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.mark.parametrize("writers_see", ["0", "1"], ids=["the owner's GPU", "another GPU only"])
def test_ranks_write_into_a_gpus_version_buffer(
    writers_see: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if int(writers_see) >= torch.cuda.device_count():
        pytest.skip("there is one GPU")
    tensors = {"model.norm.weight": torch.randn(1001), "model.embed_tokens.weight": torch.randn(300, 7)}
    specs = tuple(TensorSpec(name, tuple(tensor.shape)) for name, tensor in tensors.items())
    layouts = TrainingSharding(specs, num_replicas=NUM_RANKS, is_partitioned=True), torch_layout(specs)
    transfer = ShardTransfer.between(*layouts, "bfloat16", None)
    buffer = VersionBuffer(transfer.buffers[0], torch.bfloat16, torch.device("cuda", 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", writers_see)
    manifest = written(Story(transfer, [buffer.handles(NUM_RANKS)], tensors, NUM_RANKS, version=1), tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(buffer.tensors[name].cpu(), tensor.flatten().bfloat16()), name
    check_received(buffer.tensors, manifest.entries, manifest.version)
