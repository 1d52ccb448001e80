"""Reward workers as Ray actors: jobs come in batches, scores leave in batches, each as soon as it is known."""

from __future__ import annotations

import asyncio

from penstock.actors.outbox import Outbox
from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.ports import Score
from penstock.dataflow.trajectory import Task, Trajectory
from penstock.envs.config import RewardConfig
from penstock.envs.contract import Device
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.scoring import RewardRunner

Job = tuple[int, Task, Trajectory]
Result = Score | TrajectoryError | PenstockError


class RewardActor:
    """One reward worker; the user's code runs in a killable child process below it."""

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig, device: Device) -> None:
        self._runner = RewardRunner(config, sandbox, device)
        self._outbox: Outbox[tuple[int, Result]] = Outbox()
        self._jobs: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Answers once the reward is loaded."""
        await self._runner.start()

    async def submit(self, jobs: list[Job]) -> None:
        for job in jobs:
            scoring = asyncio.create_task(self._score(*job))
            self._jobs.add(scoring)
            scoring.add_done_callback(self._jobs.discard)

    async def collect(self, wait_s: float) -> list[tuple[int, Result]]:
        """Scores that are known since the last call; waits at most `wait_s` seconds for the first."""
        return await self._outbox.collect(wait_s)

    async def shutdown(self) -> None:
        for job in list(self._jobs):
            job.cancel()
        await self._runner.shutdown()

    async def _score(self, number: int, task: Task, trajectory: Trajectory) -> None:
        result: Result
        try:
            result = await self._runner.score(task, trajectory)
        except (TrajectoryError, PenstockError) as error:
            result = error
        except Exception as error:  # noqa: BLE001  a job that is not answered would be waited for for ever
            result = TrajectoryError("reward", f"{trajectory.trajectory_id}: {type(error).__name__}: {error}")
        self._outbox.send((number, result))
