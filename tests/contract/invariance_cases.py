"""One batch, computed in as many ways as the product has, and the program of one rank that does it.

sys.argv[1:]: RANK PORT FOLDER WORLD
"""

from __future__ import annotations

import itertools
import pickle
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.dataflow.ids import GroupId, TaskId, TrajectoryId
from penstock.dataflow.trajectory import GroupPayload, Trajectory
from penstock.dataflow.versions import Span
from tests.contract.trainer_backend_cases import VOCAB, Case, build, weights_of

NUM_GROUPS, GROUP_SIZE, NUM_TOKENS = 8, 4, 32
"""Every sequence is as long, so that a token budget makes exactly so many micro-batches; prompts are ragged."""


class WeightRoute(NamedTuple):
    """How the batch is computed."""

    num_ranks: int
    zero_stage: int
    num_micro_batches: int
    is_permuted: bool

    @property
    def max_tokens(self) -> int:
        return NUM_GROUPS * GROUP_SIZE * NUM_TOKENS // (self.num_ranks * self.num_micro_batches)


WAYS = [WeightRoute(*values) for values in itertools.product((1, 2), (0, 1, 2, 3), (1, 4, 16), (False, True))]


class Result(NamedTuple):
    """What came of it."""

    change: dict[str, np.ndarray]
    num_micro_batches: float
    grad_norm: float


def make_batch(*, is_permuted: bool) -> list[GroupPayload]:
    """The same groups and members, in order or not."""
    rng = np.random.default_rng(7)
    groups = []
    for group in range(NUM_GROUPS):
        num_prompt = int(rng.integers(2, 28))
        prompt = rng.integers(2, VOCAB, num_prompt)
        members = []
        for member in range(GROUP_SIZE):
            mask = np.arange(NUM_TOKENS) >= num_prompt
            answer = rng.integers(2, VOCAB, NUM_TOKENS - num_prompt)
            behavior = np.where(mask, rng.normal(-3.2, 0.3, NUM_TOKENS), 0.0)
            trajectory = Trajectory(
                trajectory_id=TrajectoryId(f"{group}/{member}"),
                task_id=TaskId("t"),
                token_ids=np.concatenate([prompt, answer]).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=behavior.astype(np.float32),
                spans=(Span(0, len(answer)),),
                prompt="",
                response="",
                finish_reason="stop",
                reward=float(rng.integers(0, 2)),
            )
            members.append(trajectory)
        groups.append(GroupPayload(GroupId(group), tuple(members)))
    if not is_permuted:
        return groups
    order = np.random.default_rng(8).permutation(NUM_GROUPS)
    return [GroupPayload(groups[index].group_id, groups[index].trajectories[::-1]) for index in order]


def compute(case: Case, folder: Path, rank: int = 0, port: int = 0, *, is_permuted: bool = False) -> Result:
    """One step. Its ε makes the update proportional to the gradient."""
    trainer = build(case, str(folder / case.policy), rank, port)
    before = weights_of(trainer)
    report = trainer.step(make_batch(is_permuted=is_permuted), 0)
    after = weights_of(trainer)
    change = {name: after[name] - before[name] for name in before}
    return Result(change, *(report.metrics[name] for name in ("trainer/num_micro_batches", "loss/grad_norm")))


def main() -> None:
    rank, port, folder, world = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    results = {}
    for way in (way for way in WAYS if way.num_ranks == world):
        case = Case(world_size=world, zero_stage=way.zero_stage, max_tokens=way.max_tokens, adam_epsilon=1.0)
        results[way] = compute(case, folder, rank, port, is_permuted=way.is_permuted)
    if rank == 0:
        (folder / f"ways-{world}").write_bytes(pickle.dumps({tuple(way): tuple(it) for way, it in results.items()}))
