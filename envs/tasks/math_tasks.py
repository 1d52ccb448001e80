"""Word problems from a Hugging Face dataset (GSM8K by default), with answers in `\\boxed{}` checked by math-verify."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.contract import Judged, pure
from penstock.envs.import_path import nearest_hint
from penstock.envs.rewards.answers import AnswerValue, checked_answer
from penstock.envs.row_files import open_rows
from penstock.envs.row_tables import Row
from penstock.envs.tasks.generated_tasks import endless

INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."
_HELD_OUT_SEED = "math/held-out"


_CALCULATOR = re.compile(r"<<[^>]*>>")
"""Calculator annotations of GSM8K next to each computed number."""
_THOUSANDS = re.compile(r"[^\d,(\[{<\\]*(?:\\\$)?\d{1,3}(?:,\d{3})+(?:\.\d+)?[^\d,]*")
"""An answer that is one number with commas, also with its unit; those of tuples, intervals and lists stay."""
_PERCENT = re.compile(r"([^%,]+?)\s*\\?%")
_EXPONENT = re.compile(r"[+-]?\d+(?:\.\d+)?[eE][+-]?\d{1,3}", re.ASCII)


@dataclass(eq=False)
class MathTasks:
    """Task source over two splits of a dataset. Rows are loaded for the first task.

    Args:
        seed: Order of the training stream. Held-out tasks do not depend on it.
        dataset: Name on the hub, or a folder of `save_to_disk` or of files by split.
        subset: Configuration of the dataset; `None` if it has none.
        train_split: Split to train on.
        held_out_split: Split to evaluate on. Its questions are removed from the training split.
        question_field: Column of the question.
        answer_field: Column of the answer.
        answer_marker: The final answer follows the last marker; without one, the whole field is the answer.
        instruction: Appended to every question, after a blank line.
    """

    seed: int
    dataset: str = "openai/gsm8k"
    subset: str | None = "main"
    _: KW_ONLY
    train_split: str = "train"
    held_out_split: str = "test"
    question_field: str = "question"
    answer_field: str = "answer"
    answer_marker: str = "####"
    instruction: str = INSTRUCTION

    def __post_init__(self) -> None:
        self._worked: dict[TaskId, str] = {}

    def train(self) -> Iterator[Task]:
        """Endless stream of training tasks: every epoch is a new shuffle, the same for the same seed."""
        if not self._train_rows:
            raise ConfigError(f"env: split {self.train_split!r} of {self.dataset} holds no question of its own.")
        yield from endless(self._train_rows, f"math/train/{self.seed}")

    def held_out(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` of a fixed shuffle of the held-out split, all if there are fewer."""
        return self._held_out_rows[:num_tasks]

    def gold_response(self, task: Task) -> str:
        """The worked steps of the dataset, if there are any before the marker, and the boxed answer."""
        boxed = f"\\boxed{{{task.fields['answer']}}}"
        worked = self._worked.get(task.task_id, "")
        return f"{worked}\n\nThe answer is {boxed}." if worked else f"The answer is {boxed}."

    def stored(self) -> dict[str, list[Task]]:
        """Name of a split -> all its questions (fingerprint.py)."""
        return {"train": self._train_rows, "held_out": self._held_out_rows}

    @cached_property
    def _held_out_rows(self) -> list[Task]:
        unique = {_question(task): task for task in self._load(self.held_out_split)}
        rows = list(unique.values())
        random.Random(_HELD_OUT_SEED).shuffle(rows)
        return rows

    @cached_property
    def _train_rows(self) -> list[Task]:
        held_out = {_question(task) for task in self._held_out_rows}
        return [task for task in self._load(self.train_split) if _question(task) not in held_out]

    def _load(self, split: str) -> list[Task]:
        """Read one split.

        Raises:
            ConfigError: If the dataset cannot be loaded, or lacks a column.
        """
        rows = open_rows(self.dataset, "env.args.dataset", subset=self.subset, split=split)
        tasks = []
        for index, row in enumerate(rows):
            for column in (self.question_field, self.answer_field):
                if column not in row:
                    raise ConfigError(
                        f"env.args: {rows.where(index)} has no column {column!r}; it has {sorted(row)}."
                        f"{nearest_hint(column, row)}"
                    )
            tasks.append(self._task(row, split, index))
        return tasks

    def _task(self, row: Row, split: str, index: int) -> Task:
        worked, _, answer = str(row[self.answer_field]).rpartition(self.answer_marker)
        answer = answer.strip()
        if _THOUSANDS.fullmatch(answer):
            answer = answer.replace(",", "")
        content = f"{str(row[self.question_field]).strip()}\n\n{self.instruction}"
        task_id = TaskId(f"math/{split}/{index}")
        self._worked[task_id] = _CALCULATOR.sub("", worked).strip()
        return Task(task_id, [{"role": "user", "content": content}], {"answer": answer})


def _question(task: Task) -> str:
    assert not isinstance(task.prompt, str)
    return task.prompt[0]["content"]


@pure
def math_verify_reward(trajectory: Trajectory, answer: AnswerValue, **_: object) -> float:
    """1 if math-verify finds the response's final (boxed) answer equal to `answer`, else 0.

    math-verify's own time-outs use alarm signals of the main thread and are switched off: the reward worker kills a
    call that hangs. A truncated response has no final answer.

    Raises:
        ValueError: If no response could equal the answer (envs/rewards/answers.py).
    """
    judged = judge(trajectory.response, answer)
    return judged if trajectory.finish_reason == "stop" else Judged(0.0, "")


def judge(text: str, answer: AnswerValue) -> Judged:
    """1 if math-verify finds the final (boxed) answer of a text equal to `answer`, which is then what is judged.

    Raises:
        ValueError: If no text could equal the answer (envs/rewards/answers.py).
    """
    import math_verify

    answer = checked_answer(answer)
    predicted = math_verify.parse(text, parsing_timeout=None)
    said = str(predicted[-1]).strip() if predicted else ""
    written = [str(answer), str(answer).lower() if isinstance(answer, bool) else _positional(answer)]
    of_answer, of_said = _numbers(str(answer).strip()), _numbers(said)
    if len(of_answer) == len(of_said) == 2:  # both are percentages: 50% is not 5000%
        of_answer, of_said = of_answer[:1], of_said[:1]
    read = [*predicted, *(one for number in of_said for one in _parsed(number))]
    golds = map(_parsed, dict.fromkeys([*written, *of_answer]))
    is_right = any(math_verify.verify(gold, read, timeout_seconds=None) for gold in golds)
    # The last one is the text that was parsed.
    return Judged(is_right, str(answer) if is_right else said)


def _parsed(answer: str) -> list[Any]:
    import math_verify

    parsed: list[Any] = math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return parsed


def _numbers(text: str) -> list[str]:
    """What a percentage, or a number with an exponent, may stand for, in forms that math-verify reads; else nothing.

    It takes 50\\% for a text, and 1e-07 for a sum with Euler's number. A percentage is its hundredth and, from 1 on,
    also its number, which is the answer to "what percent" in GSM8K.
    """
    if percent := _PERCENT.fullmatch(text):
        is_number = re.match(r"[+-]?[1-9]", percent[1])
        return [rf"\frac{{{percent[1]}}}{{100}}", *([percent[1]] if is_number else [])]
    return [f"{Decimal(text):f}"] if _EXPONENT.fullmatch(text) else []


def _positional(answer: AnswerValue) -> str:
    """An answer with numbers as mathematics has them: 0.0000001, for which Python writes 1e-07."""
    if isinstance(answer, list):
        return f"[{', '.join(repr(one) if isinstance(one, str) else _positional(one) for one in answer)}]"
    return f"{Decimal(str(answer)):f}" if isinstance(answer, float | Decimal) else str(answer)
