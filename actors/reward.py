"""Reward workers as Ray actors: a job comes and its score leaves over a connection of its own, beside Ray."""

from __future__ import annotations

import asyncio
import pickle

import ray

from penstock.actors.direct import Address, Listener
from penstock.dataflow.errors import PenstockError, TrajectoryError
from penstock.dataflow.ports import Score
from penstock.envs.config import RewardConfig
from penstock.envs.contract import Device
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.scoring import RewardRunner

Job = tuple[int, str, bytes]
"""Its number; what it is called in messages; task and trajectory, pickled by themselves: one that cannot be read here
costs no other job."""
Result = Score | TrajectoryError | PenstockError


class RewardActor:
    """One reward worker; the user's code runs in a killable child process below it."""

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig, device: Device) -> None:
        self._runner = RewardRunner(config, sandbox, device)
        self._line = Listener(self._submit)
        self._jobs: set[asyncio.Task[None]] = set()
        self._results: list[tuple[int, Result]] = []

    async def start(self) -> None:
        """Answers once the reward is loaded."""
        await self._runner.start()

    async def listen(self) -> Address:
        """Where lists of jobs are taken, once Ray has given the worker its place; lists of `(number, Result)` leave."""
        return await self._line.listen(ray.util.get_node_ip_address())

    async def is_alive(self) -> None:
        """Answers, unless Ray knows how it died."""

    async def shutdown(self) -> None:
        for job in list(self._jobs):
            job.cancel()
        await self._line.close()
        await self._runner.shutdown()

    def _submit(self, jobs: list[Job]) -> None:
        for job in jobs:
            scoring = asyncio.create_task(self._score(*job))
            self._jobs.add(scoring)
            scoring.add_done_callback(self._jobs.discard)

    async def _score(self, number: int, label: str, body: bytes) -> None:
        result: Result
        try:
            task, trajectory = pickle.loads(body)  # noqa: S301  from our own driver, which showed the secret
        except Exception as error:  # noqa: BLE001  user data: whatever its reading raises is data
            what = "the task was sent, but cannot be read in the reward worker's process"
            result = TrajectoryError("reward", f"{label}: {what}: {type(error).__name__}: {error}")
        else:
            try:
                result = await self._runner.score(task, trajectory)
            except (TrajectoryError, PenstockError) as error:
                result = error
            except Exception as error:  # noqa: BLE001  an unanswered job would be waited for forever
                result = TrajectoryError("reward", f"{label}: {type(error).__name__}: {error}")
        self._results.append((number, result))
        if len(self._results) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send the results of this tick together."""
        results, self._results = self._results, []
        self._line.send(results)
