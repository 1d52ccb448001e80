"""Every task of reasoning-gym by name, scored by its own verifier: `env=reasoning_gym env.args.dataset=chain_sum`.

Install with `pip install 'penstock[envs]'`. Training rows come from one seed range and held-out rows from another;
training skips held-out questions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.contract import pure
from penstock.envs.import_path import import_extra, nearest_hint

ROWS_PER_EPOCH = 4096
MAX_HELD_OUT = 2048
HELD_OUT_SEED = 1_000_003
_FIRST_TRAIN_SEED = 1 << 21
_EPOCHS_PER_SEED = 1024
_NUM_EPOCHS = (2**32 - _FIRST_TRAIN_SEED) // ROWS_PER_EPOCH
"""Limited because some datasets seed numpy, which takes 32 bits."""
_INSTRUCTION = "Give the final answer alone between <answer> and </answer>."


@dataclass(eq=False)
class ReasoningGymTasks:
    """Task source over one dataset of reasoning-gym.

    Args:
        seed: Seed of the training rows. Held-out rows do not depend on it.
        dataset: Name of the dataset in reasoning-gym.
        config: Its own settings, e.g. `{min_terms: 2, max_terms: 3}`.

    Raises:
        ConfigError: If reasoning-gym is not installed.
        ValueError: If there is no such dataset, or it refuses its settings.
    """

    seed: int
    dataset: str = "chain_sum"
    config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.dataset not in dataset_names():
            raise ValueError(
                f"dataset={self.dataset!r} is none of the {len(dataset_names())} of reasoning-gym."
                f"{nearest_hint(self.dataset, dataset_names())}"
            )
        self._rows(self.seed, 1)  # settings that do not fit are refused now

    def train(self) -> Iterator[Task]:
        """Endless stream of rows, with new ones in every epoch."""
        held_out = {row["question"] for row in self._held_out}
        epoch = 0
        while True:
            has_new = False
            rows = self._rows(train_seed(self.seed, epoch), ROWS_PER_EPOCH)
            for index in range(ROWS_PER_EPOCH):
                if (row := rows[index])["question"] not in held_out:
                    has_new = True
                    yield self._task(row, f"train/{epoch * ROWS_PER_EPOCH + index}")
            if not has_new:
                raise ConfigError(f"env: every row of {self.dataset} is held out: its settings allow too few.")
            epoch += 1

    def held_out(self, num_tasks: int) -> list[Task]:
        """The first `num_tasks` different questions of a fixed seed, all if there are fewer."""
        return [self._task(row, f"held_out/{index}") for index, row in enumerate(self._held_out[:num_tasks])]

    @property
    def _held_out(self) -> list[Any]:
        return _held_out_rows(self.dataset, json.dumps(dict(self.config or {}), sort_keys=True))

    def _rows(self, seed: int, size: int) -> Any:
        try:
            return import_extra("reasoning_gym").create_dataset(
                self.dataset, seed=seed, size=size, **(self.config or {})
            )
        except (AssertionError, TypeError) as error:
            raise ValueError(f"config={self.config} does not fit {self.dataset}: {error}") from error

    def _task(self, row: Mapping[str, Any], where: str) -> Task:
        prompt = [{"role": "user", "content": f"{row['question']}\n\n{_INSTRUCTION}"}]
        fields: dict[str, Any] = {"dataset": self.dataset, "entry": dict(row)}
        return Task(TaskId(f"{self.dataset}/{where}"), prompt, fields)

    def gold_response(self, task: Task) -> str:
        """The answer that reasoning-gym gives. It may be None for tasks with several answers."""
        return f"<answer>{task.fields['entry']['answer']}</answer>"


def train_seed(seed: int, epoch: int) -> int:
    """Seed of an epoch's first row. Row i is drawn from seed + i, so epochs are `ROWS_PER_EPOCH` apart."""
    return _FIRST_TRAIN_SEED + (seed * _EPOCHS_PER_SEED + epoch) % _NUM_EPOCHS * ROWS_PER_EPOCH


@pure
def reasoning_gym_reward(trajectory: Trajectory, dataset: str, entry: dict[str, Any], **_: object) -> dict[str, float]:
    """The score of reasoning-gym's verifier for the text between the last answer tags, in 0..1.

    Some verifiers evaluate the answer as Python (countdown, puzzle24, n_queens): `reward=reasoning_gym` isolates them.
    """
    _thoughts, opening, after = trajectory.response.rpartition("<answer>")
    if not opening:
        return {"reward": 0.0, "verifier_error": 0.0}
    return verified(_scorer(dataset).score_answer, after.partition("</answer>")[0].strip(), entry)


def verified(
    score_answer: Callable[[str, dict[str, Any]], float], answer: str, entry: dict[str, Any]
) -> dict[str, float]:
    """Reward of an answer. Some verifiers raise if they cannot parse it: it is wrong, and counted separately."""
    try:
        return {"reward": float(score_answer(answer, entry)), "verifier_error": 0.0}
    except Exception:  # noqa: BLE001  an exception means that the answer cannot be parsed
        return {"reward": 0.0, "verifier_error": 1.0}


def dataset_names() -> list[str]:
    """All datasets by name."""
    return sorted(import_extra("reasoning_gym").factory.DATASETS)


@cache
def _held_out_rows(dataset: str, config: str) -> list[Any]:
    """Drawn once per process for all sources: a row of countdown takes 25 ms."""
    rows = import_extra("reasoning_gym").create_dataset(
        dataset, seed=HELD_OUT_SEED, size=MAX_HELD_OUT, **json.loads(config)
    )
    return list({row["question"]: row for row in map(rows.__getitem__, range(MAX_HELD_OUT))}.values())


@cache
def _scorer(dataset: str) -> Any:
    return import_extra("reasoning_gym").get_score_answer_fn(dataset).__self__
