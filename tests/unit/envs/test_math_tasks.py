"""Dataset tasks without the network: a local folder replaces the hub."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import EnvConfig, RewardConfig
from penstock.envs.scripted_check import check_environment
from penstock.envs.tasks.math_tasks import MathTasks, math_verify_reward
from tests.answers import answered

RESPONSE = answered("")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = {
        "train": [(f"What is {n}+{n}?", f"Twice {n}.\n#### {2 * n:,}") for n in (1, 2, 600)],
        "test": [("What is 2+2?", "#### 4"), ("What is 3+3?", "#### 6")],
    }
    data = tmp_path / "data"
    data.mkdir()
    for split, pairs in rows.items():
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in pairs]
        (data / f"{split}.jsonl").write_text("\n".join(lines))
    return data


def test_rows_become_chat_tasks_and_held_out_questions_leave_the_training_split(folder: Path) -> None:
    source = MathTasks(0, str(folder), None)
    tasks = list(islice(source.train(), 4))
    assert {task.fields["answer"] for task in tasks} == {"2", "1200"}
    assert tasks[0].prompt[0]["role"] == "user"  # type: ignore[index]
    assert "\\boxed{}" in tasks[0].prompt[0]["content"]  # type: ignore[index]
    assert {task.fields["answer"] for task in source.held_out(2)} == {"4", "6"}
    assert source.held_out(3) == source.held_out(2)


def test_a_folder_of_save_to_disk_replaces_the_hub(folder: Path, tmp_path: Path) -> None:
    import datasets

    datasets.load_dataset(str(folder)).save_to_disk(tmp_path / "saved")
    saved, files = (MathTasks(0, str(path), None) for path in (tmp_path / "saved", folder))
    assert saved.held_out(2) == files.held_out(2)
    assert list(islice(saved.train(), 6)) == list(islice(files.train(), 6))


def test_a_dataset_out_of_reach_or_without_the_column_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="absent: no such file or folder"):
        MathTasks(0, str(folder / "absent"), None).held_out(1)
    with pytest.raises(ConfigError, match="not in the local cache and cannot be downloaded"):
        MathTasks(0, "org/absent", None).held_out(1)
    with pytest.raises(ConfigError, match=r"test.jsonl, line 1 has no column 'problem'"):
        MathTasks(0, str(folder), None, question_field="problem").held_out(1)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("So it is \\boxed{18}.", "18", 1.0),
        ("So it is \\boxed{18.0}", "18", 1.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("So it is \\boxed{17}.", "18", 0.0),
        ("I do not know.", "18", 0.0),
    ],
)
def test_math_verify_judges_the_boxed_answer(response: str, answer: str, reward: float) -> None:
    assert math_verify_reward(replace(RESPONSE, response=response), answer=answer) == reward


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("50%", [r"\boxed{50\%}", r"$50\%$", "**50%**", "The answer is 50%.", r"\boxed{50.0 \%}"], [r"\boxed{5\%}"]),
        (r"50\%", [r"\boxed{50 \%}", r"\boxed{50.0\%}", r"\boxed{0.5}", "It is 50%."], [r"\boxed{51\%}"]),
        ("0.5%", [r"\boxed{0.50\%}", r"\boxed{0.005}"], ["**50%**", r"\boxed{50\%}"]),
        ("0.5", [r"\boxed{50\%}"], [r"\boxed{0.5\%}"]),
        ("50", [r"\boxed{50.0}", r"\boxed{50\%}", "It is 50%."], [r"\boxed{0.5}", r"\boxed{0.5\%}"]),
        ("50%", [r"\boxed{50}"], [r"\boxed{5}", r"\boxed{5000\%}"]),
        ("1e-07", [r"\boxed{0.0000001}", r"\boxed{10^{-7}}", r"\boxed{1e-7}"], [r"\boxed{0.000001}"]),
        (1e-7, [r"\boxed{1e-7}", r"\boxed{1.0e-07}"], [r"\boxed{1e-6}"]),
    ],
)
def test_percentages_and_exponents_are_numbers(answer: str | float, right: list[str], wrong: list[str]) -> None:
    def score(response: str) -> float:
        return math_verify_reward(replace(RESPONSE, response=response), answer=answer)

    assert {response: score(response) for response in right + wrong} == dict.fromkeys(right, 1.0) | dict.fromkeys(
        wrong, 0.0
    )


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("(3,125)", None),
        ("1,10,100", None),
        ("[0,100)", None),
        (r"\langle 3,125\rangle", None),
        ("12,345.67", "12345.67"),
        (r"-\$1,200,000", r"-\$1200000"),
        ("1,234 apples", "1234 apples"),
    ],
)
def test_commas_of_a_number_go_and_those_between_numbers_stay(written: str, answer: str | None, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "?", "answer": f"#### {written}"}))
    (task,) = MathTasks(0, str(tmp_path), None).held_out(1)
    assert task.fields["answer"] == (answer or written)
    assert math_verify_reward(replace(RESPONSE, response=rf"\boxed{{{written}}}"), **task.fields) == 1.0


def test_a_truncated_response_has_no_final_answer() -> None:
    cut = replace(RESPONSE, response="\\boxed{18}", finish_reason="length")
    assert math_verify_reward(cut, answer="18") == 0.0


async def test_gold_answers_are_the_worked_steps_and_the_boxed_answer_and_get_full_reward(folder: Path) -> None:
    (folder / "train.jsonl").write_text(
        json.dumps({"question": "Twice 600?", "answer": "2*600=<<2*600=1200>>1200.\n#### 1,200"})
        + "\n"
        + json.dumps({"question": "A half?", "answer": "\\frac{1}{2}"})
    )
    source = MathTasks(0, str(folder), None)
    gold = {source.gold_response(task) for task in islice(source.train(), 2)}
    assert gold == {"2*600=1200.\n\nThe answer is \\boxed{1200}.", "The answer is \\boxed{\\frac{1}{2}}."}
    env = EnvConfig(factory="math", args={"dataset": str(folder), "subset": None})
    findings = await check_environment(env, RewardConfig(fn="penstock.envs.tasks.math_tasks:math_verify_reward"))
    judged = {finding.name: finding.is_good for finding in findings}
    assert judged["gold gets full reward"]
    assert judged["garbage gets no full reward"]
