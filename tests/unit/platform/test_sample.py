"""Which answers of a policy become pairs."""

from __future__ import annotations

import numpy as np

from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.trajectory import Episode, FinishReason, Trajectory, Turn
from penstock.dataflow.versions import Span
from penstock.platform.run.sample import ranked_pairs


def answer(
    text: str, reward: float, finish_reason: FinishReason = "stop", episode: Episode | None = None
) -> Trajectory:
    return Trajectory(
        TrajectoryId("t"),
        TaskId("t"),
        np.array([5, 6], np.int32),
        np.array([False, True]),
        np.zeros(2, np.float32),
        (Span(0, 1),),
        "p",
        text,
        finish_reason,
        reward,
        episode=episode,
    )


def texts(*answers: Trajectory) -> list[tuple[str, str]]:
    return [(better.response, worse.response) for better, worse in ranked_pairs(answers)]


def test_pairs_differ_in_reward_and_the_widest_come_first() -> None:
    assert texts(answer("half", 0.5), answer("none", 0.0), answer("full", 1.0)) == [
        ("full", "none"),
        ("full", "half"),
        ("half", "none"),
    ]
    assert texts(answer("a", 1.0), answer("b", 1.0)) == []
    assert texts(answer("a", 0.3), answer("b", 0.1 + 0.2)) == [], "rounding is no preference"
    assert texts() == []


def test_a_text_is_compared_with_another_once() -> None:
    assert texts(answer("right", 1.0), answer("wrong", 0.0), answer("wrong", 0.0), answer("right", 1.0)) == [
        ("right", "wrong")
    ]


def test_truncated_answers_and_conversations_are_in_no_pair() -> None:
    conversation = Episode((Turn("right", "stop", 1),), "done")
    assert texts(answer("right", 1.0), answer("cut", 0.0, "length"), answer("said", 0.0, episode=conversation)) == []
