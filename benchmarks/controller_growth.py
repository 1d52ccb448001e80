"""Whether what the driver needs per group stays the same over a long run: CPU time per group, and memory.

    python benchmarks/controller_growth.py [--groups 1000000] [--traced 200000]     (10 minutes; prints JSON)

The shipping flow, core, ledger with its log, task queue with hooks, filters, statistics, pool and runner, over engines
and rewards that do no more than answer: groups of 2, two streams of 10,000 recurring tasks each, a tenth of the groups
filtered and replaced. After each tenth of the groups: CPU time of the process per group, resident memory, and the CPU
time of a bare asyncio task at that moment, since a busy neighbour slows both. `--traced` then runs so many groups under
tracemalloc, which is slow, and names the lines of code that hold more at their end than at their middle.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from controller_load import _bare_cpu_s
from provenance import provenance

from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.difficulty import LengthBySuccess, SizeBySuccess
from penstock.dataflow.filters import FilterChain, zero_variance
from penstock.dataflow.ids import EngineId, RequestId, TaskId
from penstock.dataflow.ledger import JournalEntry
from penstock.dataflow.ports import (
    EngineLoad,
    GenerateRequest,
    Score,
    TokenDelta,
)
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.staleness import FlowLimits
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import LengthLimits, TaskQueue, TaskStream
from penstock.dataflow.trajectory import GroupPayload, Trajectory
from penstock.dataflow.versions import Span
from penstock.platform.metrics.flow_stats import EventTail, FlowStats
from penstock.platform.run.flow import Flow, FlowPorts
from penstock.platform.run.ledger_log import LedgerLog
from penstock.platform.run.lifecycle import set_gc_thresholds
from penstock.platform.simulator.parts import SimulatedCodec
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.trajectory.runner import TrajectoryRunner

BATCH, GROUP_SIZE, MAX_STALENESS = 64, 2, 2
NUM_TASKS = 10_000
ANSWER_TOKENS = 16
_TOKEN_IDS = tuple(range(1, ANSWER_TOKENS + 1))
_LOGPROBS = (-1.0,) * ANSWER_TOKENS
BARE_TASKS = 5_000


class Engine:
    """Answers with one delta in the next turn of the event loop."""

    def __init__(self, index: int) -> None:
        self.engine_id = EngineId(f"engine-{index}")
        self.version = 0

    async def generate(self, _request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        await asyncio.sleep(0)
        yield TokenDelta(_TOKEN_IDS, _LOGPROBS, (Span(self.version, ANSWER_TOKENS),), "stop")

    async def abort(self, _request_id: RequestId) -> None:
        """Nothing runs."""

    async def load(self) -> EngineLoad:
        return EngineLoad(self.version, 0, 0, 0.0, 0, 0.0)


class Rewards:
    """1 and 0 in turn; of every tenth group 1 and 1, which has no signal."""

    def __init__(self) -> None:
        self._num_scored = 0

    async def score(self, _task: Task, _trajectory: Trajectory) -> Score:
        self._num_scored += 1
        return Score(1.0 if self._num_scored % 20 < 2 else float(self._num_scored % 2))


class Store:
    """Payloads are their own handles."""

    async def put(self, payload: GroupPayload) -> GroupPayload:
        return payload

    async def get(self, handle: GroupPayload) -> GroupPayload:
        return handle


def recurring(name: str) -> Iterator[Task]:
    """Tasks of a dataset, over and over."""
    return itertools.cycle([Task(TaskId(f"{name}{index}"), str(index), {"answer": "2"}) for index in range(NUM_TASKS)])


async def train(num_groups: int, run_dir: Path, after_tenth: Callable[[], None]) -> None:
    """Train `num_groups` groups; `after_tenth` is called ten times."""
    engines = [Engine(index) for index in range(8)]
    steps = num_groups // BATCH
    limits = FlowLimits(BATCH, MAX_STALENESS, steps)
    core = Dataflow(limits, GroupRules(GROUP_SIZE, 2, 1))
    log, tail = LedgerLog(run_dir, 0, 0), EventTail()

    def record(entry: JournalEntry) -> None:
        tail(entry)
        log(entry)

    core.ledger.listeners = (record,)
    queue = TaskQueue(
        [TaskStream("a", recurring("a"), 3.0), TaskStream("b", recurring("b"))],
        limits.window,
        GROUP_SIZE,
        sizing=SizeBySuccess(GROUP_SIZE, 1.0),
        lengths=LengthLimits(64, LengthBySuccess(64, 1.0)),
    )
    runner = TrajectoryRunner(EnginePool(engines, 64), SimulatedCodec(8), silence_timeout_s=3600)
    ports = FlowPorts(runner, Rewards(), Store(), SamplingParams(64))
    async with Flow(core, queue, FilterChain([zero_variance()]), ports, FlowStats(), 600.0) as flow:
        for version in range(1, steps + 1):
            for _ in await flow.next_batch():
                pass
            for engine in engines:
                engine.version = version
            flow.advance(version)
            if version % max(steps // 10, 1) == 0:
                after_tenth()
    log.close()
    assert log.error is None, log.error


def cost_and_memory(num_groups: int) -> list[dict[str, float]]:
    """CPU µs per trained group, µs of a bare asyncio task, and MiB of resident memory, after each tenth."""
    process, rows = psutil.Process(), []
    cpu_s = time.process_time()

    def after_tenth() -> None:
        nonlocal cpu_s
        group_us = 1e6 * (time.process_time() - cpu_s) / (num_groups // 10)
        bare_us = 1e6 * min(_bare_in_thread() for _ in range(3))
        rows.append({"us_per_group": group_us, "us_of_bare_task": bare_us, "mib": process.memory_info().rss / 2**20})
        cpu_s = time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(train(num_groups, Path(folder), after_tenth))
    return [{name: round(value, 1) for name, value in row.items()} for row in rows]


def _bare_in_thread() -> float:
    """The bare program has an event loop of its own, which one thread cannot have twice."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_bare_cpu_s, BARE_TASKS).result()


def growth(num_groups: int) -> dict[str, Any]:
    """What Python holds at the end of a traced run beyond what it held at the middle, by line of code."""
    snapshots: list[tracemalloc.Snapshot] = []
    traced: list[int] = []

    def after_tenth() -> None:
        gc.collect()
        traced.append(tracemalloc.get_traced_memory()[0])
        snapshots.append(tracemalloc.take_snapshot())
        del snapshots[1:-1]

    tracemalloc.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(train(num_groups, Path(folder), after_tenth))
    finally:
        tracemalloc.stop()
    more = snapshots[-1].compare_to(snapshots[0], "lineno")
    lines = {f"{one.traceback[0].filename}:{one.traceback[0].lineno}": one.size_diff for one in more[:8]}
    return {"mib_after_each_tenth": [round(held / 2**20, 2) for held in traced], "bytes_since_the_first_tenth": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--traced", type=int, default=0)
    arguments = parser.parse_args()
    set_gc_thresholds()  # as every run does
    found: dict[str, Any] = {"groups": arguments.groups, "after each tenth": cost_and_memory(arguments.groups)}
    if arguments.traced:
        found["traced"] = growth(arguments.traced)
    print(json.dumps(found | {"from": provenance()}, indent=1))


if __name__ == "__main__":
    main()
