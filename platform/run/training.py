"""`penstock train`: runs the loop of a run to its end, whatever happens, and writes the summary and the report.

build.py makes the run; the loop is `controller.train`. What can end it early: a signal or `max_hours`, after which the
policy is saved first; lost trainer ranks, after which the run goes back to a checkpoint; an error.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock import __version__
from penstock.actors.restart_budget import RestartBudget
from penstock.dataflow.errors import (
    CheckpointError,
    EngineLostError,
    PenstockError,
    PlacementError,
    StepEndedError,
    TrainingError,
)
from penstock.dataflow.ledger import LedgerCounts
from penstock.platform.cluster.actor_factory import RunActors
from penstock.platform.cluster.session import is_joined, with_absolute_paths
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.console import RunConsole
from penstock.platform.metrics.evaluation_table import EvaluationTable
from penstock.platform.metrics.flow_stats import EventTail
from penstock.platform.metrics.hub import MetricsHub
from penstock.platform.metrics.instruments import Instruments
from penstock.platform.metrics.memory_sampler import MemorySampler
from penstock.platform.metrics.progress import Progress
from penstock.platform.metrics.report import write_report
from penstock.platform.metrics.run_files import POLICY_FOLDER, SUMMARY_FILE
from penstock.platform.metrics.summary import (
    RunStatus,
    RunSummary,
    first_and_last_mean,
    write_failures,
    write_staleness,
    write_summary,
)
from penstock.platform.metrics.trackers.build import build_trackers
from penstock.platform.metrics.trajectory_table import BadBatches, TrajectoryTable
from penstock.platform.run import controller
from penstock.platform.run.build import RunParts, build_run, start_parts
from penstock.platform.run.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    choose_checkpoint,
)
from penstock.platform.run.checkpoint_upload import check_is_free
from penstock.platform.run.evaluation import evaluated_on
from penstock.platform.run.flow import StopRequestedError
from penstock.platform.run.lifecycle import EXIT_OK, Stop, first_error, run_to_end, write_failure
from penstock.platform.run.run import Run
from penstock.platform.run.run_dir import in_new_run_dir, read_environment
from penstock.trainer.backends.sequence_parallel import sequence_parallelism

MAX_ROLLBACKS_PER_HOUR = 5
"""A trainer that loses ranks more often has a cause that going back does not mend."""
REPORT_S, REPORT_PAUSE = 60.0, 50.0
"""Seconds between two reports of a run, and the shortest pause as a multiple of the time that one takes."""


def train(config: RunConfig) -> int:
    """Run `penstock train` to its end; returns the exit code."""
    check_is_free(config.checkpoint.upload)
    stop = Stop(config.stop_grace_s)

    # From the first file on, a signal is answered in order.
    return run_to_end(lambda: in_new_run_dir(config, lambda run_dir: _train(config, run_dir, None, stop)), stop)


def train_in(config: RunConfig, run_dir: Path, resumed: Checkpoint | None) -> int:
    """Train in a run directory whose lock is held; returns the exit code.

    Args:
        config: Configuration of the run.
        run_dir: Its directory.
        resumed: Checkpoint in it to continue from; None begins at step 0.
    """
    stop = Stop(config.stop_grace_s)
    return run_to_end(lambda: _train(config, run_dir, resumed, stop), stop)


async def _train(config: RunConfig, run_dir: Path, resumed: Checkpoint | None = None, stop: Stop | None = None) -> int:
    if is_joined(config):
        config, run_dir = with_absolute_paths(config), run_dir.absolute()
    stop = stop or Stop()
    console = RunConsole(config.total_steps, config.console)
    console.header(config.name, header_facts(config))
    lineage = read_environment(run_dir).get("branched_from")
    memory = MemorySampler()
    memory.start()
    raw = config.model_dump(mode="json")
    open_trackers = partial(build_trackers, config.tracker, run_dir, config.name, raw, lineage=lineage)
    hub = MetricsHub(open_trackers(first_step=0 if resumed is None else resumed.version + 1), console)
    instruments = Instruments(hub, memory, TrajectoryTable(run_dir), BadBatches(run_dir), run_dir, console.note)
    events = EventTail()
    status: RunStatus = "failed"
    run: Run | None = None
    rollbacks = Rollbacks()
    began_at = time.monotonic()
    pending: set[str] = set()

    def progress() -> Progress:
        if run is None or pending:
            return Progress(f"starting {', '.join(sorted(pending)) or 'the run'}")
        return Progress("ending: saving what there is") if stop.reason else run.progress()

    def write(end: RunStatus) -> RunSummary:
        """Write `summary.json` and what belongs to it; a full disk does not hide what has ended the run."""
        if run is not None:
            summary = summarise(run, hub, end, memory.peak_gib)
        else:
            steps = 0 if resumed is None else resumed.version
            summary = unstarted_summary(config, end, steps, time.monotonic() - began_at, memory.peak_gib)
        ended_by = stop.reason or None if end == "interrupted" else None
        summary = replace(summary, ended_by=ended_by, branched_from=lineage)
        try:
            if run is not None:
                write_staleness(run_dir, run.stats.total.tokens_by_staleness)
                write_failures(run_dir, run.stats.failures)
            elif resumed is not None and (run_dir / SUMMARY_FILE).exists():
                return summary  # the file is of the training before
            write_summary(run_dir, summary)
        except OSError as error:
            console.note(f"{SUMMARY_FILE} could not be written: {error}")
        return summary

    def make_report() -> None:
        try:
            write_report(run_dir)
        except (OSError, PenstockError) as error:
            console.note(f"the report could not be made: {error}")

    async def saved() -> None:
        stop.next_command = next_command(run_dir, write("interrupted")) or ""
        await asyncio.to_thread(make_report)

    shown = ExitStack()
    shown.enter_context(console.showing(progress))
    try:
        async with (
            limited(config.max_hours, stop),
            reports(make_report),
            start_parts(config, instruments, resumed, pending) as parts,
        ):
            while status == "failed":
                try:
                    async with build_run(config, parts, instruments, events, resumed) as run:
                        pending.clear()
                        await train_to_end(run, parts.actors, stop, saved)
                    status = "completed"
                except PenstockError as error:  # of any kind: a node takes ranks, engines and workers with it
                    if stop.reason:
                        raise
                    lost = await ranks_lost(parts.actors, error)
                    resumed = await newest_checkpoint(run_dir, lost)
                    reached = 0 if run is None else run.version
                    config = config if run is None else run.config  # `penstock set` may have changed it
                    pending.add("the trainer again")
                    await roll_back(config, parts, instruments, lost, resumed, rollbacks, reached)
                    hub.roll_back(resumed.version, partial(open_trackers, first_step=resumed.version + 1))
    except asyncio.CancelledError:
        status = "interrupted"
        if stop.signum is not None or not stop.reason:
            raise
    except BaseException as error:
        write_failure(run_dir, error, events.lines())
        raise
    finally:
        shown.close()
        memory.stop()
        summary = None
        if status == "interrupted" or (run is not None and run.has_begun):
            summary = write(status)
            make_report()
        hub.close(summary)
        if summary is not None:
            console.final(summary, run_dir, next_command(run_dir, summary))
    return EXIT_OK


@asynccontextmanager
async def limited(max_hours: float | None, stop: Stop) -> AsyncIterator[None]:
    """Within it, the run is told to end after `max_hours`, at the next cut."""
    if max_hours is None:
        yield
        return
    timer = asyncio.get_running_loop().call_later(3600 * max_hours, stop.begin, f"max_hours={max_hours:g}")
    try:
        yield
    finally:
        timer.cancel()


@asynccontextmanager
async def reports(make: Callable[[], None]) -> AsyncIterator[None]:
    """Within it, a report is made at once, and every `REPORT_S` seconds, or less often if that takes long."""

    async def repeat() -> None:
        while True:
            began_at = time.monotonic()
            await asyncio.to_thread(make)
            await asyncio.sleep(max(REPORT_S, REPORT_PAUSE * (time.monotonic() - began_at)))

    task = asyncio.create_task(repeat(), name="reports")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def next_command(run_dir: Path, summary: RunSummary) -> str | None:
    """The command that goes on with a run that has not completed; None if it has."""
    if summary.status == "completed":
        return None
    if CheckpointFolder(run_dir).versions():
        return shlex.join(["penstock", "resume", str(run_dir)])
    words = ["penstock", *sys.argv[1:]]
    if not summary.steps:
        return shlex.join([*words, *(() if "overwrite=true" in words else ("overwrite=true",))])
    again = [f"run_dir={run_dir}-2", f"model.path={run_dir / POLICY_FOLDER}"]
    return shlex.join([*words, *again])


class Rollbacks:
    """How often a run goes back.

    Invariant: at most `MAX_ROLLBACKS_PER_HOUR` in an hour, however long, while no step is trained that was not before.
    """

    def __init__(self) -> None:
        self._budget = RestartBudget(MAX_ROLLBACKS_PER_HOUR)
        self._furthest = 0

    def take(self, reached: int) -> float | None:
        """Use one rollback after a loss at version `reached`.

        Returns:
            Pause before it, seconds; None if none is left.
        """
        is_further, self._furthest = reached > self._furthest, max(reached, self._furthest)
        return self._budget.take(has_served=is_further)


class RanksLostError(PenstockError):
    """Trainer ranks are dead or do not answer, or a step hangs, and so the policy is lost.

    The cause is what ended the training.
    """


async def ranks_lost(actors: RunActors, error: PenstockError) -> RanksLostError:
    """What `error` means if trainer ranks are lost.

    Raises:
        PenstockError: `error` itself, if they are all there.
    """
    if isinstance(error, RanksLostError):
        return error
    if not (lost := await actors.lost_ranks()):
        raise error
    return RanksLostError(f"lost {', '.join(lost)}: {error}")


async def nothing() -> None:
    """What follows a saved policy where there is no summary to write."""


async def train_to_end(
    run: Run, actors: RunActors, stop: Stop, on_saved: Callable[[], Awaitable[None]] = nothing
) -> None:
    """Train; however it ends, the policy is saved, and if possible also a checkpoint.

    If it is told to end (`stop`), the policy comes first, then `on_saved`, then the checkpoint, as far as time allows.

    Raises:
        RanksLostError: If the policy cannot be saved, because trainer ranks are lost.
        asyncio.CancelledError: If it was told to end.
    """
    training = asyncio.create_task(controller.train(run), name="training")
    told = asyncio.create_task(stop.told.wait(), name="told to end")
    stop.ends_itself = True
    stop.loses = run.unsaved
    try:
        await asyncio.wait({training, told}, return_when=asyncio.FIRST_COMPLETED)
        if not training.done():
            await end_training(run, training, stop, on_saved)
        else:
            await training
            await within(stop, run.checkpointer.written(), "the last checkpoint is not complete", run.note)
            await within(stop, run.checkpoint_uploaded(), "the last checkpoint is not copied", run.note)
    except PenstockError as error:
        try:
            lost = await ranks_lost(actors, error)
        except PenstockError:
            await run.end_failed_step()
            await within(stop, run.save_policy_at_end(), "the policy is not saved", run.note)
            await within(stop, run.checkpoint_at_end(), "the last checkpoint is not complete", run.note)
            raise
        await run.checkpointer.abandon()
        raise lost from error
    except BaseException:
        if not stop.reason:
            training.cancel()
            await asyncio.wait({training})
            await run.save_policy_at_end()
        raise
    finally:
        stop.ends_itself = False
        training.cancel()
        told.cancel()


async def end_training(
    run: Run, training: asyncio.Task[None], stop: Stop, on_saved: Callable[[], Awaitable[None]]
) -> None:
    """End the training since it was told to, and save what there is: the policy, the summary, a checkpoint.

    Raises:
        asyncio.CancelledError: At the end, unless the training was completed meanwhile.
    """
    note = run.note
    limit = f"within {stop.grace_s:g} s" if stop.signum is not None else "after this step"
    note(f"{stop.reason}: the run ends {limit}; policy, summary and a checkpoint are saved first …")
    if stop.signum is None:
        run.end_at_cut()
        signalled = asyncio.create_task(stop.signalled.wait(), name="a signal")
        await asyncio.wait({training, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
    if not training.done():
        await run.stop(training, stop.left_s)
    if training.done() and not training.cancelled() and training.exception() is None:
        return  # it has just been completed
    error = training.exception() if training.done() and not training.cancelled() else None
    if error is not None and not isinstance(error, StopRequestedError | StepEndedError):
        note(f"while the run was ending: {first_error(error)}")
    await within(stop, run.save_policy_at_end(even_untrained=True), "the policy is not saved", note)
    report = asyncio.ensure_future(on_saved())
    await within(stop, run.checkpoint_at_end(even_untrained=True), "the last checkpoint is not complete", note)
    await run.checkpointer.abandon()  # if it is not complete
    await within(stop, report, "the report is not complete", note)
    await within(stop, run.checkpoint_uploaded(), "the last checkpoint is not copied", note)
    raise asyncio.CancelledError


async def within(stop: Stop, saving: Awaitable[None], if_late: str, note: Callable[[str], None]) -> None:
    """Save something in the time that a signal leaves, which may come meanwhile; note it if that does not suffice."""
    task = asyncio.ensure_future(saving)
    signalled = asyncio.create_task(stop.signalled.wait(), name="a signal")
    try:
        await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
        left_s = max(0.0, stop.left_s)
        if not task.done():
            await asyncio.wait({task}, timeout=left_s)
    finally:
        signalled.cancel()
        is_late = not task.done()
        if is_late:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if not is_late:
        await task
    else:
        note(
            f"{if_late}: {left_s:.0f} s were left of stop_grace_s={stop.grace_s:g}. Raise it if what ends "
            "the run waits longer before it kills."
        )


async def newest_checkpoint(run_dir: Path, lost: RanksLostError) -> Checkpoint:
    """The checkpoint to go back to.

    Raises:
        RanksLostError: `lost`, if there is none.
    """
    try:
        return await asyncio.to_thread(choose_checkpoint, run_dir)
    except CheckpointError:
        raise lost from lost.__cause__


async def roll_back(
    config: RunConfig,
    parts: RunParts,
    instruments: Instruments,
    lost: RanksLostError,
    checkpoint: Checkpoint,
    rollbacks: Rollbacks,
    reached: int,
) -> None:
    """After the loss of a trainer rank, start the trainer again from a checkpoint; the engines stay up.

    Args:
        config: Configuration of the run.
        parts: What outlives the trainer.
        instruments: Outputs of the run.
        lost: Which ranks are lost, and why.
        checkpoint: Where the run goes back to.
        rollbacks: Budget of the rollbacks; this one uses one.
        reached: Version at the loss.

    Raises:
        RanksLostError: `lost`, after too many rollbacks.
    """
    while (pause_s := rollbacks.take(reached)) is not None:
        instruments.note(str(lost))
        instruments.note(f"the trainer goes back to the checkpoint of v{checkpoint.version}; the engines stay up …")
        await asyncio.sleep(pause_s)
        try:
            await parts.actors.roll_back(config, str(checkpoint.path))
        except (TrainingError, EngineLostError, PlacementError) as error:  # a process was lost again, while it started
            lost = RanksLostError(str(error))
            continue
        instruments.trajectories.files.drop_after(checkpoint.version)
        EvaluationTable(instruments.run_dir).files.drop_after(checkpoint.version)
        return
    raise lost


def header_facts(config: RunConfig) -> dict[str, str]:
    """Main settings of a run, printed before it starts."""
    flow, trainer, algorithm = config.dataflow, config.trainer, config.algorithm
    rollouts = [view.rollout for view in config.rollout_views]
    backend = f"deepspeed {trainer.sharding}" if trainer.backend == "deepspeed" else trainer.sharding
    lora = f", LoRA of rank {trainer.lora.rank}" if trainer.lora else ""
    if (sharing := sequence_parallelism(config.model, trainer)) is not None:
        backend += f", sequences over {trainer.sequence_parallel_size} ranks ({sharing})"
    return {
        "policy": _policy(config),
        **({} if config.partner is None else {"partner": _policy(config.partner_view)}),
        "batch": f"{flow.batch_groups} groups × {flow.group_size} trajectories, max_staleness {flow.max_staleness}",
        "rollout": " + ".join(f"{one.num_engines} × {one.engine.type}" for one in rollouts),
        "trainer": f"{trainer.num_ranks} × {backend}, {algorithm.advantage.name} with {algorithm.loss.name}{lora}",
        "run": config.run_dir,
    }


def _policy(config: RunConfig) -> str:
    return f"{config.model.path} ({config.model.shape.num_parameters / 1e6:.1f} M parameters)"


def computed_by(config: RunConfig) -> dict[str, str]:
    """How the trainer computes the policy."""
    model = config.model
    found: dict[str, str] = {"rows": model.rows, "head": model.head, "attention": model.attention}
    if model.shape.num_experts:
        found["routing"] = config.algorithm.routing
    return found


def unstarted_summary(config: RunConfig, status: RunStatus, steps: int, wall_s: float, peak_gib: float) -> RunSummary:
    """The summary of a run that ended before its first step; `steps` is what was done before it was resumed."""
    return RunSummary(
        name=config.name,
        seed=config.seed,
        status=status,
        version=__version__,
        steps=steps,
        wall_s=round(wall_s, 2),
        max_staleness_configured=config.dataflow.max_staleness,
        peak_memory_gib=round(peak_gib, 3),
        ledger=LedgerCounts(admitted=0, trained=0, dropped=0, filtered=0, failed=0, live=0),
        computed_by=computed_by(config),
    )


def summarise(run: Run, hub: MetricsHub, status: RunStatus, peak_gib: float) -> RunSummary:
    """Build the summary of a run."""
    counts = run.ledger.counts()
    first, last = first_and_last_mean(hub.rewards)
    evaluations = run.evaluations.done
    before = next((evaluation for evaluation in evaluations if evaluation.step == 0), None)
    at_end = run.version if run.version > 0 and status == "completed" else None
    after = next((evaluation for evaluation in evaluations if evaluation.step == at_end), None)
    return RunSummary(
        name=run.config.name,
        seed=run.config.seed,
        status=status,
        version=__version__,
        evaluated_on=evaluated_on(run.evaluations.held_out),
        eval_before=None if before is None else before.accuracy,
        eval_after=None if after is None else after.accuracy,
        eval_reward_before=None if before is None else before.reward_mean,
        eval_reward_after=None if after is None else after.reward_mean,
        partner_eval_before=None if before is None or before.partner is None else before.partner.accuracy,
        partner_eval_after=None if after is None or after.partner is None else after.partner.accuracy,
        reward_first=first,
        reward_last=last,
        steps=run.version,
        policy_version=run.policy_version,
        wall_s=round(run.wall_s, 2),
        trained_groups=counts.trained,
        max_staleness_configured=run.config.dataflow.max_staleness,
        max_staleness_seen=run.stats.total.max_versions,
        share_tokens_stale=run.stats.total.stale_share,
        multi_version_trajectories=run.stats.total.multi_version_trajectories,
        tokens_generated=run.stats.tokens_generated,
        tokens_trained=run.stats.total.num_tokens,
        peak_memory_gib=round(peak_gib, 3),
        computed_by=computed_by(run.config),
        ledger=counts,
        skipped_prompts=run.skipped_prompts(),
        untrained={f"{state}({reason})": count for (state, reason), count in run.ledger.reasons.items()},
        failed_attempts=dict(run.stats.anomalies.failed_attempts),
        slow_parts=dict(run.log.slow_parts.named),
    )
