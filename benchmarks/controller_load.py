"""What the controller itself costs: many live groups of short answers, so that little but the platform's code runs.

    python benchmarks/controller_load.py [--live 1000 10000] [--runs 3]     (one minute; prints one JSON object)

Time is CPU time of one process on one core, over the shipping flow, core, pool and runner; the simulated parts are in
it, with engines and rewards that do no more than answer. Memory is what a live group holds while its trajectories are
sampled. Both are compared with a bare asyncio program with as many tasks of the same shape (a task in which coroutines
wait for each other, and the innermost for a future), run just before: it shows the share of asyncio in the figures, on
this machine at this moment.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from statistics import median
from typing import Any, Self

from ray.actor import ActorHandle

from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.filters import FilterChain
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import (
    EngineLoad,
    GenerateRequest,
    Score,
    TokenDelta,
)
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.staleness import FlowLimits
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import TaskQueue, TaskStream
from penstock.dataflow.trajectory import Trajectory
from penstock.dataflow.versions import Span
from penstock.platform.metrics.flow_stats import FlowStats
from penstock.platform.run.flow import Flow, FlowPorts
from penstock.platform.run.lifecycle import set_gc_thresholds
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.engine_processes import EngineClasses, SimulatedClient
from penstock.platform.simulator.parts import SimulatedCodec, SimulatedStore, TrainingTasks
from penstock.platform.simulator.rewards import SimulatedRewards
from penstock.platform.simulator.simulation import Parts, simulate
from penstock.platform.simulator.sweep import rounded
from penstock.platform.simulator.world import LengthTable, World
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.trajectory.runner import TrajectoryRunner

GROUP_SIZE = 8
ENGINES = 64
STEPS = 4
ANSWER_S = 1.0
ANSWER_TOKENS = 16
_TOKEN_IDS = tuple(range(1, ANSWER_TOKENS + 1))
_LOGPROBS = (-1.0,) * ANSWER_TOKENS
MEASURED_GROUPS = 1_000
"""For memory: what a group holds does not depend on how many there are."""


def load_config(live_groups: int) -> SimulationConfig:
    """`live_groups` under way at η = 1, every one of them in a slot; answers of one delta of 16 tokens."""
    return SimulationConfig(
        profile="constant",
        mean_tokens=ANSWER_TOKENS,
        cap_tokens=ANSWER_TOKENS,
        grain=1,
        prompt_tokens=8,
        engines=ENGINES,
        slots=live_groups * GROUP_SIZE // ENGINES + GROUP_SIZE,
        kv_tokens=1_000_000_000,
        batch=live_groups // 2,
        group_size=GROUP_SIZE,
        eta=1,
        steps=STEPS,
        train_s_per_token=1e-9,
        reward_mean_s=0.0,
    )


def controller_load(sizes: Iterable[int], num_runs: int) -> dict[str, Any]:
    """Completions per second of CPU time by number of live groups, and memory per live group."""
    figures: dict[str, Any] = {"unit": f"trajectory completions per CPU second, one core, groups of {GROUP_SIZE}"}
    set_gc_thresholds()  # as every run does
    for live_groups in sizes:
        costs_s, bare_s = [], []
        for seed in range(num_runs):
            bare_s.append(_bare_cpu_s(min(live_groups, 5_000) * GROUP_SIZE))
            costs_s.append(_cpu_s_per_completion(load_config(live_groups), seed))
        figures[f"{live_groups} live groups"] = {
            "completions_per_s": rounded(1 / median(costs_s)),
            "us_per_completion": [rounded(1e6 * cost) for cost in costs_s],
            "us_of_bare_asyncio": [rounded(1e6 * cost) for cost in bare_s],
        }
    group_kib, bare_kib = held_kib()
    figures["kib per live group"] = rounded(group_kib)
    figures["kib of bare asyncio"] = rounded(bare_kib)
    figures["kib beyond asyncio"] = rounded(group_kib - bare_kib)
    return figures


def held_kib() -> tuple[float, float]:
    """What a live group holds while its trajectories are sampled, and a bare asyncio program of the same shape."""
    _held_bytes(_park_flow)  # what is loaded and cached at the first time is no group's
    return _held_bytes(_park_flow) / 1024, _held_bytes(_park_bare) / 1024


class Answer:
    """A stream of one delta, which is a future."""

    __slots__ = ("delta",)

    def __init__(self, delta: asyncio.Future[TokenDelta]) -> None:
        self.delta: asyncio.Future[TokenDelta] | None = delta

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> asyncio.Future[TokenDelta]:
        delta, self.delta = self.delta, None
        if delta is None:
            raise StopAsyncIteration
        return delta


class AnsweringClient(SimulatedClient):
    """Answers every request with one delta within `ANSWER_S`, without a process: its work would be in the figure."""

    def __init__(self, engine_id: EngineId, actor: ActorHandle, node_id: str) -> None:
        super().__init__(engine_id, actor, node_id)
        self._waiting: list[asyncio.Future[TokenDelta]] = []
        self._loop = asyncio.get_running_loop()

    def generate(self, _request: GenerateRequest) -> Answer:
        if not self._waiting:
            self._loop.call_later(ANSWER_S, self._answer)
        delta: asyncio.Future[TokenDelta] = self._loop.create_future()
        self._waiting.append(delta)
        return Answer(delta)

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        answer = TokenDelta(_TOKEN_IDS, _LOGPROBS, (Span(self.version, ANSWER_TOKENS),), "stop")
        for delta in waiting:
            if not delta.done():
                delta.set_result(answer)


class AnsweringRewards(SimulatedRewards):
    """Scores every answer by its length."""

    async def score(self, _task: Task, trajectory: Trajectory) -> Score:
        return Score(float(trajectory.num_sampled_tokens))


ANSWERING = EngineClasses(client=AnsweringClient)


def _cpu_s_per_completion(config: SimulationConfig, seed: int) -> float:
    gc.collect()  # what the run before left behind is not this one's cost
    started = time.process_time()
    outcome = simulate(config, seed, Parts(engines=ANSWERING, rewards=AnsweringRewards))
    assert outcome.violation is None, outcome.violation
    return (time.process_time() - started) / len(outcome.trained.lengths)


async def _bare_member(parked: AsyncIterator[None]) -> None:
    await _bare_generate(parked)


async def _bare_generate(parked: AsyncIterator[None]) -> None:
    async for _ in parked:
        pass


async def _parked(gate: asyncio.Event) -> AsyncIterator[Any]:
    await gate.wait()
    yield


def _bare_cpu_s(num_tasks: int) -> float:
    """CPU seconds per task that is created, waits and ends."""

    async def main() -> None:
        gate = asyncio.Event()
        tasks = [asyncio.create_task(_bare_member(_parked(gate))) for _ in range(num_tasks)]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks)

    started = time.process_time()
    asyncio.run(main())
    return (time.process_time() - started) / num_tasks


class _ParkedEngine:
    """Takes requests and never answers."""

    def __init__(self) -> None:
        self.engine_id = EngineId("parked")
        self.version = 0
        self.is_full = asyncio.Event()
        self._gate = asyncio.Event()
        self._num_requests = 0

    def generate(self, _request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        self._num_requests += 1
        if self._num_requests == MEASURED_GROUPS * GROUP_SIZE:
            self.is_full.set()
        return _parked(self._gate)

    async def abort(self, _request_id: RequestId) -> None:
        """Nothing runs."""

    async def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0.0, 0, 0.0)


async def _park_flow(measure: Callable[[], None]) -> None:
    """The shipping flow with every trajectory of `MEASURED_GROUPS` groups on an engine."""
    engine = _ParkedEngine()
    limits = FlowLimits(MEASURED_GROUPS, max_staleness=0, total_steps=1)
    core = Dataflow(limits, GroupRules(GROUP_SIZE, 2, 0))
    pool = EnginePool([engine], max_per_engine=MEASURED_GROUPS * GROUP_SIZE)
    config = load_config(MEASURED_GROUPS)
    world = World(LengthTable(config.lengths, GROUP_SIZE, 0, 1), 8, 0)
    ports = FlowPorts(
        TrajectoryRunner(pool, SimulatedCodec(8), silence_timeout_s=3600),
        SimulatedRewards(world, 0.0, 1),
        SimulatedStore(),
        SamplingParams(16),
    )
    line = TaskQueue([TaskStream("", TrainingTasks())], limits.window, GROUP_SIZE)
    async with Flow(core, line, FilterChain([], 1), ports, FlowStats(), 60.0):
        await engine.is_full.wait()
        await asyncio.sleep(0)
        measure()


async def _park_bare(measure: Callable[[], None]) -> None:
    gate = asyncio.Event()
    tasks = [asyncio.create_task(_bare_member(_parked(gate))) for _ in range(MEASURED_GROUPS * GROUP_SIZE)]
    await asyncio.sleep(0.01)
    measure()
    gate.set()
    await asyncio.gather(*tasks)


def _held_bytes(park: Callable[[Callable[[], None]], Awaitable[None]]) -> float:
    """Bytes that Python holds per group while all of them wait."""
    held: list[int] = []

    async def main() -> None:
        await park(lambda: held.append(tracemalloc.get_traced_memory()[0]))

    tracemalloc.start()
    try:
        asyncio.run(main())
    finally:
        tracemalloc.stop()
    return held[0] / MEASURED_GROUPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=int, nargs="+", default=[1_000, 10_000], help="live groups, e.g. 100000")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    print(json.dumps(controller_load(arguments.live, arguments.runs), indent=1))


if __name__ == "__main__":
    main()
