"""Version buffers of an engine, written by training ranks in other processes; on CPU, where a handle names a file.

The same between GPUs: tests/gpu/test_device_memory.py.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import WeightManifest
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engines.torch.engine import TorchEngine
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.transport.device_memory import OpenedVersionBuffers, VersionBufferHandle
from penstock.weights.transport.shards import ShardTransfer
from penstock.weights.transport.shared_memory import remove_directories_of
from tests.layouts import torch_layout

from .engine_harness import JOURNAL_INTERVAL, MAX_NUM_SEQS, Harness, OpenHarness, prompt_of, within
from .version_buffer_stories import OWN_SIZES, Story

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 2
START_S = 240.0
CONFIG = TorchEngineConfig(type="torch", max_num_seqs=MAX_NUM_SEQS, journal_interval_tokens=JOURNAL_INTERVAL)


def start(part: str, rank: int, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.contract.version_buffer_stories", part, str(rank), str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def written(story: Story, folder: Path) -> WeightManifest:
    """The manifest of a version that training ranks have written."""
    (folder / "story").write_bytes(pickle.dumps(story))
    ranks = [start("write", rank, folder) for rank in range(story.num_ranks)]
    try:
        outputs = [rank.communicate(timeout=START_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(outputs)
    parts = [pickle.loads((folder / f"sums{rank}").read_bytes()) for rank in range(story.num_ranks)]
    return story.transfer.manifest(story.version, [one for some in parts for one in some])


@pytest_asyncio.fixture
async def harness(open_harness: OpenHarness) -> AsyncIterator[Harness]:
    async with open_harness(TorchEngine, CONFIG, "keep_kv") as harness:
        yield harness


@pytest.mark.asyncio
async def test_ranks_of_zero_3_write_an_engines_version_from_their_own_processes(
    harness: Harness, tiny_tensors: Callable[[int], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    tensors, engine = tiny_tensors(5), harness.engine
    specs = tuple(TensorSpec(name, tuple(tensor.shape)) for name, tensor in tensors.items())
    layouts = TrainingSharding(specs, num_replicas=NUM_RANKS, is_partitioned=True), torch_layout(specs)
    transfer = ShardTransfer.between(*layouts, "float32", None)
    handles = await engine.make_version_buffers(transfer.buffers, "float32", NUM_RANKS)
    story = Story(transfer, handles, tensors, NUM_RANKS, version=1)
    manifest = await asyncio.to_thread(written, story, tmp_path)
    harness.seed_of_version[1] = 5
    ack = await within(engine.update_weights(manifest))
    assert (ack.version, ack.checksum) == (1, manifest.checksum)
    output = await harness.sample(prompt_of(7), max_new_tokens=20)
    assert output.spans == ((1, 20),)
    np.testing.assert_allclose(output.logprobs, harness.expected(prompt_of(7), output), atol=1e-4)

    # There is one buffer: the next version, written through new handles, overwrites this one.
    again = await engine.make_version_buffers(transfer.buffers, "float32", 1)
    opened = OpenedVersionBuffers([mine for (mine,) in again], transfer.buffers, [0])
    opened.tensors(2, 0)["model.norm.weight"][0] += 1
    with pytest.raises(WeightSyncError, match=r"received model\.norm\.weight checksum differs"):
        await within(engine.update_weights(manifest))
    assert engine.version == 1
    output = await harness.sample(prompt_of(7), max_new_tokens=20)
    np.testing.assert_allclose(output.logprobs, harness.expected(prompt_of(7), output), atol=1e-4)


def test_memory_outlives_its_owner_for_processes_that_have_opened_it_but_no_other_can_open_it(tmp_path: Path) -> None:
    owner = start("own", 0, tmp_path)
    try:
        handles = wait_for(tmp_path / "handles", owner)
        opened = OpenedVersionBuffers(handles[:1], [OWN_SIZES], [0])
    finally:
        owner.kill()
        owner.wait(timeout=START_S)
    remove_directories_of([owner.pid])  # as the cluster does
    values = opened.tensors(1, 0)["values"]
    values += 1
    assert (values == 2).all()
    with pytest.raises(WeightSyncError, match=r"rank 0 on cpu cannot be opened: .* Its engine has ended"):
        OpenedVersionBuffers(handles[1:], [OWN_SIZES], [0])


def wait_for(file: Path, owner: subprocess.Popen[str]) -> Sequence[VersionBufferHandle]:
    deadline = time.monotonic() + START_S
    while not file.exists():
        assert owner.poll() is None, owner.communicate()[0]
        assert time.monotonic() < deadline, f"no handles after {START_S:.0f} s"
        time.sleep(0.05)
    handles: Sequence[VersionBufferHandle] = pickle.loads(file.read_bytes())
    return handles
