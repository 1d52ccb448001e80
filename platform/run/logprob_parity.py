"""The ratio probe: do engines compute with the trainer's weights what the trainer computes?

Symbols: π_e, π_t = token probabilities of an engine and of the trainer at one version; the probe's figure is
max |log π_e(y) − log π_t(y)| over tokens y that the engine samples anew from a few held-out prompts. Checksums prove
that the weights arrived; this proves that what is done with them agrees (layouts, kernels, temperature, a tied head).
Without it a difference would only be seen as importance ratios that are a little off, for ever.

Consumes: a finished publish, after which actors/weights/publisher.py asks it. Waits for: the engines' answers, then the
trainer's forward. Unblocked by: them, or their own time limits. Prefix caches are salted by version, so no KV of older
weights blurs the figure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.actors.trainer.client import TrainerClient
from penstock.dataflow.errors import EngineLostError, TrajectoryError, WeightSyncError
from penstock.dataflow.ids import RequestId
from penstock.dataflow.ports import Engine, GenerateRequest, SamplingParams
from penstock.rollout.pool.pool import EnginePool
from penstock.weights.model_config import DType

logger = logging.getLogger(__name__)

NUM_PARITY_PROMPTS = 4
"""Prompts."""
NUM_TOKENS = 16
"""Sampled per prompt and engine."""
TOLERANCE: dict[DType, float] = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference that rounding explains, nat. Measured over 10,000 tokens: 4e-6 in float32, 0.05 in bfloat16."""


@dataclass(frozen=True, slots=True)
class _Answer:
    engine: Engine
    prompt: tuple[int, ...]
    token_ids: list[int]
    logprobs: list[float]


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
        """Connect both sides.

        Args:
            pool: Engines to ask; past the pool's slots, so a full engine queues it.
            trainer: Scores what they answer.
            prompts: What they are asked, token ids.
            sampling: The temperature of training.
            dtype: Of the forward passes; decides the tolerance.
            timeout_s: Longest wait for an engine's answer.
        """
        self._pool = pool
        self._trainer = trainer
        self._prompts = prompts
        self._sampling = SamplingParams(min(NUM_TOKENS, sampling.max_new_tokens), sampling.temperature)
        self._tolerance = TOLERANCE[dtype]
        self._timeout_s = timeout_s

    async def check(self, version: int) -> float | None:
        """Largest difference of a token's logprob, nat; None if no engine could be asked.

        Raises:
            WeightSyncError: If it is above what rounding explains.
        """
        engines = [engine for engine in self._pool.engines() if engine.version == version]
        asked = [self._ask(engine, version, index) for engine in engines for index in range(len(self._prompts))]
        answers = [answer for answer in await asyncio.gather(*asked) if answer is not None]
        if len(answers) < len(asked):
            logger.warning(
                "ratio probe at v%d: %d of %d answers were lost", version, len(asked) - len(answers), len(asked)
            )
        if not answers:
            return None
        scores = await self._trainer.token_logprobs([(answer.prompt, answer.token_ids) for answer in answers])
        borders = np.cumsum([len(answer.token_ids) for answer in answers])[:-1]
        largest = 0.0
        for answer, expected in zip(answers, np.split(scores, borders), strict=True):
            differences = np.abs(np.array(answer.logprobs) - expected)
            worst = int(differences.argmax())
            largest = max(largest, float(differences[worst]))
            if not differences[worst] <= self._tolerance:  # also if it is no number
                raise WeightSyncError(
                    f"ratio probe at v{version}: {answer.engine.engine_id} gives token {worst + 1} of an answer the "
                    f"logprob {answer.logprobs[worst]:.4f}, the trainer {expected[worst]:.4f}; rounding explains "
                    f"{self._tolerance:g}. Their weights are equal by checksum, so one of them computes something "
                    "else, and every importance ratio would be off. Compare model.attention, model.dtype and the "
                    "engine's kernels with the trainer's; weights.probe_every=0 trains all the same."
                )
        return largest

    async def _ask(self, engine: Engine, version: int, index: int) -> _Answer | None:
        """None if the engine was lost or silent, refused it, or got newer weights meanwhile."""
        answer = _Answer(engine, self._prompts[index], [], [])
        name = RequestId(f"probe/{version}/{engine.engine_id}/{index}")
        try:
            async with asyncio.timeout(self._timeout_s):
                async for delta in engine.generate(GenerateRequest(name, answer.prompt, self._sampling)):
                    if any(span.version != version for span in delta.spans):
                        return None
                    answer.token_ids.extend(delta.token_ids)
                    answer.logprobs.extend(delta.logprobs)
        except (EngineLostError, TrajectoryError, TimeoutError):
            return None  # whoever it serves notices, and fences it off
        return answer
