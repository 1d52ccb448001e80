"""The logprob parity check over fakes: agreement passes, a difference of many tokens stops the run and of a single one
warns, lost engines are skipped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from penstock.dataflow.errors import EngineLostError, WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import GenerateRequest, TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.versions import Span
from penstock.platform.run.logprob_parity import TOLERANCE, LogprobParityCheck
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.weights.model_config import DType


@dataclass
class Answering:
    """An engine whose token t has logprob −t / 10, off by `error` at the last one of each answer, or of some."""

    engine_id: EngineId
    version: int = 3
    error: float = 0.0
    is_lost: bool = False
    stamps: int = 3
    of_prompts: Collection[tuple[int, ...]] | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        if self.is_lost:
            raise EngineLostError("gone")
        count = request.sampling.max_new_tokens
        ids = tuple(range(1, count + 1))
        is_off = self.of_prompts is None or request.prompt_token_ids in self.of_prompts
        logprobs = (*(-t / 10 for t in ids[:-1]), -count / 10 + self.error * is_off)
        yield TokenDelta(ids[:1], logprobs[:1], (Span(self.stamps, 1),))
        yield TokenDelta(ids[1:], logprobs[1:], (Span(self.stamps, count - 1),), "length")


class Teacher:
    def __init__(self) -> None:
        self.num_requested = 0

    async def token_logprobs(
        self, examples: Sequence[tuple[Sequence[int], Sequence[int]]], _routes: object
    ) -> np.ndarray:
        self.num_requested += len(examples)
        return np.array([-t / 10 for _, tokens in examples for t in tokens])


def probe_of(*engines: Answering, dtype: DType = "float32") -> tuple[LogprobParityCheck, Teacher]:
    teacher = Teacher()
    pool = EnginePool(engines, 4)  # type: ignore[arg-type]
    return LogprobParityCheck(pool, teacher, [(5,), (6, 7)], SamplingParams(8), dtype, timeout_s=5.0), teacher


async def test_every_engine_at_the_version_is_compared() -> None:
    probe, teacher = probe_of(Answering(EngineId("a")), Answering(EngineId("b")), Answering(EngineId("old"), version=2))
    assert (await probe.check(3) or 0.0) < 1e-12
    assert teacher.num_requested == 4


@pytest.mark.parametrize("error", [0.01, float("nan")])
async def test_a_difference_names_the_engine_and_both_numbers(error: float) -> None:
    probe, _ = probe_of(Answering(EngineId("a")), Answering(EngineId("b"), error=error))
    with pytest.raises(
        WeightSyncError,
        match=rf"at v3: b gives a token the logprob {-0.8 + error:.4f}, the trainer -0\.8000; the 99% quantile of the "
        rf"difference over 16 tokens is {error:.2g}, of which rounding explains 0\.001\.",
    ):
        await probe.check(3)


@pytest.mark.parametrize(("dtype", "explained", "too_much"), [("float32", 9e-4, 2e-3), ("bfloat16", 0.24, 0.26)])
async def test_what_rounding_explains_depends_on_the_precision(dtype: DType, explained: float, too_much: float) -> None:
    probe, _ = probe_of(Answering(EngineId("a"), error=explained), dtype=dtype)
    assert await probe.check(3) == pytest.approx(explained)
    probe, _ = probe_of(Answering(EngineId("a"), error=too_much), dtype=dtype)
    with pytest.raises(WeightSyncError, match=rf"a gives a token .* rounding explains {TOLERANCE[dtype]:g}\."):
        await probe.check(3)


@pytest.mark.parametrize(("num_prompts", "stops"), [(1, False), (4, True)])
async def test_single_tokens_far_apart_warn_and_many_stop_the_run(
    num_prompts: int, stops: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 256 tokens, those at the ends of one answer or of four differ: 1 or 4 of 256, while 1 % are 2."""
    prompts = [(prompt,) for prompt in range(4)]
    far = {prompts[index] for index in range(num_prompts)}
    engine = Answering(EngineId("a"), error=0.6, of_prompts=far)
    probe = LogprobParityCheck(
        EnginePool([engine], 4),  # type: ignore[arg-type]
        Teacher(),  # type: ignore[arg-type]
        prompts,
        SamplingParams(512),
        "bfloat16",
        timeout_s=5.0,
    )
    if stops:
        with pytest.raises(WeightSyncError, match=r"over 256 tokens is 0\.6, of which rounding explains 0\.25\."):
            await probe.check(3)
        return
    assert await probe.check(3) == pytest.approx(0.6)
    assert "a gives a token the logprob -5.8000, the trainer -6.4000" in caplog.text


async def test_a_lost_engine_and_newer_weights_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    probe, teacher = probe_of(Answering(EngineId("a"), is_lost=True), Answering(EngineId("b"), stamps=4))
    assert await probe.check(3) is None
    assert teacher.num_requested == 0
    assert "4 of 4 answers were lost" in caplog.text
