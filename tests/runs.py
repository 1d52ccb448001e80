"""A run in this process: the shipping loop and flow over fakes, trained without a model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ids import GroupId, TaskId
from penstock.dataflow.ports import PublishReport, StepReport, WeightAck, WrittenFile
from penstock.dataflow.task import Task
from penstock.platform.config.schema import CheckpointConfig
from penstock.platform.metrics.trajectory_table import BadBatches, TrajectoryTable
from penstock.platform.run.checkpoint import Checkpointer, CheckpointFolder
from penstock.platform.run.engine_monitor import EngineMonitor
from penstock.platform.run.evaluation import Evaluation
from penstock.platform.run.run import PolicyRuntime, Run
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.simulation import instruments, run_config
from penstock.rollout.engine_pool.pool import EnginePool
from tests.fakes import FakeEngine, FakeRewards
from tests.flows import make_flow

STEPS, GROUPS = 4, 20
HELD_OUT = [Task(TaskId("held_out/0"), "1+1=")]


@dataclass
class Trainer:
    """Skips its steps of these numbers, counted from 0.

    Attributes:
        saved: Where it was told to save, relative to the folder of the run, and its version then.
        is_silent: Whether its batches have no gradient.
        snapshots: Its version at each snapshot for a checkpoint.
        fails_to_save: Raised by `save`.
        hangs_in: Number of the step that never ends, counted from 0.
        hangs: Set when it has begun.
        given: The groups of each batch.
    """

    bad: set[int]
    run_dir: Path
    version: int = 0
    num_steps: int = 0
    mismatches: list[float] = field(default_factory=list)
    is_silent: bool = False
    saved: list[tuple[str, int]] = field(default_factory=list)
    snapshots: list[int] = field(default_factory=list)
    given: list[list[GroupId]] = field(default_factory=list)
    fails_to_save: Exception | None = None
    hangs_in: int | None = None
    hangs: asyncio.Event = field(default_factory=asyncio.Event)

    async def step(self, batch):
        groups = list(batch)
        assert len(groups) == GROUPS
        self.given.append([group.group_id for group in groups])
        if self.num_steps == self.hangs_in:
            self.hangs.set()
            await asyncio.Event().wait()
        is_bad = self.num_steps in self.bad
        metrics = {"loss/grad_norm": math.inf if is_bad else 1.0}
        if self.is_silent:
            metrics |= {"trainer/silent_updates": 1.0, "trainer/updates": 1.0}
        if self.mismatches:
            metrics["mismatch/abs_logprob_mean"] = self.mismatches[self.num_steps]
        self.num_steps += 1
        self.version += not is_bad
        return StepReport(self.version, is_bad, metrics, busy_s=1.0)

    async def stop_step(self) -> bool:
        return True

    async def wait_for_step(self) -> None:
        pass

    async def save(self, path: str) -> None:
        if self.fails_to_save is not None:
            raise self.fails_to_save
        self.saved.append((str(Path(path).relative_to(self.run_dir)), self.version))

    async def snapshot(self) -> float:
        self.snapshots.append(self.version)
        return 0.0

    async def write_checkpoint(self, folder: str) -> list[WrittenFile]:
        return []


async def at_once(work: Callable[..., Any], *args: Any) -> Any:
    """Does blocking work in the event loop, so that a checkpoint is complete before the next step."""
    return work(*args)


@dataclass
class Publisher:
    engine: FakeEngine
    changed_share: float | None = None

    async def publish(self, version: int) -> PublishReport:
        self.engine.version = version
        acks = [WeightAck(self.engine.engine_id, version, 0, 0.0, 0.0)]
        return PublishReport(version, 1, 0.0, 0.0, acks, changed_share=self.changed_share)

    async def delivered(self) -> None:
        return None


@dataclass
class Evaluator:
    """Fails at these versions.

    Attributes:
        evaluated: The evaluated versions, in order.
    """

    fails_at: set[int] = field(default_factory=set)
    evaluated: list[int] = field(default_factory=list)

    async def evaluate(self, step: int, tasks: object, name: str = "") -> Evaluation:
        del tasks
        self.evaluated.append(step)
        if step in self.fails_at:
            raise PenstockError("evaluation: sums/7 failed 3 times; the last time: the judge is down")
        return Evaluation(1.0, 1.0, 1, step=step, version_min=step, version_max=step)


def run_of(
    bad: set[int],
    run_dir: Path,
    notes: list[str],
    max_bad_steps: int = 3,
    *,
    every_steps: int = STEPS,
    evaluator: Evaluator | None = None,
) -> Run:
    """A run of `STEPS` batches of `GROUPS` groups that skips the steps `bad`; it checkpoints every so many."""
    engine = FakeEngine()
    flows = make_flow([engine], FakeRewards(), batch=GROUPS, eta=1, steps=STEPS)
    simulated = run_config(SimulationConfig(steps=STEPS, eval_every=every_steps)).model_copy(
        update={"checkpoint": CheckpointConfig(every_minutes=0, every_steps=every_steps)}
    )
    trainer = simulated.trainer.model_copy(update={"max_bad_steps": max_bad_steps})
    kept = replace(
        instruments(),
        trajectories=TrajectoryTable(run_dir),
        bad_batches=BadBatches(run_dir),
        run_dir=run_dir,
        note=notes.append,
    )
    side = PolicyRuntime(
        flows.ports.runner,
        Trainer(bad, run_dir),
        Publisher(engine),
        evaluator or Evaluator(),
        EngineMonitor(EnginePool([engine], 4)),
    )
    checkpointer = Checkpointer(
        simulated.checkpoint,
        CheckpointFolder(run_dir),
        side.trainer,
        flows.ports.store,
        notes.append,
        in_thread=at_once,
    )
    return Run(simulated.model_copy(update={"trainer": trainer}), side, HELD_OUT, flows, kept, checkpointer)
