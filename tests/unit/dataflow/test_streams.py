"""Task streams: mixing, quotas, requeueing, curricula and group sizes, all at admission."""

from __future__ import annotations

import copy
import itertools
import json
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import GroupState, Ledger, Reason
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import LengthLimits, QueuedTask, TaskQueue, TaskStream
from penstock.dataflow.trajectory import Trajectory


def endless(name: str) -> Iterator[Task]:
    return (Task(TaskId(f"{name}{index}"), "") for index in itertools.count())


def stream(name: str, weight: float = 1.0, quota: float = 1.0) -> TaskStream:
    return TaskStream(name, endless(name), weight, quota)


def admit(queue: TaskQueue, ledger: Ledger) -> QueuedTask | None:
    queued = queue.next(ledger)
    if queued is not None:
        ledger.admit(queued.task.task_id, queued.group_size, queued.stream, queued.requeues)
    return queued


def test_shares_follow_the_weights_at_every_point() -> None:
    queue, ledger = TaskQueue([stream("a", 5), stream("b", 2), stream("c", 1)], 1000, 2), Ledger()
    seen: Counter[str] = Counter()
    for count in range(1, 161):
        queued = admit(queue, ledger)
        assert queued is not None
        seen[queued.stream] += 1
        for name, weight in (("a", 5), ("b", 2), ("c", 1)):
            assert abs(seen[name] - count * weight / 8) <= 1.5


def test_a_stream_at_its_quota_waits_and_the_others_go_on() -> None:
    queue, ledger = TaskQueue([stream("a", 1, quota=0.25), stream("b", 1, quota=0.75)], 8, 2), Ledger()
    admitted = [admit(queue, ledger) for _ in range(8)]
    assert Counter(queued.stream for queued in admitted if queued) == {"a": 2, "b": 6}
    assert queue.next(ledger) is None
    first_of_a = next(record.group_id for record in ledger.live() if record.stream == "a")
    ledger.end(first_of_a, GroupState.DROPPED, Reason.STALE)
    assert queue.next(ledger).stream == "a"  # type: ignore[union-attr]


def test_a_requeued_task_comes_back_after_a_window_of_others_and_not_before() -> None:
    queue, ledger = TaskQueue([stream("a")], window=3, group_size=2), Ledger()
    first = admit(queue, ledger)
    assert first is not None
    queue.requeue(first, ledger)
    names, requeues = [], []
    for _ in range(5):
        ledger.end(next(ledger.live()).group_id, GroupState.DROPPED, Reason.STALE)
        queued = admit(queue, ledger)
        assert queued is not None
        names.append(queued.task.task_id)
        requeues.append(queued.requeues)
    assert names == ["a1", "a2", "a3", "a0", "a4"]
    assert requeues == [0, 0, 0, 1, 0]


class Harder:
    """Once the easy stream earns enough, only hard tasks."""

    def weights(self, version: int, rewards: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
        earned = rewards.get("easy", ())
        return {"easy": 0.0 if len(earned) == 5 and min(earned) > 0.8 else 1.0, "hard": 1.0}


def scored(reward: float) -> Trajectory:
    trajectory = object.__new__(Trajectory)
    object.__setattr__(trajectory, "reward", reward)
    return trajectory


def test_a_curriculum_changes_the_mix_and_makes_nothing_up() -> None:
    ledger = Ledger()
    queue = TaskQueue([stream("easy"), stream("hard")], 100, 2, curriculum=Harder())
    queued = [admit(queue, ledger) for _ in range(10)]
    queue.follow_curriculum(1, ledger)
    assert Counter(task.stream for task in queued if task) == {"easy": 5, "hard": 5}
    for task in queued:
        assert task is not None
        queue.group_scored(task, [scored(1.0), scored(0.9)])
    queue.follow_curriculum(2, ledger)
    assert {admit(queue, ledger).stream for _ in range(10)} == {"hard"}  # type: ignore[union-attr]


GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "curricula.md"
STAGES = re.compile(r"`my_stages.py`.*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_stages_of_the_guide_are_left_when_enough_of_the_newest_groups_succeed() -> None:
    module = types.ModuleType("my_stages")
    exec(STAGES.findall(GUIDE.read_text())[0], vars(module))
    ledger = Ledger()
    queue = TaskQueue([stream("easy"), stream("hard", weight=0)], 1000, 2, curriculum=module.stages)

    def play(num_groups: int, reward: float, version: int) -> set[str]:
        played = [admit(queue, ledger) for _ in range(num_groups)]
        for queued in played:
            assert queued is not None
            queue.group_scored(queued, [scored(reward), scored(reward)])
        queue.follow_curriculum(version, ledger)
        return {queued.stream for queued in played if queued}

    assert play(31, 1.0, 1) == {"easy"}
    assert play(10, 0.0, 2) == {"easy"}, "31 groups were fewer than the gate asks for"
    assert play(32, 0.9, 3) == {"easy"}, "22 of 32 were below 0.8"
    assert play(8, 0.0, 4) == {"hard"}
    assert play(32, 0.0, 5) == {"hard"}, "a stage that was left stays left"


def test_a_requeued_task_of_a_stream_without_weight_comes_back_and_delays_no_other() -> None:
    ledger = Ledger()
    queue = TaskQueue([stream("easy"), stream("hard")], 2, 2, curriculum=Harder())
    easy, hard = admit(queue, ledger), admit(queue, ledger)
    assert (easy and easy.stream, hard and hard.stream) == ("easy", "hard")
    for _ in range(5):
        queue.group_scored(easy, [scored(1.0)])  # type: ignore[arg-type]
    queue.follow_curriculum(1, ledger)
    for record in list(ledger.live()):
        ledger.end(record.group_id, GroupState.DROPPED, Reason.STALE)
    queue.requeue(easy, ledger)  # type: ignore[arg-type]
    queue.requeue(hard, ledger)  # type: ignore[arg-type]
    names = []
    for _ in range(4):
        names.append(admit(queue, ledger).task.task_id)  # type: ignore[union-attr]
        ledger.end(next(ledger.live()).group_id, GroupState.DROPPED, Reason.STALE)
    assert names == ["hard1", "hard2", "easy0", "hard0"]


class NoWeights:
    def weights(self, version: int, rewards: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
        return {"easy": 0.0}


def test_a_curriculum_that_admits_nothing_is_refused() -> None:
    queue = TaskQueue([stream("easy")], 4, 2, curriculum=NoWeights())
    with pytest.raises(PenstockError, match="nothing could be admitted"):
        queue.follow_curriculum(1, Ledger())


class ByName:
    def group_size(self, task: Task, stream: str) -> int:
        return 4 if task.task_id.endswith("0") else 9


def test_group_sizes_stay_within_the_reserved_capacity() -> None:
    queue, ledger = TaskQueue([stream("a")], 4, group_size=8, sizing=ByName()), Ledger()
    assert queue.next(ledger).group_size == 4  # type: ignore[union-attr]
    with pytest.raises(PenstockError, match=r"group_size\(a1\) gave 9"):
        queue.next(ledger)


class ByTask:
    def max_new_tokens(self, task: Task, stream: str) -> int:
        return {"a0": 5, "a1": 64}.get(task.task_id, 65)


def test_length_limits_stay_within_the_run_s() -> None:
    queue, ledger = TaskQueue([stream("a")], 1, 2, lengths=LengthLimits(64, ByTask())), Ledger()
    assert [queue.next(ledger).max_new_tokens for _ in range(2)] == [5, 64]  # type: ignore[union-attr]
    with pytest.raises(PenstockError, match=r"max_new_tokens\(a2\) gave 65.*1\.\.64"):
        queue.next(ledger)
    assert TaskQueue([stream("a")], 1, 2).next(ledger).max_new_tokens is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ([stream("a", quota=0.5), stream("b", quota=0.3)], "quotas sum to 0.8, below 1"),
        ([stream("a"), stream("a")], "not unique"),
        ([stream("a", weight=0.0)], "no stream has a weight above 0"),
        ([stream("a", weight=-1.0), stream("b")], "weight=-1"),
    ],
)
def test_a_mix_that_cannot_work_is_refused(streams: list[TaskStream], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TaskQueue(streams, 4, 2)


def test_a_stream_that_ends_reports_it() -> None:
    queue, ledger = TaskQueue([TaskStream("short", iter([Task(TaskId("only"), "")]))], 4, 2), Ledger()
    admit(queue, ledger)
    with pytest.raises(PenstockError, match="task source short ended after 1 tasks"):
        queue.next(ledger)


def test_a_restored_queue_continues_with_the_next_tasks_and_finds_those_that_are_needed_again() -> None:
    ledger, queue = Ledger(), TaskQueue([stream("a"), stream("b")], 4, 2)
    admitted = [queued for _ in range(4) if (queued := admit(queue, ledger))]
    queue.requeue(admitted[0], ledger)
    for group_id in range(4):
        ledger.end(GroupId(group_id), GroupState.DROPPED, Reason.STALE)

    restored = TaskQueue([stream("a"), stream("b")], 4, 2)
    wanted = [(queued.stream, queued.task.task_id) for queued in admitted]
    found = restored.load_state_dict(json.loads(json.dumps(queue.state_dict())), queue.num_taken, wanted)
    assert found == {(queued.stream, queued.task.task_id): queued.task for queued in admitted}
    copy_of_ledger = copy.deepcopy(ledger)
    continued = [admit(queue, ledger) for _ in range(8)]
    assert [admit(restored, copy_of_ledger) for _ in range(8)] == continued
    assert [queued.requeues for queued in continued if queued].count(1) == 1, "the dropped task starts again"


def is_odd(task: Task) -> bool:
    return bool(int(task.task_id[1:]) % 2)


def test_tasks_that_do_not_fit_are_taken_counted_and_never_admitted_and_a_resume_keeps_the_cursor() -> None:
    def queue_of(fits: Callable[[Task], bool] | None) -> TaskQueue:
        return TaskQueue([stream("a"), stream("b")], 8, 2, fits=fits)

    queue, ledger = queue_of(is_odd), Ledger()
    admitted = [queued.task.task_id for _ in range(8) if (queued := admit(queue, ledger))]
    assert sorted(admitted) == [f"{name}{number}" for name in "ab" for number in (1, 3, 5, 7)]
    assert (queue.num_taken, queue.num_skipped, queue.first_skipped) == ({"a": 8, "b": 8}, {"a": 4, "b": 4}, "a0")
    assert ledger.counts().admitted == 8, "the ledger does not know what was skipped"
    state = json.loads(json.dumps(queue.state_dict()))
    restored = queue_of(is_odd)
    restored.load_state_dict(state, queue.num_taken)
    assert (restored.num_skipped, restored.first_skipped) == (queue.num_skipped, "a0")
    copy_of_ledger = copy.deepcopy(ledger)
    assert [admit(restored, copy_of_ledger) for _ in range(8)] == [admit(queue, ledger) for _ in range(8)]


def test_a_stream_most_of_whose_tasks_do_not_fit_stops_the_run_with_the_numbers() -> None:
    queue, ledger = TaskQueue([stream("a")], 8, 2, fits=lambda task: int(task.task_id[1:]) % 5 < 2), Ledger()
    admitted = iter(lambda: queue.next(ledger), None)
    with pytest.raises(PenstockError, match=r"614 of the first 1024 tasks of the source a have prompts .* a2 first"):
        list(itertools.islice(admitted, 2000))


def test_a_restored_queue_lacks_a_task_that_no_longer_exists() -> None:
    ledger, queue = Ledger(), TaskQueue([stream("a")], 4, 2)
    queued = admit(queue, ledger)
    assert queued is not None
    other = TaskQueue([TaskStream("a", endless("other"))], 4, 2)
    with pytest.raises(PenstockError, match=r"1 tasks of the checkpoint, a0 among them.*the first 1 tasks"):
        other.load_state_dict(queue.state_dict(), queue.num_taken, [("a", queued.task.task_id)])
