"""A turn knows how long the policy and the environment took for it."""

from __future__ import annotations

import pytest

from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.versions import Span
from penstock.envs.reasoning import TurnText
from penstock.rollout.trajectory import conversation
from penstock.rollout.trajectory.conversation import Conversation


def test_seconds_of_sampling_and_of_the_environment_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(conversation.time, "monotonic", lambda: now[0])
    talk = Conversation((1, 2), "12", SamplingParams(4))
    for sampling_s, environment_s in ((2.0, 0.5), (3.0, 0.25)):
        turn = talk.next_turn(max_tokens=20)
        now[0] += sampling_s
        turn.extend(TokenDelta((5,), (-0.5,), (Span(0, 1),), "stop"))
        talk.add_turn(turn, TurnText("", "5"))
        now[0] += environment_s
        talk.add_observation((7,), "7")
    assert [(turn.sampling_s, turn.environment_s) for turn in talk.turns] == [(2.0, 0.5), (3.0, 0.25)]
