"""Trajectories as parquet: a sample of the trained groups, and whole batches of skipped steps.

`trajectories/step_<n>.parquet`, one file per step; `bad_batches/<n>.parquet`, counted from 1 over the run.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.dataflow.ports import TrainedTokens
from penstock.dataflow.trajectory import GroupPayload, Trajectory, Turn
from penstock.platform.metrics.atomic_file import write_atomically

logger = logging.getLogger(__name__)

TRAJECTORIES_DIR = "trajectories"
BAD_BATCHES_DIR = "bad_batches"
TokenTexts = Callable[[Iterable[int]], list[str]]
"""Token ids -> the text of each."""
ROWS_AT_ONCE = 16
"""Rows of a file that are decoded together."""
MAX_KEPT = 16
"""Files of bad batches; older ones are deleted."""

TRAJECTORY_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group_id", pa.int64()),
        ("trajectory_id", pa.string()),
        ("task_id", pa.string()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("reward_parts", pa.string()),
        ("finish_reason", pa.string()),
        ("spans", pa.string()),
        ("staleness", pa.int64()),
        ("num_tokens", pa.int64()),
        ("threads", pa.string()),
        ("turns", pa.string()),
        ("retried_after", pa.string()),
        ("policy_id", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("tokens", pa.list_(pa.string())),
        ("logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
    ]
)


class StepFiles:
    """Parquet files of rows, one per step: `<directory>/step_<n>.parquet`.

    A file that cannot be written is a warning, the first time; the run goes on without such files.
    """

    def __init__(self, directory: Path, schema: pa.Schema) -> None:
        self._directory = directory
        self._schema = schema
        self._has_warned = False

    def write(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write the file of one step atomically, and return its path."""
        path = self._directory / f"step_{step:06d}.parquet"
        self.write_file(path, rows)
        return path

    def write_file(
        self, path: Path, rows: Sequence[Mapping[str, Any]], metadata: Mapping[str, str] | None = None
    ) -> bool:
        """Write a file of another name, with metadata of its schema; whether it could be written."""
        table = pa.Table.from_pylist(rows, schema=self._schema.with_metadata(metadata))
        try:
            write_atomically(path, lambda temporary: pq.write_table(table, temporary))
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("%s cannot be written: %s. Training goes on without such files.", path, error)
            return False
        return True

    def drop_after(self, step: int) -> None:
        """Remove the files of later steps, also in folders below, whose training was lost."""
        for path in self._directory.rglob("step_*.parquet"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()


class TrajectoryTable:
    """Writes whole groups of each step, one in `FlowStats.sampled_every`.

    Columns: step, group_id, trajectory_id, task_id, prompt, response (all sampled text), reward, reward_parts (JSON
    object), finish_reason, spans (JSON list of [version, tokens]), staleness (of the oldest sampled token, versions),
    num_tokens (sampled tokens), threads (JSON list of [name, fork_of, tokens]; empty for a trajectory of one thread),
    turns (JSON list, see `turns_of`; empty for a trajectory of a single turn), retried_after (why the previous attempt
    failed; empty for a first attempt), policy_id.

    Columns with one value per token, prompt included, threads one after another: token_ids, loss_mask (whether the
    policy sampled it), behavior_logprobs (0 where not sampled), tokens (text), and, empty unless the trainer reported
    them, logprobs (of the policy when it trained on the token; NaN where it did not) and advantages (likewise).

    Attributes:
        files: Its files.
        token_texts: Splits token ids into texts; None leaves the column `tokens` empty.
    """

    def __init__(self, run_dir: Path, token_texts: TokenTexts | None = None) -> None:
        self.token_texts = token_texts
        self.files = StepFiles(run_dir / TRAJECTORIES_DIR, TRAJECTORY_SCHEMA)

    def write_step(
        self, step: int, trajectories: Sequence[Trajectory], *, version: int, trained: TrainedTokens | None = None
    ) -> Path:
        """Write the file of one step and return its path.

        Args:
            step: Training step.
            trajectories: Sample of the trajectories trained in the step.
            version: The trainer's policy version at this step.
            trained: What the trainer reported of their tokens.
        """
        rows = [trajectory_row(step, one, version, self.token_texts, trained) for one in trajectories]
        return self.files.write(step, rows)


class BadBatches:
    """Writes all trajectories of a batch whose step was skipped, and the metrics of the step.

    Columns: those of `TrajectoryTable`; step is the number of the file. The metadata of the schema has `version` and
    `metrics` (JSON object; non-finite values as text).
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / BAD_BATCHES_DIR
        self._files = StepFiles(self._directory, TRAJECTORY_SCHEMA)
        # A resumed run keeps the batches from before.
        self._num_written = max((int(path.stem) for path in self._directory.glob("*.parquet")), default=0)

    def write(self, version: int, batch: Sequence[GroupPayload], metrics: Mapping[str, float]) -> Path | None:
        """Write one batch atomically and return its path; None, with a warning, if it cannot be written.

        Args:
            version: The trainer's policy version at the skipped step.
            batch: All groups of the batch.
            metrics: Metrics of the step.
        """
        self._num_written += 1
        rows = [trajectory_row(self._num_written, one, version) for group in batch for one in group.trajectories]
        told = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        metadata = {"version": str(version), "metrics": json.dumps(told)}
        path = self._directory / f"{self._num_written}.parquet"
        if not self._files.write_file(path, rows, metadata):
            return None
        (self._directory / f"{self._num_written - MAX_KEPT}.parquet").unlink(missing_ok=True)
        return path


def spread_steps(directory: Path, most: int) -> list[Path]:
    """At most so many of its files of steps, evenly spread over the steps, with the first and the last."""
    files = sorted(directory.glob("step_*.parquet"))
    if len(files) <= most:
        return files
    return [files[round(index * (len(files) - 1) / (most - 1))] for index in range(most)]


def iterate_trajectories(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file with decoded JSON columns. Few are in memory at once: a token takes some 200 bytes."""
    for batch in pq.ParquetFile(path).iter_batches(batch_size=ROWS_AT_ONCE):
        for row in batch.to_pylist():
            row["reward_parts"] = json.loads(row["reward_parts"])
            row["spans"] = json.loads(row["spans"])
            row["threads"] = json.loads(row.get("threads") or "[]")
            row["turns"] = json.loads(row.get("turns") or "[]")
            yield row


def read_trajectories(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a file with decoded JSON columns."""
    return list(iterate_trajectories(path))


def read_outcomes(path: Path) -> list[tuple[int, float | None, int]]:
    """Read step, reward and number of sampled tokens of each row of a file."""
    table = pq.read_table(path, columns=["step", "reward", "num_tokens"])
    return list(zip(*(table[name].to_pylist() for name in ("step", "reward", "num_tokens")), strict=True))


def turns_of(trajectory: Trajectory) -> list[dict[str, Any]]:
    """What was said in an episode, in order; empty for a trajectory of a single turn.

    Of the policy: role `policy`, thread, text, num_tokens, seconds (waits included), finish_reason, interruptions. Of
    the environment, template included: role `environment`, thread, text, num_tokens, seconds (its own and its tools').
    Those that are not trained (`Episode.side_turns`) come last, with `trained` false, which the others do not have.
    """
    episode = trajectory.episode
    if episode is None:
        return []
    said: list[dict[str, Any]] = []
    marked: list[tuple[Turn, dict[str, bool]]] = [(turn, {}) for turn in episode.turns]
    marked += [(turn, {"trained": False}) for turn in episode.side_turns]
    for turn, mark in marked:
        said.append(
            {"role": "policy", "thread": turn.thread, "text": encodable(turn.reasoning + turn.response)}
            | {"num_tokens": turn.num_tokens, "seconds": round(turn.sampling_s, 3)}
            | {"finish_reason": turn.finish_reason, "interruptions": turn.num_interruptions}
            | mark
        )
        if turn.num_observation_tokens:
            said.append(
                {"role": "environment", "thread": turn.thread, "text": encodable(turn.observation)}
                | {"num_tokens": turn.num_observation_tokens, "seconds": round(turn.environment_s, 3)}
                | mark
            )
    return said


def trajectory_row(
    step: int,
    trajectory: Trajectory,
    version: int,
    token_texts: TokenTexts | None = None,
    trained: TrainedTokens | None = None,
) -> dict[str, Any]:
    """Convert a trajectory to a row of `TRAJECTORY_SCHEMA`. `version` is that of the trainer."""
    spans = trajectory.spans
    logprobs, advantages = (trained or {}).get(trajectory.trajectory_id, ((), ()))
    return {
        "step": step,
        "group_id": int(trajectory.trajectory_id.partition("/")[0]),
        "trajectory_id": trajectory.trajectory_id,
        "task_id": encodable(trajectory.task_id),
        "prompt": encodable(trajectory.prompt),
        "response": encodable(trajectory.text),
        "reward": trajectory.reward,
        "reward_parts": json.dumps({name: float(value) for name, value in trajectory.reward_parts.items()}),
        "finish_reason": trajectory.finish_reason,
        "spans": json.dumps([[span.version, span.num_tokens] for span in spans]),
        "staleness": version - trajectory.oldest_version if spans else 0,
        "num_tokens": trajectory.num_sampled_tokens,
        "threads": json.dumps([[thread.name, thread.fork_of, thread.num_tokens] for thread in trajectory.threads]),
        "turns": json.dumps(turns_of(trajectory)),
        "retried_after": encodable(trajectory.retried_after),
        "policy_id": trajectory.policy_id,
        "token_ids": trajectory.token_ids,
        "loss_mask": trajectory.loss_mask,
        "behavior_logprobs": trajectory.behavior_logprobs,
        "tokens": [] if token_texts is None else [encodable(one) for one in token_texts(trajectory.token_ids)],
        "logprobs": logprobs,
        "advantages": advantages,
    }


def encodable(text: str) -> str:
    """Replace lone surrogates, which a model can emit but UTF-8 cannot represent."""
    return text.encode("utf-8", "replace").decode("utf-8")
