"""Guessing, calculator, countdown: gold gets full reward, garbage none, splits are disjoint."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest
from calculator import CalculatorTasks
from countdown import CountdownTasks, countdown_reward, evaluate, solves
from guessing import GuessingGame

from penstock.dataflow.task import Task
from penstock.envs.environment import Action, Done
from penstock.envs.tasks.generated_tasks import GeneratedTasks
from penstock.envs.workers.episode_child import call_environment
from tests.answers import answered

SOURCES: list[Callable[[int], GeneratedTasks]] = [
    lambda seed: GuessingGame(seed, 100, 7),
    lambda seed: GuessingGame(seed, 1000, 3, chat=True),
    CalculatorTasks,
    CountdownTasks,
    lambda seed: CountdownTasks(seed, 3, 9, 30, chat=False),
]


@pytest.mark.parametrize("make", SOURCES)
def test_tasks_are_the_same_for_the_same_seed_and_held_out_ones_for_every_seed(
    make: Callable[[int], GeneratedTasks],
) -> None:
    first, again, other = (list(islice(make(seed).train(), 50)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert make(0).held_out(5) == make(1).held_out(5)
    held_out = {prompt_of(task) for task in make(0).held_out(5)}
    assert len(held_out) == 5
    assert not held_out & {prompt_of(task) for task in islice(make(3).train(), 2000)}


def prompt_of(task: Task) -> str:
    """The prompt; of the guessing game, which says nothing of its secret, that."""
    return repr(task.fields.get("secret", task.prompt))


def test_a_countdown_of_few_kinds_has_no_held_out_prompt_or_order_of_numbers_in_training() -> None:
    source = CountdownTasks(0, 3, 9, 30)
    held_out, trained = source.held_out(100), list(islice(source.train(), 5000))
    assert not {str(task.prompt) for task in held_out} & {str(task.prompt) for task in trained}
    splits = [{(*sorted(t.fields["numbers"]), t.fields["target"]) for t in split} for split in (held_out, trained)]
    assert len(splits[0]) == 100
    assert not splits[0] & splits[1]


def test_all_held_out_tasks_are_given_if_there_are_fewer() -> None:
    found = GuessingGame(0, 30).held_out(50)
    assert 0 < len(found) < 10
    assert len({task.fields["secret"] for task in found}) == len(found)


@pytest.mark.parametrize("source", [GuessingGame(0, 100, 7), GuessingGame(0, 100, 2), CalculatorTasks(0)])
async def test_gold_actions_get_full_reward_and_garbage_none(source: GuessingGame | CalculatorTasks) -> None:
    for task in islice(source.train(), 50):
        assert await played(source, task, source.gold_actions(task)) == 1.0
        assert await played(source, task, ["no", "garbage"] * 5) == 0.0


async def played(source: Any, task: Task, actions: list[str]) -> object:
    environment = source.environment()
    await call_environment(environment, "reset", task)
    for turn, text in enumerate(actions):
        reply = await call_environment(environment, "step", Action(text, turn=turn))
        if isinstance(reply, Done):
            return reply.reward
    return None


def random_tree(rng: random.Random, depth: int) -> tuple[str, Fraction | None]:
    """An expression with minimal parentheses nowhere, and its value by Python; None where it divides by zero."""
    if depth == 0 or rng.random() < 0.2:
        number = rng.randint(0, 20)
        return str(number), Fraction(number)
    (left, a), (right, b), sign = random_tree(rng, depth - 1), random_tree(rng, depth - 1), rng.choice("+-*/")
    if a is None or b is None or (sign == "/" and b == 0):
        return f"({left}{sign}{right})", None
    return f"({left} {sign} {right})", {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]


def test_the_evaluator_agrees_with_fractions_on_a_thousand_trees_and_with_python_on_precedence() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        text, value = random_tree(rng, 3)
        if value is None:
            with pytest.raises(ValueError, match="division by zero"):
                evaluate(text)
        else:
            assert evaluate(text)[0] == value
        flat = "".join(f"{rng.randint(1, 9)}{rng.choice('+-*')}" for _ in range(5)) + "7"
        assert evaluate(flat)[0] == eval(flat)


@pytest.mark.parametrize(
    "text", ["", "1+", "(1", "1)", "2**3", "1 2", "x", "__import__('os')", "1//2", "9" * 201, "(" * 150]
)
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        evaluate(text)


@pytest.mark.parametrize(
    ("expression", "is_right"),
    [("(1+2)*3", True), ("3*2+1*3", False), ("1+2+3+3", False), ("3*3", False), ("9", False), ("3*(2+1)", True)],
)
def test_countdown_counts_every_number_once(expression: str, is_right: bool) -> None:
    assert solves(expression, [1, 2, 3], 9) == is_right


@pytest.mark.parametrize("make", SOURCES[3:])
def test_the_gold_trace_of_countdown_solves_it(make: Callable[[int], CountdownTasks]) -> None:
    source = make(0)
    for task in islice(source.train(), 1000):
        gold = source.gold_response(task)
        assert countdown_reward(answered(gold), **task.fields) == 1.0
        assert countdown_reward(answered(f"{gold} <answer>no expression</answer>"), **task.fields) == 0.0
        assert countdown_reward(answered(str(task.fields["target"] * 1000)), **task.fields) == 0.0
