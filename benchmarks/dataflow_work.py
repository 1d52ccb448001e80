"""The work that both sides of `dataflow.py` do, on flat arrays; needs numpy alone, so each side's environment has it.

Shape legend: N = trajectories of a call, T = their tokens, packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
PER_TOKEN = ("token_ids", "loss_mask", "behavior_logprobs", "proximal_logprobs", "reference_logprobs")
FIELDS = (*PER_TOKEN, "reward")
VOCABULARY = 1 << 15
LOGPROB_SCALES = {"behavior_logprobs": -1e-3, "proximal_logprobs": -2e-3, "reference_logprobs": -3e-3}


@dataclass(frozen=True)
class Work:
    """What is done, and in which portions.

    Attributes:
        num_groups: Of a round.
        group_size: Trajectories per group.
        num_tokens: Per trajectory.
        batch_groups: Groups of one training step.
        max_staleness: Versions; groups under way are at most (max_staleness + 1) * batch_groups.
        call_groups: Groups that travel together in one call.
    """

    num_groups: int = 4096
    group_size: int = 8
    num_tokens: int = 2048
    batch_groups: int = 128
    max_staleness: int = 2
    call_groups: int = 16

    @property
    def window(self) -> int:
        return (self.max_staleness + 1) * self.batch_groups

    @property
    def num_bytes(self) -> int:
        """Of all columns of a round."""
        return self.num_groups * self.group_size * (17 * self.num_tokens + 4)


def generate(work: Work, group_ids: list[int]) -> dict[str, Array]:
    """`[T]` ids, mask and behavior logprobs of these groups; the first eighth of a trajectory is its prompt."""
    positions = np.arange(work.num_tokens, dtype=np.int32)
    members = np.arange(work.group_size, dtype=np.int32)
    starts = (np.asarray(group_ids, dtype=np.int32)[:, None] * work.group_size + members).ravel()
    token_ids = (starts[:, None] * 7 + positions[None, :] * 31) & (VOCABULARY - 1)
    loss_mask = np.broadcast_to(positions >= work.num_tokens // 8, token_ids.shape)
    flat = token_ids.ravel()
    return {
        "token_ids": flat,
        "loss_mask": np.ascontiguousarray(loss_mask).ravel(),
        "behavior_logprobs": logprobs(flat, "behavior_logprobs"),
    }


def logprobs(token_ids: Array, name: str, out: Array | None = None) -> Array:
    """`[T] float32`, a function of every id."""
    return np.multiply(token_ids, np.float32(LOGPROB_SCALES[name]), out=out, dtype=np.float32, casting="unsafe")


def rewards(token_ids: Array, token_starts: Array) -> Array:
    """`[N] float32`, a function of every id of the trajectory."""
    return (np.add.reduceat(token_ids, token_starts[:-1], dtype=np.int64) & 1).astype(np.float32)


def checksum(columns: Mapping[str, Array]) -> int:
    """Sum over every byte pattern of every field: the same however the groups are cut into arrays."""
    total = 0
    for name in FIELDS:
        column = columns[name]
        total += int(column.view(np.uint8 if column.itemsize == 1 else np.uint32).sum(dtype=np.uint64))
    return total


def expected_checksum(work: Work) -> int:
    """What the trainer ranks must find in all groups together."""
    total = 0
    starts = np.arange(work.group_size + 1) * work.num_tokens
    for group_id in range(work.num_groups):
        columns = generate(work, [group_id])
        columns |= {name: logprobs(columns["token_ids"], name) for name in ("proximal_logprobs", "reference_logprobs")}
        columns["reward"] = rewards(columns["token_ids"], starts)
        total += checksum(columns)
    return total
