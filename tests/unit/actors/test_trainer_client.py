"""A batch in parts: the ranks get them in order, each as soon as it is full, and a rank that fails ends the wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray

from penstock.actors.trainer.client import UNKNOWN, TrainerClient
from penstock.dataflow.errors import CheckpointError, TrainingError, WeightSendError, WeightSyncError
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ports import StepReport, WrittenFile
from penstock.dataflow.trajectory import GroupRef
from penstock.dataflow.versions import Span


class FakeRank:
    """Answers as a Ray actor does: `rank.method.remote(...)` is a call that was made already."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.fails = fails
        self.versions: list[int] = []
        self.metrics: dict[str, float] = {}

    def __getattr__(self, method: str) -> Any:
        return type("Method", (), {"remote": staticmethod(lambda *arguments: self._call(method, *arguments))})

    def _call(self, method: str, groups: list[GroupRef], version: int) -> asyncio.Future[StepReport | None]:
        self.calls.append((method, [group.handle for group in groups]))
        self.versions.append(version)
        answer: asyncio.Future[StepReport | None] = asyncio.get_running_loop().create_future()
        if self.fails:
            answer.set_exception(RuntimeError("planted"))
        else:
            answer.set_result(None if method == "accumulate" else StepReport(1, False, self.metrics, 2.0))
        return answer


def batch(tokens: list[int]) -> list[GroupRef]:
    spans = [((Span(0, num_tokens),),) for num_tokens in tokens]
    return [
        GroupRef(GroupId(index), TaskId("t"), f"handle {index}", spans[index], (1.0,), num_tokens)
        for index, num_tokens in enumerate(tokens)
    ]


async def test_a_step_waits_for_a_holder_of_the_step_lock() -> None:
    rank = FakeRank()
    client = TrainerClient([rank], 10.0)
    first, second = batch([5, 5])
    async with client.step_lock:
        await client.accumulate([first])
        step = asyncio.create_task(client.step([second]))
        for _ in range(5):
            await asyncio.sleep(0)
        assert rank.calls == [("accumulate", ["handle 0"])], "gradients change no weights"
        assert client.version == 0
    await step
    assert (rank.calls[-1], client.version) == (("step", ["handle 1"]), 1)


async def test_a_step_is_taken_in_its_turn_and_holds_no_lock_while_it_waits_for_it() -> None:
    rank = FakeRank()
    client = TrainerClient([rank], 10.0)
    seen: list[object] = []

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        seen.append(client.step_lock.locked())
        yield
        seen.append(rank.calls[-1])

    client.turn = turn
    await client.step(batch([5]))
    assert seen == [False, ("step", ["handle 0"])]


async def test_a_part_and_the_step_are_calls_of_every_rank_from_the_version_before_the_step() -> None:
    ranks = [FakeRank(), FakeRank()]
    client = TrainerClient(ranks, 10.0)
    first, second, third = batch([5, 5, 7])
    await client.accumulate([first, second])
    report = await client.step([third])
    assert ranks[0].calls == ranks[1].calls
    assert ranks[0].calls == [("accumulate", ["handle 0", "handle 1"]), ("step", ["handle 2"])]
    assert (client.version, client.busy_s, report.version) == (1, 2.0, 1)
    assert ranks[0].versions == [0, 0]


async def test_early_logprobs_of_a_group_are_computed_on_every_rank_before_the_step() -> None:
    ranks = [FakeRank(), FakeRank()]
    client = TrainerClient(ranks, 10.0)
    client.version = 3
    (group,) = batch([5])
    await client.early_logprobs(group)
    await client.step(batch([5, 5]))
    for rank in ranks:
        assert rank.calls == [("early_logprobs", ["handle 0"]), ("step", ["handle 0", "handle 1"])]
        assert rank.versions == [3, 3], "what is forwarded is for the step that comes next"


async def test_after_a_step_that_was_not_seen_to_end_the_version_is_unknown() -> None:
    failing = TrainerClient([FakeRank(), FakeRank(fails=True)], 10.0)
    with pytest.raises((TrainingError, RuntimeError), match="planted"):
        await failing.step(batch([8]))
    late = TrainerClient([Stopped()], 0.01)
    with pytest.raises(TrainingError, match="step"):
        await late.step(batch([8]))
    given_up = TrainerClient([Stopped()], 10.0)
    step = asyncio.create_task(given_up.step(batch([8])))
    await asyncio.sleep(0.01)
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    assert failing.version == late.version == given_up.version == UNKNOWN, "the ranks may complete it all the same"


class StopsItsStep(FakeRank):
    """Its step fails, and it answers whether it failed before it decided to make the update."""

    def __init__(self, is_ended: bool) -> None:
        super().__init__(fails=True)
        self.is_ended = is_ended
        self.saved: list[tuple[Any, ...]] = []

    def _call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        if method == "step":
            return super()._call(method, *arguments)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_result(self.is_ended if method == "stop_step" else None)
        if method == "save_hf":
            self.saved.append(arguments)
        return answer


async def test_after_a_step_that_failed_before_its_update_the_version_before_it_can_be_saved() -> None:
    ranks = [StopsItsStep(is_ended=True), StopsItsStep(is_ended=False)]
    client = TrainerClient(ranks, 10.0)
    client.version = 4
    with pytest.raises((TrainingError, RuntimeError), match="planted"):
        await client.step(batch([8]))
    assert client.version == UNKNOWN
    assert await client.stop_step()
    await client.save("policy")
    assert (client.version, ranks[0].saved[0][:2]) == (4, ("policy", 4))


async def test_after_a_step_that_failed_in_its_update_nothing_can_be_saved() -> None:
    client = TrainerClient([StopsItsStep(is_ended=False)], 10.0)
    with pytest.raises((TrainingError, RuntimeError), match="planted"):
        await client.step(batch([8]))
    assert not await client.stop_step()
    with pytest.raises(TrainingError, match="of no version"):
        await client.save("policy")


async def test_a_step_that_hangs_in_living_processes_has_lost_all_ranks() -> None:
    class Hangs(FakeRank):
        """Its process lives, and its collective never ends."""

        def _call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:  # type: ignore[override]
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if method == "is_alive":
                answer.set_result(True)
            return answer

    client = TrainerClient([Hangs(), Hangs()], 0.01)
    assert await client.lost_ranks() == []
    with pytest.raises(TrainingError, match=r"step: no answer within 0.01 s.*One of 2 ranks hangs.*step_timeout_s"):
        await client.step(batch([8]))
    assert await client.lost_ranks() == [0, 1]


async def test_other_failures_and_limits_say_nothing_of_the_processes() -> None:
    class Alive(FakeRank):
        def _call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:  # type: ignore[override]
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if method == "is_alive":
                answer.set_result(True)
            elif method == "step":
                cause = TimeoutError("the store of a user's reward did not answer")
                answer.set_exception(ray.exceptions.RayTaskError("step", "traceback", cause).as_instanceof_cause())
            return answer

    client = TrainerClient([Alive()], 10.0)
    with pytest.raises(TrainingError, match="did not answer"):
        await client.step(batch([8]))
    await client.close(timeout_s=0.01)
    assert await client.lost_ranks() == []


async def test_ranks_that_are_late_with_a_step_of_a_publish_are_named_with_their_progress() -> None:
    class Late(FakeRank):
        """Writes forever."""

        def _call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:  # type: ignore[override]
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if method == "writing":
                answer.set_result("v7, bucket 3 of 17")
            return answer

    class Quick(FakeRank):
        def _call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:  # type: ignore[override]
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            answer.set_result([method, *arguments])
            return answer

    quick = TrainerClient([Quick(), Quick()], 10.0)
    assert await quick.call_ranks("publish v7", 5.0, "write_shards", 7) == [["write_shards", 7]] * 2
    client = TrainerClient([Quick(), Late(), Late()], 10.0)
    late = r"training rank 1 \(v7, bucket 3 of 17\), training rank 2 \(v7, bucket 3 of 17\)"
    with pytest.raises(WeightSyncError, match=rf"publish v7: write_shards is not complete after 0.05 s .*: {late}"):
        await client.call_ranks("publish v7", 0.05, "write_shards", 7)


class Stopped(FakeRank):
    """Never answers."""

    def _call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        return asyncio.get_running_loop().create_future()


class Dead(FakeRank):
    def _call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_exception(ray.exceptions.OutOfMemoryError("the node is running low on memory"))
        return answer


async def test_if_ranks_are_never_placed_the_start_ends_in_time_and_names_them() -> None:
    missing = r"trainer: 2 of 3 ranks \(1, 2\) have no process after 0\.05 s \(trainer\.start_timeout_s\)"
    with pytest.raises(TrainingError, match=missing):
        await asyncio.wait_for(TrainerClient([Saves(), Stopped(), Stopped()], 10.0).start(0.05), 5.0)
    with pytest.raises(TrainingError, match=r"trainer: rendezvous: a process died: .*low on memory"):
        await asyncio.wait_for(TrainerClient([Stopped(), Dead()], 10.0).start(5.0), 5.0)


async def test_a_dead_rank_is_an_error_of_the_export_and_a_slow_one_may_wait_for_an_engine() -> None:
    with pytest.raises(WeightSendError, match=r"trainer: send_weights: a process died: .*low on memory"):
        await TrainerClient([Dead()], 10.0).call_transfer("send_weights", 1, timeout_s=5.0)
    with pytest.raises(WeightSendError, match="publish v1: write_shards on the training ranks: a process died"):
        await TrainerClient([Dead()], 10.0).call_ranks("publish v1", 5.0, "write_shards", 1)
    with pytest.raises(WeightSyncError, match="trainer: send_weights: no answer within") as late:
        await TrainerClient([Stopped()], 10.0).call_transfer("send_weights", 1, timeout_s=0.05)
    assert not isinstance(late.value, WeightSendError)


class Saves(FakeRank):
    """Was restored to version 7."""

    def _call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        self.calls.append((method, list(arguments)))
        answers = {"rendezvous": ("host", 1, 2), "start": ("node", 7), "write_checkpoint": WrittenFile("file", 3, 4)}
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        answer.set_result(answers.get(method))
        return answer


async def test_a_checkpoint_is_a_snapshot_of_the_version_and_a_file_of_each_rank() -> None:
    ranks = [Saves(), Saves()]
    client = TrainerClient(ranks, 10.0)
    await client.start(5.0)
    assert (client.version, client.nodes) == (7, ["node", "node"])
    assert 0 <= await client.snapshot() < 5
    assert await client.write_checkpoint("/folder") == [WrittenFile("file", 3, 4)] * 2
    assert ranks[1].calls[:2] == [("rendezvous", []), ("start", ["host", 1, 2])]
    assert ranks[1].calls[2:] == [("snapshot", [7]), ("write_checkpoint", ["/folder"])]


async def test_a_checkpoint_that_is_not_written_says_why_and_names_its_limit() -> None:
    limit = r"trainer: checkpoint /folder: no answer within 0\.2 s\. The limit is 4 x trainer\.step_timeout_s\."
    with pytest.raises(CheckpointError, match=limit):
        await TrainerClient([Stopped()], 0.05).write_checkpoint("/folder")
    with pytest.raises(CheckpointError, match=r"trainer: checkpoint /folder: a process died: .*low on memory"):
        await TrainerClient([Dead()], 10.0).write_checkpoint("/folder")


async def test_what_only_one_rank_measures_is_in_the_report_of_all() -> None:
    ranks = [FakeRank(), FakeRank()]
    for number, rank in enumerate(ranks):
        rank.metrics = {"loss/policy": 10.0 + number, f"rank/busy_s/{number}": float(number)}
    report = await TrainerClient(ranks, 10.0).step(batch([5]))
    assert report.metrics == {"loss/policy": 10.0, "rank/busy_s/0": 0.0, "rank/busy_s/1": 1.0}
