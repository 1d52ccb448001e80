"""A prompt that no engine can answer, or that engines die over, costs its group and not the run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.actors.engine.actor import EngineActor
from penstock.actors.engine.client import RemoteEngine
from penstock.dataflow.errors import EngineLostError, PenstockError, TrajectoryError
from penstock.dataflow.ids import EngineId, GroupId, TaskId
from penstock.dataflow.ledger import GroupState, LedgerCounts, Reason
from penstock.dataflow.ports import GenerateRequest, TokenDelta
from penstock.dataflow.saved_groups import MemberProgress, OpenGroup
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import QueuedTask, TaskStream
from penstock.dataflow.versions import Span
from penstock.platform.run.flow import Flow
from penstock.platform.run.group_run import GroupRun
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.weights.model_config import ModelConfig
from tests.conftest import TINY_SHAPE
from tests.fakes import FakeEngine, FakeRewards
from tests.flows import make_flow, train_all

Prompt = str | list[dict[str, str]]
CONTEXT = 20
TOO_LONG = "1+1=" * 10
GROUP_SIZE, BATCH, STEPS = 8, 4, 6


def tasks_with(prompt: Prompt, index: int = 5) -> list[TaskStream]:
    """All tasks are short but one."""

    def draw() -> Iterator[Task]:
        for number in itertools.count():
            yield Task(TaskId(f"t{number}"), prompt if number == index else "1+1=", {"answer": "2"})

    return [TaskStream("", draw())]


def flow_over(engines: Sequence[Any], prompt: Prompt, **settings: Any) -> Flow:
    shape: dict[str, Any] = {"batch": BATCH, "eta": 2, "steps": STEPS, "group_size": GROUP_SIZE}
    streams, rewards = tasks_with(prompt), FakeRewards(lambda _: 1.0)
    return make_flow(engines, rewards, streams=streams, retries=2, engine_retries=3, **(shape | settings))


def fakes(number: int, kind: type[FakeEngine] = FakeEngine) -> list[FakeEngine]:
    return [kind(EngineId(f"e{index}")) for index in range(number)]


def trained_but_one(counts: LedgerCounts) -> bool:
    return (counts.trained, counts.failed, counts.admitted) == (BATCH * STEPS, 1, BATCH * STEPS + 1)


@pytest.mark.parametrize("num_engines", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("prompt", "reason", "told"),
    [
        (
            TOO_LONG,
            Reason.LONG_PROMPT,
            r"the prompt of t5 has 40 tokens; model.max_context_tokens=20 leaves space for at most 19",
        ),
        ("1+1=" * 5, Reason.LONG_PROMPT, r"the prompt of t5 has 20 tokens"),  # no space for one token
        ("ß", Reason.ENV, r"it knows no 'ß'"),
        ([{"role": "user", "content": "1+1="}], Reason.ENV, r"t5: .*the tokenizer has no chat template"),
    ],
    ids=["too_long", "full", "unknown_character", "messages_without_a_template"],
)
async def test_a_prompt_that_cannot_be_answered_reaches_no_engine_and_fails_its_group(
    prompt: Prompt, reason: Reason, told: str, num_engines: int
) -> None:
    engines = fakes(num_engines)
    flow = flow_over(engines, prompt, max_context=CONTEXT)
    await train_all(flow, engines)
    assert trained_but_one(flow.counts())
    assert flow.core.ledger.reasons[GroupState.FAILED, reason] == 1
    (failure,) = flow.stats.failures
    with pytest.raises(TrajectoryError, match=told):
        raise failure
    assert flow.core.retries.total() == 0, "another attempt would fail likewise"
    assert sum(engine.served for engine in engines) == BATCH * STEPS * GROUP_SIZE
    assert flow.ports.runner.pool.fenced == {}


class Method:
    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._function(*arguments))


class Handle:
    """An actor in this process, as its Ray handle looks."""

    def __init__(self, actor: object) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Method:
        return Method(getattr(self._actor, name))


class Refusing(FakeEngine):
    """Raises what no engine of ours would, as a library that it uses may."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        if len(request.prompt_token_ids) >= CONTEXT:
            raise ValueError(f"prompt of length {len(request.prompt_token_ids)} is longer than {CONTEXT}")
        async for delta in FakeEngine.generate(self, request):
            yield delta

    async def shutdown(self) -> None:
        pass


def as_remote(engine: FakeEngine, directory: Path) -> RemoteEngine:
    """The shipping client over the shipping actor, without Ray between them."""
    model = ModelConfig(max_context_tokens=CONTEXT, shape=TINY_SHAPE)
    spec = EngineSpec(
        engine_id=engine.engine_id,
        model_path="",
        model=model,
        engine=TorchEngineConfig(type="torch"),
        device="cpu",
        update_mode="keep_kv",
        publish_in=str(directory),
        seed=0,
        threads=1,
    )
    actor = EngineActor(spec)
    actor._engine = engine  # type: ignore[assignment]
    remote = RemoteEngine(engine.engine_id, Handle(actor), "node")  # type: ignore[arg-type]
    remote._version = engine.version
    return remote


@pytest.mark.parametrize("num_engines", [1, 2, 4, 8])
async def test_what_an_engine_raises_for_one_request_fails_its_group_and_fences_no_engine(
    num_engines: int, tmp_path: Path
) -> None:
    engines = fakes(num_engines, Refusing)
    remotes = [as_remote(engine, tmp_path) for engine in engines]
    flow = flow_over(remotes, TOO_LONG, slots=64)
    async with flow:
        for version in range(1, STEPS + 1):
            for _ in await flow.next_batch():
                pass
            for engine, remote in zip(engines, remotes, strict=True):
                engine.version = remote._version = version
            flow.advance(version)
    assert trained_but_one(flow.counts())
    assert flow.core.ledger.reasons[GroupState.FAILED, Reason.ENGINE] == 1
    assert "ValueError: prompt of length 40 is longer than 20" in str(flow.stats.failures[0])
    assert flow.ports.runner.pool.fenced == {}
    await asyncio.gather(*(remote.close(0.1) for remote in remotes))


class Mortal(FakeEngine):
    """Its process ends over a long prompt."""

    is_dead = False

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        self.is_dead = self.is_dead or len(request.prompt_token_ids) >= CONTEXT
        if self.is_dead:
            raise EngineLostError.final(f"{self.engine_id}: its process ended")
        async for delta in FakeEngine.generate(self, request):
            yield delta


@pytest.mark.parametrize("num_engines", [4, 8])
async def test_a_prompt_that_kills_engines_gets_two_of_them_and_no_retry(num_engines: int) -> None:
    engines = fakes(num_engines, Mortal)
    flow = flow_over(engines, TOO_LONG, batch=1, eta=1, steps=BATCH * STEPS)  # so few groups that each is on one engine
    await train_all(flow, engines)
    assert trained_but_one(flow.counts())
    assert flow.core.ledger.reasons[GroupState.FAILED, Reason.ENGINE] == 1
    assert len(flow.ports.runner.pool.fenced) == 2
    with pytest.raises(TrajectoryError, match=r"e\d and e\d died or hung on its prompt of 40 tokens"):
        raise flow.stats.failures[0]


async def test_a_prompt_that_kills_the_only_engine_kills_it_twice_and_the_run_goes_on_with_the_third() -> None:
    first = Mortal(EngineId("e0"))
    flow = flow_over([first], TOO_LONG, batch=1, eta=1, steps=BATCH * STEPS)
    pool, started = flow.ports.runner.pool, [first]

    def start_again(engine_id: EngineId) -> bool:
        started.append(Mortal(engine_id, version=started[-1].version))
        asyncio.get_running_loop().call_soon(pool.add, started[-1])
        return True

    pool.set_restart_hook(start_again)
    async with flow:
        for version in range(1, BATCH * STEPS + 1):
            for _ in await flow.next_batch():
                pass
            started[-1].version = version
            flow.advance(version)
    assert [engine.is_dead for engine in started] == [True, True, False]
    assert flow.counts().trained == BATCH * STEPS
    assert flow.counts().failed in (1, 2), "the other group that had no token on either cannot be told from it"


class Doomed(FakeEngine):
    """Its process ends over any prompt."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        await asyncio.sleep(0)
        raise EngineLostError.final(f"{self.engine_id}: its process ended")
        yield TokenDelta((), (), (), None)


async def test_a_prompt_that_had_tokens_before_a_resume_is_not_the_cause_of_lost_engines() -> None:
    flow = flow_over([Doomed(EngineId("e0"))], "1+1=")
    pool, others = flow.ports.runner.pool, iter([Doomed(EngineId("e0")), FakeEngine(EngineId("e0"))])

    def start_again(engine_id: EngineId) -> bool:
        asyncio.get_running_loop().call_soon(pool.add, next(others))
        return True

    pool.set_restart_hook(start_again)
    group = GroupRun(flow, GroupId(0), QueuedTask(Task(TaskId("t"), "1+1="), "", 2))
    had_tokens = MemberProgress(deltas=(TokenDelta((5,), (-1.0,), (Span(0, 1),)),))
    group.restore(OpenGroup(GroupId(0), (had_tokens, MemberProgress())).packed())
    for member in range(2):
        assert (await flow.ports.runner.run(group.context, member, flow.ports.sampling)).finish_reason == "stop"


async def test_engines_that_are_lost_twice_before_any_answer_end_their_groups_and_not_the_run() -> None:
    started: list[FakeEngine] = [Doomed(EngineId("e0"))]
    flow = flow_over(started, "1+1=", slots=12 * GROUP_SIZE, eta=1)
    pool = flow.ports.runner.pool

    def start_again(engine_id: EngineId) -> bool:
        kind = Doomed if len(started) < 2 else FakeEngine
        started.append(kind(engine_id, version=started[-1].version))
        asyncio.get_running_loop().call_soon(pool.add, started[-1])
        return True

    pool.set_restart_hook(start_again)
    async with flow:
        for version in range(1, STEPS + 1):
            for _ in await flow.next_batch():
                pass
            started[-1].version = version
            flow.advance(version)
    assert len(started) == 3
    assert flow.counts().trained == BATCH * STEPS
    assert flow.counts().failed == flow.core.limits.window, "more than end a run if anything else makes them fail"


@pytest.mark.parametrize("num_engines", [2, 4])
async def test_a_prompt_over_which_engines_stand_still_is_sent_to_two_of_them_and_fences_none(
    num_engines: int,
) -> None:
    class Slow(FakeEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
            if len(request.prompt_token_ids) >= CONTEXT:
                await asyncio.sleep(3600)
            async for delta in FakeEngine.generate(self, request):
                yield delta

    engines = fakes(num_engines, Slow)
    flow = flow_over(engines, TOO_LONG, silence_s=0.05)
    await train_all(flow, engines)
    assert trained_but_one(flow.counts())
    assert flow.core.ledger.reasons[GroupState.FAILED, Reason.ENGINE] == 1
    assert flow.ports.runner.pool.fenced == {}


async def test_an_engine_that_fails_every_request_is_fenced_off_instead_of_attracting_more() -> None:
    class Broken(FakeEngine):
        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
            self.served += 1
            raise TrajectoryError("engine", "e0: KeyError: 'planted'")
            yield TokenDelta((), (), (), None)

    engines = [Broken(EngineId("e0")), FakeEngine(EngineId("e1"))]
    flow = flow_over(engines, "1+1=", slots=8)
    await train_all(flow, engines)
    assert "KeyError: 'planted'" in flow.ports.runner.pool.fenced[EngineId("e0")]
    assert engines[0].served <= 5 * GROUP_SIZE, "one group with its retries, then another one's"
    assert flow.counts().trained == BATCH * STEPS


async def test_when_nothing_but_such_prompts_comes_the_run_ends_and_says_why() -> None:
    engine = FakeEngine()
    streams = [TaskStream("", (Task(TaskId(f"t{index}"), TOO_LONG) for index in itertools.count()))]
    flow = make_flow([engine], FakeRewards(), streams=streams, max_context=CONTEXT)
    async with flow:
        with pytest.raises(PenstockError, match=r"8 groups in a row failed.*model.max_context_tokens=20"):
            for _ in await flow.next_batch():
                pass
    assert engine.served == 0
