"""The processes of test_device_memory.py. The test writes a `Story`; they answer with files next to it.

python -m tests.contract.version_buffer_stories write RANK FOLDER   # a training rank: writes its part of a version
python -m tests.contract.version_buffer_stories own RANK FOLDER     # an engine rank: owns a buffer until it is killed
"""

from __future__ import annotations

import pickle
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.weights.transport.device_memory import CPU, OpenedVersionBuffers, VersionBuffer, VersionBufferHandle
from penstock.weights.transport.shards import ShardTransfer, ShardWriter, copies_of

OWN_SIZES = {"values": 1000}
LIFETIME_S = 120.0


@dataclass(frozen=True)
class Story:
    """One publish by ranks under ZeRO-3.

    Attributes:
        handles: By rank of the engine and of the trainer.
        tensors: Whole; each rank takes its part.
    """

    transfer: ShardTransfer
    handles: list[list[VersionBufferHandle]]
    tensors: dict[str, torch.Tensor]
    num_ranks: int
    version: int


def part(tensor: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """A rank's part of a tensor under ZeRO-3, flat and padded."""
    size = -(-tensor.numel() // num_ranks)
    padded = torch.nn.functional.pad(tensor.flatten(), (0, size * num_ranks - tensor.numel()))
    return padded[rank * size : (rank + 1) * size]


def write(rank: int, folder: Path) -> None:
    story: Story = pickle.loads((folder / "story").read_bytes())
    mine = [of_ranks[rank] for of_ranks in story.handles]
    device = "cpu" if mine[0].device == CPU else "cuda"
    tensors = {name: part(tensor, rank, story.num_ranks).to(device) for name, tensor in story.tensors.items()}
    needed = {copy.dst_rank for copy in copies_of(story.transfer, rank)}
    writer = ShardWriter(story.transfer, rank, OpenedVersionBuffers(mine, story.transfer.buffers, needed))
    writer.write(story.version, tensors)
    (folder / f"sums{rank}").write_bytes(pickle.dumps(writer.sums(tensors)))


def own(rank: int, folder: Path) -> None:
    buffer = VersionBuffer(OWN_SIZES, torch.float32, torch.device("cpu"))
    buffer.tensors["values"].fill_(rank + 1)
    (folder / "partial").write_bytes(pickle.dumps(buffer.handles(2)))
    (folder / "partial").rename(folder / "handles")
    time.sleep(LIFETIME_S)


if __name__ == "__main__":
    {"write": write, "own": own}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
