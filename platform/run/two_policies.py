"""A run of two policies: one flow, one ledger and one staleness bound, with two trainers and two sets of engines.

Both policies train on every batch and publish every version, so the controller's loop and the gates of the flow are the
same as for one. Consumes: batches of groups that both policies have sampled (rollout/trajectory/runner.py). Waits for:
both policies. Unblocked by: the slower one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from penstock.actors.trainer.client import TrainerClient
from penstock.dataflow.errors import CheckpointError, TrainingError
from penstock.dataflow.ids import PARTNER, POLICY, PolicyId
from penstock.dataflow.ports import PublishReport, StepReport, WeightPublisher, WrittenFile
from penstock.dataflow.trajectory import GroupRef
from penstock.platform.run.evaluation import Evaluator, TwoPolicyEvaluator
from penstock.platform.run.run import PolicyRuntime
from penstock.rollout.trajectory.runner import SharedGroups


def combine_policies(policy: PolicyRuntime, partner: PolicyRuntime, max_bad_steps: int) -> PolicyRuntime:
    """Combine the runtimes of two policies into one. The monitor covers the engines of `policy` only."""
    trainer = TwoPolicyTrainer(
        cast("TrainerClient", policy.trainer), cast("TrainerClient", partner.trainer), max_bad_steps
    )
    return PolicyRuntime(
        SharedGroups(policy.runner, partner.runner),
        trainer=trainer,
        publisher=TwoPolicyPublisher(policy.publisher, partner.publisher),
        evaluator=TwoPolicyEvaluator(cast("Evaluator", policy.evaluator), cast("Evaluator", partner.evaluator)),
        monitor=policy.monitor,
    )


class TwoPolicyTrainer:
    """A `TrainerGroup` of two policies: both train on the same groups, concurrently."""

    def __init__(self, policy: TrainerClient, partner: TrainerClient, max_bad_steps: int) -> None:
        """Create the trainer.

        Args:
            policy: Trainer of the policy, saved in `policy/`. Its metrics keep their names.
            partner: Trainer of the partner, saved next to it in `partner/`. Its metrics are prefixed with `partner/`.
            max_bad_steps: Consecutive skipped steps of either policy that stop the run.
        """
        self._trainers: dict[PolicyId, TrainerClient] = {POLICY: policy, PARTNER: partner}
        self._max_bad_steps = max_bad_steps
        self._consecutive_skips: Counter[PolicyId] = Counter()
        self._is_one_ahead = False

    async def step(self, batch: Sequence[GroupRef]) -> StepReport:
        """Train both policies on one batch.

        A version counts trained batches. If only one policy skipped its step, its unchanged weights are published again
        under the new version.

        Raises:
            TrainingError: If either trainer fails, or has skipped too many consecutive steps.
        """
        mine, other = await asyncio.gather(*(trainer.step(batch) for trainer in self._trainers.values()))
        for policy_id, report in ((POLICY, mine), (PARTNER, other)):
            num_skipped = self._consecutive_skips[policy_id] + 1 if report.skipped else 0
            self._consecutive_skips[policy_id] = num_skipped
            if num_skipped >= self._max_bad_steps:
                raise TrainingError(
                    f"trainer: {num_skipped} steps in a row of the {policy_id} had a non-finite loss or gradient, "
                    f"trainer.max_bad_steps is {self._max_bad_steps}. Lower its learning rate, or check the rewards."
                )
        version = max(mine.version, other.version)
        for trainer in self._trainers.values():
            trainer.version = version
        metrics = {**mine.metrics, **{f"partner/{name}": value for name, value in other.metrics.items()}}
        is_skipped = mine.skipped and other.skipped
        tokens = {**other.trained_tokens, **mine.trained_tokens}
        return StepReport(version, is_skipped, metrics, max(mine.busy_s, other.busy_s), tokens)

    async def early_logprobs(self, group: GroupRef) -> None:
        """Compute the early logprobs of a ready group on both trainers."""
        await asyncio.gather(*(trainer.early_logprobs(group) for trainer in self._trainers.values()))

    async def set_learning_rate(self, settings: Mapping[str, Any]) -> int:
        """Refuse it.

        Raises:
            TrainingError: Always: the two policies may have different optimizers.
        """
        del settings
        raise TrainingError(
            "trainer.optimizer: this run trains two policies, whose learning rates are set when it starts. End it and "
            "resume it with the other one."
        )

    async def stop_step(self) -> bool:
        """End the step of both trainers. If only one of them can, the other one has kept the version before."""
        trainers = list(self._trainers.values())
        ended = await asyncio.gather(*(trainer.stop_step() for trainer in trainers))
        self._is_one_ahead = any(ended) and not all(ended)
        if self._is_one_ahead:
            version = trainers[ended.index(True)].version
            for trainer in trainers:
                trainer.return_to(version)
        return any(ended)

    async def wait_for_step(self) -> None:
        """Wait until both have completed the step that they are in."""
        await asyncio.gather(*(trainer.wait_for_step() for trainer in self._trainers.values()))

    async def save(self, path: str) -> None:
        """Write the policy to `path` and the partner to the sibling folder `partner`."""
        await asyncio.gather(
            *(trainer.save(str(Path(path).with_name(policy_id))) for policy_id, trainer in self._trainers.items())
        )

    async def snapshot(self) -> float:
        """Copy the state of both trainers to host memory, concurrently; returns the longer of the two times.

        Raises:
            CheckpointError: If the step was ended for one of them only.
        """
        if self._is_one_ahead:
            raise CheckpointError(
                "trainer: the step was ended for one of the two policies, and the other one has completed it. Both are "
                "saved; a resume uses an earlier checkpoint."
            )
        return max(await asyncio.gather(*(trainer.snapshot() for trainer in self._trainers.values())))

    async def write_checkpoint(self, folder: str) -> list[WrittenFile]:
        """Write the last snapshots: of the policy to `folder`, of the partner to the sub-folder `partner`."""
        mine, other = await asyncio.gather(
            self._trainers[POLICY].write_checkpoint(folder),
            self._trainers[PARTNER].write_checkpoint(str(Path(folder) / PARTNER)),
        )
        return [*mine, *(file._replace(name=f"{PARTNER}/{file.name}") for file in other)]


class TwoPolicyPublisher:
    """A `WeightPublisher` of two policies: a version is published once the engines of both have it."""

    def __init__(self, policy: WeightPublisher, partner: WeightPublisher) -> None:
        self._publishers = (policy, partner)

    async def publish(self, version: int) -> PublishReport:
        """Publish a version of both policies.

        Raises:
            WeightSyncError: If no engine of one of the policies acknowledged it.
        """
        return _merge_reports(await asyncio.gather(*(publisher.publish(version) for publisher in self._publishers)))

    async def delivered(self) -> PublishReport:
        return _merge_reports(await asyncio.gather(*(publisher.delivered() for publisher in self._publishers)))


def _merge_reports(reports: Sequence[PublishReport]) -> PublishReport:
    """Sum bytes and counts and take the maximum of durations, which overlap; the rest is that of the first policy."""
    mine, other = reports
    return replace(
        mine,
        num_bytes=mine.num_bytes + other.num_bytes,
        send_s=max(mine.send_s, other.send_s),
        total_s=max(mine.total_s, other.total_s),
        acks=(*mine.acks, *other.acks),
        drain_timeouts=mine.drain_timeouts + other.drain_timeouts,
        rewrites=mine.rewrites + other.rewrites,
        max_logprob_diff=max(
            (report.max_logprob_diff for report in reports if report.max_logprob_diff is not None), default=None
        ),
        sent_bytes=mine.sent_bytes + other.sent_bytes,
        changed_share=max(
            (report.changed_share for report in reports if report.changed_share is not None), default=None
        ),
    )
