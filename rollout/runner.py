"""One trajectory: a task, an engine, the exact tokens.

The prompt is rendered once; sampled ids are kept as they came and never re-tokenised. Ray-free: the
engine is a port, so the same code runs in tests and in the simulator.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np

from penstock.dataflow.errors import EngineLostError, TrajectoryError
from penstock.dataflow.ids import RequestId, TrajectoryId
from penstock.dataflow.ports import GenerateRequest, SamplingParams, TokenDelta
from penstock.dataflow.trajectory import FinishReason, Task, Trajectory
from penstock.dataflow.versions import Span, join_spans
from penstock.rollout.pool import EnginePool
from penstock.rollout.tokenizers import TokenCodec

VersionListener = Callable[[int], None]


@dataclass(slots=True)
class _Sampled:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def extend(self, delta: TokenDelta) -> None:
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.spans.extend(delta.spans)
        self.finish_reason = delta.finish_reason


class TrajectoryRunner:
    """Runs single-turn trajectories on a pool of engines.

    Attributes:
        silence_timeout_s: Longest wait for the next tokens of one request before its engine counts as lost.
    """

    def __init__(self, pool: EnginePool, codec: TokenCodec, silence_timeout_s: float) -> None:
        self.pool = pool
        self.codec = codec
        self.silence_timeout_s = silence_timeout_s
        self._serial = itertools.count()

    async def run(
        self,
        task: Task,
        trajectory_id: TrajectoryId,
        sampling: SamplingParams,
        on_version: VersionListener = lambda _version: None,
    ) -> Trajectory:
        """Sample one answer.

        Args:
            task: What is asked.
            trajectory_id: Name of this attempt's place in its group.
            sampling: How tokens are drawn.
            on_version: Told the engine's version at dispatch, then the version of the first token.

        Raises:
            TrajectoryError: kind `engine`, if the engine died, went silent or aborted the request.
        """
        prompt_ids = self.codec.encode_prompt(task.prompt)
        request = GenerateRequest(RequestId(f"{trajectory_id}#{next(self._serial)}"), prompt_ids, sampling)
        sampled = _Sampled()
        async with self.pool.lease() as engine:
            on_version(engine.version)
            try:
                async for delta in self._patiently(
                    engine.generate(request), f"{engine.engine_id} {request.request_id}"
                ):
                    if not sampled.token_ids and delta.spans:
                        on_version(delta.spans[0].version)
                    sampled.extend(delta)
            except EngineLostError as error:
                raise TrajectoryError("engine", str(error)) from error
            except BaseException:
                await engine.abort(request.request_id)
                raise
        if sampled.finish_reason in (None, "abort") or not sampled.token_ids:
            raise TrajectoryError("engine", f"{request.request_id} ended {sampled.finish_reason} without an answer")
        return self._trajectory(task, trajectory_id, prompt_ids, sampled)

    async def _patiently(self, deltas: AsyncIterator[TokenDelta], what: str) -> AsyncIterator[TokenDelta]:
        while True:
            try:
                async with asyncio.timeout(self.silence_timeout_s):
                    delta = await anext(deltas)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise TrajectoryError("engine", f"{what}: no token for {self.silence_timeout_s:.0f} s") from None
            yield delta

    def _trajectory(
        self, task: Task, trajectory_id: TrajectoryId, prompt_ids: tuple[int, ...], sampled: _Sampled
    ) -> Trajectory:
        num_prompt, num_sampled = len(prompt_ids), len(sampled.token_ids)
        loss_mask = np.zeros(num_prompt + num_sampled, dtype=np.bool_)
        loss_mask[num_prompt:] = True
        logprobs = np.zeros(num_prompt + num_sampled, dtype=np.float32)
        logprobs[num_prompt:] = sampled.logprobs
        assert sampled.finish_reason is not None
        return Trajectory(
            trajectory_id=trajectory_id,
            task_id=task.task_id,
            token_ids=np.array([*prompt_ids, *sampled.token_ids], dtype=np.int32),
            loss_mask=loss_mask,
            behavior_logprobs=logprobs,
            spans=join_spans(sampled.spans),
            prompt=self.codec.decode(prompt_ids),
            response=self.codec.decode(sampled.token_ids),
            finish_reason=sampled.finish_reason,
        )
