"""Nim follows its rules and tells its sides apart; drafts fork and join; check and play know threads."""

from __future__ import annotations

from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.dataflow.ids import TaskId
from penstock.dataflow.trajectory import Task
from penstock.envs.composition import WeightedPart, compose
from penstock.envs.environment import Action, Done, Environment, Observation
from penstock.envs.episode_child import is_episode_reply, to_episode_reply
from penstock.envs.nim import NimEpisode, NimGame
from tests.answers import answered

EXAMPLES = Path(__file__).parents[3] / "examples"


@cache
def wins(stones: int, most: int) -> bool:
    """Whether the side to move can win, by trying everything."""
    return any(not wins(stones - taken, most) for taken in range(1, min(most, stones) + 1))


def play(stones: int, moves: list[str], most: int = 3, *, chat: bool = False) -> tuple[list[Observation], Done]:
    game, said = NimEpisode(most, is_chat=chat), []
    returned: Any = game.reset(Task(TaskId("t"), f"{stones}:", {"stones": stones}))
    for turn, move in enumerate(moves):
        said.append(returned)
        returned = game.step(Action(move, turn=turn, thread=returned.thread))
    assert isinstance(returned, Done)
    return said, returned


def test_sides_take_turns_in_threads_of_their_own_and_the_last_stone_wins() -> None:
    said, end = play(6, ["1", "take 2", "3"])
    assert [(one.thread, one.content) for one in said] == [("first", "6:"), ("second", "5:"), ("first", "3:")]
    assert end.thread_rewards == {"first": 1.0, "second": 0.0}
    assert end.reward == pytest.approx(1 / 3), "6 - 2 and 5 - 1 would have left fours"


@pytest.mark.parametrize("move", ["", "0", "4", "9" * 500, "none"])
def test_what_may_not_be_taken_loses(move: str) -> None:
    assert play(9, [move])[1] == Done(0.0, {"illegal_moves": 1.0}, {"first": 0.0})
    assert play(9, ["1", move])[1] == Done(0.5, {"illegal_moves": 1.0}, {"first": 1.0, "second": 0.0})
    assert play(2, ["3"])[1].thread_rewards == {"first": 0.0}


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_gold_is_best_play_and_the_side_that_can_win_does(most: int) -> None:
    source = NimGame(0, 1, 30, most)
    for stones in range(1, 31):
        gold = source.gold_actions(Task(TaskId("t"), "", {"stones": stones}))
        _, end = play(stones, gold, most)
        assert end.reward == 1.0
        assert end.thread_rewards["first"] == float(wins(stones, most))


def test_in_chat_each_side_is_told_the_rules_once() -> None:
    said, _ = play(6, ["1", "1", "1", "3"], chat=True)
    assert "You and another player take 1 to 3 of 6 stones" in said[1].messages[0]["content"]
    assert "The other player took 1. 5 are left. Answer" in said[1].messages[0]["content"]
    assert said[2].messages == [{"role": "user", "content": "The other player took 1. 4 are left."}]
    task = next(NimGame(0, chat=True).train())
    assert "You begin. Answer" in task.prompt[0]["content"]  # type: ignore[index]


def test_held_out_stones_are_none_that_are_trained_on() -> None:
    source = NimGame(0, high=40)
    held_out = {task.fields["stones"] for task in source.held_out(2)}
    assert held_out == {task.fields["stones"] for task in NimGame(1, high=40, chat=True).held_out(2)}
    assert not held_out & {task.fields["stones"] for task in islice(source.train(), 500)}


def invoke(*words: str) -> tuple[int, str]:
    from penstock.platform.cli import app

    result = CliRunner().invoke(app, ["env", *words], env={"COLUMNS": "250"})
    return result.exit_code, result.output


def test_check_plays_games_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    for words in (["nim"], ["drafts:Drafts"]):
        code, output = invoke("check", *words)
        assert code == 0, output
        assert "no check failed" in output
    code, output = invoke("check", "drafts:Drafts", "--max-turns", "4")
    assert code == 1
    assert "takes 5 turns, env.episode.max_turns=4" in output


def test_play_asks_each_side_by_its_name() -> None:
    from penstock.platform.cli_env import run_env_play

    console = Console(record=True, width=200)
    moves = iter(["1", "no"])
    assert run_env_play("nim", [], lambda: next(moves), console) == 0
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

    reward = compose(
        {"game": WeightedPart(game, 2.0, (-1.0, 1.0)), "short": WeightedPart(lambda *_, **__: 0.5, 1.0, None)},
    )
    found: Any = reward(answered("x"))
    assert (found["reward"], found["thread/first"], found["thread/second"]) == (0.5, 2.5, -1.5)
    with pytest.raises(ValueError, match="called 'thread'"):
        compose({"thread": WeightedPart(game, 1.0, None)})
