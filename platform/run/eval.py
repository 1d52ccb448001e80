"""`penstock eval`: measures a policy on the held-out tasks and the sets of `evaluation.sets`, and stores the answers.

The folder of the results has `evaluation.json`, the figures and what they were measured with, and `answers.jsonl`, a
row per answer. `penstock compare` reads two of them (metrics/evaluation_results.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from penstock import __version__
from penstock.dataflow.errors import PenstockError
from penstock.dataflow.task import Task
from penstock.envs.streams import MAIN, load_held_out
from penstock.platform.cluster.actor_factory import model_path
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.atomic_file import write_text_atomically
from penstock.platform.metrics.evaluation_results import ANSWERS_FILE, HELD_OUT, RESULTS_FILE, label_of
from penstock.platform.metrics.evaluation_table import TaskAnswers
from penstock.platform.metrics.progress import Progress, ProgressLine
from penstock.platform.run.evaluation import Evaluation, Evaluator, SetScore, load_sets, measured
from penstock.platform.run.lifecycle import EXIT_OK, Stop, run_to_end
from penstock.platform.run.sample import answer_row
from penstock.platform.run.serving import STARTING, prompt_limit, rollout_sampling, serving


class AnswerRows:
    """Keeps the answers of evaluations as rows: those of `penstock sample`, and what an evaluation makes of them.

    Attributes:
        by_set: Name of the set of `evaluation.sets` -> its rows.
    """

    def __init__(self, config: RunConfig) -> None:
        self.by_set: dict[str, list[dict[str, Any]]] = {}
        self._part, self._pass_reward = config.evaluation.part, config.dataflow.pass_reward

    def write(self, step: int, answers: TaskAnswers, name: str = MAIN) -> None:
        """Keep those of one evaluation."""
        del step
        self.by_set[name] = [
            {
                "set": label_of(name, task.evaluation_set),
                "number": number,
                "solves": None if one.has_abstained else measured(one, self._part) >= self._pass_reward,
                "answer": one.answer,
                **answer_row(task, one),
            }
            for task, of_task in answers
            for number, one in enumerate(of_task)
        ]


def run_eval(config: RunConfig, policy: str, step: int | None, folder: Path) -> int:
    """Evaluate the policy at `model.path`; returns the exit code.

    A table is printed, and one JSON line with the figures.

    Args:
        config: The configuration.
        policy: The policy as results name it.
        step: Its step, if it is that of a run.
        folder: A folder for the results.
    """
    return run_to_end(lambda: _evaluate(config, policy, step, folder), Stop(config.stop_grace_s))


async def _evaluate(config: RunConfig, policy: str, step: int | None, folder: Path) -> int:
    held_out = load_held_out(config.env, config.seed, config.evaluation.num_tasks)
    tasks: dict[str, list[Task]] = {MAIN: held_out, **load_sets(config)}
    evaluator: Evaluator | None = None

    def progress() -> Progress:
        if evaluator is None:
            return STARTING
        if not evaluator.num_wanted:
            return Progress("ending")
        return Progress("evaluating", evaluator.num_answered, evaluator.num_wanted, "answers")

    console, rows = Console(stderr=True), AnswerRows(config)
    async with AsyncExitStack() as stack:
        stack.enter_context(ProgressLine(console).showing(progress))
        runner, rewards = await stack.enter_async_context(serving(config, "eval"))
        sampling, limit = rollout_sampling(config, runner.codec), prompt_limit(config, runner.codec)
        pass_reward = config.dataflow.pass_reward
        evaluator = Evaluator(runner, rewards, sampling, config.evaluation, pass_reward, rows, limit)
        measuring = (evaluator.evaluate(0, of_set, name) for name, of_set in tasks.items())
        found = dict(zip(tasks, await asyncio.gather(*measuring, return_exceptions=True), strict=True))
    done = {name: one for name, one in found.items() if isinstance(one, Evaluation)}
    if done:
        results = {"policy": policy, "model": model_path(config), "step": step, **_results(done), **facts(config)}
        ordered = (row for name in tasks for row in rows.by_set.get(name, ()))
        lines = [json.dumps(row, ensure_ascii=False, default=str) for row in ordered]
        # Not UTF-8 are lone surrogates, which a model can emit.
        text = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace").decode()
        await asyncio.to_thread(write_text_atomically, folder / ANSWERS_FILE, text)
        write_text_atomically(folder / RESULTS_FILE, json.dumps(results, indent=2, default=str) + "\n")
        console.print(results_table(policy, config, done))
        print(json.dumps({"model": policy, **_results(done), "results": str(folder)}))
    for name, one in found.items():
        if isinstance(one, PenstockError) and name and done:
            raise PenstockError(f"evaluation.sets.{name}: {one}") from one
        if isinstance(one, BaseException):
            raise one
    return EXIT_OK


def _results(done: Mapping[str, Evaluation]) -> dict[str, Any]:
    """The figures as JSON types: those of the held-out tasks, and of the sets by name."""
    found = {label: figures(score) for _, label, score in scores(done)}
    for name, one in done.items():
        if one.num_unscorable:
            found[label_of(name)] |= {"unscorable": one.num_unscorable, "failures": dict(one.failures)}
        if one.num_abstained:
            found[label_of(name)] |= {"abstained": one.num_abstained}
    return found.pop(HELD_OUT, {}) | ({"sets": found} if found else {})


def scores(done: Mapping[str, Evaluation]) -> Iterator[tuple[str, str, SetScore]]:
    """Set of `evaluation.sets`, its label and its figures; each followed by the sets that its environment names."""
    for name, one in done.items():
        yield name, label_of(name), one
        for inner, score in one.sets.items():
            yield name, label_of(name, inner), score


def figures(score: SetScore) -> dict[str, Any]:
    """The figures as JSON types."""
    return {
        "accuracy": score.accuracy,
        "reward_mean": score.reward_mean,
        "tasks": score.num_tasks,
        **({"skipped": score.num_skipped} if score.num_skipped else {}),
        **{f"pass@{k}": share for k, share in score.pass_at.items()},
        **{f"maj@{k}": share for k, share in score.maj_at.items()},
    }


def facts(config: RunConfig) -> dict[str, Any]:
    """What the figures were measured with, as JSON types."""
    return {
        "measured": {label_of(name): _measured(config, name) for name in (MAIN, *config.evaluation.sets)},
        "reward": config.reward.model_dump(mode="json", include={"fn", "args", "style", "parts"}),
        "part": config.evaluation.part,
        "pass_reward": config.dataflow.pass_reward,
        "sampling": config.rollout.sampling.model_dump(mode="json"),
        "seed": config.seed,
        "penstock": __version__,
    }


def _measured(config: RunConfig, name: str) -> dict[str, Any]:
    """The tasks of a set, and how they are answered."""
    env, view = config.set_env(name) if name else config.env, config.evaluation.of_set(name)
    answers = {"answers_per_task": view.answers_per_task, "temperature": view.temperature}
    return {"env": {"factory": env.factory, "args": env.args}, **answers}


def results_table(policy: str, config: RunConfig, done: Mapping[str, Evaluation]) -> Table:
    """A row per set. Of pass@k, that of all answers to a task."""
    headings = ("tasks", "k", "avg@k", "pass@k", "maj@k", "mean reward")
    figures = (Column(one, justify="right", no_wrap=True) for one in headings)
    table = Table(Column("set", overflow="fold"), *figures, title=Text(policy), title_justify="left")
    for name, label, score in scores(done):
        k = str(config.evaluation.of_set(name).answers_per_task)
        shares = (score.accuracy, score.pass_at.get(k), score.maj_at.get(k))
        shown = ("–" if share is None else f"{share:.3f}" for share in shares)
        skipped = f" of {score.num_tasks + score.num_skipped:,}" if score.num_skipped else ""
        table.add_row(label, f"{score.num_tasks:,}{skipped}", k, *shown, f"{score.reward_mean:.3f}")
    return table
