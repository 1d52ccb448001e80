"""The trainer of a simulated run: the shipping client over simulated ranks in virtual processes.

    controller ─▶ TrainerClient ─▶ virtual handles ─▶ SimulatedRank, one per process ─▶ SimulatedTrainer, shared

Rank 0 computes, and the other ranks wait for it, as in a collective. How long a call may take, which ranks count as
lost and what follows from that is decided by the client and by platform/run/training.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from ray.actor import ActorHandle

from penstock.dataflow.ports import StepReport, WeightManifest
from penstock.dataflow.trajectory import GroupRef
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.virtual_actor import VirtualProcess
from penstock.platform.simulator.world import World, task_of

NUM_RANKS = 2
"""Ranks, unless there are speeds of more."""
RATE_SIGMA = 0.15
"""σ of the logarithm of a rank's rate as measured in one step (benchmarks/results/slow_parts.md)."""


@dataclass(slots=True)
class Trained:
    """Record of the trained trajectories."""

    tasks: set[int] = field(default_factory=set)
    lengths: list[int] = field(default_factory=list)
    """Sampled tokens per trajectory."""
    trimmed_tokens: int = 0
    """Sampled tokens that carried no loss weight."""
    max_staleness: int = 0
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    """(virtual time, step seconds, tokens) per step taken."""


class SimulatedRank:
    """One rank. Its calls run one after another, except those that Ray runs in threads of their own."""

    def __init__(self, trainer: SimulatedTrainer, index: int) -> None:
        self._trainer = trainer
        self._index = index
        self._turn = asyncio.Lock()

    async def rendezvous(self) -> tuple[str, int]:
        """There are no sockets."""
        return self._trainer.node_id, 1

    async def start(self, _host: str, _port: int) -> tuple[str, int]:
        return self._trainer.node_id, self._trainer.version

    async def step(self, groups: Sequence[GroupRef], version: int) -> StepReport:
        report: StepReport = await self._together("step", groups, version)
        rate = {f"rank/product_tflops/{self._index}": self._trainer.product_tflops(self._index)}
        return replace(report, metrics={**report.metrics, **rate})

    async def accumulate(self, groups: Sequence[GroupRef], version: int) -> None:
        await self._together("accumulate", groups, version)

    async def export(self, version: int) -> WeightManifest:
        return cast("WeightManifest", await self._together("export", version))

    async def held_weights(self, _version: int) -> None:
        """There are no weights."""

    async def save_hf(self, _path: str, _version: int, *_held: None) -> None:
        """There are no weights to save, but rank 0 answers only if its process does."""

    async def read_back(self, _manifest: WeightManifest) -> None:
        """Engines need no bytes."""

    async def is_alive(self) -> bool:
        return True

    async def shutdown(self) -> None:
        """Nothing is shared with other processes."""

    async def _together(self, method: str, *arguments: Any) -> Any:
        async with self._turn:
            return await self._trainer.together(self._index, method, *arguments)


class SimulatedTrainer:
    """What the ranks hold together.

    Attributes:
        trained: What was trained into the policy it holds.
        version: Of that policy.
        processes: Of the ranks.
    """

    rank: type[SimulatedRank] = SimulatedRank
    process: type[VirtualProcess] = VirtualProcess

    def __init__(self, world: World, config: SimulationConfig) -> None:
        self.node_id = "simulated"
        self.trained = Trained()
        self.version = 0
        num_ranks = max(NUM_RANKS, len(config.rank_speeds))
        self.processes = [self.process(self.rank(self, rank), lambda: None) for rank in range(num_ranks)]
        self._num_calls = [0] * num_ranks
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._parts: list[GroupRef] = []
        self._world = world
        self._config = config
        self._rates = world.rng("rank speeds")

    @property
    def ranks(self) -> list[ActorHandle]:
        """Handles of the ranks, for the client."""
        return [cast("ActorHandle", process.handle) for process in self.processes]

    async def together(self, rank: int, method: str, *arguments: Any) -> Any:
        """A collective call: rank 0 does it, and every rank gets the result."""
        number, self._num_calls[rank] = self._num_calls[rank], self._num_calls[rank] + 1
        result = self._results.setdefault(number, asyncio.get_running_loop().create_future())
        if min(self._num_calls) > number:
            del self._results[number]
        if rank:
            return await result
        answer = await getattr(self, method)(*arguments)
        result.set_result(answer)
        return answer

    async def accumulate(self, groups: Sequence[GroupRef], _version: int) -> None:
        """Compute the gradient of a part of a batch."""
        self._parts += groups
        await asyncio.sleep(self._compute_s(sum(group.num_tokens for group in groups)))

    async def step(self, groups: Sequence[GroupRef], _version: int) -> StepReport:
        """Compute the gradient of the last part, and take the step."""
        batch, self._parts = [*self._parts, *groups], []
        num_tokens = sum(group.num_tokens for group in batch)
        busy_s = self._config.train_fixed_s + self._compute_s(num_tokens)
        await asyncio.sleep(self._config.train_fixed_s + self._compute_s(sum(group.num_tokens for group in groups)))
        self._account(batch, busy_s, num_tokens)
        self.version += 1
        return StepReport(self.version, skipped=False, metrics={}, busy_s=busy_s)

    async def export(self, version: int) -> WeightManifest:
        """Write the weights of this version for the engines."""
        return WeightManifest(version, "simulated", (), self._config.weight_bytes, checksum=version * 31 + 7)

    def product_tflops(self, rank: int) -> float:
        """Speed of a rank, as measured."""
        return self._speed_of(rank) * self._rates.lognormvariate(0.0, RATE_SIGMA)

    def _speed_of(self, rank: int) -> float:
        return self._config.rank_speeds[rank % len(self._config.rank_speeds)]

    def _compute_s(self, num_tokens: int) -> float:
        slowest = min(map(self._speed_of, range(len(self.processes))))
        per_token_s = self._config.train_s_per_token * self._config.grain
        return num_tokens * per_token_s / (self._config.trainer_devices * slowest)

    def _account(self, groups: Sequence[GroupRef], step_s: float, batch_tokens: int) -> None:
        trained = self.trained
        trained.steps.append((asyncio.get_running_loop().time(), step_s, batch_tokens))
        for group in groups:
            trained.max_staleness = max(trained.max_staleness, group.staleness(self.version))
            trained.trimmed_tokens += group.num_trimmed_tokens
            task = task_of(int(group.handle.trajectories[0].token_ids[0]))
            trained.tasks.add(task)
            trained.lengths += [member.num_sampled_tokens for member in group.handle.trajectories]
