"""Pairs of trainers, one that is saved and one that continues from it, and the program of one rank of either.

    sys.argv[1:]: PHASE FORM RANK PORT FOLDER WORLD TENSOR_PARALLEL SEQUENCES CONTEXT

`PHASE` is `save` or `restore`, `FORM` is `short`, or `long` for `LONG_PAIRS` too. Checkpoints are compared as files:

    <saver>/saved       after three steps; written after three more
    <saver>/later       after those three more
    <saver>/<goes on>/again   what the restored trainer has
    <saver>/<goes on>/later   what it has after three steps
"""

from __future__ import annotations

import dataclasses
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.trainer import checkpoint
from penstock.trainer.checkpoint import TrainerSnapshot, write_snapshot
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.weights.model_config import ModelShape
from tests.contract.trainer_backend_cases import EXPERT_PARALLEL, REFERENCE, Case, build, make_batch, wait_for_all_ranks

NUM_STEPS = 3


class Pair(NamedTuple):
    saver: Case
    goes_on: Case

    @property
    def is_same(self) -> bool:
        return self.saver == self.goes_on


def zero(stage: int, world_size: int = 2, **settings) -> Case:
    return Case(zero_stage=stage, world_size=world_size, **settings)


def fsdp2(world_size: int = 2, **settings) -> Case:
    return Case("fsdp2", world_size, **settings)


def same(case: Case) -> Pair:
    return Pair(case, case)


WITH_CRITIC = {"max_tokens": 40, "updates": "several with a critic"}
TENSOR_PARALLEL = {"tensor_parallel": 2, "is_tied": False}
TORCH = dataclasses.replace(REFERENCE)
UNTIED_TORCH = dataclasses.replace(REFERENCE, is_tied=False)

PAIRS = [
    same(zero(3, **WITH_CRITIC)),
    Pair(fsdp2(), zero(2, 1)),
    Pair(zero(2, 1), fsdp2()),
]
LONG_PAIRS = [
    same(fsdp2(**WITH_CRITIC)),
    Pair(zero(1), zero(3)),
    same(zero(1)),
    Pair(fsdp2(**EXPERT_PARALLEL), dataclasses.replace(TORCH, has_experts=True)),
    Pair(zero(1), TORCH),
    same(zero(1, optimizer="bfloat16 moments")),
    same(zero(0, optimizer="muon")),
    same(zero(0, optimizer="muon", dtype="bfloat16")),
    *(same(zero(stage, optimizer="bfloat16 moments", dtype="bfloat16")) for stage in (0, 1, 2, 3)),
    same(zero(2, optimizer="bfloat16 moments", offload_optimizer=True)),
    Pair(zero(0, optimizer="muon"), dataclasses.replace(TORCH, optimizer="muon")),
    Pair(dataclasses.replace(TORCH, optimizer="muon"), zero(0, optimizer="muon")),
    Pair(zero(3, optimizer="bfloat16 moments"), zero(1, 1, optimizer="bfloat16 moments")),
    Pair(zero(2, optimizer="bfloat16 moments"), dataclasses.replace(TORCH, optimizer="bfloat16 moments")),
    same(zero(0)),
    same(zero(2)),
    same(zero(3)),
    *(same(zero(stage, dtype="bfloat16")) for stage in (0, 1, 2, 3)),
    *(same(zero(stage, offload_optimizer=True)) for stage in (2, 3)),
    same(zero(1, dtype="bfloat16", offload_optimizer=True)),
    same(zero(3, offload_parameters=True)),
    Pair(zero(3, offload_parameters=True, offload_optimizer=True), zero(3)),
    *(same(zero(stage, has_adapters=True)) for stage in (0, 1, 3)),
    same(zero(1, **WITH_CRITIC)),
    same(zero(1, sequence_parallel=2)),
    same(zero(3, sequence_parallel=2)),
    *(same(zero(stage, 4, **TENSOR_PARALLEL)) for stage in (0, 1, 2, 3)),
    *(Pair(zero(stage), zero(stage, 1)) for stage in (1, 2, 3)),
    *(Pair(zero(stage, 1), zero(stage)) for stage in (1, 2, 3)),
    Pair(zero(2), zero(3)),
    Pair(zero(3), zero(0)),
    Pair(zero(2), zero(3, offload_optimizer=True)),
    Pair(zero(3), TORCH),
    Pair(zero(0), TORCH),
    Pair(TORCH, zero(3)),
    Pair(TORCH, zero(0)),
    Pair(zero(3, **WITH_CRITIC), zero(1, 1, **WITH_CRITIC)),
    Pair(zero(3, has_adapters=True), zero(2, 1, has_adapters=True)),
    Pair(zero(1, dtype="bfloat16"), zero(3, dtype="bfloat16")),
    Pair(zero(3, dtype="bfloat16"), zero(1, 1, dtype="bfloat16")),
    Pair(zero(1, sequence_parallel=2), zero(1)),
    Pair(zero(1), zero(1, sequence_parallel=2)),
    *(Pair(zero(stage, **TENSOR_PARALLEL), zero(1, 1, is_tied=False)) for stage in (0, 1)),
    *(Pair(zero(1, 1, is_tied=False), zero(stage, **TENSOR_PARALLEL)) for stage in (0, 1)),
    Pair(zero(3, 4, **TENSOR_PARALLEL), zero(2, is_tied=False)),
    Pair(zero(2, is_tied=False), zero(3, 4, **TENSOR_PARALLEL)),
    Pair(zero(1, 4, **TENSOR_PARALLEL), UNTIED_TORCH),
    same(fsdp2(has_adapters=True)),
    same(fsdp2(dtype="bfloat16")),
    same(fsdp2(offload_parameters=True, offload_optimizer=True)),
    same(fsdp2(4, fsdp_copies=2)),
    same(fsdp2(**EXPERT_PARALLEL)),
    Pair(fsdp2(4, **EXPERT_PARALLEL), fsdp2(has_experts=True)),
    Pair(zero(3, has_experts=True), fsdp2(**EXPERT_PARALLEL)),
    *(Pair(zero(stage), fsdp2()) for stage in (0, 1, 3)),
    *(Pair(fsdp2(), zero(stage)) for stage in (0, 1, 3)),
    Pair(TORCH, fsdp2()),
    Pair(fsdp2(), TORCH),
    Pair(fsdp2(), fsdp2(1)),
    Pair(fsdp2(1), fsdp2(4, fsdp_copies=2)),
    Pair(fsdp2(4, fsdp_copies=2), zero(3)),
    Pair(fsdp2(4, has_adapters=True), zero(2, 1, has_adapters=True)),
    Pair(zero(3, **WITH_CRITIC), fsdp2(1, **WITH_CRITIC)),
    Pair(fsdp2(dtype="bfloat16"), zero(1, 1, dtype="bfloat16")),
    Pair(zero(2, dtype="bfloat16"), fsdp2(dtype="bfloat16")),
    Pair(zero(1, 4, **TENSOR_PARALLEL), fsdp2(is_tied=False)),
]
"""Left to `make test-full`."""


def pairs_of(form: str) -> list[Pair]:
    return PAIRS + (LONG_PAIRS if form == "long" else [])


def zero_3_last(cases: list[Case]) -> list[Case]:
    """While a model of ZeRO-3 lives, transformers loads every model partitioned."""
    return sorted(dict.fromkeys(cases), key=lambda case: case.zero_stage == 3)


def label(case: Case) -> str:
    changed = [
        f"{one.name}={getattr(case, one.name)}"
        for one in dataclasses.fields(case)
        if getattr(case, one.name) != one.default
    ]
    return ",".join(changed).replace(" ", "_")


def steps(trainer: PolicyTrainer, shape: ModelShape, first: int) -> list[dict[str, float]]:
    numbers = range(first, first + NUM_STEPS)
    reports = [trainer.step(make_batch(10 + number, shape=shape), number) for number in numbers]
    assert not any(report.skipped for report in reports)
    kept = ("loss/", "ratio/", "critic/", "mismatch/")
    return [{name: value for name, value in one.metrics.items() if name.startswith(kept)} for one in reports]


@contextmanager
def copying_late() -> Iterator[Callable[[TrainerSnapshot], TrainerSnapshot]]:
    """A snapshot is copied only when the next optimizer step waits for it, after all that a backend does before."""
    may_copy, copy = threading.Event(), checkpoint._host_copies

    def copied_late(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        assert may_copy.wait(60.0), "no optimizer step has waited for the copy"
        return copy(tensors)

    def late(snapshot: TrainerSnapshot) -> TrainerSnapshot:
        wait = snapshot.wait
        snapshot.wait = lambda: (may_copy.set(), wait())[1]  # type: ignore[method-assign]
        return snapshot

    checkpoint._host_copies = copied_late
    yield late
    checkpoint._host_copies = copy


def save(case: Case, folder: Path, rank: int = 0, port: int = 0) -> list[dict[str, float]]:
    """Metrics of the three steps after the checkpoint."""
    trainer = build(case, str(folder / case.policy), rank, port)
    steps(trainer, case.shape, 0)
    with copying_late() as late:
        snapshot = late(trainer.snapshot(NUM_STEPS))
        metrics = steps(trainer, case.shape, NUM_STEPS)
    write_snapshot(snapshot, folder / label(case) / "saved", rank)
    write_snapshot(trainer.snapshot(2 * NUM_STEPS), folder / label(case) / "later", rank)
    wait_for_all_ranks()
    return metrics


def restore(pair: Pair, folder: Path, rank: int = 0, port: int = 0) -> list[dict[str, float]]:
    """Metrics of three steps from the checkpoint."""
    trainer = build(pair.goes_on, str(folder / pair.goes_on.policy), rank, port)
    assert trainer.restore(str(folder / label(pair.saver) / "saved")) == NUM_STEPS
    here = folder / label(pair.saver) / label(pair.goes_on)
    write_snapshot(trainer.snapshot(NUM_STEPS), here / "again", rank)
    metrics = steps(trainer, pair.goes_on.shape, NUM_STEPS)
    write_snapshot(trainer.snapshot(2 * NUM_STEPS), here / "later", rank)
    wait_for_all_ranks()
    return metrics


def main() -> None:
    phase, form, folder, (rank, port, *ranks) = (
        *sys.argv[1:3],
        Path(sys.argv[5]),
        map(int, sys.argv[3:5] + sys.argv[6:]),
    )
    pairs = pairs_of(form)
    results: dict = {}
    if phase == "save":
        savers = [pair.saver for pair in pairs if pair.saver.ranks == tuple(ranks)]
        results = {case: save(case, folder, rank, port) for case in zero_3_last(savers) if case.backend != "torch"}
    else:
        ours = [pair for pair in pairs if pair.goes_on.ranks == tuple(ranks) and pair.goes_on.backend != "torch"]
        for case in zero_3_last([pair.goes_on for pair in ours]):
            results |= {tuple(pair): restore(pair, folder, rank, port) for pair in ours if pair.goes_on == case}
    if rank == 0:
        (folder / "-".join(map(str, [phase, *ranks]))).write_bytes(pickle.dumps(results))
    if torch.distributed.is_initialized():  # a thread of gloo that still runs at the exit aborts the process
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
