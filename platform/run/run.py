"""The state of one run as the controller sees it: its policy version, evaluations, checkpoints and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ports import StepReport, TrainerGroup, WeightPublisher
from penstock.dataflow.task import Task
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.instruments import Instruments
from penstock.platform.metrics.progress import Progress
from penstock.platform.metrics.run_files import POLICY_FOLDER
from penstock.platform.metrics.summary import SkippedPrompts
from penstock.platform.metrics.timeline import Timeline
from penstock.platform.run.checkpoint import Checkpointer
from penstock.platform.run.checkpoint_upload import CheckpointUpload
from penstock.platform.run.engine_monitor import EngineMonitor
from penstock.platform.run.evaluation import Evaluator, TwoPolicyEvaluator, comparable_evaluations
from penstock.platform.run.evaluations import Evaluations
from penstock.platform.run.flow import Flow, StopRequestedError
from penstock.platform.run.saved_config import differences
from penstock.platform.run.step_log import Publish, StepLog
from penstock.rollout.trajectory.episodes import EpisodePlayer
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


class Run:
    """State and bookkeeping of one run, kept out of the controller's loop.

    Attributes:
        version: Version of the policy that was published last.
        total_steps: Batches to train; `evaluation.patience` lowers it to those that were trained.
        has_begun: Whether the flow was started.
        stats: What the flow has counted.
        ledger: The states of all groups.
        evaluations: What it evaluates, and when.
        checkpointer: Takes its checkpoints.
        log: What its steps leave behind.
        note: Prints a line on the console.
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
        upload: CheckpointUpload | None = None,
        sets: Mapping[str, list[Task]] | None = None,
        episodes: EpisodePlayer | None = None,
    ) -> None:
        self.config = config
        self.version = 0
        self.total_steps = config.total_steps
        self.trainer = runtime.trainer
        self.publisher = runtime.publisher
        self.stats = flow.stats
        self.ledger = flow.core.ledger
        self.note = instruments.note
        self.checkpointer = checkpointer
        self.has_begun = False
        self.evaluations = Evaluations(
            config.evaluation,
            runtime.evaluator,
            held_out,
            instruments.run_dir,
            lambda metrics: instruments.hub.log(self.version, metrics),
            instruments.note,
            timeline,
            sets,
        )
        self.policy_version: int | None = None
        self._saving: tuple[int, asyncio.Task[None]] | None = None
        self._published = 0  # or being published
        self._publishes: list[Publish] = []  # since the last step was logged
        self._flow = flow
        self._instruments = instruments
        self._upload = upload
        self._episodes = episodes
        warmup_steps = config.critic.warmup_steps if config.algorithm.needs_critic else 0
        bad_steps = config.trainer.max_bad_steps
        self.log = StepLog(flow, runtime.monitor, instruments, timeline, bad_steps, warmup_steps)
        self._wall_s_before = 0.0
        self._began_at = time.monotonic()

    def flow(self) -> Flow:
        """The dataflow of this run. `async with` starts and ends it."""
        self.has_begun = True
        self.log.begin()
        return self._flow

    @property
    def has_trained(self) -> bool:
        """Whether the training loop has been left, so that no step follows."""
        return self.has_begun and not self._flow.is_running

    def skipped_prompts(self) -> SkippedPrompts:
        """The tasks that were skipped because their prompt leaves no space for an answer."""
        taken, skipped, first = self._flow.skipped_tasks()
        newest = self.evaluations.done[-1] if self.evaluations.done else None
        return SkippedPrompts(
            taken, skipped, first, newest.num_tasks if newest else 0, newest.num_skipped if newest else 0
        )

    async def publish(self, version: int) -> None:
        """Publish `version` to the engines while they generate."""
        began_at, self._published = time.time(), version
        report = await self.publisher.publish(version)
        self.version = version
        self._publishes.append(Publish(version, began_at, time.time(), report))

    async def dump_bad_batch(self, report: StepReport) -> None:
        """Write the batch of a skipped step to a file. Call it before `flow.skip`, which ends its groups."""
        await self.log.dump_bad_batch(self.version, report)

    def observe(self, report: StepReport) -> None:
        """Log a step and its publish.

        Raises:
            TrainingError: After `trainer.max_bad_steps` skipped steps in a row, or if the run directory is gone.
        """
        more = self.checkpointer.take_metrics()
        more |= {} if self._upload is None else self._upload.take_metrics()
        more |= {} if self._episodes is None else self._episodes.take_metrics()
        self.log.step(self.version, report, self._publishes, more)
        self._publishes.clear()

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
        if self.version != self.total_steps:
            self.evaluations.start(self.version)

    def _end_without_progress(self) -> None:
        """Make this version the last one if `evaluation.patience` is at its end."""
        if self.version < self.total_steps and self.evaluations.is_without_progress(self.version):
            self.total_steps = self.version

    async def maybe_checkpoint(self) -> None:
        """Take a checkpoint if one is due. Call it directly after `flow.advance`: that is the cut."""
        is_last = self.version == self.total_steps
        may_be_best = self.config.evaluation.keep_best and (is_last or self.evaluations.running == self.version)
        if may_be_best or self.checkpointer.is_due(self.version, is_last=is_last):
            self.checkpointer.spared = self.evaluations.spared_versions(self.config.checkpoint.keep_best)
            await self.checkpointer.take(self.version, self._flow.snapshot(), self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the run besides the flow and the trainer, as JSON types."""
        return {
            "config": self.config.model_dump(mode="json"),
            "evaluations": self.evaluations.state(),
            "rewards": list(self._instruments.hub.rewards),
            **self.log.state_dict(),
            "failed_evaluations": self.evaluations.num_failed,
            "evaluating": self.evaluations.running,
            "wall_s": self.wall_s,
        }

    def load_state_dict(self, version: int, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, at a policy version."""
        self.version = version
        evaluations, why_none = comparable_evaluations(state, self.config)
        if why_none is not None:
            self.note(why_none)
        evaluating = state.get("evaluating")  # that of this version is repeated
        cut_off = None if evaluating == version else evaluating
        self.evaluations.restore(evaluations, state["failed_evaluations"], cut_off)
        self.log.load_state_dict(state)
        self._instruments.hub.rewards[:] = state["rewards"]
        self._wall_s_before = state["wall_s"]

    async def change(self, config: RunConfig) -> int:
        """Take over another configuration, in which only keys of `live_settings.SETTABLE` differ.

        Returns:
            The last version that was trained without it.

        Raises:
            TrainingError: If a trainer rank is lost; nothing has changed then.
        """
        version, total_steps = self.trained_version, self.total_steps
        if config.total_steps != self.config.total_steps:  # at once, or a step too many could begin meanwhile
            self._set_total_steps(config.total_steps)
        if config.trainer.optimizer != self.config.trainer.optimizer:
            try:
                version = await self.trainer.set_learning_rate(config.trainer.optimizer.model_dump())
            except PenstockError:
                self._set_total_steps(total_steps)
                raise
        changed = differences(self.config.model_dump(mode="json"), config.model_dump(mode="json"))
        self.config = config
        self.evaluations.config = config.evaluation
        self.checkpointer.config = config.checkpoint
        values = {f"config/{key}": float(now) for key, (_, now) in changed.items() if isinstance(now, int | float)}
        self._instruments.hub.log(self.version, values)
        return version

    def _set_total_steps(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self._flow.set_total_steps(total_steps)

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
                self.note(f"the running step cannot be ended: {error}")
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
            await self.checkpointer.written()
            return
        try:
            await self.checkpointer.take_last(self.version, saved, self.state_dict())
        except PenstockError as error:
            self.note(f"the last checkpoint, of v{self.version}, could not be taken: {error}")

    def end_at_cut(self) -> None:
        """End the training loop where it waits for the next batch; a step that runs is completed and published."""
        self._flow.fail(StopRequestedError(f"the run was stopped at v{self.version}"))

    def unsaved(self) -> str:
        """What is not on the disk yet, as the end of a sentence."""
        newest, version = self.checkpointer.newest, self.trained_version
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

    async def checkpoint_uploaded(self) -> None:
        """Wait until the newest checkpoint is in its other place (`checkpoint.upload`), if it has one."""
        if self._upload is not None:
            await self._upload.finished()

    async def save_policy_at_end(self, *, even_untrained: bool = False) -> None:
        """Save the policy of a run that was stopped or has failed; a failure to save is only noted.

        Args:
            even_untrained: Also that of version 0.
        """
        version = self.trained_version
        if self.policy_version == version or not (version or even_untrained):
            return
        self.note(f"saving the policy of v{version} before the run ends …")
        try:
            await self.save_policy()
        except PenstockError as error:
            self.note(f"the policy of v{version} could not be saved: {error}")

    async def close(self) -> None:
        """Cancel a running evaluation, and wait for the checkpoint that is being written."""
        await self.checkpointer.written()
        await self.evaluations.close()
