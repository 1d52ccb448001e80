"""Data sets as strangers have them, mutated at random: each gives the right rewards, or one clear line.

A seed makes 1 to 30 rows of sums, changes their answers, columns, messages and file as people and tools do, and writes
them. They are loaded, checked as before a run, and a right response to every task is scored. Never is there a
traceback, and never a reward of 0 for a right response.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.task import Task
from penstock.envs.config import RewardConfig
from penstock.envs.loading import load_reward
from penstock.envs.reward_result import to_failure, to_reply
from penstock.envs.scripted_check import kinds_of_tasks, scripted_answer
from penstock.platform.checks.tasks import TaskSample, check_reward, check_sample
from penstock.platform.cli.env import EnvConfig
from penstock.rollout.tokenization.tokenizers import TokenCodec, byte_tokenizer
from tests.tiers import by_tier

NUM_SEEDS = by_tier(40, full=400)
CODEC = TokenCodec(byte_tokenizer())
Rows = list[dict[str, Any]]


def nested(levels: int) -> Any:
    """A list in a list, and so on."""
    return [nested(levels - 1)] if levels else 1


ANSWERS: dict[str, Callable[[int, random.Random], Any]] = {
    "text": lambda total, _: str(total),
    "padded text": lambda total, rng: f"{' ' * rng.randrange(3)}{total} ",
    "int": lambda total, _: total,
    "float": lambda total, _: float(total),
    "text of a float": lambda total, _: f"{total}.0",
    "list": lambda total, _: [total, str(total)],
    "list with semicolons": lambda total, _: [f"{total};", ";"],
    "semicolons": lambda total, _: f"x = {total}; y = {total};",
    "code like a number": lambda total, _: f"{total:03}",
    "word like a value": lambda _, rng: rng.choice(
        ["true", "NA", "null", "1e5", "2024-01-01", "None", "[1, 2]", '"a"']
    ),
    "truth value": lambda total, _: total % 2 == 0,
    "mixed": lambda total, rng: rng.choice([str(total), total, float(total)]),
    "sometimes null": lambda total, rng: rng.choice([total, total, None]),
    "rarely the text nan": lambda total, rng: "nan" if rng.random() < 0.1 else str(total),
    "sometimes a list of an object": lambda total, rng: rng.choice([[total], [{}]]),
    "sometimes empty": lambda total, rng: rng.choice([str(total), ""]),
    "sometimes nan": lambda total, rng: rng.choice([float(total), float("nan")]),
    "object": lambda total, _: {"value": total},
}
MESSAGES: dict[str, Callable[[str], Any]] = {
    "text": lambda question: question,
    "text of two lines": lambda question: f'He said "{question}",\nok? — ü',
    "messages": lambda question: [{"role": "user", "content": question}],
    "messages as JSON": lambda question: json.dumps([{"role": "user", "content": question}]),
    "messages of Python": lambda question: str([{"role": "user", "content": question}]),
    "parts": lambda question: [{"role": "user", "content": [{"type": "text", "text": question}]}],
    "null keys": lambda question: [{"role": "user", "content": question, "name": None, "tool_calls": None}],
    "calls": lambda question: [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": {question[0]: 1, "of": {question[-2]: [2]}}}}],
        },
        {"role": "tool", "content": "3"},
    ],
    "ShareGPT": lambda question: [{"from": "human", "value": question}],
    "blank": lambda _: " ",
    "number": len,
    "half a pair": lambda question: f"{question}\ud83d",
    "half a pair in a role": lambda question: [{"role": "user\ud83d", "content": question}],
    "deep": lambda question: [{"role": "user", "content": question, "meta": nested(600)}],
    "date": lambda question: [{"role": "user", "content": question, "at": date(2024, 1, 1)}],
}
FILES = (
    *("rows.jsonl", "ROWS.JSONL", "rows.json", "rows.csv", "rows.tsv", "rows.jsonl.gz", "rows.csv.gz", "rows.json.gz"),
    *("rows.parquet", "pandas.parquet", "rows.txt", "saved", "wrapped.json", "columns.json", "rows[1].parquet"),
    *("folder/rows.jsonl", "folder/train.csv", "folder [v2]/list.json", "folder/a.parquet"),
)
"""Of a file in a folder, the folder is read."""
ENCODINGS = ("utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1")


def mutated(rng: random.Random) -> tuple[Rows, list[str]]:
    """Rows, and the right response to each; what is no answer has any."""
    answer, prompt = rng.choice(list(ANSWERS)), rng.choice([*MESSAGES, *("text", "messages", "calls") * 4])
    rows, gold = [], []
    for index in range(rng.randint(1, 30)):
        left, right = index, rng.randrange(9)
        value = ANSWERS[answer](left + right, rng)
        rows.append({"prompt": MESSAGES[prompt](f"{left}+{right}="), "answer": value})
        # Of a number the response is the number, whatever a table makes of it; of the others what Python writes.
        gold.append(str(value) if isinstance(value, list | bool | str) else str(left + right))
    for _ in range(rng.randrange(3)):
        mutate_columns(rows, rng)
    return rows, gold


def mutate_columns(rows: Rows, rng: random.Random) -> None:
    change = rng.choice(["rename", "drop in one", "drop", "extra", "keyword", "trajectory", "nested", "space"])
    victim = rng.choice(rows)
    if change == "drop in one":
        victim.pop(rng.choice(list(victim)), None)
    for index, row in enumerate(rows):
        if change == "rename" and "answer" in row:
            row["solution"] = row.pop("answer")
        elif change == "space" and "answer" in row:
            row[" answer"] = row.pop("answer")
        elif change == "drop":
            row.pop("answer", None)
        elif change == "extra":
            row[rng.choice(["difficulty", "source"])] = rng.choice([1, "x", None])
        elif change == "keyword":
            row |= {"class": "x", "from": 1, "self": 2, "response": "r", "reward": 1.0, "id": index}
        elif change == "trajectory":
            row["trajectory"] = "x"
        elif change == "nested":
            row["info"] = {rng.choice("abc"): {"value": index}, "list": [None, {"only": index}]}


def write(rows: Rows, name: str, rng: random.Random) -> str:
    """Write rows as people and tools do; not every file can hold every row."""
    Path(name).parent.mkdir(exist_ok=True)
    path, columns = Path(name), list(dict.fromkeys(column for row in rows for column in row))
    kind = name.lower().removesuffix(".gz")
    if kind.endswith(("csv", "tsv")):
        file = io.StringIO(newline="")
        delimiter = rng.choice(",,,;") if kind.endswith("csv") else "\t"
        writer = csv.writer(file, delimiter=delimiter, lineterminator=rng.choice(["\n", "\r\n"]))
        writer.writerow(rng.choice([columns, columns, [*columns, ""], [f" {column}" for column in columns]]))
        writer.writerows([row.get(column) for column in columns] for row in rows)
        text = file.getvalue()
    elif name == "wrapped.json":
        text = json.dumps({"data": rows}, indent=1)
    elif name == "columns.json":
        text = json.dumps({column: [row.get(column) for row in rows] for column in columns}, indent=1)
    elif kind.endswith(".json"):
        text = json.dumps(rows, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.5)
    elif name.endswith(".parquet") and name != "pandas.parquet":
        datasets.Dataset.from_list(rows).to_parquet(name)
        return name
    elif name == "pandas.parquet":
        pd.DataFrame(rows).to_parquet(name)
        return name
    elif name == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(name)
        return name
    else:
        text = rng.choice(["\n", "\r\n", "\n\n"]).join(json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in rows)
    content = text.encode(rng.choice(ENCODINGS), errors="replace")
    if rng.random() < 0.1:
        content = content[: rng.randrange(len(content))]
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return name


def problems_before_a_run(source: Any, tasks: TaskSample, reward: Any) -> list[str]:
    """What the checks before a run find, with the kinds of rows scored in this process."""
    found = [*check_sample(EnvConfig(factory="dataset"), tasks), *check_reward(reward, tasks)]
    problems = [finding.message for finding in found if finding.severity == "error"]
    for task in [] if problems else kinds_of_tasks([*tasks.train, *tasks.held_out]):
        try:
            reply = to_reply(reward(scripted_answer(task, "0"), **task.fields))
        except Exception as error:  # noqa: BLE001 - as the reward's process does
            reply = to_failure(error)
        if "error" in reply:
            problems.append(TrajectoryError("reward", reply["error"]).cause)
    for task in tasks.train:
        try:
            CODEC.encode_prompt(task.prompt)
        except (ConfigError, TrajectoryError) as error:
            problems.append(str(error))
    return problems


@pytest.mark.parametrize("start", range(0, NUM_SEEDS, 40))
def test_a_mutated_data_set_gives_the_right_rewards_or_one_clear_line(
    start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.envs.adapters.rows import RowTasks

    outcomes = [0, 0]
    reward = load_reward(RewardConfig(fn="penstock.envs.tasks.arithmetic:exact_match"))
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "own", "answer": "1"}) + "\n")
    for seed in range(start, start + 40):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        monkeypatch.chdir(folder)
        rows, gold = mutated(rng)
        try:
            name = write(rows, rng.choice(FILES), rng)
        except Exception:  # noqa: BLE001 - the library cannot write such rows
            continue
        try:
            place = name.rpartition("/")[0] or name
            source = RowTasks(seed, place, held_out=str(tmp_path / "own.jsonl"), chat=rng.random() < 0.5)
            # Each once: in the order of the data, if it is not shuffled.
            train = list({task.task_id: task for task in islice(source.train(), 60)}.values())
            problems = problems_before_a_run(source, TaskSample(train, source.held_out(1)), reward)
        except ConfigError as error:
            problems = error.violations
        outcomes[bool(problems)] += 1
        if problems:
            for problem in problems[:1]:
                assert problem.strip(), seed
                assert "\n" not in problem.strip(), (seed, problem)
                assert "Traceback" not in problem, (seed, problem)
            continue
        for task in train:
            response = gold[int(task.task_id.removeprefix("rows/"))]
            assert reward(scripted_answer(task, response), **task.fields) == 1.0, (seed, name, task, response)
            assert_same_prompt(task, rows[int(task.task_id.removeprefix("rows/"))]["prompt"])
    assert outcomes[0] > 0, "data sets that cannot run prove nothing about rewards"


def assert_same_prompt(task: Task, written: Any) -> None:
    """The prompt has the tool calls of its row, and nothing of other rows."""
    if isinstance(written, list) and len(written) == 3:
        assert not isinstance(task.prompt, str)
        calls: Any = task.prompt[1]["tool_calls"]
        assert calls == written[1]["tool_calls"], task
