"""The driver's client of the trainer ranks: all of them as one `TrainerGroup`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle

from penstock.actors.ray_errors import answer_of, late_calls, ray_boundary, silence_limit, wait_started
from penstock.dataflow.errors import CheckpointError, StepEndedError, TrainingError, WeightSendError, WeightSyncError
from penstock.dataflow.ports import StepReport, WeightManifest, WrittenFile
from penstock.dataflow.trajectory import GroupRef, Routes
from penstock.trainer.batches.examples import Example, Preference
from penstock.trainer.micro_batches import TeacherForced
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.model_config import DType
from penstock.weights.transport.shards import ShardTransfer

HEALTH_S = 5.0
"""A rank that does not answer for so long, while it has nothing else to do in that thread, is lost; seconds."""
PROGRESS_S = 2.0
"""Longest wait for the progress report of a rank that is late, seconds."""
WRITE_STEPS = 4.0
"""Longest write of a checkpoint, as a multiple of the longest step. Nothing waits for it but the next checkpoint."""
UNKNOWN = -1
"""Version of weights that a step may have changed or not."""
_DESYNCHRONISED = "rank/desynchronised"


class TrainerClient:
    """All ranks as one trainer group.

    Attributes:
        nodes: Node of each rank.
        version: Of the weights; `UNKNOWN` after a step that has failed or was given up.
        step_lock: Held while a step may change the weights; any other holder sees the weights of `version`.
        turn: Makes the context of a step; where it shares its devices, it has them to itself there.
    """

    def __init__(self, ranks: Sequence[ActorHandle], step_timeout_s: float) -> None:
        """Connect the ranks.

        Args:
            ranks: Their actors.
            step_timeout_s: Longest call, seconds.
        """
        self._ranks = ranks
        self._step_timeout_s = step_timeout_s
        self.nodes: list[str] = []
        self.version = 0
        self.busy_s = 0.0
        self.step_lock = asyncio.Lock()
        self.turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        self._hangs = False
        self._is_stopped = False
        self._in_step = False
        self._version_before = 0

    async def start(self, timeout_s: float) -> None:
        """Start all ranks: each has a process, then reaches rank 0, then loads the policy.

        Raises:
            TrainingError: If one does not within the limit; the ranks that are missing are named.
        """
        calls = [asyncio.ensure_future(call) for call in self._call("rendezvous")]
        late = await late_calls(calls, timeout_s, asyncio.FIRST_EXCEPTION)
        for call in late:
            call.cancel()
        with ray_boundary(TrainingError, "trainer: rendezvous"):
            answers = [call.result() for call in calls if call not in late]
        if late:
            missing = ", ".join(str(rank) for rank, call in enumerate(calls) if call in late)
            raise TrainingError(
                f"trainer: {len(late)} of {len(calls)} ranks ({missing}) have no process after {timeout_s:g} s "
                "(trainer.start_timeout_s). Ray has not placed them, or their nodes do not answer: see `ray status`."
            )
        starts = {f"trainer rank {rank}": call for rank, call in enumerate(self._call("start", *answers[0]))}
        hint = "Raise trainer.start_timeout_s if they are only slow; see logs/ of the run."
        started = await wait_started("trainer: start", starts, timeout_s, TrainingError, hint)
        self.nodes = [node for node, _ in started]
        self.version = self._version_before = started[0][1]

    @property
    def node_id(self) -> str:
        """Node of rank 0, where gathered versions are written."""
        return self.nodes[0]

    async def step(self, batch: Sequence[GroupRef]) -> StepReport:
        """Train one batch, or the last part of one; the version moves on unless the step was skipped."""
        async with self.turn(), self.step_lock:
            self._version_before, self._in_step = self.version, True
            try:
                reports = await self._all("step", batch, self.version)
            except BaseException:
                if not self._is_stopped:  # the ranks may complete it all the same
                    self.version = UNKNOWN
                raise
            self._in_step = False
            self.version = self._version_before = reports[0].version
        metrics = {name: value for one in reversed(reports) for name, value in one.metrics.items()}
        if _DESYNCHRONISED in metrics:  # ranks of another tensor-parallel part compare their own
            metrics[_DESYNCHRONISED] = max(one.metrics[_DESYNCHRONISED] for one in reports)
        report: StepReport = replace(reports[0], metrics=metrics)
        self.busy_s += report.busy_s
        return report

    async def set_learning_rate(self, settings: Mapping[str, Any]) -> int:
        """Between two steps, take over other settings of `OptimizerConfig`; returns the version trained last."""
        async with self.step_lock:
            await self._all("set_learning_rate", settings)
            return self.version

    async def accumulate(self, part: Sequence[GroupRef]) -> None:
        """Add the gradient of a part of a batch, which changes no weights; ranks keep the order of calls."""
        await self._all("accumulate", part, self.version)

    async def early_logprobs(self, group: GroupRef) -> None:
        """Have the ranks compute logprobs of a group before its batch is complete; ranks keep the order of calls."""
        await self._all("early_logprobs", [group], self.version)

    async def supervised_step(self, examples: Sequence[Example]) -> dict[str, float]:
        return await self._learn("supervised_step", examples)

    async def teacher_forced(self, examples: Sequence[Example]) -> TeacherForced:
        return await self._learn("teacher_forced", examples)

    async def preference_step(
        self, pairs: Sequence[Preference], references: Sequence[NDArray[np.float32]] | None
    ) -> dict[str, float]:
        return await self._learn("preference_step", pairs, references)

    async def preference_margins(self, pairs: Sequence[Preference]) -> NDArray[np.float64]:
        """`[P]`: by how much the model prefers the chosen answer of each pair."""
        return await self._learn("preference_margins", pairs)

    async def preference_logprobs(self, pairs: Sequence[Preference]) -> list[NDArray[np.float32]]:
        """`[n]` per answer, chosen and rejected in turns: the policy's logprob of each of its n tokens."""
        return await self._learn("preference_logprobs", pairs)

    async def token_logprobs(
        self, examples: Sequence[Example], routes: Sequence[Routes | None] = ()
    ) -> NDArray[np.float64]:
        """`[n] float64`: of all n response tokens, one example after another, at the sampling temperature; `routes` as
        the engine recorded them of each example.
        """
        return await self._learn("token_logprobs", examples, routes)

    async def export(self, version: int) -> WeightManifest:
        manifest = (await self._all("export", version))[0]
        assert manifest is not None, "rank 0 exports"
        return manifest

    async def export_adapters(self, version: int) -> WeightManifest:
        manifest = (await self._all("export_adapters", version))[0]
        assert manifest is not None, "rank 0 exports"
        return manifest

    async def training_sharding(self) -> tuple[TrainingSharding, str]:
        """How the ranks shard the model, and rank 0's folder in shared memory."""
        ((training, folder),) = await self._answers("training_sharding", [self._ranks[0].training_sharding.remote()])
        return training, folder

    async def without_peer_access(self, engine_devices: Sequence[str]) -> list[tuple[str, str]]:
        """Pairs of a rank's and an engine's device on rank 0's node between which memory cannot be mapped.

        Raises:
            WeightSyncError: If it cannot be found out.
        """
        own = [device for devices in await self.call_transfer("seen_devices") for device in devices]
        pairs = [(one, other) for one in own for other in engine_devices]
        call, what = self._ranks[0].without_peer_access.remote(pairs), "trainer: peer access between GPUs"
        found: list[tuple[str, str]] = await answer_of(call, self._step_timeout_s, WeightSyncError, what)
        return found

    async def plan_transfer(self, engine: EngineLayout, dtype: DType, first_node: str | None = None) -> ShardTransfer:
        """Plan how the ranks publish into the engines' layout; across nodes, the first receiver is on `first_node`.

        Raises:
            WeightSyncError: If a layout is not known.
        """
        training, folder = await self.training_sharding()
        first = [first_node] * engine.tp_size if first_node else []
        return await asyncio.to_thread(ShardTransfer.between, training, engine, dtype, folder, self.nodes, first)

    async def call_transfer(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of every rank for a weight transfer in which ranks may wait for engines.

        Raises:
            WeightSendError: If a rank dies.
            WeightSyncError: If one fails or exceeds the time limit; an engine that it waits for may be the cause.
        """
        try:
            return await self._all(method, *arguments, timeout_s=timeout_s)
        except TrainingError as error:
            has_died = isinstance(error.__cause__, ray.exceptions.RayError) and not isinstance(
                error.__cause__, ray.exceptions.RayTaskError
            )
            raise (WeightSendError if has_died else WeightSyncError)(str(error)) from error

    async def call_ranks(self, what: str, timeout_s: float, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank, for a step of a publish in which no rank waits for an engine.

        Args:
            what: The publish, for error messages.
            timeout_s: Longest wait, seconds.
            method: Of the ranks.
            arguments: Of the method.

        Raises:
            WeightSendError: If a rank fails, dies or is too late; the message names the late ranks and their progress.
        """
        calls = [asyncio.ensure_future(call) for call in self._call(method, *arguments)]
        late = await late_calls(calls, timeout_s, asyncio.FIRST_EXCEPTION)
        for call in late:
            call.cancel()
        with ray_boundary(WeightSendError, f"{what}: {method} on the training ranks"):
            answers = [call.result() for call in calls if call not in late]
        if not late:
            return answers
        ranks = [rank for rank, call in enumerate(calls) if call in late]
        progress = await asyncio.gather(*(self._progress(rank) for rank in ranks))
        missing = ", ".join(f"training rank {rank} ({state})" for rank, state in zip(ranks, progress, strict=True))
        raise WeightSendError(
            f"{what}: {method} is not complete after {timeout_s:g} s (weights.timeout_s). Missing: {missing}. A rank "
            "hangs, or the memory it writes to is too slow; if it is only slow, raise weights.timeout_s."
        )

    async def _progress(self, rank: int) -> str:
        call = self._ranks[rank].writing.remote()
        try:
            state: str = await answer_of(call, PROGRESS_S, TrainingError, f"training rank {rank}: writing")
        except TrainingError:
            return "its process does not answer"
        return state

    def read_back(self, manifest: WeightManifest) -> ray.ObjectRef:
        """Handle of the version's bytes in the object store."""
        return self._ranks[0].read_back.remote(manifest)

    async def stop_step(self) -> bool:
        """End the running step, and all later ones, before they change the weights.

        Returns:
            Whether the weights stay as they are; if not, the step that runs is about to be completed.
        """
        self._is_stopped = any(await self._all("stop_step", timeout_s=HEALTH_S))
        if self._is_stopped:
            self.version = self._version_before
        return self._is_stopped

    def return_to(self, version: int) -> None:
        """Save this version from now on, though the next step may be complete (`TrainerSpec.has_partner`)."""
        self._is_stopped, self.version = True, version

    async def wait_for_step(self) -> None:
        """Wait until the ranks have ended the step that they are in, if they are in one."""
        if self._in_step:
            await self._all("device")

    async def save(self, path: str) -> None:
        """Write the policy in Hugging Face form to `path`. Waits for no step: see `stop_step`.

        Raises:
            TrainingError: If a step is changing the weights, or a rank cannot write.
        """
        if self.version == UNKNOWN:
            raise TrainingError("trainer: a step that changes the weights was given up, so they are of no version.")
        first, *others = self._ranks
        held = [rank.held_weights.remote(self.version) for rank in others]
        await self._answers("save_hf", [first.save_hf.remote(path, self.version, *held)])

    async def snapshot(self) -> float:
        """Begin to copy the state of all ranks to host memory; returns the seconds that the loop was blocked.

        After `stop_step` it does not wait for the step that it has ended, in which ranks may still be.
        """
        start = time.perf_counter()
        await self._all("snapshot_now" if self._is_stopped else "snapshot", self.version)
        return time.perf_counter() - start

    async def write_checkpoint(self, folder: str) -> list[WrittenFile]:
        """Write the last snapshot, one file per rank, while training continues.

        Args:
            folder: On a file system that all ranks and the driver see. Created if it is missing.

        Raises:
            CheckpointError: If a rank cannot write its file, dies, or is not finished in time.
        """
        limit_s = WRITE_STEPS * self._step_timeout_s
        hint = (
            f"The limit is {WRITE_STEPS:g} x trainer.step_timeout_s. The disk hangs or is too slow; if it is only "
            "slow, raise trainer.step_timeout_s."
        )
        calls = asyncio.gather(*self._call("write_checkpoint", folder))
        return list(await answer_of(calls, limit_s, CheckpointError, f"trainer: checkpoint {folder}", hint))

    async def lost_ranks(self) -> list[int]:
        """Ranks whose process is dead, or does not answer within `HEALTH_S`; all of them after a call that hangs.

        A collective that never ends leaves living processes with which nothing can be computed any more.
        """
        if self._hangs:
            return list(range(len(self._ranks)))

        async def is_lost(rank: ActorHandle) -> bool:
            try:
                async with silence_limit(HEALTH_S):
                    await rank.is_alive.remote()
            except (TimeoutError, ray.exceptions.RayError):
                return True
            return False

        found = await asyncio.gather(*(is_lost(rank) for rank in self._ranks))
        return [rank for rank, is_gone in enumerate(found) if is_gone]

    def kill(self) -> None:
        """End the processes of all ranks now."""
        for rank in self._ranks:
            ray.kill(rank)

    async def close(self, timeout_s: float = 2.0) -> None:
        with suppress(TrainingError):  # the cluster ends the processes in any case
            await self._all("shutdown", timeout_s=timeout_s)

    async def _all(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call every rank; the first failure fails the call, with its cause."""
        return await self._answers(method, self._call(method, *arguments), timeout_s)

    async def _learn(self, method: str, *arguments: Any) -> Any:
        """Rank 0's answer to a call of `TrainerRank.learn`."""
        self._in_step = method.endswith("_step")
        answer = (await self._answers(method, self._call("learn", method, *arguments)))[0]
        self._in_step = False
        return answer

    def _call(self, method: str, *arguments: Any) -> list[ray.ObjectRef]:
        return [getattr(rank, method).remote(*arguments) for rank in self._ranks]

    async def _answers(self, method: str, calls: list[ray.ObjectRef], timeout_s: float | None = None) -> list[Any]:
        limit_s = timeout_s or self._step_timeout_s
        hint = " or the step is too large; if it is only slow, raise trainer.step_timeout_s" if not timeout_s else ""
        hangs = f"One of {len(calls)} ranks hangs{hint}."
        try:
            return list(await answer_of(asyncio.gather(*calls), limit_s, TrainingError, f"trainer: {method}", hangs))
        except TrainingError as error:
            if isinstance(error.__cause__, StepEndedError):
                self._is_stopped = True
                self.version = self._version_before
                raise StepEndedError(str(error)) from error
            # Not by `isinstance`: Ray makes the exception of a rank that raised one a `TimeoutError` too.
            self._hangs = self._hangs or (not timeout_s and type(error.__cause__) is TimeoutError)
            raise
