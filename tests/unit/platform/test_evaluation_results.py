"""`penstock compare` of two results of `penstock eval`: the difference on the same tasks, and what changed."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.platform.cli.main import app
from penstock.platform.metrics.evaluation_results import (
    MAX_SHOWN,
    compare_results,
    label_of,
    read_results,
    run_comparison,
)
from penstock.platform.metrics.paired import paired_difference

FACTS = {
    "measured": {"held-out": {"env": {"factory": "m:t", "args": {"digits": 3}}, "answers_per_task": 1}},
    "reward": {"fn": "m:f", "args": {}, "style": None, "parts": {}},
    "pass_reward": 1.0,
    "sampling": {"max_new_tokens": 8},
    "part": None,
}


def results(
    folder: Path, policy: str, solves: Mapping[str, Sequence[bool | None]], label: str = "held-out", **facts: Any
) -> Path:
    """A folder of results; `solves` is task -> whether each answer solves it. The prompt is the id of the task."""
    folder.mkdir(exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps({"policy": policy, **FACTS, **facts}))
    with (folder / "answers.jsonl").open("a") as rows:
        for task, of_task in solves.items():
            for number, one in enumerate(of_task):
                row = {
                    "set": label, "number": number, "solves": one, "answer": None, "task_id": task, "prompt": task,
                    "response": f"{policy} says {one}", "reward": None if one is None else float(one),
                    "finish_reason": "stop",
                }  # fmt: skip
                rows.write(json.dumps(row) + "\n")
    return folder


def compare(*words: str | Path, columns: int = 400) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["compare", *map(str, words)], env={"COLUMNS": str(columns)})
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def test_shares_difference_interval_and_changed_tasks(tmp_path: Path) -> None:
    first = results(tmp_path / "a", "old", {"t1": [True], "t2": [True], "t3": [False], "t4": [False], "alone": [True]})
    second = results(tmp_path / "b", "new", {"t1": [True], "t2": [False], "t3": [True], "t4": [True], "other": [False]})
    found = compare_results(read_results(first), read_results(second))
    one = found.sets["held-out"]
    assert (one.num_tasks, one.num_alone, one.accuracy, one.solved_alone) == (4, (1, 1), (0.5, 0.75), (1, 2))
    assert one.difference == paired_difference([0.0, -1.0, 1.0, 1.0])
    assert [task[1] for task in found.changed] == ["t2", "t3", "t4"]


def test_of_several_answers_a_share_counts_and_one_that_solves_is_enough_to_be_changed(tmp_path: Path) -> None:
    first = results(tmp_path / "a", "old", {"t1": [True, False], "t2": [False, False], "t3": [False, None]})
    second = results(tmp_path / "b", "new", {"t1": [True, True], "t2": [False, True], "t3": [None, None]})
    found = compare_results(read_results(first), read_results(second))
    one = found.sets["held-out"]
    assert (one.num_tasks, one.num_alone, one.accuracy) == (2, (1, 0), (0.25, 0.75)), "no opinion is no answer"
    assert one.difference == paired_difference([0.5, 0.5], 2)
    assert [task[1] for task in found.changed] == ["t2"], "both solve t1 at times"


def test_each_set_is_compared_and_one_without_common_tasks_is_said(tmp_path: Path) -> None:
    for name, policy in (("a", "old"), ("b", "new")):
        folder = results(tmp_path / name, policy, {"t1": [name == "b"]})
        results(folder, policy, {"t1": [True]}, "hard")
        results(folder, policy, {f"only in {name}": [True]}, "apart")
    found = compare_results(read_results(tmp_path / "a"), read_results(tmp_path / "b"))
    assert {label: one.difference.mean for label, one in found.sets.items()} == {"held-out": 1.0, "hard": 0.0}
    assert found.differs == ["apart: no common task; A has answered 1 and B 1"]
    assert [task[:2] for task in found.changed] == [("held-out", "t1")]


def test_the_same_id_with_another_prompt_is_another_task(tmp_path: Path) -> None:
    first, second = (results(tmp_path / name, name, {"t1": [True], "t2": [True]}) for name in "ab")
    rows = (second / "answers.jsonl").read_text().replace('"prompt": "t2"', '"prompt": "else"')
    (second / "answers.jsonl").write_text(rows)
    found = compare_results(read_results(first), read_results(second)).sets["held-out"]
    assert (found.num_tasks, found.num_alone) == (1, (1, 1))


@pytest.mark.parametrize("columns", [80, 120])
def test_the_console_shows_some_changed_tasks_and_the_file_has_all(tmp_path: Path, columns: int) -> None:
    long = "7+5+0=12; " * 40
    first = results(tmp_path / "a", "old", {f"t{index}": [False] for index in range(MAX_SHOWN + 3)})
    second = results(tmp_path / "b", "new", {f"t{index}": [True] for index in range(MAX_SHOWN + 3)})
    for folder in (first, second):
        rows = (folder / "answers.jsonl").read_text().replace(" says ", f" {long} says ")
        (folder / "answers.jsonl").write_text(rows)
    code, output = compare(first, second, columns=columns)
    assert code == 0, output
    assert max(map(len, output.splitlines()[2:-1])) <= columns
    assert "+1.000 [" in output
    assert output.count("new 7+5") == MAX_SHOWN
    assert output.count("says True") == MAX_SHOWN, "the end of an answer is shown, too"
    path = second / "compared_with_a.json"
    assert f"{MAX_SHOWN} of {MAX_SHOWN + 3} tasks that only one of the two solves; all: {path}" in output
    written = json.loads(path.read_text())
    assert [one["task_id"] for one in written["changed"]] == [f"t{index}" for index in range(MAX_SHOWN + 3)]
    assert written["changed"][0]["answers"][1]["response"] == f"new {long} says True"
    assert written["sets"]["held-out"]["solved_by_one_only"] == [0, MAX_SHOWN + 3]
    assert written["policies"] == ["old", "new"]


def test_what_else_differs_is_said(tmp_path: Path) -> None:
    first = results(tmp_path / "a", "old", {"t1": [True], "t2": [True]})
    measured = {"held-out": {"env": {"factory": "m:t", "args": {}}, "answers_per_task": 8}, "hard": {}}
    second = results(tmp_path / "b", "new", {"t1": [True]}, sampling={"max_new_tokens": 16}, measured=measured)
    code, output = compare(first, second)
    assert code == 0
    assert "sampling.max_new_tokens differs: 8 and 16" in output
    assert "held-out.answers_per_task differs: 1 and 8" in output
    assert "held-out.env.args.digits differs: 3 and –" in output
    assert "left out: 1 tasks that only A has answered, 0 that only B has" in output


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda one: (one / "evaluation.json").unlink(), "b: holds no evaluation.json, so it is no result"),
        (lambda one: (one / "answers.jsonl").unlink(), "b: holds no answers.jsonl, so its tasks cannot be compared"),
        (lambda one: (one / "answers.jsonl").write_text(""), "answers.jsonl has no answer with a reward"),
        (lambda one: (one / "answers.jsonl").write_text("{"), "b: it cannot be read: JSONDecodeError"),
        (lambda one: (one / "evaluation.json").write_text("[]"), "b: it cannot be read"),
        (
            lambda one: (one / "answers.jsonl").write_text((one / "answers.jsonl").read_text().replace("t1", "t9")),
            "no task is common: ",
        ),
        (
            lambda one: (one / "evaluation.json").write_text(json.dumps({"policy": "p", **FACTS, "pass_reward": 0.5})),
            "pass_reward differs, 1.0 and 0.5",
        ),
        (
            lambda one: (one / "evaluation.json").write_text(
                json.dumps({"policy": "p", **FACTS, "reward": {"fn": "x"}})
            ),
            "reward differs, ",
        ),
    ],
    ids=["results", "answers", "empty", "broken", "no object", "tasks", "pass_reward", "reward"],
)
def test_what_cannot_be_compared_is_refused_in_one_line(tmp_path: Path, damage: Any, message: str) -> None:
    first, second = (results(tmp_path / name, name, {"t1": [True]}) for name in "ab")
    damage(second)
    code, output = compare(first, second)
    assert (code, len(output.splitlines())) == (1, 1), output
    assert message in output
    assert not list(second.glob("compared*"))


def test_three_results_or_a_run_and_a_result_are_refused(tmp_path: Path) -> None:
    first = results(tmp_path / "a", "a", {"t1": [True]})
    assert "3 folders: give two" in compare(first, first, first)[1]
    (tmp_path / "run").mkdir()
    assert "run: holds no evaluation.json" in compare(first, tmp_path / "run")[1]


def test_markup_and_odd_texts_are_shown_as_they_are(tmp_path: Path) -> None:
    first = results(tmp_path / "a", "[bold]old", {"[red]t1[/red]": [False]})
    second = results(tmp_path / "b", "new", {"[red]t1[/red]": [True]})
    text = io.StringIO()
    run_comparison([first, second], Console(file=text, width=100))
    assert "[bold]old" in text.getvalue()
    assert "[red]t1[/red]" in text.getvalue()


def test_what_a_model_says_controls_no_terminal(tmp_path: Path) -> None:
    said = "\x1b[2J\x1b]0;title\x07 half \ud83d \u202edesrever"
    first = results(tmp_path / "a", said, {"t1": [True]})
    second = results(tmp_path / "b", "new", {"t1": [False]})
    (first / "evaluation.json").write_text(json.dumps({"policy": "old", **FACTS}))
    code, output = compare(first, second)
    assert code == 0
    assert "A  solved       [2J ]0;title  half    desrever says True" in output


def test_labels() -> None:
    assert [label_of(""), label_of("hard"), label_of("", "easy"), label_of("hard", "easy")] == [
        "held-out", "hard", "easy", "hard/easy",
    ]  # fmt: skip
