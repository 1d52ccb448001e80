"""The state of one run as the controller sees it: its policy version, evaluations, checkpoints and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from penstock.dataflow.core import WaitReason
from penstock.dataflow.errors import FailureKind, PenstockError, TrainingError
from penstock.dataflow.ledger import GroupState, LedgerCounts, Reason
from penstock.dataflow.ports import PublishReport, StepReport, TrainerGroup, WeightPublisher
from penstock.dataflow.task import Task
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.hub import MetricsHub
from penstock.platform.metrics.memory_sampler import MemorySampler
from penstock.platform.metrics.progress import Progress
from penstock.platform.metrics.run_files import CONFIG_FILE, POLICY_FOLDER
from penstock.platform.metrics.summary import SkippedPrompts
from penstock.platform.metrics.timeline import Timeline
from penstock.platform.metrics.trajectory_table import BadBatches, TrajectoryTable
from penstock.platform.run.checkpoint import Checkpointer
from penstock.platform.run.engine_monitor import EngineMonitor
from penstock.platform.run.evaluation import Evaluator, TwoPolicyEvaluator
from penstock.platform.run.evaluations import Evaluations
from penstock.platform.run.flow import Flow, StopRequestedError
from penstock.platform.run.mismatch_trend import MismatchTrend
from penstock.rollout.trajectory.runner import RolloutRunner

ABANDON_S = 2.0
"""Longest wait for the training loop to end after it was cancelled, seconds."""


@dataclass(frozen=True, slots=True)
class PolicyRuntime:
    """The engines and the trainer of one policy, and what connects them; two policies are combined into one runtime."""

    runner: RolloutRunner
    trainer: TrainerGroup
    publisher: WeightPublisher
    evaluator: Evaluator | TwoPolicyEvaluator
    monitor: EngineMonitor


@dataclass(frozen=True, slots=True)
class Instruments:
    """Outputs of a run: metrics, trajectories, dumped batches and console notes."""

    hub: MetricsHub
    memory: MemorySampler
    trajectories: TrajectoryTable
    bad_batches: BadBatches
    run_dir: Path
    note: Callable[[str], None]


class Run:
    """State and bookkeeping of one run, kept out of the controller's loop.

    Attributes:
        version: Version of the policy that was published last.
        total_steps: Batches to train; `evaluation.patience` lowers it to those that were trained.
        has_begun: Whether the flow was started.
        evaluations: What it evaluates, and when.
        policy_version: Version of the policy saved in the run directory; None before the first save.
    """

    def __init__(
        self,
        config: RunConfig,
        runtime: PolicyRuntime,
        held_out: list[Task],
        flow: Flow,
        instruments: Instruments,
        checkpointer: Checkpointer,
        timeline: Timeline | None = None,
    ) -> None:
        self.config = config
        self.version = 0
        self.total_steps = config.total_steps
        self.trainer = runtime.trainer
        self.publisher = runtime.publisher
        self.stats = flow.stats
        self.has_begun = False
        self.evaluations = Evaluations(
            config.evaluation,
            runtime.evaluator,
            held_out,
            instruments.run_dir,
            lambda metrics: instruments.hub.log(self.version, metrics),
            instruments.note,
            timeline,
        )
        self.policy_version: int | None = None
        self._saving: tuple[int, asyncio.Task[None]] | None = None
        self._published = 0  # or being published
        self._monitor = runtime.monitor
        self._flow = flow
        self._instruments = instruments
        self._checkpointer = checkpointer
        self._timeline = timeline
        self._step_ended_at = 0.0
        self._mismatch = MismatchTrend()
        self._last_publish: PublishReport | None = None
        self._last_step_at = 0.0
        self._trainer_waited_for: Mapping[WaitReason, float] = {}
        self._tokens_generated = 0
        self._consecutive_bad_steps = 0
        self._skipped_steps = 0
        self._is_silent = False
        self._has_directory = (instruments.run_dir / CONFIG_FILE).exists()  # a simulated run has none
        self._bad_batch: Path | str | None = None
        self._wall_s_before = 0.0
        self._began_at = time.monotonic()

    def flow(self) -> Flow:
        """The dataflow of this run. `async with` starts and ends it."""
        self.has_begun = True
        self._last_step_at = asyncio.get_running_loop().time()
        return self._flow

    def counts(self) -> LedgerCounts:
        """Number of groups by state."""
        return self._flow.counts()

    def untrained(self) -> Mapping[tuple[GroupState, Reason], int]:
        """Number of groups that ended untrained, by state and reason."""
        return self._flow.core.ledger.reasons

    def skipped_prompts(self) -> SkippedPrompts:
        """The tasks that were skipped because their prompt leaves no space for an answer."""
        taken, skipped, first = self._flow.skipped_tasks()
        newest = self.evaluations.done[-1].score if self.evaluations.done else None
        return SkippedPrompts(
            taken, skipped, first, newest.num_tasks if newest else 0, newest.num_skipped if newest else 0
        )

    async def publish(self, version: int) -> None:
        """Publish `version` to the engines while they generate."""
        self._step_ended_at = time.time()
        self._published = version
        self._last_publish = report = await self.publisher.publish(version)
        self.version = version
        if self._timeline is not None:
            measured = {"bytes": report.sent_bytes, "stall_s": report.max_stall_s}
            self._timeline.add("publish", f"publish v{version}", self._step_ended_at, time.time(), **measured)

    async def dump_bad_batch(self, report: StepReport) -> None:
        """Dump the whole batch of a skipped step. Call it before `flow.skip`, which ends the groups of the batch."""
        batch = await self._flow.fetch_batch()
        path = self._instruments.bad_batches.write(self.version, batch, report.metrics)
        self._bad_batch = path or "no file, since it could not be written"
        self._instruments.note(
            f"step at v{self.version} skipped: non-finite loss or gradient; its batch is in {self._bad_batch}"
        )

    def observe(self, report: StepReport) -> None:
        """Log the metrics of a step and write its sampled trajectories.

        Raises:
            TrainingError: After `trainer.max_bad_steps` skipped steps in a row, or if the run directory is gone.
        """
        if self._has_directory and not (self._instruments.run_dir / CONFIG_FILE).exists():
            raise TrainingError(
                f"run_dir={self._instruments.run_dir}: {CONFIG_FILE} is gone at v{self.version}, so the directory was "
                "deleted or moved while the run was using it, and the run could not be resumed. Start "
                "it again, and delete or move a run only after its end."
            )
        if self._timeline is not None:
            ended_at = time.time() if report.skipped else self._step_ended_at
            name = f"skipped step at v{self.version}" if report.skipped else f"step v{self.version}"
            self._timeline.add("trainer", name, ended_at - report.busy_s, ended_at)
        now = asyncio.get_running_loop().time()
        wall_s = max(now - self._last_step_at, 1e-9)
        self._last_step_at = now
        self._consecutive_bad_steps = self._consecutive_bad_steps + 1 if report.skipped else 0
        self._skipped_steps += report.skipped
        trend, warning = self._mismatch.observe(self.version, report.metrics, self.stats.last.max_versions)
        if warning:
            self._instruments.note(warning)
        metrics = {
            **report.metrics,
            **trend,
            **self._flow_metrics(report, wall_s),
            **self._publish_metrics(),
            **self._checkpointer.take_metrics(),
            "trainer/version": float(self.version),
            "trainer/skipped_steps": float(self._skipped_steps),
            "memory/pss_gib": self._instruments.memory.latest_gib,
        }
        self._instruments.hub.log(self.version, metrics)
        self.stats.anomalies.step_trained(metrics)
        # A skipped step keeps the version, so its file would overwrite that of the last trained batch.
        if not report.skipped:
            self._instruments.trajectories.write_step(
                self.version, self.stats.samples, version=self.stats.last_version, trained=report.trained_tokens
            )
        silent = report.metrics.get("trainer/silent_updates", 0.0)
        was_silent, self._is_silent = self._is_silent, bool(silent and silent == report.metrics["trainer/updates"])
        if self._is_silent and not was_silent:
            self._instruments.note(
                f"v{self.version} has the weights of the version before: no token of its batch has a gradient. Further "
                "such steps are only counted (trainer/silent_updates). See docs/debugging.md, “The reward is flat”."
            )
        if self._consecutive_bad_steps >= self.config.trainer.max_bad_steps:
            raise TrainingError(
                f"trainer: {self._consecutive_bad_steps} steps in a row had a non-finite loss or gradient at "
                f"v{self.version}, trainer.max_bad_steps is {self.config.trainer.max_bad_steps}. The newest batch "
                f"is in {self._bad_batch}. Lower trainer.optimizer.lr, or check its rewards and logprobs."
            )

    async def evaluate_first(self) -> None:
        """Evaluate before training. A resumed run repeats the evaluation that was cut off."""
        self._end_without_progress()
        if not self.version and not self.evaluations.done:
            await self.evaluations.first(self.version)
        elif all(evaluation.step != self.version for evaluation in self.evaluations.done):
            self._evaluate_if_due()

    def evaluate_concurrently(self) -> None:
        """Every `evaluation.every_steps` steps, start an evaluation that shares the engines with the rollouts.

        Call it at the cut, before `maybe_checkpoint`: if earlier evaluations end the training, it ends here.
        """
        self._end_without_progress()
        self._evaluate_if_due()

    async def evaluate_last(self) -> None:
        """Evaluate after training, once the engines have the last published version."""
        await self.evaluations.last(self.version, self.publisher.delivered)

    def _evaluate_if_due(self) -> None:
        if self.version != self.total_steps and self.evaluations.is_due(self.version):
            self.evaluations.start(self.version)

    def _end_without_progress(self) -> None:
        """Make this version the last one if `evaluation.patience` is at its end."""
        if self.version < self.total_steps and self.evaluations.is_without_progress(self.version):
            self.total_steps = self.version

    async def maybe_checkpoint(self) -> None:
        """Take a checkpoint if one is due. Call it directly after `flow.advance`: that is the cut."""
        is_last = self.version == self.total_steps
        may_be_best = self.config.evaluation.keep_best and (is_last or self.evaluations.running == self.version)
        if may_be_best or self._checkpointer.is_due(self.version, is_last=is_last):
            self._checkpointer.spared = self.evaluations.spared_versions()
            await self._checkpointer.take(self.version, self._flow.snapshot(), self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the run besides the flow and the trainer, as JSON types."""
        return {
            "evaluations": self.evaluations.state(),
            "mismatch": self._mismatch.state_dict(),
            "rewards": list(self._instruments.hub.rewards),
            "skipped_steps": self._skipped_steps,
            "failed_evaluations": self.evaluations.num_failed,
            "wall_s": self.wall_s,
        }

    def load_state_dict(self, version: int, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, at a policy version."""
        self.version = version
        self.evaluations.restore(state["evaluations"], state["failed_evaluations"])
        self._mismatch.load_state_dict(state["mismatch"])
        self._instruments.hub.rewards[:] = state["rewards"]
        self._skipped_steps = state["skipped_steps"]
        self._tokens_generated = self.stats.tokens_generated
        self._trainer_waited_for = dict(self.stats.trainer_wait_for)
        self._wall_s_before = state["wall_s"]

    @property
    def wall_s(self) -> float:
        """Seconds since the run began, without the time between a crash and its resume."""
        return self._wall_s_before + time.monotonic() - self._began_at

    @property
    def trained_version(self) -> int:
        """Version of the trainer's weights, while `version` is being replaced by it."""
        return max(self.version, self._published)

    async def save_policy(self) -> None:
        """Write the current policy into the run directory, unless that version is already there.

        If this is cancelled, the writing goes on, and the next call waits for it.

        Raises:
            TrainingError: If a trainer rank is dead or hangs, or the disk is full.
        """
        version = self.trained_version
        if self.policy_version == version:
            return
        if self._saving is None or self._saving[0] != version or self._saving[1].done():
            writing = self.trainer.save(str(self._instruments.run_dir / POLICY_FOLDER))
            self._saving = version, asyncio.ensure_future(writing)
        await asyncio.shield(self._saving[1])
        self.policy_version = version

    async def stop(self, training: asyncio.Task[None], left_s: float) -> None:
        """End the training loop with the weights of the newest published version.

        A step that computes is ended before it changes the weights, and its batch is ready again. A step that is about
        to be completed is published first.

        Args:
            training: The running loop.
            left_s: Time that is left for it and for saving, seconds.
        """
        began_at = time.monotonic()
        if self._flow.is_running:
            answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._flow.stop(answer)
            is_ended = False
            try:
                is_ended = await self.trainer.stop_step()
            except PenstockError as error:
                self._instruments.note(f"the running step cannot be ended: {error}")
            finally:
                answer.set_result(is_ended)
            if is_ended and self._flow.is_running:
                training.cancel()
            elif not is_ended:  # without the end of its update, there is no version to save
                await self._wait_for_step(left_s - ABANDON_S)
        else:
            training.cancel()
        passed_s = time.monotonic() - began_at
        await asyncio.wait({training}, timeout=max(0.0, (left_s - passed_s) / 2 - ABANDON_S))
        training.cancel()
        await asyncio.wait({training}, timeout=ABANDON_S)

    async def _wait_for_step(self, limit_s: float) -> None:
        with suppress(PenstockError, TimeoutError):
            async with asyncio.timeout(max(0.0, limit_s)):
                await self.trainer.wait_for_step()

    async def end_failed_step(self) -> None:
        """After an error in a step, have the ranks keep the weights that they had before it, if they still can."""
        with suppress(PenstockError):
            await self.trainer.stop_step()

    async def checkpoint_at_end(self, *, even_untrained: bool = False) -> None:
        """Take a checkpoint of a run that was stopped or has failed, unless it failed within a step.

        A failure to take it is only noted.

        Args:
            even_untrained: Also of version 0.
        """
        saved = self._flow.last_snapshot
        if saved is None or not (self.version or even_untrained):
            await self.checkpoint_written()
            return
        try:
            await self._checkpointer.take_last(self.version, saved, self.state_dict())
        except PenstockError as error:
            self._instruments.note(f"the last checkpoint, of v{self.version}, could not be taken: {error}")

    def end_at_cut(self) -> None:
        """End the training loop where it waits for the next batch; a step that runs is completed and published."""
        self._flow.fail(StopRequestedError(f"the run was stopped at v{self.version}"))

    def unsaved(self) -> str:
        """What is not on the disk yet, as the end of a sentence."""
        newest, version = self._checkpointer.newest, self.trained_version
        lost = [] if self.policy_version == version else [f"the policy of v{version}"]
        if newest is None:
            lost.append("what a checkpoint keeps: there is none")
        elif newest != version:
            lost.append(f"all after the checkpoint of v{newest}")
        return ", ".join(lost) or "nothing"

    def progress(self) -> Progress:
        """What the run does now. Called in a thread."""
        num_tokens = self._flow.ports.runner.stats.received_tokens
        if not self._flow.is_running:
            if (evaluating := self.evaluations.progress(self.version)) is not None:
                return evaluating._replace(num_tokens=num_tokens)
            return Progress(f"publishing v{self.version}" if not self.has_begun else "ending")
        core, step = self._flow.core, f"step {self.version + 1}/{self.total_steps}"
        if core.is_batch_complete:
            what = f"{step}: publishing" if self.trained_version > self.version else f"{step}: training"
            return Progress(what, num_tokens=num_tokens)
        num_ready = core.num_ready + len(core.in_training)
        batch = core.limits.batch_groups
        return Progress(f"{step}: generating", min(num_ready, batch), batch, "groups", num_tokens)

    def note(self, message: str) -> None:
        """Print a line on the console."""
        self._instruments.note(message)

    async def checkpoint_written(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        await self._checkpointer.written()

    async def abandon_checkpoint(self) -> None:
        """Stop writing a checkpoint, since a trainer rank is lost."""
        await self._checkpointer.abandon()

    async def save_policy_at_end(self, *, even_untrained: bool = False) -> None:
        """Save the policy of a run that was stopped or has failed; a failure to save is only noted.

        Args:
            even_untrained: Also that of version 0.
        """
        version = self.trained_version
        if self.policy_version == version or not (version or even_untrained):
            return
        self._instruments.note(f"saving the policy of v{version} before the run ends …")
        try:
            await self.save_policy()
        except PenstockError as error:
            self._instruments.note(f"the policy of v{version} could not be saved: {error}")

    async def close(self) -> None:
        """Cancel a running evaluation, and wait for the checkpoint that is being written."""
        await self._checkpointer.written()
        await self.evaluations.close()

    def _flow_metrics(self, report: StepReport, wall_s: float) -> dict[str, float]:
        flow, last, counts = self._flow, self.stats.last, self.counts()
        waited_for = dict(self.stats.trainer_wait_for)
        waited_s = {
            wait_reason: total - self._trainer_waited_for.get(wait_reason, 0.0)
            for wait_reason, total in waited_for.items()
        }
        generated = self.stats.tokens_generated - self._tokens_generated
        self._trainer_waited_for = waited_for
        self._tokens_generated = self.stats.tokens_generated
        return {
            "staleness/mean_versions": last.mean_versions,
            "staleness/max_versions": last.max_versions,
            "staleness/stale_token_share": last.stale_share,
            "staleness/multi_version_trajectories": last.multi_version_trajectories,
            "staleness/trimmed_token_share": last.trimmed_share,
            "length/trained_share": self.stats.length_bias,
            "flow/admitted": counts.admitted,
            "flow/trained": counts.trained,
            "flow/dropped": counts.dropped,
            "flow/filtered": counts.filtered,
            "flow/failed": counts.failed,
            "flow/live": counts.live,
            "flow/ready": flow.core.num_ready,
            "flow/credits_free": flow.core.free_credits,
            "flow/skipped_prompts": flow.skipped_tasks()[1],
            "flow/abstained": self.stats.num_abstained,
            "flow/retries": flow.core.retries.total(),
            **{f"flow/retries/{kind}": flow.core.retries[kind] for kind in get_args(FailureKind)},
            "flow/resumed_trajectories": flow.ports.runner.stats.trajectories,
            "flow/resumed_tokens": flow.ports.runner.stats.tokens,
            "flow/preemptions": self._monitor.num_preemptions,
            "flow/engines": self._monitor.num_engines,
            "flow/engine_restarts": self._monitor.num_restarts,
            "flow/ignored_reports": flow.core.ignored.total(),
            "throughput/generated_tokens_per_s": generated / wall_s,
            "throughput/trained_tokens_per_s": last.num_tokens / wall_s,
            "throughput/step_s": wall_s,
            "idle/trainer_share": max(0.0, 1.0 - report.busy_s / wall_s),
            "idle/trainer_wait_s": sum(waited_s.values()),
            **{f"idle/trainer_wait_for/{wait_reason}": seconds for wait_reason, seconds in waited_s.items()},
            "idle/engine_share": self._monitor.idle_share,
            **{f"stream/weight/{name}": weight for name, weight in flow.stream_weights.items() if name},
        }

    def _publish_metrics(self) -> dict[str, float]:
        last = self._last_publish
        if last is None:
            return {}
        measured = {"weights/max_logprob_diff": last.max_logprob_diff, "weights/changed_share": last.changed_share}
        return {
            "weights/bytes": last.num_bytes,
            "weights/sent_bytes": last.sent_bytes,
            "weights/acks": len(last.acks),
            "weights/publish_s": last.total_s,
            "weights/send_s": last.send_s,
            "weights/stage_s": max(ack.stage_s for ack in last.acks),
            "weights/stall_s": last.max_stall_s,
            "weights/drain_timeouts": last.drain_timeouts,
            **{name: value for name, value in measured.items() if value is not None},
            "weights/rewrites": last.rewrites,
        }
