"""A run of two policies: one flow, one ledger, one bound on staleness; two trainers, two sets of engines.

Both train every batch and publish every version, so the controller's loop and the gates of the flow need not know.
Consumes: batches of groups that both have answered (rollout/trajectory/runner.py). Waits for: both. Unblocked by: the
slower one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from penstock.actors.trainer.client import TrainerClient
from penstock.dataflow.errors import TrainingError
from penstock.dataflow.ids import PARTNER, POLICY, PolicyId
from penstock.dataflow.ports import PublishReport, StepReport, WeightPublisher
from penstock.dataflow.trajectory import GroupRef, Task, iterate_groups
from penstock.platform.run.evaluation import Evaluation, SupportsEvaluation
from penstock.platform.run.run import PolicyRuntime
from penstock.rollout.trajectory.runner import SharedGroups


def combine_policies(policy: PolicyRuntime, partner: PolicyRuntime, max_bad_steps: int) -> PolicyRuntime:
    """Both sides as one; what the monitor tells is of the policy's engines."""
    trainer = TwoPolicyTrainer(
        cast("TrainerClient", policy.trainer), cast("TrainerClient", partner.trainer), max_bad_steps
    )
    return PolicyRuntime(
        SharedGroups(policy.runner, partner.runner),
        trainer=trainer,
        publisher=TwoPolicyPublisher(policy.publisher, partner.publisher),
        evaluator=TwoPolicyEvaluator(policy.evaluator, partner.evaluator),
        monitor=policy.monitor,
    )


class TwoPolicyTrainer:
    """A `TrainerGroup` of both: each step trains the same groups twice, at the same time."""

    def __init__(self, policy: TrainerClient, partner: TrainerClient, max_bad_steps: int) -> None:
        """Connect both.

        Args:
            policy: Whose report is that of the run; `policy/` is where it is saved.
            partner: Saved beside it, in `partner/`; its metrics begin with `partner/`.
            max_bad_steps: Skipped steps in a row of either that end the run.
        """
        self._trainers: dict[PolicyId, TrainerClient] = {POLICY: policy, PARTNER: partner}
        self._max_bad_steps = max_bad_steps
        self._skipped_in_a_row: Counter[PolicyId] = Counter()

    async def step(self, batch: AsyncIterator[GroupRef]) -> StepReport:
        """Train both on one batch.

        A version is a trained batch. Where only one of the two had bad numbers its weights stay as they are, and it
        publishes them again under the new version.

        Raises:
            TrainingError: If either fails, or has had too many bad steps in a row.
        """
        groups = [group async for group in batch]
        mine, other = await asyncio.gather(*(one.step(iterate_groups(groups)) for one in self._trainers.values()))
        for policy_id, report in ((POLICY, mine), (PARTNER, other)):
            num_skipped = self._skipped_in_a_row[policy_id] + 1 if report.skipped else 0
            self._skipped_in_a_row[policy_id] = num_skipped
            if num_skipped >= self._max_bad_steps:
                raise TrainingError(
                    f"trainer: {num_skipped} steps in a row of the {policy_id} had a non-finite loss or gradient, "
                    f"trainer.max_bad_steps is {self._max_bad_steps}. Lower its learning rate, or look at the rewards."
                )
        version = max(mine.version, other.version)
        for trainer in self._trainers.values():
            trainer.version = version
        metrics = {**mine.metrics, **{f"partner/{name}": value for name, value in other.metrics.items()}}
        is_skipped = mine.skipped and other.skipped
        return StepReport(version, is_skipped, metrics, max(mine.busy_s, other.busy_s))

    async def early_logprobs(self, group: GroupRef) -> None:
        """Let both forward a group of the batch that is awaited."""
        await asyncio.gather(*(one.early_logprobs(group) for one in self._trainers.values()))

    async def save(self, path: str) -> None:
        """Write both: the policy to `path`, its partner beside it."""
        await asyncio.gather(
            *(one.save(str(Path(path).with_name(policy_id))) for policy_id, one in self._trainers.items())
        )


class TwoPolicyPublisher:
    """A `WeightPublisher` of both: a version is out when the engines of both have it."""

    def __init__(self, policy: WeightPublisher, partner: WeightPublisher) -> None:
        self._publishers = (policy, partner)

    async def publish(self, version: int) -> PublishReport:
        """Publish a version of both.

        Raises:
            WeightSyncError: If no engine of one of them took it.
        """
        return _both(await asyncio.gather(*(one.publish(version) for one in self._publishers)))

    async def delivered(self) -> PublishReport:
        return _both(await asyncio.gather(*(one.delivered() for one in self._publishers)))


class TwoPolicyEvaluator:
    """Evaluates both on the same tasks, at the same time, each on its own engines."""

    def __init__(self, policy: SupportsEvaluation, partner: SupportsEvaluation) -> None:
        self._evaluators = (policy, partner)

    async def evaluate(self, step: int, tasks: Sequence[Task]) -> Evaluation:
        mine, other = await asyncio.gather(*(one.evaluate(step, tasks) for one in self._evaluators))
        return replace(mine, partner=other)


def _both(reports: Sequence[PublishReport]) -> PublishReport:
    mine, other = reports
    return replace(
        mine,
        num_bytes=mine.num_bytes + other.num_bytes,
        send_s=max(mine.send_s, other.send_s),
        total_s=max(mine.total_s, other.total_s),
        acks=(*mine.acks, *other.acks),
        drain_timeouts=mine.drain_timeouts + other.drain_timeouts,
        max_logprob_diff=max(
            (one.max_logprob_diff for one in reports if one.max_logprob_diff is not None), default=None
        ),
        sent_bytes=mine.sent_bytes + other.sent_bytes,
        changed_share=max((one.changed_share for one in reports if one.changed_share is not None), default=None),
    )
