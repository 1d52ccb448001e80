"""The logprob parity check: compares the logprobs of the engines with those of the trainer at equal weights.

Symbols: π_e, π_t = token probabilities of an engine and of the trainer at one version. The check measures
d(y) = |log π_e(y) − log π_t(y)| over tokens y that the engine samples from a few held-out prompts. Checksums prove that
the weights arrived; this check shows that both sides compute the same with them (layouts, kernels, temperature, a tied
head). Without it, a difference would only appear as importance ratios with a small permanent bias.

A run is stopped by the 99 % quantile of d of one engine. Its maximum only warns: d grows as the probability of a token
falls, so in bfloat16 rounding alone exceeds any useful limit at single tokens, while a wrong computation changes most.

Consumes: a finished publish, after which actors/weights/publisher.py calls it. Waits for: the engines' answers, then
the trainer's forward pass. Unblocked by: these or their time limits. Prefix caches are salted by version, so no KV
entry of older weights affects the result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.actors.trainer.client import TrainerClient
from penstock.dataflow.errors import EngineLostError, TrajectoryError, WeightSyncError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import Engine, GenerateRequest
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.trajectory import Routes, joined_routes
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.weights.model_config import DType

logger = logging.getLogger(__name__)

NUM_PARITY_PROMPTS = 4
"""Prompts per check."""
NUM_TOKENS = 64
"""Tokens sampled per prompt and engine; with so many, two may exceed the tolerance."""
QUANTILE = 0.99
"""Share of an engine's tokens within the tolerance."""
TOLERANCE: dict[DType, float] = {"float32": 1e-3, "bfloat16": 0.25}
"""What rounding explains at almost all tokens, in nats. The maxima over 10,000 tokens of tiny policies on CPUs were
4e-6 in float32 and 0.05 in bfloat16. On an H200 it was 7.5e-6 in float32 (256 tokens), and with random weights of 0.5 B
in bfloat16 the quantile was 0.24 (benchmarks/results/gpu_runs.md).
"""


@dataclass(frozen=True, slots=True)
class _Answer:
    engine: Engine
    prompt: tuple[int, ...]
    token_ids: list[int]
    logprobs: list[float]
    routes: list[Routes | None]


class LogprobParityCheck:
    """Compares every engine in service with the trainer."""

    def __init__(
        self,
        pool: EnginePool,
        trainer: TrainerClient,
        prompts: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        dtype: DType,
        timeout_s: float,
    ) -> None:
        """Create the check.

        Args:
            pool: The engines. Requests bypass the pool's concurrency slots, so a full engine queues them itself.
            trainer: Computes the expected logprobs of the sampled tokens.
            prompts: Prompts as token ids.
            sampling: Sampling parameters of training, for the temperature.
            dtype: Data type of the forward passes; determines the tolerance.
            timeout_s: Longest wait for an engine's answer.
        """
        self._pool = pool
        self._trainer = trainer
        self._prompts = prompts
        self._sampling = SamplingParams(min(NUM_TOKENS, sampling.max_new_tokens), sampling.temperature)
        self._tolerance = TOLERANCE[dtype]
        self._timeout_s = timeout_s

    async def check(self, version: int) -> float | None:
        """Return the largest logprob difference of a token in nats; None if no engine answered.

        Raises:
            WeightSyncError: If more than a share of 1 − `QUANTILE` of an engine's tokens exceeds the tolerance.
        """
        engines = [engine for engine in self._pool.engines() if engine.version == version]
        requests = [self._sample(engine, version, index) for engine in engines for index in range(len(self._prompts))]
        answers = [answer for answer in await asyncio.gather(*requests) if answer is not None]
        if len(answers) < len(requests):
            num_lost = len(requests) - len(answers)
            logger.warning("logprob parity check at v%d: %d of %d answers were lost", version, num_lost, len(requests))
        if not answers:
            return None
        examples = [(answer.prompt, answer.token_ids) for answer in answers]
        routes = [joined_routes(answer.routes) for answer in answers]
        logprobs = await self._trainer.token_logprobs(examples, routes)
        offsets = np.cumsum([len(answer.token_ids) for answer in answers])[:-1]
        scored: dict[EngineId, list[tuple[_Answer, NDArray[np.float64]]]] = {}
        for answer, expected in zip(answers, np.split(logprobs, offsets), strict=True):
            scored.setdefault(answer.engine.engine_id, []).append((answer, expected))
        return max(self._compare(engine_id, version, answered) for engine_id, answered in scored.items())

    def _compare(self, engine_id: EngineId, version: int, scored: list[tuple[_Answer, NDArray[np.float64]]]) -> float:
        """The largest difference of one engine, nat, over its answers and the trainer's logprobs of them."""
        ours = np.concatenate([answer.logprobs for answer, _ in scored])
        theirs = np.concatenate([expected for _, expected in scored])
        differences = np.abs(ours - theirs)
        worst, usual = int(differences.argmax()), float(np.quantile(differences, QUANTILE))
        said = (
            f"logprob parity check at v{version}: {engine_id} gives a token the logprob {ours[worst]:.4f}, the "
            f"trainer {theirs[worst]:.4f}; the {QUANTILE:.0%} quantile of the difference over {len(ours)} tokens is "
            f"{usual:.2g}, of which rounding explains {self._tolerance:g}."
        )
        if not usual <= self._tolerance:  # negated, so that a NaN fails the check as well
            raise WeightSyncError(
                f"{said} Their weights have equal checksums, so their implementations differ and every importance "
                "ratio would be biased. Compare config.json of the model with what both make of it (rope_parameters, "
                "above all a type that depends on the length, sliding_window), and model.attention, model.dtype and "
                "the engine's kernels with the trainer's."
            )
        if differences[worst] > self._tolerance:
            logger.warning("%s Single tokens may differ by more in bfloat16; watch weights/max_logprob_diff.", said)
        return float(differences[worst])

    async def _sample(self, engine: Engine, version: int, index: int) -> _Answer | None:
        """Sample from one prompt; None if the engine was lost, timed out, refused it or received newer weights."""
        answer = _Answer(engine, self._prompts[index], [], [], [])
        name = RequestId(f"probe/{version}/{engine.engine_id}/{index}")
        try:
            async with asyncio.timeout(self._timeout_s):
                async for delta in engine.generate(GenerateRequest(name, answer.prompt, self._sampling)):
                    if any(span.version != version for span in delta.spans):
                        return None
                    answer.token_ids.extend(delta.token_ids)
                    answer.logprobs.extend(delta.logprobs)
                    answer.routes.append(delta.routes)
        except (EngineLostError, TrajectoryError, TimeoutError):
            # Fencing off a lost engine is left to the requests of the rollouts, which fail as well.
            return None
        return answer
