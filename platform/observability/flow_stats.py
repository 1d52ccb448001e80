"""What the flow saw between two training steps, and over the whole run: staleness, waiting, samples."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupRef, Trajectory

MAX_FAILURES_KEPT = 20


@dataclass(slots=True)
class BatchStaleness:
    """Staleness of one batch, in versions, counted over sampled tokens.

    Attributes:
        tokens_by_lag: Staleness -> tokens.
        multi_version_trajectories: Trajectories that hold tokens of two or more versions.
    """

    tokens_by_lag: Counter[int]
    multi_version_trajectories: int

    @property
    def num_tokens(self) -> int:
        return self.tokens_by_lag.total()

    @property
    def mean_versions(self) -> float:
        return sum(lag * tokens for lag, tokens in self.tokens_by_lag.items()) / max(self.num_tokens, 1)

    @property
    def max_versions(self) -> int:
        return max(self.tokens_by_lag, default=0)

    @property
    def stale_share(self) -> float:
        return 1 - self.tokens_by_lag[0] / max(self.num_tokens, 1)


def batch_staleness(batch: Sequence[GroupRef], version: int) -> BatchStaleness:
    """Staleness of the groups of a batch trained at `version`."""
    by_lag: Counter[int] = Counter()
    for group in batch:
        by_lag.update(group.staleness_tokens(version))
    mixed = sum(len(spans) > 1 for group in batch for spans in group.spans)
    return BatchStaleness(by_lag, mixed)


@dataclass(slots=True)
class FlowStats:
    """Counters over the whole run, and the samples of the newest batch.

    Attributes:
        total: Staleness over all trained batches.
        last: Staleness of the newest batch.
        trainer_wait_s: Absolute seconds the trainer waited for batches.
        tokens_generated: Tokens sampled for training so far, trained or not.
        samples: A few trajectories of the newest batch, those with several versions first.
        last_version: The version the newest batch was trained at.
        failures: The first failures of groups, with their traceback.
    """

    samples_per_step: int = 16
    total: BatchStaleness = field(default_factory=lambda: BatchStaleness(Counter(), 0))
    last: BatchStaleness = field(default_factory=lambda: BatchStaleness(Counter(), 0))
    trainer_wait_s: float = 0.0
    tokens_generated: int = 0
    failures: list[TrajectoryError] = field(default_factory=list)
    samples: list[Trajectory] = field(default_factory=list)
    last_version: int = 0
    _candidates: dict[GroupId, tuple[Trajectory, ...]] = field(default_factory=dict)

    @contextmanager
    def trainer_waits(self) -> Iterator[None]:
        """Count the time inside as the trainer waiting for data."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.trainer_wait_s += time.monotonic() - started

    def trajectory_generated(self, trajectory: Trajectory) -> None:
        self.tokens_generated += trajectory.num_sampled_tokens

    def group_ready(self, group_id: GroupId, members: Sequence[Trajectory]) -> None:
        """Remember two members until the group trains (bounded by the admission window)."""
        self._candidates[group_id] = tuple(members[:2])

    def group_failed(self, failure: TrajectoryError) -> None:
        if len(self.failures) < MAX_FAILURES_KEPT:
            self.failures.append(failure)

    def batch_closed(self, batch: Sequence[GroupRef], version: int) -> None:
        """Account a batch that is about to train at `version`."""
        self.last = batch_staleness(batch, version)
        self.total.tokens_by_lag.update(self.last.tokens_by_lag)
        self.total.multi_version_trajectories += self.last.multi_version_trajectories
        self.last_version = version
        chosen = [member for group in batch for member in self._candidates.pop(group.group_id, ())]
        # Those that lived through an update first: they are what is worth looking at.
        chosen.sort(key=lambda member: -len(member.spans))
        self.samples = chosen[: self.samples_per_step]
