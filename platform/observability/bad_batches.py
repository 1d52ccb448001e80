"""Batches whose step was skipped, whole: `bad_batches/<n>.parquet`, counted from 1 over the run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.dataflow.trajectory import GroupPayload
from penstock.platform.observability.atomic_file import write_atomically
from penstock.platform.observability.trajectory_table import TRAJECTORY_SCHEMA, trajectory_row

BAD_BATCHES_DIR = "bad_batches"
MAX_KEPT = 16
"""Files; older ones are deleted."""

_SCHEMA = pa.schema(
    [
        *TRAJECTORY_SCHEMA,
        ("policy_id", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("behavior_logprobs", pa.list_(pa.float32())),
    ]
)


class BadBatches:
    """Write every trajectory of a batch that could not be trained, and what its step reported.

    Columns: those of `TrajectoryTable` (step is the number of the file), policy_id, and per token token_ids, loss_mask,
    behavior_logprobs. The metadata of the schema has `version` and `metrics` (JSON object; what is not finite as text).
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / BAD_BATCHES_DIR
        self._num_written = 0

    def write(self, version: int, batch: Sequence[GroupPayload], metrics: Mapping[str, float]) -> Path:
        """Write one batch atomically and return its path.

        Args:
            version: The trainer's policy version when it tried.
            batch: All its groups.
            metrics: Of the step.
        """
        self._num_written += 1
        rows = [
            {
                **trajectory_row(self._num_written, one, version, {}),
                "policy_id": one.policy_id,
                "token_ids": one.token_ids,
                "loss_mask": one.loss_mask,
                "behavior_logprobs": one.behavior_logprobs,
            }
            for group in batch
            for one in group.trajectories
        ]
        told = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        metadata = {"version": str(version), "metrics": json.dumps(told)}
        table = pa.Table.from_pylist(rows, schema=_SCHEMA.with_metadata(metadata))
        path = self._path(self._num_written)
        write_atomically(path, lambda temporary: pq.write_table(table, temporary))
        self._path(self._num_written - MAX_KEPT).unlink(missing_ok=True)
        return path

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.parquet"
