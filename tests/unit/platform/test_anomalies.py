"""The console names each new reason of failed attempts once, and shows a sample when all rewards are the same."""

from __future__ import annotations

import io
import itertools

import pytest

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.trajectory import Trajectory
from penstock.platform.metrics.anomalies import MAX_REASONS, NUM_EQUAL_GROUPS, OTHER_REASONS, Anomalies
from penstock.platform.metrics.console import RunConsole
from tests.answers import answered
from tests.fakes import FakeEngine, FakeRewards
from tests.flows import make_flow, train_all

TRACEBACK = (
    "my.fn on {0}/0 (t/{0}): Traceback (most recent call last):\n"
    '  File "/somewhere/scoring.py", line 5, in _call\n    return function(trajectory)\n'
    '  File "/home/me/my.py", line 7, in fn\n    return table[key]\nKeyError: {1!r}'
)


def scored(*rewards: float, response: str = "2") -> list[Trajectory]:
    members = [answered(response) for _ in rewards]
    for member, reward in zip(members, rewards, strict=True):
        member.score(reward, {})
    return members


def test_a_reason_is_noted_once_with_its_line_of_code_and_counted() -> None:
    notes: list[str] = []
    anomalies = Anomalies(notes.append)
    for number in range(51):
        failure = TrajectoryError("reward", TRACEBACK.format(number, f"column {number}"))
        anomalies.attempt_failed(TaskId(f"t/{number}"), failure)
    anomalies.attempt_failed(TaskId("t/7"), TrajectoryError("env", "step of t/7: timed out after 30 s"))
    reward, env = notes
    assert reward.startswith("an attempt at t/0 failed (reward: it raised KeyError: 'column 0' (my.py, line 7)). ")
    assert env.startswith(
        "an attempt at t/7 failed (env: timed out after 30 s). See docs/debugging.md, “Attempts fail”"
    )
    assert list(anomalies.failed_attempts.values()) == [51, 1]


def test_a_reason_that_is_never_the_same_ends_up_as_others() -> None:
    notes: list[str] = []
    anomalies = Anomalies(notes.append)
    for first, second in itertools.product("abcdef", repeat=2):
        anomalies.attempt_failed(TaskId("t"), TrajectoryError("reward", f"{first}{second} is missing"))
    assert len(notes) == MAX_REASONS
    assert anomalies.failed_attempts[OTHER_REASONS] == 36 - MAX_REASONS


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_sample_is_shown_once_when_all_rewards_of_many_groups_are_the_same(reward: float) -> None:
    notes: list[str] = []
    anomalies = Anomalies(notes.append)
    for _ in range(NUM_EQUAL_GROUPS - 1):
        anomalies.group_scored(scored(reward, reward))
    anomalies.group_scored(scored(reward, 0.5))
    for _ in range(NUM_EQUAL_GROUPS - 1):
        anomalies.group_scored(scored(reward, reward))
    assert notes == []
    for _ in range(100):
        anomalies.group_scored(scored(reward, reward, response="x" * 1000))
    (note,) = notes
    assert note.startswith(f"all rewards of the last {NUM_EQUAL_GROUPS} groups are {reward:g}, so there is nothing to")
    assert f"t/0: prompt '?', answer '{'x' * 300}…', finish_reason stop. See docs/debugging.md" in note


def test_control_codes_and_half_an_emoji_in_an_error_neither_reach_the_console_nor_hide_it() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    anomalies = Anomalies(RunConsole(10, stream=stream).note)
    anomalies.attempt_failed(TaskId("t/0"), TrajectoryError("env", "\x1b[31mFAILED\x1b[0m \ud83d"))
    stream.seek(0)
    assert stream.read().startswith("  an attempt at t/0 failed (env:  [31mFAILED [0m")


def test_rewards_that_are_equal_up_to_rounding_are_noted_once() -> None:
    notes: list[str] = []
    anomalies = Anomalies(notes.append)
    for index in range(200):
        anomalies.group_scored(scored(0.3 + index * 1e-12, 0.3))
    assert len(notes) == 1


def test_groups_of_different_rewards_are_no_anomaly() -> None:
    notes: list[str] = []
    anomalies = Anomalies(notes.append)
    for index in range(200):
        anomalies.group_scored(scored(index % 2, index % 2))
    assert notes == []


async def test_the_flow_reports_failed_attempts_and_equal_rewards() -> None:
    engines, failures, notes = [FakeEngine()], itertools.count(), []
    rewards = FakeRewards(lambda _: TrajectoryError("reward", "planted") if next(failures) < 1 else 0.0)
    flow = make_flow(engines, rewards, batch=4, eta=0, steps=NUM_EQUAL_GROUPS // 4)
    flow.stats.anomalies = Anomalies(notes.append)
    await train_all(flow, engines)
    assert flow.stats.anomalies.failed_attempts == {"reward: planted": 1}
    failed, equal = notes
    assert "failed (reward: planted)" in failed
    assert equal.startswith("all rewards of the last 32 groups are 0")


def test_steps_whose_turns_are_mostly_cut_off_are_noted_once() -> None:
    notes: list[str] = []
    anomalies = Anomalies(notes.append)
    for share in (0.9, 0.9, 0.1, 0.9, 0.9):
        anomalies.step_trained({"length/truncated_share": share})
    assert notes == []
    for _ in range(10):
        anomalies.step_trained({"length/truncated_share": 0.75})
    anomalies.step_trained({})
    (note,) = notes
    assert note.startswith("75% of the turns of this step were cut off at rollout.sampling.max_new_tokens")
    assert "“Answers are cut off”" in note
