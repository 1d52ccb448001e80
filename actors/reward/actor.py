"""Reward workers as Ray actors: one call per trajectory."""

from __future__ import annotations

import pickle

from penstock.actors.worker_log import keep_output
from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.ports import Score
from penstock.envs.config import RewardConfig
from penstock.envs.contract import Device
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.workers.scoring import RewardRunner

Result = Score | TrajectoryError | PenstockError


class RewardActor:
    """One reward worker; the user's code runs in a killable child process below it."""

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig, device: Device) -> None:
        keep_output("rewards")
        self._runner = RewardRunner(config, sandbox, device)

    async def start(self) -> None:
        """Answers once the reward is loaded."""
        await self._runner.start()

    async def is_alive(self) -> None:
        """Answers as long as the event loop of the scoring runs."""

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
        """End the child process; scores that are under way fail."""
        await self._runner.shutdown()
