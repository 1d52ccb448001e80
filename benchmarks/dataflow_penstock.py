"""Our side of `dataflow.py`: columns in Ray's object store, decisions in `dataflow.Dataflow`, all over Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from dataflow_side import measured, run_side
from dataflow_work import FIELDS, Work, checksum, generate, logprobs, rewards
from ray.actor import ActorHandle

from penstock.actors.cluster import ray_session
from penstock.actors.column_stage import ColumnWriters, SourceWorker, StageWorker
from penstock.dataflow.columns import ColumnBlock, ColumnHandle, Cut, GroupColumns, Packing, plan_read, read
from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.staleness import FlowLimits
from penstock.dataflow.trajectory import GroupRef
from penstock.dataflow.versions import Span

CALL_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Generation:
    """Writes ids, mask and behavior logprobs of each (work, group id)."""

    def begin(self, orders: Sequence[tuple[Work, int]]) -> tuple[ColumnBlock, list[None]]:
        work = orders[0][0]
        lengths = [[work.num_tokens] * work.group_size] * len(orders)
        block = ColumnBlock(Packing.of(lengths), generate(work, [group_id for _, group_id in orders]), {})
        return block, [None] * len(orders)


@dataclass(frozen=True)
class Scoring:
    """Writes one reward per trajectory."""

    reads = ("token_ids",)

    def extend(self, groups: Sequence[GroupColumns]) -> tuple[ColumnBlock, list[list[float]]]:
        scores = [rewards(group["token_ids"], group.token_starts) for group in groups]
        packing = Packing.of([np.diff(group.token_starts).tolist() for group in groups])
        return ColumnBlock(packing, {}, {"reward": np.concatenate(scores)}), [score.tolist() for score in scores]


@dataclass(frozen=True)
class Logprobs:
    """Writes the logprobs of one frozen or earlier policy."""

    name: str
    reads = ("token_ids",)

    def extend(self, groups: Sequence[GroupColumns]) -> tuple[ColumnBlock, list[None]]:
        packing = Packing.of([np.diff(group.token_starts).tolist() for group in groups])
        column = np.empty(packing.num_tokens, np.float32)
        for index, group in enumerate(groups):
            logprobs(group["token_ids"], self.name, out=column[packing.place(index).tokens])
        return ColumnBlock(packing, {self.name: column}, {}), [None] * len(groups)


class Trainer:
    """One rank: reads every field of its share."""

    def step(self, cuts: list[Cut], *blocks: ColumnBlock) -> int:
        return sum(checksum(group.columns) for group in read(blocks, cuts, FIELDS))


@dataclass(frozen=True)
class Workers:
    """All processes of our side."""

    generation: ColumnWriters
    later: tuple[ColumnWriters, ...]
    trainers: list[ActorHandle]


@asynccontextmanager
async def workers() -> AsyncIterator[Workers]:
    """Ray with 2 generation, 1 scoring and 2 logprob workers and 2 trainer ranks."""

    async with ray_session("local"):
        started: list[ActorHandle] = []

        def start(worker: type, *arguments: Any, count: int = 1) -> list[ActorHandle]:
            started.extend(ray.remote(worker).options(num_cpus=0).remote(*arguments) for _ in range(count))
            return started[-count:]

        def stage(name: str, of: Scoring | Logprobs) -> ColumnWriters:
            return ColumnWriters(name, start(StageWorker, of), of.reads, CALL_TIMEOUT_S)

        generation = ColumnWriters("generation", start(SourceWorker, Generation(), count=2), (), CALL_TIMEOUT_S)
        logprobs_of = [stage(name, Logprobs(name)) for name in ("proximal_logprobs", "reference_logprobs")]
        processes = Workers(generation, (stage("scoring", Scoring()), *logprobs_of), start(Trainer, count=2))
        await asyncio.gather(*(actor.__ray_ready__.remote() for actor in started))
        yield processes


class Round:
    """Trains `num_groups` groups once. Waits for credits and for batches that may close, both on one condition."""

    def __init__(self, work: Work, processes: Workers, num_groups: int) -> None:
        steps = num_groups // work.batch_groups
        limits = FlowLimits(work.batch_groups, work.max_staleness, steps)
        self.core = Dataflow(limits, GroupRules(work.group_size, work.group_size, max_retries=0))
        self._work = work
        self._processes = processes
        self._steps = steps
        self._changed = asyncio.Event()

    async def run(self) -> int:
        """Returns the checksum over everything that the trainer ranks read."""
        total = 0
        async with asyncio.TaskGroup() as calls:
            while self.core.version < self._steps:
                self._admit(calls)
                self._changed.clear()
                batch = self.core.close_batch()
                if batch is None:
                    await self._changed.wait()
                    continue
                total += await self._train(batch)
                self.core.advance(self.core.version + 1)
        counts = self.core.finish()
        assert counts.trained == counts.admitted == self._steps * self._work.batch_groups, counts
        return total

    def _admit(self, calls: asyncio.TaskGroup) -> None:
        while self.core.free_credits >= self._work.call_groups:
            group_ids = [self.core.admit(TaskId("")) for _ in range(self._work.call_groups)]
            calls.create_task(self._make(group_ids))

    async def _make(self, group_ids: list[GroupId]) -> None:
        """One call's groups, from generation to ready."""
        work, version = self._work, self.core.version
        for group_id in group_ids:
            for member in range(work.group_size):
                self.core.member_at(group_id, member, version)
        begun = await self._processes.generation.begin([(work, group_id) for group_id in group_ids])
        handles = [ColumnHandle((piece,)) for piece, _ in begun]
        for group_id in group_ids:
            self.core.generated(group_id)
        answers = await asyncio.gather(*(stage.extend(handles) for stage in self._processes.later))
        spans = ((Span(version, work.num_tokens - work.num_tokens // 8),),) * work.group_size
        for group_id, handle, *written in zip(group_ids, handles, *answers, strict=True):
            self.core.ready(
                GroupRef(
                    group_id=group_id,
                    task_id=TaskId(""),
                    handle=handle.joined(piece for piece, _ in written),
                    spans=spans,
                    rewards=tuple(written[0][1]),
                    num_tokens=work.group_size * work.num_tokens,
                )
            )
        self._changed.set()

    async def _train(self, batch: tuple[GroupRef, ...]) -> int:
        """One step on both ranks, half of the batch each."""
        half = len(batch) // 2
        steps = []
        for rank, share in zip(self._processes.trainers, (batch[:half], batch[half:]), strict=True):
            refs, cuts = plan_read([group.handle for group in share], FIELDS)
            steps.append(rank.step.remote(cuts, *refs))
        return sum(await asyncio.gather(*steps))


async def main(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure what the spec asks for."""
    async with workers() as processes:
        return await measured(spec, lambda work, num_groups: Round(work, processes, num_groups).run())


if __name__ == "__main__":
    run_side(main, packages=("penstock", "ray", "numpy"))
