"""A flow over fakes, for tests that need no Ray."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.errors import TrainingError
from penstock.dataflow.filters import FilterChain, GroupFilter
from penstock.dataflow.ids import TaskId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import Curriculum, GroupSizing, LengthLimits, TaskQueue, TaskStream
from penstock.dataflow.trajectory import GroupRef
from penstock.platform.metrics.flow_stats import FlowStats
from penstock.platform.run.flow import Flow, FlowPorts
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.tokenization.tokenizers import TokenCodec, character_tokenizer
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.fakes import FakeEngine, FakeRewards, FakeStore

CODEC = TokenCodec(character_tokenizer())


def tasks(name: str = "t") -> Iterator[Task]:
    return (Task(TaskId(f"{name}{index}"), "1+1=", {"answer": "2"}) for index in itertools.count())


def make_flow(
    engines: Sequence[FakeEngine],
    rewards: FakeRewards,
    *,
    batch: int = 2,
    eta: int = 1,
    steps: int = 4,
    group_size: int = 2,
    min_group_size: int = 2,
    retries: int = 1,
    engine_retries: int = 1,
    timeout_s: float = 5.0,
    silence_s: float = 5.0,
    slots: int = 64,
    surplus: int = 0,
    on_expiry: ExpiryPolicy = ExpiryPolicy.WAIT,
    filters: Sequence[GroupFilter] = (),
    max_refills: int = 100,
    streams: Sequence[TaskStream] = (),
    max_requeues: int = 3,
    max_live: int | None = None,
    lengths: LengthLimits | None = None,
    sizing: GroupSizing | None = None,
    curriculum: Curriculum | None = None,
    streamed: bool = False,
    tokens_per_part: float = 0,
    reference: Any = None,
    teacher: Any = None,
    forward: Any = None,
    max_context: int | None = None,
) -> Flow:
    """Groups of two over `engines`; other settings are small and quick."""
    limits = FlowLimits(batch, eta, steps, surplus, on_expiry, max_requeues, max_live)
    core = Dataflow(limits, GroupRules(group_size, min_group_size, retries, engine_retries))
    runner = TrajectoryRunner(EnginePool(engines, slots), CODEC, silence_s, max_context_tokens=max_context)
    sampling = SamplingParams(5000, stop_token_ids=CODEC.stop_token_ids)
    frozen = [worker and worker.logprobs for worker in (reference, teacher)]
    early = forward and forward.early_logprobs
    ports = FlowPorts(runner, rewards, FakeStore(), sampling, *frozen, early, Parts() if streamed else None)
    line = TaskQueue(streams or [TaskStream("", tasks())], limits.window, group_size, sizing, lengths, curriculum)
    chain = FilterChain(filters, max_refills)
    return Flow(core, line, chain, ports, FlowStats(), timeout_s, tokens_per_part)


class Parts:
    """Takes the parts of a batch, as a trainer does."""

    def __init__(self) -> None:
        self.sent: list[list[GroupRef]] = []
        self.fails = False

    async def __call__(self, part: Sequence[GroupRef]) -> None:
        if self.fails:
            raise TrainingError("planted")
        self.sent.append(list(part))

    def taken(self) -> list[GroupRef]:
        groups = [group for part in self.sent for group in part]
        self.sent.clear()
        return groups


async def next_groups(flow: Flow) -> list[GroupRef]:
    """The next batch, with its earlier parts."""
    last = await flow.next_batch()
    return [*(flow.ports.accumulate.taken() if isinstance(flow.ports.accumulate, Parts) else ()), *last]


async def train_all(flow: Flow, engines: Sequence[FakeEngine]) -> list[GroupRef]:
    """Train every batch of the run; the engines move on with each."""
    trained: list[GroupRef] = []
    async with flow:
        for version in range(1, flow.core.limits.total_steps + 1):
            trained += await next_groups(flow)
            for engine in engines:
                engine.version = version
            flow.advance(version)
            assert flow.counts().live <= flow.core.limits.window
    return trained
