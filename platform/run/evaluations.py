"""When a run evaluates: before, during and after training; and which of its policies is the best.

How it evaluates is evaluation.py. An evaluation during training is a task that shares the engines with the rollouts and
reports the versions that it sampled. A failure is noted and counted; it never ends the run.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from penstock.dataflow.errors import PenstockError
from penstock.dataflow.task import Task
from penstock.envs.streams import MAIN
from penstock.platform.config.schema import EvaluationConfig
from penstock.platform.metrics.atomic_file import write_text_atomically
from penstock.platform.metrics.progress import Progress
from penstock.platform.metrics.run_files import BEST_FILE, CONFIG_FILE
from penstock.platform.metrics.timeline import Timeline
from penstock.platform.run.evaluation import (
    Evaluation,
    Evaluator,
    TwoPolicyEvaluator,
    best_of,
    evaluated_on,
    evaluation_from,
    num_since_best,
)


@dataclass(slots=True)
class Evaluations:
    """All evaluations of a run: of its held-out tasks, and of the sets of `evaluation.sets`.

    They go on concurrently, one at a time of each set. Sets have metrics, a line on the console and files; all else
    looks at the held-out tasks of the run alone.
    """

    config: EvaluationConfig
    """How often, and how many tasks."""
    evaluator: Evaluator | TwoPolicyEvaluator
    """How."""
    held_out: list[Task]
    """Tasks of the first and the last one; empty: the run has no evaluations."""
    run_dir: Path
    """Where the best step is written."""
    log: Callable[[Mapping[str, float]], None]
    """Logs metrics at the version that the run has by then."""
    note: Callable[[str], None]
    """Prints a line on the console."""
    timeline: Timeline | None = None
    """Gets a slice per evaluation."""
    sets: Mapping[str, list[Task]] | None = None
    """Name of each set of `evaluation.sets` -> its tasks."""
    done: list[Evaluation] = field(default_factory=list)
    """Successful ones of the held-out tasks, in order."""
    num_failed: int = 0
    """Failed ones, of sets, too."""
    running: int | None = None
    """Version whose evaluation of the held-out tasks goes on during training; None if there is none."""
    _cut_off: int | None = None
    """Version whose evaluation was cut off by the end of the process before."""
    _started: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """The newest of each set during training."""
    _num_evaluating: int = 0
    _tasks: dict[str, list[Task]] = field(init=False)

    def __post_init__(self) -> None:
        self._tasks = {name: tasks for name, tasks in {MAIN: self.held_out, **(self.sets or {})}.items() if tasks}

    async def first(self, version: int) -> None:
        """Evaluate before training, on all tasks of the sets with `before_training`."""
        names = [name for name in self._tasks if self.config.of_set(name).before_training]
        await asyncio.gather(*(self._evaluate(version, name, self._tasks[name]) for name in names))

    async def last(self, version: int, delivered: Callable[[], Awaitable[object]]) -> None:
        """Evaluate after training, on all tasks, once the engines have the version."""
        await asyncio.gather(*self._started.values())
        if not self._tasks:
            return
        try:
            await delivered()
        except PenstockError as error:
            self._fail(f"evaluation at v{version}", error)
            return
        await asyncio.gather(*(self._evaluate(version, name, tasks) for name, tasks in self._tasks.items()))

    def _due(self, version: int) -> dict[str, list[Task]]:
        """Name -> tasks of the sets that are evaluated at a version during training: every `every_steps` steps."""
        due = {}
        for name, tasks in self._tasks.items():
            config = self.config.of_set(name)
            if version and config.every_steps and version % config.every_steps == 0:
                due[name] = tasks[: config.first_tasks(len(tasks))]
        return due

    def start(self, version: int) -> None:
        """Begin to evaluate the sets that are due during training, but for those that are still being evaluated."""
        for name, tasks in self._due(version).items():
            before = self._started.get(name)
            if before is not None:
                if not before.done():
                    self.note(f"{_named('evaluation', name, version)} skipped: the previous one is still running")
                    continue
                # A failed evaluation is noted in `_evaluate`; an exception raised here is a bug and stops the run.
                before.result()
            if not name:
                self.running = version
            what = f"evaluation {name}".rstrip()
            self._started[name] = asyncio.create_task(self._evaluate(version, name, tasks), name=what)

    def is_without_progress(self, version: int) -> bool:
        """Whether `evaluation.patience` evaluations in a row were not better than the best; says so.

        It needs no state but the evaluations, so a run that is resumed or rolled back ends at the same step.
        """
        patience, num_worse = self.config.patience, num_since_best(self.done)
        if patience is None or num_worse < patience:
            return False
        best, first = best_of(self.done), self.done[0]
        assert best is not None, "evaluations came after it"
        was_better = not first.step and first.num_tasks == best.num_tasks and first.rank > best.rank
        self.note(
            f"the training ends at v{version}: v{best.step} is still the best ({best}) after {num_worse} "
            f"more evaluation{'s' if num_worse > 1 else ''}, and evaluation.patience is {patience}. "
            + (f"Before training it was better still ({first}). " if was_better else "")
            + (
                f"`penstock export {self.run_dir} --best` writes its policy"
                if self.config.keep_best
                else f"The policy of v{best.step} is not kept, since evaluation.keep_best=false"
            )
        )
        return True

    def spared_versions(self, num_best: int) -> frozenset[int]:
        """Versions whose checkpoints are kept, however old: so many best ones, and one whose evaluation goes on or was
        cut off by the end of the process before.
        """
        if not self.config.keep_best:
            return frozenset()
        ranked = sorted((one for one in self.done if one.step), key=lambda one: one.rank, reverse=True)
        best = [one.step for one in ranked[:num_best]]
        return frozenset(version for version in (*best, self.running, self._cut_off) if version)

    def progress(self, version: int) -> Progress | None:
        """How far the evaluation is that runs now; None if none does, or it has just begun."""
        evaluator = self.evaluator
        if not self._num_evaluating or not evaluator.num_wanted:
            return None
        return Progress(f"evaluating v{version}", evaluator.num_answered, evaluator.num_wanted, "answers")

    def state(self) -> list[dict[str, Any]]:
        """The successful ones, as JSON types."""
        return [asdict(evaluation) for evaluation in self.done]

    def restore(self, saved: Iterable[Mapping[str, Any]], num_failed: int, cut_off: int | None = None) -> None:
        """Continue after those of a checkpoint; that of version `cut_off` went on then, and is not repeated."""
        self.done = [evaluation_from(one) for one in saved]
        self.num_failed = num_failed
        self._cut_off = cut_off
        self._write_best()
        if cut_off is not None:
            self.note(
                f"the evaluation at v{cut_off} was cut off, and is not repeated, since the run has trained on. "
                f"`penstock eval {self.run_dir} --step {cut_off}` measures it, if there is a checkpoint"
            )

    async def close(self) -> None:
        """Cancel running evaluations."""
        for task in self._started.values():
            task.cancel()
        await asyncio.gather(*self._started.values(), return_exceptions=True)

    async def _evaluate(self, version: int, name: str, tasks: list[Task]) -> None:
        """Evaluate one set."""
        began_at = time.time()
        self._num_evaluating += 1
        try:
            evaluation = await self.evaluator.evaluate(version, tasks, name)
        except PenstockError as error:
            self._fail(_named("evaluation", name, version), error)
            return
        finally:
            self._num_evaluating -= 1
            if not name:
                self.running = None
        if self.timeline is not None and not name:  # its track has no place for several at once
            what = _named("evaluation", name, version)
            self.timeline.add("evaluation", what, began_at, time.time(), tasks=len(tasks))
        num_trained_on = sum(task.is_trained_on for task in tasks)
        key = f"eval/tasks_trained_on/{name}" if name else "eval/tasks_trained_on"
        self.log(evaluation.metrics(name) | {key: num_trained_on})
        if not name:
            self.done.append(evaluation)
        is_best = not name and self._write_best() is evaluation
        self._tell(version, name, evaluation, tasks, is_best=is_best)

    def _fail(self, what: str, error: PenstockError) -> None:
        self.num_failed += 1
        self.log({"eval/failed": float(self.num_failed)})
        self.note(f"{what} failed; the run continues: {error}")

    def _tell(self, version: int, name: str, evaluation: Evaluation, tasks: list[Task], *, is_best: bool) -> None:
        size = self.config.of_set(name).answers_per_task
        self.note(
            _named("eval", name, evaluation.version_min)
            + (f"…v{evaluation.version_max}" if evaluation.version_max > evaluation.version_min else "")
            + (f", {part}" if (part := self.config.part) else "")
            + f": {evaluation} on {evaluation.counted} {evaluated_on(tasks)} tasks"
            + (f" with {size} answers each" if size > 1 else "")
            + ("" if evaluation.partner is None else f"; of the partner: {evaluation.partner}")
            + "".join(f"; {inner}: {score} on {score.counted}" for inner, score in evaluation.sets.items())
            + ("; the best so far" if is_best else "")
        )
        if evaluation.num_unscorable:
            reasons = ", ".join(f"{count} × {reason}" for reason, count in evaluation.failures.items())
            self.note(
                f"{_named('eval', name, version)}: {evaluation.num_unscorable} answers could not be sampled or scored "
                f"and are left out ({reasons})"
            )
        if evaluation.num_abstained:
            self.note(
                f"{_named('eval', name, version)}: the reward had no opinion (None) on {evaluation.num_abstained} "
                "answers, which are left out"
            )

    def _write_best(self) -> Evaluation | None:
        """With `keep_best`, write which evaluation is the best so far, and return it. A failure to write is noted."""
        best = best_of(self.done) if self.config.keep_best else None
        path = self.run_dir / BEST_FILE
        try:
            if best is not None:
                figures = {"step": best.step, "accuracy": best.accuracy, "reward_mean": best.reward_mean}
                write_text_atomically(path, json.dumps(figures) + "\n")
            elif (self.run_dir / CONFIG_FILE).exists():  # a simulated run has no directory
                path.unlink(missing_ok=True)
        except OSError as error:
            self.note(f"{path} could not be written, so `export --best` may name an older step: {error}")
        return best


def _named(what: str, name: str, version: int) -> str:
    """An evaluation of a set, as the subject of a sentence."""
    return f"{what} of {name} at v{version}" if name else f"{what} at v{version}"
