"""The policy is saved however a run ends, and a failed evaluation affects only its own metrics."""

from __future__ import annotations

import asyncio
import errno
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from penstock.actors import restart_budget
from penstock.actors.frozen_policies import FrozenPolicyClient
from penstock.dataflow.errors import AccountingError, PenstockError, TrainingError
from penstock.platform.checks.load import compose_config
from penstock.platform.metrics import atomic_file
from penstock.platform.run import controller, training
from penstock.platform.run.checkpoint import choose_checkpoint
from penstock.platform.run.engine_restarts import EngineRestarts
from penstock.platform.run.evaluation import Evaluation
from penstock.platform.run.lifecycle import Stop, write_failure
from penstock.platform.run.run import Run
from penstock.platform.run.run_dir import prepare_run_dir
from penstock.platform.run.training import train_to_end
from tests.runs import GROUPS, STEPS, Evaluator, run_of


async def test_the_policy_is_saved_before_the_last_evaluation_which_may_fail(tmp_path: Path) -> None:
    class LooksAtTheDisk(Evaluator):
        async def evaluate(self, step: int, tasks: object, name: str = "") -> Evaluation:
            assert step < STEPS or ("policy", STEPS) in run.trainer.saved
            return await super().evaluate(step, tasks)

    notes: list[str] = []
    run = run_of(set(), tmp_path, notes, evaluator=LooksAtTheDisk(fails_at={STEPS}))
    await controller.train(run)
    assert run.policy_version == STEPS
    assert [one.step for one in run.evaluations.done] == [0], "the figure is missing, not replaced by another one"
    assert [note for note in notes if "the judge is down" in note and f"v{STEPS}" in note]


async def test_failed_evaluations_before_and_during_training_are_reported_and_counted(tmp_path: Path) -> None:
    evaluator = Evaluator(fails_at={0, 2})
    run, logged = run_of(set(), tmp_path, [], every_steps=1, evaluator=evaluator), []
    log = run._instruments.hub.log
    run._instruments.hub.log = lambda step, metrics: (logged.append((step, metrics)), log(step, metrics))
    await controller.train(run)
    assert run.version == STEPS
    assert [one.step for one in run.evaluations.done] == [1, 3, STEPS]
    assert [(step, found["eval/failed"]) for step, found in logged if "eval/failed" in found] == [(0, 1.0), (2, 2.0)]


async def test_an_evaluation_that_fails_after_later_steps_is_counted_at_the_present_step(tmp_path: Path) -> None:
    class FailsLate(Evaluator):
        async def evaluate(self, step: int, tasks: object, name: str = "") -> Evaluation:
            while step == 1 and run.version < STEPS:  # noqa: ASYNC110 - the run has no event for it
                await asyncio.sleep(0)
            return await super().evaluate(step, tasks)

    run, logged = run_of(set(), tmp_path, [], every_steps=1, evaluator=FailsLate(fails_at={1})), []
    log = run._instruments.hub.log
    run._instruments.hub.log = lambda step, metrics: (logged.append((step, metrics)), log(step, metrics))
    await controller.train(run)
    assert [step for step, found in logged if "eval/failed" in found] == [STEPS]


async def test_a_skipped_step_repeats_neither_the_checkpoint_nor_the_evaluation_of_its_version(tmp_path: Path) -> None:
    evaluator = Evaluator()
    run = run_of({0, 2, 3, 5}, tmp_path, [], every_steps=1, evaluator=evaluator)
    await controller.train(run)
    assert run.trainer.snapshots == [1, 2, 3, STEPS], "each version once"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_3", f"step_{STEPS}"]
    assert run.trainer.saved == [("policy", STEPS)]
    assert evaluator.evaluated == [0, 1, 2, 3, STEPS], "each version once"


async def test_a_policy_that_cannot_be_saved_at_the_end_is_reported_and_hides_no_cause(tmp_path: Path) -> None:
    notes: list[str] = []
    run = run_of(set(), tmp_path, notes)
    run.version = 2
    run.trainer.fails_to_save = TrainingError("trainer: save_hf: a process died: rank 0")
    await run.save_policy_at_end()
    assert run.policy_version is None
    assert "could not be saved: trainer: save_hf: a process died: rank 0" in notes[-1]


async def test_a_run_whose_directory_is_deleted_ends_with_that_reason_in_the_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("name: run\n")
    run = run_of(set(), run_dir, [])
    fail_at(run, 2, lambda: shutil.rmtree(run_dir))
    error = await fails_to_the_end(run)
    assert "config.yaml is gone at v" in str(error)
    assert run.version < STEPS
    shutil.rmtree(run_dir, ignore_errors=True)
    write_failure(run_dir, error)
    assert "config.yaml is gone" in (run_dir / "error.txt").read_text()


@pytest.mark.parametrize(
    ("error", "logged"), [(asyncio.CancelledError, ["interrupted"]), (TrainingError, [None])], ids=["SIGTERM", "error"]
)
async def test_a_full_disk_hides_no_cause_and_the_trackers_are_closed(
    error: type[BaseException], logged: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    @asynccontextmanager
    async def start(*_: object) -> AsyncIterator[None]:
        raise error("the cause")
        yield

    closed: list[str | None] = []
    monkeypatch.chdir(tmp_path)
    config, stop = compose_config(["experiment=arithmetic"]), Stop()
    stop.begin("SIGTERM", signal.SIGTERM)
    run_dir = prepare_run_dir(config)
    monkeypatch.setattr(training, "write_summary", full)
    monkeypatch.setattr(training, "write_report", full)
    monkeypatch.setattr(atomic_file.os, "fsync", full)
    monkeypatch.setattr(training, "start_parts", start)
    monkeypatch.setattr(training.MetricsHub, "close", lambda _hub, end: closed.append(end and end.status))
    with pytest.raises(error, match="the cause"):
        await training._train(config, run_dir, stop=stop)
    assert closed == logged


async def test_nothing_is_saved_of_a_run_that_has_trained_nothing(tmp_path: Path) -> None:
    run = run_of(set(), tmp_path, [])
    await run.save_policy_at_end()
    assert run.trainer.saved == []


class FrozenProcess:
    """Computes so many groups and dies; with 0 it does not come up."""

    def __init__(self, num_groups: int) -> None:
        self._num_left = num_groups
        self.ready = SimpleNamespace(remote=lambda: asyncio.ensure_future(self._check()))
        self.logprobs = SimpleNamespace(remote=lambda group: (group, asyncio.ensure_future(self._compute())))

    async def _check(self) -> None:
        if not self._num_left:
            raise ray.exceptions.OutOfMemoryError("the node is running low on memory")

    async def _compute(self) -> int:
        await self._check()
        self._num_left -= 1
        return 1


class LiveActors:
    """All trainer ranks are alive."""

    async def lost_ranks(self) -> list[str]:
        return []


LIVE_ACTORS: Any = LiveActors()


async def fails_to_the_end(run: Run) -> PenstockError:
    """Train; returns the error that the console shows."""
    with pytest.raises(PenstockError) as found:
        await asyncio.wait_for(train_to_end(run, LIVE_ACTORS, Stop()), 60.0)
    return found.value


@pytest.mark.parametrize("role", ["reference", "teacher"])
async def test_a_run_without_frozen_workers_ends_with_one_error_its_policy_and_a_checkpoint(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "kill", lambda _process: None)
    monkeypatch.setattr(restart_budget, "FIRST_PAUSE_S", 0.0)
    notes: list[str] = []
    run = run_of(set(), tmp_path, notes)
    processes = iter([FrozenProcess(2 * GROUPS + 1)])
    client = FrozenPolicyClient(role, [lambda: cast("Any", next(processes, FrozenProcess(0)))], 5.0)
    run._flow.ports = replace(run._flow.ports, **{role: client.logprobs})
    error = await fails_to_the_end(run)
    client.close()
    assert f"{role}: no worker is left: 1 of 1 were given up (each is restarted at most 10 times" in str(error)
    assert "low on memory" in str(error)
    assert "penstock resume" in str(error)
    assert "\n" not in str(error)
    check_saved(run, tmp_path)


async def test_a_run_without_engines_ends_with_one_error_its_policy_and_a_checkpoint(tmp_path: Path) -> None:
    run = run_of(set(), tmp_path, [])
    pool = run._flow.ports.runner.pool
    (engine,) = cast("list[Any]", pool.engines())
    engine.dies, engine.loses_at = True, lambda serial: 0 if serial > 5 * GROUPS else None

    async def begin_again(_engine_id: object) -> Any:
        engine.served = 5 * GROUPS + 1  # dies at the next request
        return engine

    async def catch_up(engine: Any) -> None:
        pool.add(engine)

    async with EngineRestarts(pool, begin_again, catch_up, 2).running():
        error = await fails_to_the_end(run)
    assert "no rollout engine is left in service: 1 of 1 are out" in str(error)
    assert "rollout.max_engine_restarts_per_hour=2" in str(error)
    assert "fake-0: planted loss of" in str(error)
    assert "penstock resume" in str(error)
    assert pool.num_returned == 2
    check_saved(run, tmp_path)


def check_saved(run: Run, run_dir: Path) -> None:
    """The policy and a checkpoint of the version that was reached are there."""
    assert 0 < run.version < STEPS
    assert run.policy_version == run.version
    assert choose_checkpoint(run_dir).version == run.version
    assert run.trainer.snapshots == [run.version]


@pytest.mark.parametrize("error", [AccountingError("planted (I3)"), ValueError("planted")])
async def test_a_run_whose_books_may_be_wrong_keeps_its_policy_and_takes_no_checkpoint(
    error: Exception, tmp_path: Path
) -> None:
    run = run_of(set(), tmp_path, [])
    fail_at(run, 2, lambda: run._flow.fail(error))
    with pytest.raises(type(error), match="planted"):
        await train_to_end(run, LIVE_ACTORS, Stop())
    assert run.policy_version == run.version == 2
    assert run.trainer.snapshots == []


async def test_a_checkpoint_that_cannot_be_taken_at_the_end_is_noted_and_hides_no_cause(tmp_path: Path) -> None:
    notes: list[str] = []
    run = run_of(set(), tmp_path, notes)
    fail_at(run, 2, lambda: run._flow.fail(PenstockError("the judge is down")))

    async def snapshot() -> float:
        raise TrainingError("trainer: snapshot: a process died: rank 0")

    run.trainer.snapshot = snapshot  # type: ignore[method-assign]
    assert str(await fails_to_the_end(run)) == "the judge is down"
    assert [note for note in notes if "v2, could not be taken: trainer: snapshot: a process died: rank 0" in note]
    assert run.policy_version == 2


def fail_at(run: Run, version: int, fail: Callable[[], None]) -> None:
    """Call `fail` directly after the flow has advanced to a version."""
    advance = run._flow.advance

    def advance_and_fail(to: int) -> None:
        advance(to)
        if to == version:
            fail()

    run._flow.advance = advance_and_fail  # type: ignore[method-assign]


@pytest.mark.parametrize("hangs_in", [0, 2])
async def test_a_run_that_is_told_to_end_in_a_long_step_keeps_its_policy_and_the_batch(
    hangs_in: int, tmp_path: Path
) -> None:
    notes: list[str] = []
    run, stop, order = run_of(set(), tmp_path, notes), Stop(grace_s=20.0), []
    run.trainer.hangs_in = hangs_in
    save = run.trainer.save

    async def saved(path: str) -> None:
        order.append("policy")
        await save(path)

    run.trainer.save = saved

    async def on_saved() -> None:
        order.append("summary")

    ending = asyncio.create_task(train_to_end(run, LIVE_ACTORS, stop, on_saved))
    await asyncio.wait_for(run.trainer.hangs.wait(), 60.0)
    assert stop.ends_itself
    assert "the policy" in stop.loses() or not hangs_in
    stop.begin("SIGTERM", 15)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(ending, 30.0)
    assert order == ["policy", "summary"]
    assert (run.version, run.policy_version, run.trainer.snapshots[-1]) == (hangs_in, hangs_in, hangs_in)
    checkpoint = choose_checkpoint(tmp_path)
    assert checkpoint.version == hangs_in
    ready = {int(group) for group in checkpoint.manifest["spooled"]}
    assert set(run.trainer.given[-1]) <= ready, "the batch of the ended step is ready again"
    trained = checkpoint.manifest["flow"]["core"]["ledger"]["ended"].get("trained", 0)
    assert trained == hangs_in * GROUPS
    stats = checkpoint.manifest["flow"]["stats"]
    assert stats["trained"][0] == sum(run._flow.core.rules.group_size for _ in range(hangs_in * GROUPS))


async def test_a_step_that_fails_before_its_update_leaves_the_policy_of_the_version_before(tmp_path: Path) -> None:
    run, order = run_of(set(), tmp_path, []), []
    step, save = run.trainer.step, run.trainer.save

    async def fails_in_the_third(batch: Any) -> Any:
        report = await step(batch)
        if report.version == 3:
            raise TrainingError("planted: out of memory")
        return report

    async def stop_step() -> bool:
        order.append("asked to keep its weights")
        return True

    async def saved(path: str) -> None:
        order.append("policy")
        await save(path)

    run.trainer.step, run.trainer.stop_step, run.trainer.save = fails_in_the_third, stop_step, saved
    assert "planted" in str(await fails_to_the_end(run))
    assert order == ["asked to keep its weights", "policy"]
    assert run.version == run.policy_version == 2


async def test_a_signal_to_a_run_that_has_failed_limits_what_it_still_saves(tmp_path: Path) -> None:
    notes: list[str] = []
    run, stop = run_of(set(), tmp_path, notes), Stop(grace_s=1.0)
    fail_at(run, 2, lambda: run._flow.fail(PenstockError("the judge is down")))

    async def never() -> float:
        stop.begin("SIGTERM", 15)
        await asyncio.Event().wait()
        return 0.0

    run.trainer.snapshot = never
    with pytest.raises(PenstockError, match="the judge is down"):
        await asyncio.wait_for(train_to_end(run, LIVE_ACTORS, stop), 30.0)
    assert run.policy_version == 2, "it comes first"
    assert any("the last checkpoint is not complete" in note for note in notes)


async def test_a_step_that_is_about_to_be_completed_is_published_before_the_run_ends(tmp_path: Path) -> None:
    run, stop = run_of(set(), tmp_path, []), Stop(grace_s=20.0)

    async def stop_step() -> bool:
        return False  # all ranks have decided to make the update

    run.trainer.stop_step = stop_step
    step = run.trainer.step

    async def signalled(batch: Any) -> Any:
        report = await step(batch)
        if report.version == 2:
            stop.begin("SIGTERM", 15)
            await asyncio.sleep(0.05)
        return report

    run.trainer.step = signalled
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(train_to_end(run, LIVE_ACTORS, stop), 30.0)
    assert run.version == run.policy_version == 2
    assert choose_checkpoint(tmp_path).version == 2


async def test_a_run_ends_after_max_hours_with_policy_and_checkpoint_at_the_next_cut(tmp_path: Path) -> None:
    notes: list[str] = []
    run, stop = run_of(set(), tmp_path, notes), Stop(grace_s=20.0)
    fail_at(run, 2, lambda: stop.begin("max_hours=0.1"))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(train_to_end(run, LIVE_ACTORS, stop), 30.0)
    assert any("max_hours=0.1: the run ends after this step" in note for note in notes)
    check_saved(run, tmp_path)
