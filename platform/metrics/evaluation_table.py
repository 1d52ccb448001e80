"""Answers of evaluations as parquet, in the form of the trained trajectories: `evaluations/step_<n>.parquet`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from penstock.dataflow.ids import PARTNER, POLICY, PolicyId, TrajectoryId
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.platform.metrics.run_files import EVALUATIONS_DIR
from penstock.platform.metrics.trajectory_table import (
    TRAJECTORY_SCHEMA,
    StepFiles,
    TokenTexts,
    encodable,
    trajectory_row,
)

MAX_ROWS_PER_SET = 256
"""Answers of one evaluation that are stored per evaluation set: those to its first tasks, the same in each one."""
_SCHEMA = pa.schema([*TRAJECTORY_SCHEMA, ("evaluation_set", pa.string()), ("answer", pa.string())])
TaskAnswers = Sequence[tuple[Task, Sequence[Trajectory]]]
"""Each task with its scored answers."""


class AnswerTable(Protocol):
    """Where the answers of evaluations go."""

    def write(self, step: int, answers: TaskAnswers, name: str = "") -> None:
        """Write those of one evaluation, of the set `name` of `evaluation.sets`, or of `evaluation` itself."""
        ...


class EvaluationTable:
    """Writes the answers of each evaluation, at most `MAX_ROWS_PER_SET` of each evaluation set.

    Columns: those of `TrajectoryTable`, where step is the evaluated version, group_id the number of the task in the
    evaluation and trajectory_id `<group_id>/<answer>`; and evaluation_set (empty if there is only one) and answer (what
    the reward read as the answer; null if it does not say). Sets of `evaluation.sets` have a folder each.
    """

    def __init__(self, run_dir: Path, policy_id: PolicyId = POLICY, token_texts: TokenTexts | None = None) -> None:
        """Create the table. Answers of the partner policy are in `evaluations/partner/`.

        Args:
            run_dir: Directory of the run.
            policy_id: Whose answers are written.
            token_texts: Splits token ids into texts; None leaves the column `tokens` empty.
        """
        self._token_texts = token_texts
        self._folder = run_dir / EVALUATIONS_DIR / (PARTNER if policy_id == PARTNER else "")
        self.files = StepFiles(self._folder, _SCHEMA)

    def write(self, step: int, answers: TaskAnswers, name: str = "") -> None:
        """Write the file of one evaluation.

        Args:
            step: Version that was evaluated.
            answers: Each task with its scored answers.
            name: Set of `evaluation.sets`, if it is one.
        """
        rows = []
        num_rows: Counter[str] = Counter()
        for index, (task, trajectories) in enumerate(answers):
            for number, one in enumerate(trajectories[: MAX_ROWS_PER_SET - num_rows[task.evaluation_set]]):
                named = replace(one, trajectory_id=TrajectoryId(f"{index}/{number}"))
                row = trajectory_row(step, named, step, self._token_texts)
                answer = None if one.answer is None else encodable(one.answer)
                rows.append({**row, "evaluation_set": task.evaluation_set, "answer": answer})
                num_rows[task.evaluation_set] += 1
        files = StepFiles(self._folder / name, _SCHEMA) if name else self.files
        files.write(step, rows)
