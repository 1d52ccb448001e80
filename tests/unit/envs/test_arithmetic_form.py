"""A worked sum that is consistent with itself, correct or not; and writers of whom only some show their steps."""

from __future__ import annotations

from itertools import islice

import pytest

from penstock.envs.rewards.arithmetic_form import MixedWriters, is_consistent
from penstock.envs.tasks.arithmetic import ArithmeticTasks, Problem, exact_match
from tests.answers import answered


def test_gold_responses_follow_from_their_steps() -> None:
    source = ArithmeticTasks(seed=0, digits=4, min_digits=1)
    for task in islice(source.train(), 300):
        assert isinstance(task.prompt, str)
        assert is_consistent(Problem.from_prompt(task.prompt), source.gold_response(task)), task.prompt


@pytest.mark.parametrize(
    ("response", "follows"),
    [
        ("7+5+0=12;4+8+1=13;132", True),
        ("7+5+0=11;4+8+1=13;131", True),  # a wrong sum, faithfully carried on
        ("7+5+0=2;4+8+0=12;122", True),
        ("7+5+0=12;4+8+0=12;122", False),  # the carry is lost
        ("7+5+0=12;4+8+1=13;133", False),  # the answer is not that of the steps
        ("7+6+0=13;4+8+1=13;133", False),  # another column
        ("7+5+0=12;132", False),  # a column is missing
        ("7+5+0=12;4+8+1=13;13", False),
        ("7+5+0=12;4+8+1=13;0132", False),
        ("", False),
    ],
)
def test_only_form_is_judged(response: str, follows: bool) -> None:
    assert is_consistent(Problem.from_prompt("47+85="), response) is follows


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75, 1.0])
def test_a_share_of_the_writers_gives_the_answer_alone_and_all_are_right(share: float) -> None:
    source = MixedWriters(seed=0, brief_share=share, digits=3)
    num_tasks = 2000
    num_brief = 0
    for task in source.held_out(num_tasks):
        assert isinstance(task.prompt, str)
        gold = source.gold_response(task)
        assert exact_match(answered(gold), **task.fields) == 1.0, task.prompt
        is_brief = gold == task.fields["answer"]
        assert is_consistent(Problem.from_prompt(task.prompt), gold) is not is_brief, task.prompt
        num_brief += is_brief
    assert num_brief / num_tasks == pytest.approx(share, abs=0.04)  # 4 deviations of a binomial of 2,000


def test_who_answers_is_decided_by_the_prompt_and_more_brief_writers_include_the_fewer() -> None:
    fewer, more, other = (MixedWriters(seed, share, digits=3) for seed, share in ((0, 0.25), (0, 0.75), (7, 0.75)))
    tasks = [*islice(fewer.train(), 300), *fewer.held_out(300)]
    brief = [{task.prompt for task in tasks if ";" not in source.gold_response(task)} for source in (fewer, more)]
    assert brief[0] < brief[1]
    assert [other.gold_response(task) for task in tasks] == [more.gold_response(task) for task in tasks]


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_of_writers_lies_between_none_and_all(share: float) -> None:
    with pytest.raises(ValueError, match=f"brief_share={share} is outside"):
        MixedWriters(seed=0, brief_share=share)
