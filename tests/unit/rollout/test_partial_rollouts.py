"""Interrupted trajectories continue from their tokens; under greedy decoding the result is the same as without it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
import pytest

from penstock.dataflow.errors import EngineLostError, TrajectoryError
from penstock.dataflow.ids import EngineId, TaskId
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.dataflow.versions import Span
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.tokenization.tokenizers import TokenCodec, character_tokenizer
from penstock.rollout.trajectory.conversation import PartialTurn
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.fakes import FakeEngine, ends_by_context
from tests.virtual_time import run_virtual

CODEC = TokenCodec(character_tokenizer())
GREEDY = SamplingParams(64, temperature=0.0, stop_token_ids=(1,))
TASK = Task(TaskId("t"), "12+34=")


def engine(name: str = "a", **settings: object) -> FakeEngine:
    return FakeEngine(EngineId(name), ends=ends_by_context, **settings)  # type: ignore[arg-type]


def make_runner(*engines: FakeEngine, silence_s: float = 5.0, max_resumes: int = 3) -> TrajectoryRunner:
    return TrajectoryRunner(EnginePool(engines, 8, version_timeout_s=0.05), CODEC, silence_s, max_resumes)


async def run(runner: TrajectoryRunner, task: Task = TASK) -> Trajectory:
    running = runner.run(RolloutContext(task, "0"), 0, GREEDY)
    return await asyncio.wait_for(running, 5)


def same(left: Trajectory, right: Trajectory) -> bool:
    return (
        np.array_equal(left.token_ids, right.token_ids)
        and np.array_equal(left.behavior_logprobs, right.behavior_logprobs)
        and (left.spans, left.finish_reason, left.response) == (right.spans, right.finish_reason, right.response)
    )


async def test_a_turn_is_kept_while_it_is_sampled() -> None:
    context, runner = RolloutContext(TASK, "0"), make_runner(engine())
    running = asyncio.create_task(runner.run(context, 0, GREEDY))
    await asyncio.sleep(0)
    assert list(context.turns) == [0]
    await running
    assert context.turns == {}, "the trajectory has its tokens"


@pytest.mark.parametrize("prompt", ["1+1=", "12+34=", "99-1=", "7*8="])
@pytest.mark.parametrize("lost_after", [0, 1, 2, 5])
async def test_interrupted_and_resumed_equals_uninterrupted(prompt: str, lost_after: int) -> None:
    task = Task(TaskId("t"), prompt)
    whole = await run(make_runner(engine()), task)
    broken = [engine(name, loses_at=lambda serial: None if serial else lost_after) for name in "abc"]
    resumed = await run(make_runner(*broken, engine("good")), task)
    assert same(resumed, whole)


async def test_only_the_missing_tokens_are_requested_from_another_engine() -> None:
    lossy = engine("lossy", loses_at=lambda serial: 4 if serial == 0 else None)
    other = engine("other")
    runner = make_runner(lossy, other)
    runner.pool.pause(EngineId("other"))
    running = asyncio.create_task(run(runner))
    await until(lambda: lossy.running == 1)
    runner.pool.resume(EngineId("other"))
    trajectory = await running
    (first,), (second,) = lossy.requests, other.requests
    assert second.prompt_token_ids == tuple(trajectory.token_ids[: len(first.prompt_token_ids) + 4])
    assert second.sampling.max_new_tokens == GREEDY.max_new_tokens - 4
    assert (runner.stats.trajectories, runner.stats.tokens) == (1, 4)
    assert runner.stats.interruptions == {"lost": 1}


async def test_an_unrequested_abort_is_resumed_on_the_same_engine() -> None:
    only = engine()
    runner = make_runner(only)
    whole = await run(make_runner(engine()))
    running = asyncio.create_task(run(runner))
    await until(lambda: only.running == 1)
    await only.abort(only.requests[0].request_id)
    assert same(await running, whole)
    assert len(only.requests) == 2
    assert runner.stats.interruptions == {"aborted": 1}


async def test_a_silent_engine_is_replaced_by_another_and_gets_an_abort() -> None:
    whole = await run(make_runner(engine()))
    silent, good = engine("silent", is_asleep=True), engine("good")
    runner = make_runner(silent, good, silence_s=0.05)
    runner.pool.pause(EngineId("good"))
    running = asyncio.create_task(run(runner))
    await until(lambda: silent.running == 1)
    runner.pool.resume(EngineId("good"))
    assert same(await running, whole)
    assert silent.aborted == [silent.requests[0].request_id]
    assert runner.stats.interruptions == {"silent": 1}


async def test_fencing_an_engine_moves_its_trajectories_at_once() -> None:
    whole = await run(make_runner(engine()))
    hanging, good = engine("hanging", is_asleep=True), engine("good")
    runner = make_runner(hanging, good, silence_s=3600)
    runner.pool.pause(EngineId("good"))
    running = [asyncio.create_task(run(runner)) for _ in range(3)]
    await until(lambda: hanging.running == 3)
    runner.pool.resume(EngineId("good"))
    runner.pool.fence(EngineId("hanging"), "planted")
    assert all(same(trajectory, whole) for trajectory in await asyncio.gather(*running))
    assert runner.stats.interruptions == {"fenced": 3}


async def test_version_spans_and_logprobs_received_are_kept_and_never_decrease() -> None:
    old = engine("old", loses_at=lambda _serial: 2)
    new = engine("new", version=7)
    runner = make_runner(old, new)
    runner.pool.pause(EngineId("new"))
    running = asyncio.create_task(run(runner))
    await until(lambda: old.running == 1)
    old.version = 6
    runner.pool.resume(EngineId("new"))
    trajectory = await running
    assert [span.version for span in trajectory.spans] == [6, 7]
    assert trajectory.spans[0] == Span(6, 2)


async def stranded() -> tuple[FakeEngine, TrajectoryRunner, asyncio.Task[Trajectory]]:
    """A trajectory that lost its engine at v3 with two tokens; the only other engine is still at v2."""
    newest, older = engine("newest", version=3, loses_at=lambda _serial: 2, dies=True), engine("older", version=2)
    runner = make_runner(newest, older)
    runner.pool.pause(EngineId("older"))
    running = asyncio.create_task(run(runner))
    await until(lambda: newest.running == 1)
    runner.pool.resume(EngineId("older"))
    await until(lambda: newest.running == 0)
    return older, runner, running


async def test_a_trajectory_waits_for_an_engine_that_is_new_enough() -> None:
    older, runner, running = await stranded()
    await until(lambda: runner.pool.num_waiting == 1)
    assert older.requests == []
    older.version = 3
    runner.pool.refresh()
    assert (await running).spans[0].version == 3


async def test_the_wait_for_a_version_has_a_limit_and_says_what_it_waits_for() -> None:
    _, runner, running = await stranded()
    with pytest.raises(TrajectoryError, match=r"an engine at v3 or newer; in service: older at v2"):
        await running
    assert runner.pool.num_waiting == 0


async def test_resumes_without_a_new_token_are_bounded_and_the_failure_names_the_last_interruption() -> None:
    hopeless = engine(loses_at=lambda serial: 2 if serial == 0 else 0)
    told = r"interrupted 3 times in a row without a new token, after 2 tokens; rollout.max_resumes is 2.*loss of 3"
    with pytest.raises(TrajectoryError, match=told):
        await run(make_runner(hopeless, max_resumes=2))
    assert len(hopeless.requests) == 4, "the first one brought two tokens"


async def test_a_trajectory_survives_any_number_of_interruptions_between_which_it_gets_tokens() -> None:
    whole = await run(make_runner(engine()))
    preempted = engine(loses_at=lambda serial: serial % 2)  # every other attempt brings one token
    runner = make_runner(preempted, max_resumes=1)
    answer = await run(runner)
    assert answer.token_ids.tolist() == whole.token_ids.tolist()
    assert runner.stats.interruptions.total() == 2 * whole.num_sampled_tokens - 1 > 3


@pytest.mark.parametrize("is_one_delta", [False, True])
async def test_when_only_the_final_reply_of_an_engine_is_lost_nothing_is_sampled_again(is_one_delta: bool) -> None:
    whole = await run(make_runner(engine()))
    num_sampled = whole.num_sampled_tokens
    dying = engine(loses_at=lambda _serial: num_sampled)

    async def without_final_reply(request):  # type: ignore[no-untyped-def]
        partial = PartialTurn(request.prompt_token_ids, request.sampling)
        async for delta in FakeEngine.generate(dying, request):
            partial.extend(delta)
            if not is_one_delta:
                yield delta._replace(finish_reason=None)
        if is_one_delta:
            yield partial.joined()._replace(finish_reason=None)
        raise EngineLostError("planted")

    dying.generate = without_final_reply  # type: ignore[method-assign]
    assert same(await run(make_runner(dying)), whole)
    assert len(dying.requests) == 1


async def test_cancelling_a_trajectory_aborts_its_request_and_leaves_no_slot() -> None:
    only = engine(is_asleep=True)
    runner = make_runner(only)
    running = asyncio.create_task(run(runner))
    await until(lambda: only.running == 1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.wait_for(runner.pool.wait_idle(), 1)
    await until(lambda: only.aborted == [only.requests[0].request_id])
    assert running.cancelled()


async def test_an_engine_that_loses_everything_is_fenced_off_and_the_others_answer() -> None:
    dead, good = engine("dead", loses_at=lambda _serial: 0), engine("good")
    runner = make_runner(dead, good)
    answers = await asyncio.gather(*(run(runner, Task(TaskId(f"t{index}"), "1+1=")) for index in range(32)))
    assert len(answers) == 32
    assert "lost 8 requests in a row, of 8 groups" in runner.pool.fenced[EngineId("dead")]


async def test_a_prompt_with_a_token_that_the_policy_lacks_is_refused_before_it_is_sent() -> None:
    only = engine()
    runner = TrajectoryRunner(EnginePool([only], 8), CODEC, 5.0, vocab_size=12)
    with pytest.raises(
        TrajectoryError, match=r"prompt of t holds the token id 15; model.shape.vocab_size=12"
    ) as refused:
        await run(runner)
    assert (refused.value.kind, refused.value.is_final, only.served) == ("env", True, 0)


@pytest.mark.parametrize("num_tasks", [1, 2])
async def test_an_engine_is_blamed_for_what_it_loses_of_two_tasks_of_an_evaluation_not_of_one(num_tasks: int) -> None:
    dead, good = engine("dead", loses_at=lambda _serial: 0), engine("good")
    runner = make_runner(dead, good)
    contexts = [RolloutContext(Task(TaskId(f"t{index % num_tasks}"), "1+1="), "eval") for index in range(32)]
    await asyncio.gather(*(runner.run(one, index, GREEDY) for index, one in enumerate(contexts)))
    assert list(runner.pool.fenced) == (["dead"] if num_tasks == 2 else [])


async def test_a_full_context_is_complete_although_its_engine_was_lost_before_it_reported_the_end() -> None:
    context = len(CODEC.encode_prompt("12+34=")) + 5
    dying = FakeEngine(EngineId("a"), length=lambda _serial: 99)

    async def without_final_reply(request):  # type: ignore[no-untyped-def]
        async for delta in FakeEngine.generate(dying, request):
            yield delta._replace(finish_reason=None)
        raise EngineLostError("planted")

    dying.generate = without_final_reply  # type: ignore[method-assign]
    pool = EnginePool([dying], 8, version_timeout_s=0.05)
    trajectory = await run(TrajectoryRunner(pool, CODEC, 5.0, max_context_tokens=context))
    assert (trajectory.num_sampled_tokens, trajectory.finish_reason, dying.served) == (5, "length", 1)


async def test_a_driver_that_stood_still_takes_no_request_for_silent() -> None:
    async def with_tokens_every_20_ms(request):  # type: ignore[no-untyped-def]
        async for delta in FakeEngine.generate(slow, request):
            await asyncio.sleep(0.02)
            yield delta

    slow = engine()
    slow.generate = with_tokens_every_20_ms  # type: ignore[method-assign]
    runner = make_runner(slow, silence_s=0.4)
    asyncio.get_running_loop().call_later(0.03, time.sleep, 1.5)
    await run(runner)
    assert runner.stats.interruptions == {}


async def test_a_driver_that_stood_still_fails_no_request_that_waits_for_a_version() -> None:
    older, runner, running = await stranded()
    await until(lambda: runner.pool.num_waiting == 1)

    def stand_still() -> None:
        time.sleep(1.2)
        asyncio.get_running_loop().call_later(0.01, follow)

    def follow() -> None:
        older.version = 3
        runner.pool.refresh()

    asyncio.get_running_loop().call_soon(stand_still)
    assert (await running).spans[0].version == 3


async def test_an_engine_on_which_requests_of_several_groups_stand_still_is_fenced() -> None:
    """Its process lives and answers, so nothing but the missing tokens shows that it is stuck."""
    stuck, good = engine("stuck", silent=True), engine("good")
    runner = make_runner(stuck, good, silence_s=0.05)
    tasks = [Task(TaskId(f"t{index}"), "1+1=") for index in range(24)]
    answers = await asyncio.gather(*(run(runner, task) for task in tasks))
    assert all(answer.finish_reason == "stop" for answer in answers)
    assert list(runner.pool.fenced) == [EngineId("stuck")]
    assert "no token for 0 s" in runner.pool.fenced[EngineId("stuck")]
    assert len(stuck.requests) <= 16, "not one request after another"


def test_the_only_engine_is_restarted_when_it_hangs_with_the_requests_of_one_group() -> None:
    async def one_group() -> None:
        stuck, started = engine("only", silent=True), engine("only")
        runner = make_runner(stuck, silence_s=0.05)
        restarts: list[str] = []

        def restart(engine_id: EngineId) -> bool:
            restarts.append(engine_id)
            asyncio.get_running_loop().call_soon(runner.pool.add, started)
            return True

        runner.pool.set_restart_hook(restart)
        context = RolloutContext(TASK, "0")
        await asyncio.gather(*(runner.run(context, index, GREEDY) for index in range(4)))
        assert restarts == ["only"]
        assert (len(stuck.requests), len(started.requests)) == (4, 4), "one silence was enough"
        assert runner.stats.interruptions == {"silent": 4}

    run_virtual(one_group())


def test_the_only_engine_stays_in_service_if_it_would_not_be_restarted() -> None:
    async def one_lost_message() -> None:
        only, delays = engine(), iter([3600.0])

        async def generate(request):  # type: ignore[no-untyped-def]
            await asyncio.sleep(next(delays, 0.0))
            async for delta in FakeEngine.generate(only, request):
                yield delta

        only.generate = generate  # type: ignore[method-assign]
        runner = make_runner(only, silence_s=0.05)
        runner.pool.set_restart_hook(lambda _engine_id: False)
        await run(runner)
        assert runner.stats.interruptions == {"silent": 1}

    run_virtual(one_lost_message())


def test_the_only_engine_is_not_restarted_for_one_silent_request_while_it_answers_others() -> None:
    async def hanging_on_one() -> None:
        only, delays = engine(), iter([3600.0])

        async def generate(request):  # type: ignore[no-untyped-def]
            await asyncio.sleep(next(delays, 0.01))
            async for delta in FakeEngine.generate(only, request):
                yield delta

        def restart(engine_id: EngineId) -> bool:
            restarts.append(engine_id)
            return False

        only.generate = generate  # type: ignore[method-assign]
        runner, restarts = make_runner(only, silence_s=0.05), list[str]()
        runner.pool.set_restart_hook(restart)
        running = asyncio.create_task(run(runner))
        await asyncio.sleep(0)
        while not running.done():
            await run(runner)
        assert runner.stats.interruptions == {"silent": 1}
        assert restarts == []

    run_virtual(hanging_on_one())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - fakes have no events
            await asyncio.sleep(0)


async def test_a_dead_engine_is_fenced_off_at_its_first_loss() -> None:
    dead, good = engine("dead"), engine("good")

    def generate(_request: object) -> object:
        raise EngineLostError.final("dead: its process ended")

    dead.generate = generate  # type: ignore[method-assign, assignment]
    runner = make_runner(dead, good, max_resumes=1)
    answers = await asyncio.gather(*(run(runner, Task(TaskId(f"t{index}"), "1+1=")) for index in range(4)))
    assert all(answer.finish_reason == "stop" for answer in answers)
    assert runner.pool.fenced == {EngineId("dead"): "dead: its process ended"}


async def test_the_loss_that_fences_an_engine_does_not_cancel_the_trajectory_that_reports_it() -> None:
    """Regression: the eighth loss in a row fenced the engine, which cancelled the reporting task itself forever."""
    lossy = engine("lossy", loses_at=lambda _serial: 0)
    good = engine("good")
    runner = make_runner(lossy, good, max_resumes=20)
    answers = await asyncio.gather(*(run(runner, Task(TaskId(f"t{index}"), "1+1=")) for index in range(16)))
    assert len(answers) == 16
