"""The flow over fakes: bounded admission, retries, failures with a reason, and time-outs that name what is missing."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from penstock.dataflow.errors import EngineLostError, PenstockError, TrajectoryError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ledger import GroupState, LedgerCounts, Reason
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import LengthLimits
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.rollout.trajectory.rollout_context import RolloutContext
from penstock.rollout.trajectory.runner import TrajectoryRunner
from tests.fakes import FakeEngine, FakeRewards
from tests.flows import CODEC, make_flow, next_groups, tasks, train_all
from tests.virtual_time import run_virtual


async def test_a_whole_run_trains_every_batch_and_balances() -> None:
    engines = [FakeEngine(length=lambda serial: 3 + serial % 5)]
    flow = make_flow(engines, FakeRewards(), batch=3, eta=2, steps=6)
    trained = await train_all(flow, engines)
    assert flow.counts() == LedgerCounts(admitted=18, trained=18, dropped=0, filtered=0, failed=0, live=0)
    assert len({group.group_id for group in trained}) == 18
    assert flow.stats.total.max_versions <= 2
    assert flow.stats.total.num_tokens == flow.stats.tokens_generated


async def test_synchronous_training_is_on_policy() -> None:
    engines = [FakeEngine()]
    flow = make_flow(engines, FakeRewards(), eta=0, steps=5)
    await train_all(flow, engines)
    assert flow.stats.total.max_versions == 0
    assert flow.stats.total.stale_share == 0.0


async def test_a_run_that_is_made_longer_after_its_last_step_samples_again() -> None:
    """As `penstock set total_steps=…` does while the last checkpoint is taken."""
    engines = [FakeEngine()]
    flow = make_flow(engines, FakeRewards(), batch=2, steps=1, timeout_s=1.0)
    async with flow:
        await next_groups(flow)
        engines[0].version = 1
        flow.advance(1)
        await asyncio.sleep(0.01)
        flow.set_total_steps(2)
        assert len(await next_groups(flow)) == 2


async def test_engine_slots_are_never_exceeded_and_work_is_spread() -> None:
    engines = [FakeEngine(engine_id=f"fake-{index}") for index in range(2)]  # type: ignore[arg-type]
    flow = make_flow(engines, FakeRewards(), batch=8, eta=1, steps=2, slots=3)
    await train_all(flow, engines)
    assert all(0 < engine.most_running <= 3 for engine in engines)


async def test_admission_goes_on_when_engines_take_groups_and_stops_when_two_batches_wait() -> None:
    flow = make_flow([FakeEngine(silent=True)], FakeRewards(), batch=1, eta=9, steps=20, slots=6)  # three groups of two
    async with flow:
        await asyncio.sleep(0.05)
        assert flow.counts().live == 5, "three are with the engine, two wait for it"
        assert flow.core.free_credits == 0


class ByNumber:
    def max_new_tokens(self, task: Task, stream: str) -> int:
        return 3 if int(task.task_id[1:]) % 2 else 7


async def test_a_tasks_own_length_limit_is_what_the_engine_gets() -> None:
    engines = [FakeEngine(length=lambda serial: 20)]
    flow = make_flow(engines, FakeRewards(), batch=4, eta=0, steps=1, lengths=LengthLimits(5000, ByNumber()))
    trained = await train_all(flow, engines)
    assert len(trained) == 4
    assert flow.stats.total.num_tokens == 2 * (2 * 3 + 2 * 7)


async def test_a_lost_request_is_resumed_and_costs_no_retry() -> None:
    engines = [FakeEngine(fail_first=2)]
    flow = make_flow(engines, FakeRewards(), steps=2, engine_retries=2)
    await train_all(flow, engines)
    assert flow.ports.runner.stats.interruptions == {"lost": 2}
    assert flow.core.retries.total() == flow.counts().failed == 0


async def test_a_group_beyond_its_retries_fails_with_its_reason_and_is_replaced() -> None:
    engines = [FakeEngine()]
    failures = itertools.count()
    rewards = FakeRewards(lambda _t: TrajectoryError("reward", "planted") if next(failures) < 4 else 1.0)
    flow = make_flow(engines, rewards, batch=1, eta=0, steps=2)
    await train_all(flow, engines)
    counts = flow.counts()
    assert counts.trained == 2
    assert counts.failed >= 1
    assert flow.core.ledger.reasons[GroupState.FAILED, Reason.REWARD] == counts.failed
    assert flow.stats.failures[0].kind == "reward"
    assert counts.admitted == counts.trained + counts.failed


async def test_a_trajectory_says_why_the_attempt_before_it_failed() -> None:
    engines = [FakeEngine()]
    failures = iter(["first", "second"])
    rewards = FakeRewards(lambda _t: TrajectoryError("reward", why) if (why := next(failures, "")) else 1.0)
    flow = make_flow(engines, rewards, batch=1, eta=0, steps=1, retries=2)
    await train_all(flow, engines)
    assert flow.core.retries == {"reward": 2}
    causes = [member.retried_after for member in flow.stats.samples]
    assert len(causes) == 2
    assert {"reward: second"} <= set(causes) <= {"", "reward: first", "reward: second"}


async def test_a_batch_that_never_closes_names_what_it_waits_for() -> None:
    flow = make_flow([FakeEngine(silent=True)], FakeRewards(), timeout_s=0.05)
    async with flow:
        with pytest.raises(PenstockError, match=r"0 of 2 groups ready at v0; unfinished: 0:generating\(oldest v0\)"):
            await next_groups(flow)
    assert flow.counts().dropped == 4  # run_end: nothing is left live


def test_a_stuck_engine_costs_one_time_limit_then_it_is_fenced_off_and_the_others_go_on() -> None:
    run_virtual(one_engine_is_stuck())  # on a busy machine the engine that works would be silent for 20 ms, too


async def one_engine_is_stuck() -> None:
    stuck, good = FakeEngine(EngineId("stuck"), silent=True), FakeEngine(EngineId("good"))
    flow = make_flow([stuck, good], FakeRewards(), batch=8, steps=8, silence_s=0.02, slots=8)
    await train_all(flow, [stuck, good])
    assert "no token for" in flow.ports.runner.pool.fenced[EngineId("stuck")]
    assert stuck.served == 8, "it gets nothing more once what it had was silent"
    assert set(stuck.aborted) == {request.request_id for request in stuck.requests}, "no task waits for them"
    assert flow.counts().failed == 0


async def test_when_the_only_engine_is_stuck_the_run_ends_and_says_why() -> None:
    flow = make_flow([FakeEngine(silent=True)], FakeRewards(), silence_s=0.02)
    async with flow:
        with pytest.raises(EngineLostError, match=r"no rollout engine is left in service: .*no token for 0 s"):
            await next_groups(flow)


async def test_losing_every_engine_fails_groups_instead_of_hanging() -> None:
    engine = FakeEngine()
    pool = EnginePool([engine], 4)
    pool.fence(engine.engine_id, "planted")
    runner = TrajectoryRunner(pool, CODEC, 1.0)
    with pytest.raises(Exception, match="no rollout engine is left in service"):
        await runner.run(RolloutContext(next(tasks()), "0"), 0, SamplingParams(4))


async def test_the_driver_keeps_no_tokens_of_groups_that_the_store_has() -> None:
    flow = make_flow([FakeEngine()], FakeRewards())
    async with flow:
        while flow.core.num_ready < 4:  # noqa: ASYNC110 - the core has no event for it
            await asyncio.sleep(0)
        await next_groups(flow)
        kept = [*flow._groups.values(), *flow._in_batch.values()]
        assert len(kept) == 4
        for run in kept:
            assert not any((run.outcomes, run._sampled, run.context.turns, run.context.prompts)), run.group_id


async def test_a_bug_in_a_group_stops_the_run() -> None:
    def broken(_trajectory: object) -> float:
        raise ZeroDivisionError("planted")

    flow = make_flow([FakeEngine()], FakeRewards(broken))  # type: ignore[arg-type]
    async with flow:
        with pytest.raises(ZeroDivisionError, match="planted"):
            await asyncio.wait_for(next_groups(flow), 5)


async def test_skipped_steps_drop_their_groups_and_return_their_credits() -> None:
    flow = make_flow([FakeEngine()], FakeRewards(), steps=2)
    async with flow:
        await next_groups(flow)
        flow.skip()
        for version in (1, 2):
            await next_groups(flow)
            flow.advance(version)
    assert flow.counts() == LedgerCounts(admitted=6, trained=4, dropped=2, filtered=0, failed=0, live=0)
    assert flow.core.ledger.reasons[GroupState.DROPPED, Reason.BAD_STEP] == 2
