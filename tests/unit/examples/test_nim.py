"""Nim follows its rules, distinguishes its players, and its gold is best play."""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import Any

import pytest
from nim import NimEpisode, NimGame

from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.environment import Action, Done, Observation


@cache
def wins(stones: int, most: int) -> bool:
    """Whether the player to move can win, by trying everything."""
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
def test_gold_is_best_play_and_the_player_that_can_win_does(most: int) -> None:
    source = NimGame(0, 1, 30, most)
    for stones in range(1, 31):
        gold = source.gold_actions(Task(TaskId("t"), "", {"stones": stones}))
        _, end = play(stones, gold, most)
        assert end.reward == 1.0
        assert end.thread_rewards["first"] == float(wins(stones, most))


def test_in_chat_each_player_gets_the_rules_once() -> None:
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
