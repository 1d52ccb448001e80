"""Reward workers as Ray actors: trajectories and results come and go in batches (actors/batched_calls.py)."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Coroutine

from penstock.actors.batched_calls import Outbox
from penstock.actors.worker_log import keep_output
from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.ports import Score
from penstock.envs.config import RewardConfig
from penstock.envs.contract import Device
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.workers.scoring import RewardRunner

Result = Score | TrajectoryError | PenstockError


Job = tuple[int, str, bytes]
"""Number of a trajectory at its client, its name in messages, and task and trajectory, pickled."""


class Scoring:
    """Scores in progress, and their results.

    Attributes:
        results: Number of the trajectory and pickled result.
    """

    def __init__(self) -> None:
        self.results: Outbox[tuple[int, bytes]] = Outbox()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, number: int, label: str, score: Coroutine[None, None, Result]) -> None:
        """Keep the result of a score under its number."""

        async def run() -> None:
            result = await score
            try:
                packed = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # noqa: BLE001  user data may raise anything
                what = f"{label}: its score cannot be pickled: {type(error).__name__}: {error}"
                packed = pickle.dumps(TrajectoryError("reward", what))
            self.results.put((number, packed))

        task = asyncio.create_task(run(), name=f"score {label}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """End the scores in progress, without a result."""
        for task in self._tasks:
            task.cancel()


class RewardActor:
    """One reward worker; the user's code runs in a killable child process below it."""

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig, device: Device) -> None:
        keep_output("rewards")
        self._runner = RewardRunner(config, sandbox, device)
        self._scoring = Scoring()

    async def start(self) -> None:
        """Answers once the reward is loaded."""
        await self._runner.start()

    async def submit(self, jobs: list[Job]) -> None:
        """Begin to score trajectories."""
        for number, label, body in jobs:
            self._scoring.begin(number, label, self.score(label, body))

    async def collect(self, wait_s: float) -> list[tuple[int, bytes]]:
        """Numbers and pickled results since the last call; waits at most `wait_s` seconds for the first one.

        It answers as long as the event loop of the scoring runs.
        """
        return await self._scoring.results.collect(wait_s)

    async def score(self, label: str, body: bytes) -> Result:
        """Score one trajectory; a failure is returned, so that Ray does not wrap it.

        Args:
            label: Name of the trajectory in messages.
            body: Task and trajectory, pickled. Unpickling runs the user's code, so a failure is returned as data.
        """
        try:
            task, trajectory = pickle.loads(body)  # noqa: S301  from our own driver
        except Exception as error:  # noqa: BLE001  user data may raise anything
            what = "the task was sent, but cannot be unpickled in the reward worker's process"
            return TrajectoryError("reward", f"{label}: {what}: {type(error).__name__}: {error}")
        try:
            return await self._runner.score(task, trajectory)
        except (TrajectoryError, PenstockError) as error:
            return error
        except Exception as error:  # noqa: BLE001  the run continues without this trajectory
            return TrajectoryError("reward", f"{label}: {type(error).__name__}: {error}")

    async def shutdown(self) -> None:
        """End the child process; scores in progress fail."""
        self._scoring.cancel()
        await self._runner.shutdown()
