"""Drafts fork and join; check and play know threads; rewards of threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.envs.environment import Action, Done, Environment, Observation
from penstock.envs.rewards.composition import WeightedPart, WeightedSum
from penstock.envs.workers.episode_child import is_episode_reply, to_episode_reply
from tests.answers import answered

EXAMPLES = Path(__file__).parents[3] / "examples"


def invoke(*words: str) -> tuple[int, str]:
    from penstock.platform.cli.main import app

    result = CliRunner().invoke(app, ["env", *words], env={"COLUMNS": "250"})
    return result.exit_code, result.output


@pytest.mark.full
def test_check_plays_games_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    for words in (["nim:NimGame"], ["drafts:Drafts"]):
        code, output = invoke("check", *words)
        assert code == 0, output
        assert "no check failed" in output
    code, output = invoke("check", "drafts:Drafts", "--max-turns", "4")
    assert code == 1
    assert "takes 5 turns, env.episode.max_turns=4" in output


def test_play_asks_each_agent_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.platform.cli.env import run_env_play

    monkeypatch.syspath_prepend(EXAMPLES)
    console = Console(record=True, width=200)
    moves = iter(["1", "no"])
    assert run_env_play("nim:NimGame", [], lambda: next(moves), console) == 0
    text = console.export_text()
    assert "first: " in text
    assert "second: " in text
    assert "'thread/first': 1.0, 'thread/second': 0.0" in text


class OnlySteps(Environment):
    def step(self, action: Action) -> Done:
        return Done()


def test_replies_of_several_threads() -> None:
    several = [
        Observation("1", reward=0.5, counts={"a": 1}, thread="x"),
        Observation("2", counts={"a": 2}, fork_of="x"),
    ]
    reply = to_episode_reply(several, "step")
    assert (reply["reward"], reply["counts"]) == (0.5, {"a": 3.0})
    assert reply["several"] == [
        {"content": "1", "role": "user", "thread": "x"},
        {"content": "2", "role": "user", "fork_of": "x"},
    ]
    assert is_episode_reply(reply)
    assert not is_episode_reply({"several": []})
    assert not is_episode_reply({"several": [{"content": "1", "role": "user", "thread": 3}]})
    assert "expected Observation, a list of them, or Done" in to_episode_reply([Observation("1"), "2"], "step")["error"]
    assert "with thread 3" in to_episode_reply(Observation("1", thread=3), "step")["error"]  # type: ignore[arg-type]
    wrong = Done(1.0, thread_rewards={"x": float("nan")})
    assert "Done with thread_rewards a dict with x=nan" in to_episode_reply(wrong, "step")["error"]
    with pytest.raises(NotImplementedError, match="OnlySteps returned a list of observations"):
        OnlySteps().step_all([])


def test_rewards_of_threads_are_weighted_and_clipped_with_the_others() -> None:
    def game(trajectory: object, **_: object) -> dict[str, float]:
        return {"reward": 0.0, "thread/first": 3.0, "thread/second": -1.0}

    reward = WeightedSum(
        {"game": WeightedPart(game, 2.0, (-1.0, 1.0)), "short": WeightedPart(lambda *_, **__: 0.5, 1.0, None)},
    )
    found: Any = reward(answered("x"))
    assert (found["reward"], found["thread/first"], found["thread/second"]) == (0.5, 2.5, -1.5)
    with pytest.raises(ValueError, match="named 'thread'"):
        WeightedSum({"thread": WeightedPart(game, 1.0, None)})
