"""The results of `penstock eval`, and `penstock compare A B` of two of them: the same tasks, answered by two policies.

A task is the same if it has the same id and prompt in the set of the same name. Its share is that of its answers that
solve it; a task of which no answer has a reward counts as not answered.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from penstock.dataflow.errors import PenstockError
from penstock.platform.metrics.atomic_file import write_text_atomically
from penstock.platform.metrics.comparison import MISSING
from penstock.platform.metrics.leaves import leaves
from penstock.platform.metrics.paired import LEVEL, Difference, paired_difference

RESULTS_FILE, ANSWERS_FILE = "evaluation.json", "answers.jsonl"
HELD_OUT = "held-out"
"""Label of the tasks of `evaluation` itself."""
MAX_SHOWN = 5
"""Changed tasks on the console; the file has all."""
TaskKey = tuple[str, str, str]
"""Label of the set, id and prompt."""
Row = dict[str, Any]


def label_of(name: str, inner: str = "") -> str:
    """Label of a set of `evaluation.sets`, or of `evaluation` itself, and of a set in it that the environment names."""
    return "/".join(filter(None, (name, inner))) or HELD_OUT


@dataclass(frozen=True, slots=True)
class Results:
    """The folder of one evaluation."""

    folder: Path
    facts: Mapping[str, Any]
    """What was measured, and with what, of `evaluation.json`."""
    answers: Mapping[TaskKey, Sequence[Row]]
    """Answers with a reward, by task."""

    @property
    def policy(self) -> str:
        return str(self.facts["policy"])

    def share(self, task: TaskKey) -> float:
        """Share of the answers that solve a task."""
        return fmean(row["solves"] for row in self.answers[task])


@dataclass(frozen=True, slots=True)
class SetComparison:
    """Two policies on the tasks of one set."""

    num_tasks: int
    """Tasks that both have answered."""
    num_alone: tuple[int, int]
    """Tasks that only the first, and only the second has answered."""
    accuracy: tuple[float, float]
    """Of the first and the second, mean over the tasks."""
    difference: Difference
    """Second minus first."""
    solved_alone: tuple[int, int]
    """Tasks that only the first, and only the second solves, with at least one answer."""


@dataclass(slots=True)
class Comparison:
    """Two policies on the same tasks."""

    first: Results
    second: Results
    sets: dict[str, SetComparison] = field(default_factory=dict)
    """Label -> comparison on the tasks of this set."""
    changed: list[TaskKey] = field(default_factory=list)
    """Tasks that one of the two solves and the other does not, the largest difference of shares first."""
    differs: list[str] = field(default_factory=list)
    """What else differs between the two evaluations, as sentences."""


def is_results(folder: Path) -> bool:
    """Whether a folder is one of `penstock eval`."""
    return (folder / RESULTS_FILE).is_file()


def run_comparison(folders: Sequence[Path], console: Console) -> int:
    """Run `penstock compare A B` of two folders of `penstock eval`; returns the exit code.

    Raises:
        PenstockError: If they cannot be compared.
    """
    if len(folders) != 2:
        raise PenstockError(f"{len(folders)} folders: give two of `penstock eval`, whose tasks are compared.")
    found = compare_results(*map(read_results, folders))
    print_comparison(found, console, write_comparison(found))
    return 0


def read_results(folder: Path) -> Results:
    """Read the folder of an evaluation.

    Raises:
        PenstockError: If it is none, or has no answers.
    """
    if not is_results(folder):
        raise PenstockError(
            f"{folder}: holds no {RESULTS_FILE}, so it is no result. `penstock eval` prints its folder."
        )
    by_task: dict[TaskKey, list[Row]] = {}
    try:
        written = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        facts = {name: written[name] for name in ("policy", "reward", "pass_reward", "part", "measured", "sampling")}
        path = folder / ANSWERS_FILE
        with path.open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                if row["solves"] is not None:
                    key = (row["set"], row["task_id"], json.dumps(row["prompt"], sort_keys=True))
                    by_task.setdefault(key, []).append(row)
    except FileNotFoundError:
        raise PenstockError(
            f"{folder}: holds no {ANSWERS_FILE}, so its tasks cannot be compared. Evaluate again."
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PenstockError(f"{folder}: it cannot be read: {type(error).__name__}: {error}") from error
    if not by_task:
        raise PenstockError(f"{folder}: {ANSWERS_FILE} has no answer with a reward, so its tasks cannot be compared.")
    return Results(folder, facts, by_task)


def compare_results(first: Results, second: Results) -> Comparison:
    """Compare two policies on the tasks that both have answered.

    Raises:
        PenstockError: If the rewards differ, or no task is common.
    """
    refuse_other_rewards(first.facts, second.facts)
    found = Comparison(first, second)
    common = [task for task in first.answers if task in second.answers]
    if not common:
        raise PenstockError(
            f"no task is common: {first.folder} has {len(first.answers)} and {second.folder} {len(second.answers)}, "
            "with other ids or prompts. Evaluate both on the same tasks (env, evaluation.sets)."
        )
    found.differs = list(_differences(first.facts, second.facts))
    for label in dict.fromkeys(task[0] for task in (*first.answers, *second.answers)):
        tasks = [task for task in common if task[0] == label]
        alone = [sum(task[0] == label for task in one.answers) - len(tasks) for one in (first, second)]
        if not tasks:
            found.differs.append(f"{label}: no common task; A has answered {alone[0]} and B {alone[1]}")
            continue
        pairs = [(first.share(task), second.share(task)) for task in tasks]
        size = min(len(one.answers[task]) for one in (first, second) for task in tasks)
        found.sets[label] = SetComparison(
            num_tasks=len(tasks),
            num_alone=(alone[0], alone[1]),
            accuracy=(fmean(one for one, _ in pairs), fmean(other for _, other in pairs)),
            difference=paired_difference([other - one for one, other in pairs], size),
            solved_alone=(sum(one > other == 0 for one, other in pairs), sum(other > one == 0 for one, other in pairs)),
        )
    is_changed = [task for task in common if bool(first.share(task)) != bool(second.share(task))]
    found.changed = sorted(is_changed, key=lambda task: -abs(first.share(task) - second.share(task)))
    return found


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Keys, with both values, by which the comparison is of more than the policies."""
    common = [label for label in first["measured"] if label in second["measured"]]
    for label, of_first, of_second in (
        ("sampling", first["sampling"], second["sampling"]),
        *((label, first["measured"][label], second["measured"][label]) for label in common),
    ):
        one, other = dict(leaves(of_first, prefix=f"{label}.")), dict(leaves(of_second, prefix=f"{label}."))
        for key in sorted(one.keys() | other.keys()):
            told = [json.dumps(values[key]) if key in values else MISSING for values in (one, other)]
            if told[0] != told[1]:
                yield f"{key} differs: {told[0]} and {told[1]}"


def refuse_other_rewards(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Refuse two evaluations, by their facts, in which an answer that solves its task is not the same.

    Raises:
        PenstockError: If the reward, its part or the value from which it passes differs.
    """
    for key in ("reward", "pass_reward", "part"):
        if first[key] != second[key]:
            told = f"{json.dumps(first[key])} and {json.dumps(second[key])}"
            raise PenstockError(f"{key} differs, {told}: solved would not be the same in both. Evaluate both with one.")


def write_comparison(found: Comparison) -> Path:
    """Write the comparison with all changed tasks into the folder of the second policy; returns the file."""
    path = found.second.folder / f"compared_with_{found.first.folder.resolve().name}.json"
    content = {
        "policies": [one.policy for one in (found.first, found.second)],
        "folders": [str(one.folder) for one in (found.first, found.second)],
        "level": LEVEL,
        "differs": found.differs,
        "sets": {
            label: {
                "tasks": one.num_tasks,
                "tasks_of_one_policy_only": one.num_alone,
                "accuracy": one.accuracy,
                "difference": one.difference.mean,
                "interval": [one.difference.low, one.difference.high],
                "solved_by_one_only": one.solved_alone,
            }
            for label, one in found.sets.items()
        },
        "changed": [
            {
                "set": task[0],
                "task_id": task[1],
                "prompt": json.loads(task[2]),
                "shares": [one.share(task) for one in (found.first, found.second)],
                "answers": [shown_answer(one, task) for one in (found.first, found.second)],
            }
            for task in found.changed
        ],
    }
    write_text_atomically(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return path


def shown_answer(results: Results, task: TaskKey) -> Row:
    """The first answer that solves a task, or else the first one."""
    rows = results.answers[task]
    row = next((one for one in rows if one["solves"]), rows[0])
    return {name: row[name] for name in ("response", "answer", "reward", "finish_reason")}


def print_comparison(found: Comparison, console: Console, path: Path) -> None:
    """Print the figures and the first changed tasks."""
    names = ("A", "B")
    for name, one in zip(names, (found.first, found.second), strict=True):
        console.print(Text(f"{name}  {one.policy}  ({one.folder})"), soft_wrap=True)
    headings = ("tasks", *names, f"B - A ({LEVEL:.0%})", "only A", "only B")
    figures = (Column(one, justify="right", no_wrap=True) for one in headings)
    table = Table(Column("set", overflow="fold"), *figures)
    for label, compared in found.sets.items():
        mean, low, high = compared.difference
        shares = (f"{share:.3f}" for share in compared.accuracy)
        difference = f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        alone = (f"{count:,}" for count in compared.solved_alone)
        table.add_row(label, f"{compared.num_tasks:,}", *shares, difference, *alone)
    console.print(table)
    for line in remarks(found):
        console.print(Text(line), soft_wrap=True)
    for task in found.changed[:MAX_SHOWN]:
        _print_changed(found, task, console)
    shown = min(MAX_SHOWN, len(found.changed))
    of_all = f"{shown} of {len(found.changed)} tasks that only one of the two solves; all" if shown else "All figures"
    console.print(Text(f"{of_all}: {path}"), soft_wrap=True)


def remarks(found: Comparison) -> Iterator[str]:
    """What a reader of the figures must know besides them."""
    yield from found.differs
    alone = Counter[str]()
    for one in found.sets.values():
        alone.update(dict(zip("AB", one.num_alone, strict=True)))
    if alone.total():
        yield f"left out: {alone['A']} tasks that only A has answered, {alone['B']} that only B has"


def _print_changed(found: Comparison, task: TaskKey, console: Console) -> None:
    label, task_id, prompt = task
    told = json.loads(prompt)
    text = told if isinstance(told, str) else str(told[-1].get("content", ""))
    head = f"{task_id}" if label == HELD_OUT else f"{label}: {task_id}"
    console.print(Text(_cut(f"{head}  {text}", console.width), style="bold"))
    for name, one in zip("AB", (found.first, found.second), strict=True):
        rows, answer = one.answers[task], shown_answer(one, task)
        solved = sum(row["solves"] for row in rows)
        mark = ("solved" if solved else "not solved") if len(rows) == 1 else f"{solved} of {len(rows)}"
        console.print(Text(_cut(f"  {name}  {mark:<10}  {answer['response']}", console.width)))


def _cut(text: str, width: int) -> str:
    """One line without control codes; of a longer text its beginning and its end, where the answer mostly is."""
    line = "".join(one if one.isprintable() else " " for one in text)
    if len(line) <= width:
        return line
    end = width // 3
    return f"{line[: width - end - 3]} … {line[-end:]}"
