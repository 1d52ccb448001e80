"""Statistics of the flow per training step and over the run: staleness, waiting times, samples, newest events."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, get_args

from penstock.dataflow.core import WaitReason
from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ledger import JournalEntry, LedgerEvent, Reason, VersionMark
from penstock.dataflow.trajectory import GroupRef, Trajectory, is_recorded
from penstock.platform.metrics.anomalies import Anomalies

MAX_FAILURES_KEPT = 20
SAMPLES_PER_STEP = 16
"""Trajectories of a batch that are written to the run directory, on average; at least one group in a batch."""
EVENTS_KEPT = 64


def sampled_every(batch_groups: int, group_size: int) -> int:
    """In how many groups one is a sample, so that a batch has `SAMPLES_PER_STEP` sampled trajectories."""
    return max(1, batch_groups // max(1, SAMPLES_PER_STEP // group_size))


@dataclass(slots=True)
class BatchStaleness:
    """Staleness of one batch, in versions, counted over sampled tokens."""

    tokens_by_staleness: Counter[int]
    """Staleness -> tokens."""
    multi_version_trajectories: int = 0
    """Trajectories that hold tokens of two or more versions."""
    trimmed_tokens: int = 0
    """Sampled tokens that lost their loss weight because they were too old."""

    @property
    def num_tokens(self) -> int:
        return self.tokens_by_staleness.total()

    @property
    def mean_versions(self) -> float:
        return sum(staleness * tokens for staleness, tokens in self.tokens_by_staleness.items()) / max(
            self.num_tokens, 1
        )

    @property
    def max_versions(self) -> int:
        return max(self.tokens_by_staleness, default=0)

    @property
    def stale_share(self) -> float:
        return 1 - self.tokens_by_staleness[0] / self.num_tokens if self.num_tokens else 0.0

    @property
    def trimmed_share(self) -> float:
        """Share of sampled tokens that were trained without loss weight."""
        return self.trimmed_tokens / max(self.num_tokens + self.trimmed_tokens, 1)


def batch_staleness(batch: Sequence[GroupRef], version: int) -> BatchStaleness:
    """Compute the staleness of a batch trained at `version`."""
    by_staleness: Counter[int] = Counter()
    mixed = trimmed = 0
    for group in batch:
        if len(group.tokens_by_version) > 1:
            mixed += sum([len(spans) > 1 for spans in group.spans])
        for sampled_by, tokens in group.tokens_by_version.items():
            if sampled_by >= group.min_version:
                by_staleness[version - sampled_by] += tokens
            else:
                trimmed += tokens
    return BatchStaleness(by_staleness, mixed, trimmed)


@dataclass(slots=True)
class MeanLength:
    """A running mean of trajectory lengths, in sampled tokens."""

    num_trajectories: int = 0
    num_tokens: int = 0

    @property
    def tokens(self) -> float:
        return self.num_tokens / max(self.num_trajectories, 1)


@dataclass(slots=True)
class FlowStats:
    """Counters over the whole run, and the samples of the newest batch."""

    total: BatchStaleness = field(default_factory=lambda: BatchStaleness(Counter()))
    """Staleness over all trained batches."""
    last: BatchStaleness = field(default_factory=lambda: BatchStaleness(Counter()))
    """Staleness of the newest batch."""
    trainer_wait_for: dict[WaitReason, float] = field(default_factory=lambda: dict.fromkeys(get_args(WaitReason), 0.0))
    """Reason for the wait -> absolute seconds that the trainer waited for batches."""
    population: MeanLength = field(default_factory=MeanLength)
    """Lengths of all completed trajectories."""
    trained: MeanLength = field(default_factory=MeanLength)
    """Lengths of the trained trajectories."""
    num_scored: int = 0
    """Trajectories that were scored by this process; a retried one counts again."""
    num_abstained: int = 0
    """Trajectories on which the reward had no opinion, over the whole run."""
    num_ready: int = 0
    """Groups that this process has made ready."""
    failures: list[TrajectoryError] = field(default_factory=list)
    """The first failures of groups, with their traceback."""
    sampled_every: int = 1
    """The members of one group in so many are samples."""
    samples: list[Trajectory] = field(default_factory=list)
    """All members of the sampled groups of the newest batch."""
    last_version: int = 0
    """The version at which the newest batch was trained."""
    anomalies: Anomalies = field(default_factory=Anomalies)
    """Notes what goes wrong on the console."""
    _candidates: dict[GroupId, tuple[Trajectory, ...]] = field(default_factory=dict)

    @property
    def tokens_generated(self) -> int:
        """Tokens sampled for training so far, trained or not."""
        return self.population.num_tokens

    @property
    def length_bias(self) -> float:
        """Mean length of trained ÷ of all completed trajectories; 1 before the first batch."""
        return self.trained.tokens / self.population.tokens if self.trained.num_trajectories else 1.0

    @contextmanager
    def trainer_waits(self, wait_reason: WaitReason) -> Iterator[None]:
        """Count the time inside the context as time in which the trainer waits for data."""
        started = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self.trainer_wait_for[wait_reason] += asyncio.get_running_loop().time() - started

    def state_dict(self) -> dict[str, Any]:
        """The counters over the whole run, as JSON types."""
        total = self.total
        return {
            "tokens_by_staleness": [[staleness, tokens] for staleness, tokens in total.tokens_by_staleness.items()],
            "multi_version_trajectories": total.multi_version_trajectories,
            "trimmed_tokens": total.trimmed_tokens,
            "trainer_wait_for": dict(self.trainer_wait_for),
            "population": [self.population.num_trajectories, self.population.num_tokens],
            "trained": [self.trained.num_trajectories, self.trained.num_tokens],
            "num_abstained": self.num_abstained,
            "failures": [[failure.kind, failure.detail] for failure in self.failures],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total = BatchStaleness(
            Counter(dict(state["tokens_by_staleness"])),
            state["multi_version_trajectories"],
            state["trimmed_tokens"],
        )
        self.trainer_wait_for.update(state["trainer_wait_for"])
        self.population, self.trained = MeanLength(*state["population"]), MeanLength(*state["trained"])
        self.num_abstained = state["num_abstained"]
        self.failures = [TrajectoryError(kind, detail) for kind, detail in state["failures"]]

    def trajectory_generated(self, trajectory: Trajectory) -> None:
        population = self.population
        population.num_trajectories += 1
        population.num_tokens += trajectory.num_sampled_tokens

    def abstained(self, task_id: TaskId) -> None:
        """Count a trajectory on which the reward had no opinion, and note the first one."""
        self.num_abstained += 1
        self.anomalies.abstained(task_id)

    def group_ready(self, group_id: GroupId, members: Sequence[Trajectory]) -> None:
        """Keep the members of a sampled group until it trains: in an admission window, one group in `sampled_every`."""
        if is_recorded(group_id, self.sampled_every):
            self._candidates[group_id] = tuple(members)

    def group_dropped(self, group_id: GroupId) -> None:
        """Forget a group that the core has ended as too old or redundant."""
        self._candidates.pop(group_id, None)

    def group_failed(self, failure: TrajectoryError) -> None:
        if len(self.failures) < MAX_FAILURES_KEPT:
            self.failures.append(failure)

    def batch_closed(self, batch: Sequence[GroupRef], version: int) -> None:
        """Record a batch that is about to train at `version`."""
        self.last = batch_staleness(batch, version)
        self.total.tokens_by_staleness.update(self.last.tokens_by_staleness)
        self.total.multi_version_trajectories += self.last.multi_version_trajectories
        self.total.trimmed_tokens += self.last.trimmed_tokens
        self.trained.num_trajectories += sum(len(group.spans) for group in batch)
        self.trained.num_tokens += self.last.num_tokens + self.last.trimmed_tokens
        self.last_version = version
        self.samples = [member for group in batch for member in self._candidates.pop(group.group_id, ())]

    def batch_returned(self, batch: Sequence[GroupRef]) -> None:
        """Take back the newest batch, which was not trained."""
        self.total.tokens_by_staleness -= self.last.tokens_by_staleness  # which keeps no version of 0 tokens
        self.total.multi_version_trajectories -= self.last.multi_version_trajectories
        self.total.trimmed_tokens -= self.last.trimmed_tokens
        self.trained.num_trajectories -= sum(len(group.spans) for group in batch)
        self.trained.num_tokens -= self.last.num_tokens + self.last.trimmed_tokens


class EventTail:
    """The newest events of the ledger, written to `error.txt` when a run fails.

    An event callback of `Ledger`. Groups that end because the run ends are left out.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[float, JournalEntry]] = deque(maxlen=EVENTS_KEPT)

    def __call__(self, entry: JournalEntry) -> None:
        if not isinstance(entry, LedgerEvent) or entry.reason is not Reason.RUN_END:
            self._events.append((time.monotonic(), entry))

    def lines(self) -> list[str]:
        """One line per event with its time relative to now, oldest first."""
        now, lines = time.monotonic(), []
        for at, entry in self._events:
            if isinstance(entry, VersionMark):
                told = f"v{entry.version} published"
            else:
                reason = f"({entry.reason})" if entry.reason else ""
                told = f"group {entry.group_id} {entry.state}{reason}  {entry.task_id}"
            lines.append(f"{at - now:9.3f} s  {told}")
        return lines
