"""`summary.json`: the key figures of a run, written once at its end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from penstock.dataflow.errors import TrajectoryError
from penstock.dataflow.ledger import LedgerCounts
from penstock.platform.metrics.atomic_file import write_text_atomically
from penstock.platform.metrics.run_files import ERROR_FILE, FAILURES_FILE, STALENESS_FILE, SUMMARY_FILE

RESUMED_FROM = "resumed_from"
"""Key of `summary.json` of a run that was resumed at this step and has not ended since then."""
RunStatus = Literal["completed", "interrupted", "failed"]
EvaluatedOn = Literal["held-out", "training", "held-out and training"]
"""Kind of the tasks of evaluations."""


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedPrompts:
    """Tasks whose prompt leaves no space for an answer (`env.on_long_prompt: skip`). They are not in the ledger."""

    taken: int = 0
    """Training tasks that were drawn, skipped ones included."""
    skipped: int = 0
    """Those that were skipped."""
    first: str | None = None
    """Id of the first of them; None if there are none."""
    evaluated: int = 0
    """Held-out tasks of the newest evaluation."""
    held_out: int = 0
    """Held-out tasks that it skipped."""

    def __str__(self) -> str:
        shown = []
        if self.skipped:
            share = self.skipped / self.taken
            shown.append(f"{self.skipped} of {self.taken} training tasks ({share:.1%}), {self.first} first")
        if self.held_out:
            shown.append(f"{self.held_out} of {self.evaluated + self.held_out} held-out tasks")
        return " and ".join(shown)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Key figures of a run. None means "not measured"."""

    name: str
    """Name of the run."""
    seed: int
    """Seed of the run."""
    status: RunStatus
    """How the run ended."""
    version: str
    """Version of Penstock."""
    eval_before: float | None = None
    """Accuracy on these tasks before the first step, 0..1."""
    eval_after: float | None = None
    """The same after the last step."""
    reward_first: float | None = None
    """Mean of `reward/mean` over the first min(10, n/2) steps."""
    reward_last: float | None = None
    """The same over the last ones."""
    steps: int
    """Training steps done."""
    wall_s: float
    """Seconds from the start of the run to its end."""
    trained_groups: int = 0
    """Groups trained."""
    max_staleness_configured: int
    """`dataflow.max_staleness`, versions."""
    max_staleness_seen: int = 0
    """Largest staleness of any trained token, versions."""
    share_tokens_stale: float = 0.0
    """Share of trained tokens with a staleness of 1 or more, 0..1."""
    multi_version_trajectories: int = 0
    """Trained trajectories with tokens of two or more versions."""
    tokens_generated: int = 0
    """Sampled tokens of all completed trajectories, trained or not."""
    tokens_trained: int = 0
    """Sampled tokens trained on."""
    peak_memory_gib: float
    """Largest sum of PSS over the processes of the run, GiB."""
    ledger: LedgerCounts
    """Number of admitted groups by state."""
    partner_eval_before: float | None = None
    """`eval_before` of the partner in a run of two policies."""
    partner_eval_after: float | None = None
    """`eval_after` of the partner."""
    evaluated_on: EvaluatedOn | None = "held-out"
    """The tasks of the evaluations; None: the run has no evaluations (`evaluation.num_tasks=0`)."""
    eval_reward_before: float | None = None
    """Mean reward on these tasks before the first step."""
    eval_reward_after: float | None = None
    """The same after the last step."""
    policy_version: int | None = None
    """Version of the policy in `policy/`; None if none was written."""
    ended_by: str | None = None
    """What told it to end: a signal, or `max_hours`; None if nothing did."""
    skipped_prompts: SkippedPrompts = SkippedPrompts()
    """Tasks that were skipped before they were admitted."""
    untrained: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Groups that ended untrained, by `state(reason)`."""
    failed_attempts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Kind and reason -> failed attempts, retried ones included, since the run or its resume began."""
    slow_parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Trainer rank or engine that was slow -> how slow, since the run or its resume began."""
    computed_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """How the trainer computed the policy: its rows, head, attention and the choice of experts."""
    branched_from: Mapping[str, Any] | None = None
    """Directory and step of the run at whose checkpoint this one began, and what it kept of it (`penstock resume RUN
    --as NEW`); None of a run of its own."""

    @property
    def is_graded(self) -> bool:
        """Whether evaluations had rewards other than 0, and none reached `dataflow.pass_reward`."""
        return not (self.eval_before or self.eval_after) and bool(self.eval_reward_before or self.eval_reward_after)

    def to_dict(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        return dataclasses.asdict(self)


def first_and_last_mean(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean of the first and of the last min(10, n/2) of n values, at least one; `(None, None)` if there are none."""
    if not values:
        return None, None
    count = max(1, min(10, len(values) // 2))
    return sum(values[:count]) / count, sum(values[-count:]) / count


def write_summary(run_dir: Path, summary: RunSummary) -> None:
    """Write `summary.json` atomically."""
    write_text_atomically(run_dir / SUMMARY_FILE, json.dumps(summary.to_dict(), indent=2) + "\n")


def note_resume(run_dir: Path, summary: Mapping[str, Any], step: int) -> None:
    """After an end with this summary the run goes on from `step`: its figures are those of the end no longer."""
    if summary:
        write_text_atomically(run_dir / SUMMARY_FILE, json.dumps({**summary, RESUMED_FROM: step}, indent=2) + "\n")
    (run_dir / ERROR_FILE).unlink(missing_ok=True)


def write_staleness(run_dir: Path, histogram: Mapping[int, int]) -> None:
    """Write `staleness.json`, `{"<staleness in versions>": trained tokens}`, atomically."""
    by_staleness = {str(staleness): histogram[staleness] for staleness in sorted(histogram)}
    write_text_atomically(run_dir / STALENESS_FILE, json.dumps(by_staleness) + "\n")


def write_failures(run_dir: Path, failures: Sequence[TrajectoryError]) -> None:
    """Write `failures.json`: kind and traceback of the first failed groups. Nothing is written if none failed."""
    if failures:
        rows = [{"kind": failure.kind, "detail": failure.detail} for failure in failures]
        write_text_atomically(run_dir / FAILURES_FILE, json.dumps(rows, indent=2) + "\n")
