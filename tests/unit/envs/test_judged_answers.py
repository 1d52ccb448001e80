"""What a reward read as the answer reaches the score, by which evaluations vote."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from penstock.dataflow.trajectory import Episode, Trajectory
from penstock.envs.config import RewardConfig
from penstock.envs.contract import Judged
from penstock.envs.environment import Done
from penstock.envs.loading import load_reward
from penstock.envs.reward_result import MAX_ANSWER_CHARACTERS, is_reply, to_reply
from penstock.envs.rewards.composition import WeightedPart, WeightedSum
from penstock.envs.rewards.episode import episode_reward
from penstock.envs.rewards.peer_styles import VerlReward
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.tasks.arithmetic import exact_match
from penstock.envs.tasks.math_tasks import math_verify_reward
from penstock.envs.workers.episode_child import is_episode_reply, to_episode_reply
from penstock.envs.workers.scoring import RewardRunner
from tests.answers import answered, pair


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1.0, {"reward": 1.0, "parts": {}}),
        (Judged(0.5, "42"), {"reward": 0.5, "parts": {}, "answer": "42"}),
        ({"reward": 1, "answer": "42"}, {"reward": 1.0, "parts": {}, "answer": "42"}),
        (
            {"right": 1.0, "form": 0.5, "answer": ""},
            {"reward": 1.5, "parts": {"right": 1.0, "form": 0.5}, "answer": ""},
        ),
        # A number of that name is a part, as ever.
        ({"answer": 1.0, "form": 0.5}, {"reward": 1.5, "parts": {"answer": 1.0, "form": 0.5}}),
    ],
)
def test_text_under_answer_is_the_answer_and_a_number_is_a_part(returned: object, expected: dict[str, Any]) -> None:
    reply = to_reply(returned)
    assert reply == expected
    assert is_reply(reply)


def test_an_answer_alone_is_no_reward_and_other_text_is_none_either() -> None:
    assert "needs at least one number" in to_reply({"answer": "42"})["error"]
    assert "expected a number" in to_reply({"reward": 1.0, "said": "42"})["error"]
    assert not is_reply({"reward": 1.0, "parts": {}, "answer": 42})
    assert len(to_reply(Judged(1.0, "x" * 9000))["answer"]) == MAX_ANSWER_CHARACTERS


def test_a_judged_reward_is_a_number() -> None:
    judged = Judged(0.5, "7")
    assert (judged + 1, judged == 0.5, max(judged, 0.25)) == (1.5, True, 0.5)
    again = pickle.loads(pickle.dumps(judged))
    assert (again, again.answer) == (0.5, "7")


@pytest.mark.parametrize(
    ("response", "finish_reason", "expected"),
    [
        ("7+5+0=12;4+8+1=13;132", "stop", (1.0, "132")),
        ("7+5+0=12; 131 ", "stop", (0.0, "131")),
        ("7+5+0=12;132", "length", (0.0, "")),
    ],
)
def test_exact_match_says_what_it_compared(response: str, finish_reason: Any, expected: tuple[float, str]) -> None:
    judged = exact_match(answered(response, finish_reason=finish_reason), answer="132")
    assert isinstance(judged, Judged)
    assert (float(judged), judged.answer) == expected


def test_equal_answers_in_other_forms_are_one_answer() -> None:
    found = [
        math_verify_reward(answered(rf"so \boxed{{{text}}}"), "1/2") for text in (r"\frac{1}{2}", "0.5", "7", "7.0")
    ]
    assert [float(one) for one in found] == [1.0, 1.0, 0.0, 0.0]
    answers = [one.answer for one in found if isinstance(one, Judged)]
    assert answers[:2] == ["1/2", "1/2"]
    assert answers[2] == "7"
    nothing = math_verify_reward(answered("I do not know"), "1/2")
    assert isinstance(nothing, Judged)
    assert nothing.answer == ""


def test_of_several_parts_the_first_answer_counts() -> None:
    def form(trajectory: Trajectory, **_: object) -> float:
        return 0.5

    def right(trajectory: Trajectory, **_: object) -> float:
        return Judged(1.0, "132")

    parts = {"form": WeightedPart(form, 1.0, None), "right": WeightedPart(right, 1.0, None)}
    returned = WeightedSum(parts)(answered("?"))
    assert returned == {"reward": 1.5, "form": 0.5, "right": 1.0, "answer": "132"}
    named = {"answer": WeightedPart(right, 1.0, None)}  # whose name was taken
    assert WeightedSum(named)(answered("?")) == {"reward": 1.0, "answer": 1.0}


def test_verl_gives_it_as_pred() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, object]:
        return {"score": 1.0, "acc": True, "pred": "42"}

    task, trajectory = pair("42", ground_truth="42")
    returned = VerlReward(compute_score, {})(trajectory, **task.fields)
    assert to_reply(returned) == {"reward": 1.0, "parts": {"acc": 1.0}, "answer": "42"}


def test_an_environment_may_say_it_with_its_last_reward() -> None:
    reply = to_episode_reply(Done({"reward": 1.0, "answer": "42"}), "step")
    assert (reply["answer"], is_episode_reply(reply)) == ("42", True)
    assert not is_episode_reply({**reply, "answer": 42})
    trajectory = answered("42")
    trajectory.episode = Episode((), "done", reply["reward"], reply["parts"], answer=reply["answer"])
    assert to_reply(episode_reward(trajectory)) == {"reward": 1.0, "parts": {}, "answer": "42"}


async def test_it_comes_back_from_the_process_of_the_reward_also_from_the_cache() -> None:
    config = RewardConfig(fn="penstock.envs.tasks.arithmetic:exact_match")
    assert load_reward(config) is exact_match
    runner = RewardRunner(config, SandboxConfig())
    try:
        for _ in range(2):
            score = await runner.score(*pair("47+85=131;131", answer="132"))
            assert (score.reward, score.answer) == (0.0, "131")
    finally:
        await runner.shutdown()
