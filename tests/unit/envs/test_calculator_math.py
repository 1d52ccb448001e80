"""Word problems with a calculator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.environment import Action, Done, Observation
from penstock.envs.tasks.calculator_math import CalculatorMath, WithCalculator
from penstock.envs.tools.calculator import calculate

TASK = Task(TaskId("t"), [{"role": "user", "content": "?"}], {"answer": "62"})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*34", "408"),
        ("(12.5+3)*4", "62"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("-(2) + +3", "1"),
        ("1,234*2", "2468"),
        ("24691357803/2", "12345678901.5"),
        ("1234567890.25+0", "1234567890.25"),
        ("0.00001*1", "0.00001"),
        ("1000000*1000000*10", "10000000000000"),
    ],
)
def test_it_computes_exactly(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["2**9", "1/0", "1,5", "__import__('os')", "1e5", "3 4", "", "(" * 150, "9" * 201]
)
def test_it_refuses_everything_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"is no expression|only \+ - \* / are known|division by zero"):
        calculate(expression)


async def test_a_call_is_answered_and_the_boxed_answer_after_it_is_scored() -> None:
    environment = WithCalculator()
    offered = environment.reset(TASK)
    assert isinstance(offered, Observation)
    assert [tool["function"]["name"] for tool in offered.tools] == ["calculate"]
    call = json.dumps({"name": "calculate", "arguments": {"expression": "(12.5+3)*4"}})
    told = await environment.step(Action(f"<tool_call>{call}</tool_call>"))
    assert isinstance(told, Observation)
    assert told.messages[0]["content"] == "62"
    for answer, reward in (("It is \\boxed{62}.", 1.0), ("It is \\boxed{61}.", 0.0)):
        ended = await environment.step(Action(answer))
        assert isinstance(ended, Done)
        assert ended.reward == reward


async def test_a_turn_that_was_cut_off_is_no_answer() -> None:
    environment = WithCalculator()
    environment.reset(TASK)
    ended = await environment.step(Action("so it is 31 + 31 = 62", is_truncated=True))
    assert ended == Done(0.0)


def test_its_tasks_are_those_of_the_dataset(tmp_path: Path) -> None:
    for split, rows in (("train", 3), ("test", 2)):
        lines = [json.dumps({"question": f"{split} {row}?", "answer": f"Work. #### {row}"}) for row in range(rows)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    source = CalculatorMath(0, str(tmp_path), None)
    (first, second) = source.held_out(5)
    assert {first.fields["answer"], second.fields["answer"]} == {"0", "1"}
    assert isinstance(source.environment(), WithCalculator)
    assert source.gold_actions(first) == [source.gold_response(first)]
