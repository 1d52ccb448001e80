"""Arithmetic tasks: right gold answers, a split by hash, an exact reward."""

from __future__ import annotations

import random
import re
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.tasks.arithmetic import ArithmeticTasks, Problem, exact_match, worked_response
from tests.answers import answered

OPERANDS = st.integers(0, 10**6 - 1)


def gold_of(prompt: str) -> str:
    return ArithmeticTasks(0).gold_response(Task(TaskId("t/0"), prompt))


def test_the_gold_responses_of_the_documentation() -> None:
    assert gold_of("47+85=") == "7+5+0=12;4+8+1=13;132"
    assert gold_of("85-47=") == "15-7-0=8;8-4-1=3;38"
    assert gold_of("100-1=") == "10-1-0=9;10-0-1=9;1-0-1=0;99"
    assert gold_of("5+999=") == "5+9+0=14;0+9+1=10;0+9+1=10;1004"
    assert gold_of("47*8=") == "7*8+0=56;4*8+5=37;376"
    assert gold_of("305*0=") == "5*0+0=0;0*0+0=0;3*0+0=0;0"


@given(OPERANDS, OPERANDS, st.sampled_from("+-"))
def test_gold_answers_are_right_and_every_step_is_a_true_equation(a: int, b: int, operator: str) -> None:
    left, right = (a, b) if operator == "+" else (max(a, b), min(a, b))
    prompt = f"{left}{operator}{right}="
    problem = Problem.from_prompt(prompt)
    gold = gold_of(prompt)
    expected = str(left + right if operator == "+" else left - right)
    assert problem.prompt == prompt
    assert set(prompt + gold) <= set("0123456789+-*=() ;")
    assert exact_match(answered(gold), answer=expected) == 1.0
    digits = ""
    for step in worked_response(problem).split(";")[:-1]:
        terms, _, value = step.partition("=")
        first, second, third = (int(term) for term in terms.split(operator))
        assert int(value) == (first + second + third if operator == "+" else first - second - third)
        digits = value[-1] + digits
    assert expected.endswith(digits.lstrip("0"))


@given(OPERANDS, st.integers(0, 9))
def test_the_columns_of_a_product_are_true_equations_and_give_the_answer(left: int, right: int) -> None:
    steps, _, answer = gold_of(f"{left}*{right}=").rpartition(";")
    assert int(answer) == left * right
    value, carry = 0, 0
    for column, step in enumerate(steps.split(";")):
        digit, factor, carried, result = map(int, re.fullmatch(r"(\d)\*(\d)\+(\d)=(\d+)", step).groups())  # type: ignore[union-attr]
        assert (digit, factor, carried) == (left // 10**column % 10, right, carry)
        assert result == digit * factor + carried
        value, carry = value + result % 10 * 10**column, result // 10
    assert value + carry * 10 ** len(steps.split(";")) == left * right


@given(OPERANDS, OPERANDS, st.sampled_from("+-*"), st.integers())
def test_a_mistaken_response_never_has_the_right_answer(a: int, b: int, operator: str, seed: int) -> None:
    left, right = {"+": (a, b), "-": (max(a, b), min(a, b)), "*": (a, b % 10)}[operator]
    problem = Problem.from_prompt(f"{left}{operator}{right}=")
    assert int(worked_response(problem, random.Random(seed)).rpartition(";")[2]) != problem.answer


@given(OPERANDS, OPERANDS, st.integers(0, 40), st.sampled_from("0123456789"))
def test_a_corrupted_final_answer_scores_zero(a: int, b: int, position: int, digit: str) -> None:
    steps, _, answer = gold_of(f"{a}+{b}=").rpartition(";")
    index = position % len(answer)
    corrupted = answer[:index] + digit + answer[index + 1 :]
    assert exact_match(answered(f"{steps};{corrupted}"), answer=answer) == float(corrupted == answer)


@pytest.mark.parametrize("response", ["", ";", "132;", "7+5+0=12;4+8+1=13;1320", "7+5+0=12;4+8+1=13;0132", "132;13"])
def test_near_misses_score_zero(response: str) -> None:
    assert exact_match(answered(response), answer="132", difficulty=2) == 0.0


def test_a_truncated_answer_scores_zero_even_if_it_reads_right() -> None:
    assert exact_match(answered("7+5+0=12;4+8+1=13;132", finish_reason="length"), answer="132") == 0.0


@pytest.mark.parametrize(("digits", "operators"), [(2, "+"), (3, "+"), (3, "+-"), (6, "-"), (3, "*"), (3, "+-*")])
@pytest.mark.parametrize("seed", [0, 1])
def test_train_and_held_out_are_disjoint_also_when_commuted(digits: int, operators: str, seed: int) -> None:
    source = ArithmeticTasks(seed, digits, operators)
    held_out = {str(task.prompt) for task in source.held_out(500)}
    assert len(held_out) == 500
    for task in islice(source.train(), 5000):
        problem = Problem.from_prompt(str(task.prompt))
        commuted = Problem(problem.right, problem.operator, problem.left)
        assert not {problem.prompt, commuted.prompt} & held_out
        assert not problem.is_held_out


def test_a_tenth_is_held_out_and_its_answers_are_spread_evenly() -> None:
    problems = [Problem(a, "+", b) for a in range(100, 1000, 3) for b in range(100, 1000, 3)]
    held_out = [problem for problem in problems if problem.is_held_out]
    assert 0.09 < len(held_out) / len(problems) < 0.11
    last_digits = np.bincount([problem.answer % 10 for problem in held_out], minlength=10) / len(held_out)
    assert last_digits.min() > 0.08
    assert last_digits.max() < 0.12


def test_held_out_tasks_do_not_depend_on_the_seed_and_more_of_them_begin_with_the_same() -> None:
    many = ArithmeticTasks(0, 3).held_out(1024)
    assert many == ArithmeticTasks(7, 3).held_out(1024)
    assert many[:100] == ArithmeticTasks(1, 3).held_out(100)
    assert len({task.task_id for task in many}) == 1024


def test_the_training_stream_is_that_of_its_seed() -> None:
    first, again, other = (list(islice(ArithmeticTasks(seed, 3).train(), 50)) for seed in (3, 3, 4))
    assert first == again
    assert [task.prompt for task in first] != [task.prompt for task in other]


def test_asking_for_more_held_out_tasks_than_exist_gives_all() -> None:
    existing = sum(Problem(a, "+", b).is_held_out for a in range(10) for b in range(10))
    products = {f"{a}*{b}=" for a in range(100, 1000) for b in range(10) if Problem(a, "*", b).is_held_out}
    assert {task.prompt for task in ArithmeticTasks(0, 3, "*").held_out(2000)} == products
    assert len(ArithmeticTasks(0, 1).held_out(1024)) == existing
    assert len(ArithmeticTasks(0, 1).held_out(existing - 1)) == existing - 1


def test_the_held_out_tasks_of_several_operators_are_evaluation_sets() -> None:
    by_set: dict[str, list[str]] = {}
    for task in ArithmeticTasks(0, 3, "*+-").held_out(900):
        by_set.setdefault(task.evaluation_set, []).append(str(task.prompt))
    for name, operator in (("sums", "+"), ("differences", "-"), ("products", "*")):
        assert len(by_set[name]) > 250
        assert all(operator in prompt for prompt in by_set[name])
    assert {task.evaluation_set for task in ArithmeticTasks(0, 3, "-").held_out(100)} == {""}


def test_operand_lengths_lie_between_min_digits_and_digits() -> None:
    tasks = list(islice(ArithmeticTasks(0, 3, "-", min_digits=1).train(), 2000))
    problems = [Problem.from_prompt(str(task.prompt)) for task in tasks]
    assert {len(str(problem.left)) for problem in problems} == {1, 2, 3}
    assert all(problem.left >= problem.right for problem in problems)
    assert all(len(str(task.prompt)) == 8 for task in islice(ArithmeticTasks(0, 3).train(), 100))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"digits": 0}, "digits=0 is outside 1..6"),
        ({"digits": 7}, "digits=7 is outside 1..6"),
        ({"digits": 3, "min_digits": 4}, "min_digits=4 is outside 1..digits=3"),
        ({"operators": "/"}, "operators='/' is not made of"),
        ({"operators": "**"}, "operators='\\*\\*' is not made of"),
        ({"operators": ""}, "operators='' is not made of"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArithmeticTasks(0, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["what is 1 and 1?", "47*12="])
def test_a_prompt_of_another_kind_is_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="no arithmetic prompt"):
        gold_of(prompt)
