"""What a step leaves behind: metrics, a sample of its trajectories, slices of the timeline, and checks over steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from penstock.dataflow.core import WaitReason
from penstock.dataflow.errors import FailureKind, TrainingError
from penstock.dataflow.ports import PublishReport, StepReport
from penstock.platform.metrics.instruments import Instruments
from penstock.platform.metrics.run_files import CONFIG_FILE
from penstock.platform.metrics.timeline import Timeline
from penstock.platform.run.engine_monitor import EngineMonitor
from penstock.platform.run.flow import Flow
from penstock.platform.run.mismatch_trend import MismatchTrend
from penstock.platform.run.slow_parts import SlowParts


class Publish(NamedTuple):
    """A complete publish; begin and end in Unix time, seconds."""

    version: int
    began_at: float
    ended_at: float
    report: PublishReport


class StepLog:
    """Logs the steps and publishes of one run.

    Attributes:
        skipped_steps: Steps with a non-finite loss or gradient, over the whole run.
        slow_parts: Ranks and engines that were found to be slow.
    """

    def __init__(
        self,
        flow: Flow,
        monitor: EngineMonitor,
        instruments: Instruments,
        timeline: Timeline | None,
        max_bad_steps: int,
        critic_warmup_steps: int = 0,
    ) -> None:
        """Begin the log of a run that starts or is resumed.

        Args:
            flow: Its dataflow.
            monitor: Of its engines.
            instruments: Where it is logged.
            timeline: Gets a slice per step and publish; a simulated run has none.
            max_bad_steps: Skipped steps in a row that end the run.
            critic_warmup_steps: Steps at the start that train the critic alone.
        """
        self.skipped_steps = 0
        self.slow_parts = SlowParts(instruments.note)
        self._flow = flow
        self._monitor = monitor
        self._instruments = instruments
        self._timeline = timeline
        self._max_bad_steps = max_bad_steps
        self._critic_warmup_steps = critic_warmup_steps
        self._mismatch = MismatchTrend()
        self._last_publish: PublishReport | None = None
        self._last_step_at = 0.0
        self._trainer_waited_for: Mapping[WaitReason, float] = {}
        self._tokens_generated = 0
        self._consecutive_bad_steps = 0
        self._is_silent = False
        self._has_directory = (instruments.run_dir / CONFIG_FILE).exists()  # a simulated run has none
        self._bad_batch: Path | str | None = None

    def begin(self) -> None:
        """Note that the first step starts."""
        self._monitor.take_idle_share()  # an evaluation before it is not part of it
        self._last_step_at = asyncio.get_running_loop().time()

    async def dump_bad_batch(self, version: int, report: StepReport) -> None:
        """Write the whole batch of a skipped step to a file."""
        batch = await self._flow.fetch_batch()
        path = self._instruments.bad_batches.write(version, batch, report.metrics)
        self._bad_batch = path or "no file, since it could not be written"
        self._instruments.note(
            f"step at v{version} skipped: non-finite loss or gradient; its batch is in {self._bad_batch}"
        )

    def step(self, version: int, report: StepReport, publishes: Sequence[Publish], more: Mapping[str, float]) -> None:
        """Log the metrics of a step and write its sampled trajectories.

        Args:
            version: That the engines serve after it.
            report: Of the trainer.
            publishes: Those since the last step, this one's included.
            more: Metrics of others.

        Raises:
            TrainingError: After `max_bad_steps` skipped steps in a row, or if the run directory is gone.
        """
        if self._has_directory and not (self._instruments.run_dir / CONFIG_FILE).exists():
            raise TrainingError(
                f"run_dir={self._instruments.run_dir}: {CONFIG_FILE} is gone at v{version}, so the directory was "
                "deleted or moved while the run was using it, and the run could not be resumed. Start "
                "it again, and delete or move a run only after its end."
            )
        if self._timeline is not None:
            ended_at = time.time() if report.skipped else publishes[-1].began_at
            name = f"skipped step at v{version}" if report.skipped else f"step v{version}"
            self._timeline.add("trainer", name, ended_at - report.busy_s, ended_at)
            for one in publishes:
                measured = {"bytes": one.report.sent_bytes, "stall_s": one.report.max_stall_s}
                self._timeline.add("publish", f"publish v{one.version}", one.began_at, one.ended_at, **measured)
        if publishes:
            self._last_publish = publishes[-1].report
        now = asyncio.get_running_loop().time()
        wall_s = max(now - self._last_step_at, 1e-9)
        self._last_step_at = now
        self._consecutive_bad_steps = self._consecutive_bad_steps + 1 if report.skipped else 0
        self.skipped_steps += report.skipped
        trend, warning = self._mismatch.observe(version, report.metrics, self._flow.stats.last.max_versions)
        if warning:
            self._instruments.note(warning)
        metrics = {
            **report.metrics,
            **trend,
            **self._flow_metrics(report, wall_s),
            **self._publish_metrics(),
            **more,
            "trainer/version": float(version),
            "trainer/skipped_steps": float(self.skipped_steps),
            "memory/pss_gib": self._instruments.memory.latest_gib,
        }
        self._instruments.hub.log(version, metrics)
        self._flow.stats.anomalies.step_trained(metrics)
        self.slow_parts.observe(version, metrics, self._monitor.speeds(), equal_engines=self._monitor.has_equal_engines)
        # A skipped step keeps the version, so its file would overwrite that of the last trained batch.
        if not report.skipped:
            self._instruments.trajectories.write_step(
                version, self._flow.stats.samples, version=self._flow.stats.last_version, trained=report.trained_tokens
            )
        silent = report.metrics.get("trainer/silent_updates", 0.0)
        is_silent = bool(silent and silent == report.metrics["trainer/updates"]) and version > self._critic_warmup_steps
        was_silent, self._is_silent = self._is_silent, is_silent
        if self._is_silent and not was_silent:
            self._instruments.note(
                f"v{version} has the weights of the version before: no token of its batch has a gradient. Further "
                "such steps are only counted (trainer/silent_updates). See docs/debugging.md, “The reward is flat”."
            )
        if self._consecutive_bad_steps >= self._max_bad_steps:
            raise TrainingError(
                f"trainer: {self._consecutive_bad_steps} steps in a row had a non-finite loss or gradient at "
                f"v{version}, trainer.max_bad_steps is {self._max_bad_steps}. The newest batch "
                f"is in {self._bad_batch}. Lower trainer.optimizer.lr, or check its rewards and logprobs."
            )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON types."""
        return {"mismatch": self._mismatch.state_dict(), "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, after the flow was restored."""
        self._mismatch.load_state_dict(state["mismatch"])
        self.skipped_steps = state["skipped_steps"]
        self._tokens_generated = self._flow.stats.tokens_generated
        self._trainer_waited_for = dict(self._flow.stats.trainer_wait_for)

    def _flow_metrics(self, report: StepReport, wall_s: float) -> dict[str, float]:
        flow, last, counts = self._flow, self._flow.stats.last, self._flow.counts()
        waited_for = dict(self._flow.stats.trainer_wait_for)
        waited_s = {
            wait_reason: total - self._trainer_waited_for.get(wait_reason, 0.0)
            for wait_reason, total in waited_for.items()
        }
        generated = self._flow.stats.tokens_generated - self._tokens_generated
        self._trainer_waited_for = waited_for
        self._tokens_generated = self._flow.stats.tokens_generated
        return {
            "staleness/mean_versions": last.mean_versions,
            "staleness/max_versions": last.max_versions,
            "staleness/stale_token_share": last.stale_share,
            "staleness/multi_version_trajectories": last.multi_version_trajectories,
            "staleness/trimmed_token_share": last.trimmed_share,
            "length/trained_share": self._flow.stats.length_bias,
            "flow/admitted": counts.admitted,
            "flow/trained": counts.trained,
            "flow/dropped": counts.dropped,
            "flow/filtered": counts.filtered,
            "flow/failed": counts.failed,
            "flow/live": counts.live,
            "flow/ready": flow.core.num_ready,
            "flow/credits_free": flow.core.free_credits,
            **({} if flow.core.surplus_search is None else {"flow/surplus": flow.core.surplus}),
            "flow/skipped_prompts": flow.skipped_tasks()[1],
            "flow/abstained": self._flow.stats.num_abstained,
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
            "idle/engine_share": self._monitor.take_idle_share(),
            **{f"engine/kv_cache_usage/{name}": share for name, share in self._monitor.take_cache_usage().items()},
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
