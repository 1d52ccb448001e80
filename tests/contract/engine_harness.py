"""What the engine contract drives engines with: an oracle, one engine and its versions, and many requests at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import (
    GenerateRequest,
    TokenDelta,
    WeightAck,
    WeightManifest,
)
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.trajectory import FinishReason
from penstock.dataflow.versions import Spans, join_spans, num_tokens
from penstock.rollout.config import EngineConfig
from penstock.rollout.engines.local_engine import EngineSpec, LocalEngine
from penstock.weights.model_config import ModelConfig
from tests.conftest import TinyPublisher

WAIT_S = 60.0
"""Longest wait for anything here; far above what any of it takes."""
JOURNAL_INTERVAL = 16
MAX_NUM_SEQS = 32

Result = TypeVar("Result")
TensorsOfSeed = Callable[[int], dict[str, torch.Tensor]]


async def within(awaitable: Awaitable[Result]) -> Result:
    return await asyncio.wait_for(awaitable, WAIT_S)


def make_spec(
    model: ModelConfig, engine: EngineConfig, update_mode: str, bucket_bytes: int | None = None
) -> EngineSpec:
    return EngineSpec(
        engine_id=EngineId("engine-0"),
        model_path=str(model.path),
        model=model,
        engine=engine,
        device="cpu",
        update_mode=update_mode,  # type: ignore[arg-type]
        seed=7,
        threads=1,
        bucket_bytes=bucket_bytes,
        profile_steps=(1,),
        profile_in=f"{model.path}/profiles",
    )


class Reference:
    """Logprobs by the Hugging Face model itself. Weights are named by the seed of `tiny_tensors`."""

    def __init__(self, model_path: Path, tensors: TensorsOfSeed) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.tensors = tensors

    def logits(self, seed: int, ids: Sequence[int]) -> torch.Tensor:
        """`[len(ids), V] float32` under one version's weights."""
        self._use(seed)
        with torch.no_grad():
            return self._model(torch.tensor([list(ids)])).logits[0]

    def logprobs(self, seed: int, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Of each sampled token, all under one version's weights; `[len(tokens)]`."""
        logits = self.logits(seed, [*prompt, *tokens])[len(prompt) - 1 : -1]
        return _chosen(logits, tokens, temperature)

    def logprobs_with_old_kv(self, seeds: Sequence[int], prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Of each sampled token, by its own version's weights over the KV cache that its predecessors left behind."""
        from transformers import DynamicCache

        inputs = [*prompt, *tokens[:-1]]
        writers = [seeds[0]] * (len(prompt) - 1) + list(seeds)
        cache, logits, start = DynamicCache(), [], 0
        for seed, run in itertools.groupby(writers):
            end = start + len(list(run))
            self._use(seed)
            with torch.no_grad():
                logits.append(self._model(torch.tensor([inputs[start:end]]), past_key_values=cache).logits[0])
            start = end
        return _chosen(torch.cat(logits)[len(prompt) - 1 :], tokens, 1.0)

    def _use(self, seed: int) -> None:
        missing, unexpected = self._model.load_state_dict(self.tensors(seed), strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}  # tied


def _chosen(logits: torch.Tensor, tokens: Sequence[int], temperature: float) -> np.ndarray:
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs[torch.arange(len(tokens)), torch.tensor(list(tokens))].numpy()


@dataclass
class Output:
    """A whole answer, and the deltas it came in."""

    deltas: list[TokenDelta] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for delta in self.deltas for logprob in delta.logprobs]

    @property
    def spans(self) -> Spans:
        return join_spans([span for delta in self.deltas for span in delta.spans])  # raises if a version decreases

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason

    def check_form(self) -> None:
        """What holds for every answer."""
        for delta in self.deltas:
            assert len(delta.token_ids) <= JOURNAL_INTERVAL
            assert len(delta.token_ids) == len(delta.logprobs) == num_tokens(delta.spans)
        assert [delta.finish_reason for delta in self.deltas[:-1]] == [None] * (len(self.deltas) - 1)
        assert self.finish_reason is not None
        assert num_tokens(self.spans) == len(self.token_ids)


@dataclass
class Harness:
    """One engine under test."""

    engine: LocalEngine
    spec: EngineSpec
    reference: Reference
    publish_tiny: TinyPublisher = field(init=False)
    refusal_before_publish: object = None
    seed_of_version: dict[int, int] = field(default_factory=dict)
    _open_requests: set[RequestId] = field(default_factory=set)
    _request_numbers: itertools.count[int] = field(default_factory=itertools.count)

    @classmethod
    async def begin(
        cls,
        engine: LocalEngine,
        spec: EngineSpec,
        reference: Reference,
        connect: Callable[[], Awaitable[TinyPublisher]],
    ) -> Harness:
        """Start the engine, send a request too early, connect a publisher, then publish version 0."""
        harness = cls(engine, spec, reference)
        await asyncio.wait_for(engine.start(), 240)
        assert engine.version == -1
        (harness.refusal_before_publish,) = await asyncio.gather(
            harness.sample([2, 3], max_new_tokens=1), return_exceptions=True
        )
        harness.publish_tiny = await within(connect())
        await harness.publish(seed=0)
        return harness

    @property
    def next_version(self) -> int:
        return max(self.seed_of_version, default=-1) + 1

    def manifest(self, seed: int | None = None) -> WeightManifest:
        """Write the next version; by default with weights that no version before it had."""
        version = self.next_version
        self.seed_of_version[version] = version if seed is None else seed
        return self.publish_tiny(version, self.seed_of_version[version])

    async def publish(self, seed: int | None = None) -> WeightAck:
        return await within(self.engine.update_weights(self.manifest(seed)))

    def damage(self, version: int) -> None:
        """Change one bit in the middle of rank 0's shard of a version, in its version buffer."""
        shard = list(self.publish_tiny.version_buffers.tensors(version, 0).values())
        shard[len(shard) // 2].view(torch.int32)[3] ^= 1

    def request(self, prompt: Sequence[int], **sampling: object) -> GenerateRequest:
        request_id = RequestId(f"request-{next(self._request_numbers)}")
        return GenerateRequest(request_id, tuple(prompt), SamplingParams(**sampling))  # type: ignore[arg-type]

    async def collect(self, request: GenerateRequest) -> Output:
        output = Output()
        async for _ in self.stream(request, output):
            pass
        return output

    async def stream(self, request: GenerateRequest, output: Output) -> AsyncIterator[None]:
        """Fill `output`; yields after each delta."""
        self._open_requests.add(request.request_id)
        async for delta in self.engine.generate(request):
            output.deltas.append(delta)
            yield
        self._open_requests.remove(request.request_id)
        output.check_form()

    async def abort_leftovers(self) -> None:
        """End what a failed test left running, so that the next one starts on an idle engine."""
        while self._open_requests:
            await within(self.engine.abort(self._open_requests.pop()))

    async def sample(self, prompt: Sequence[int], **sampling: object) -> Output:
        return await within(self.collect(self.request(prompt, **sampling)))

    def expected(self, prompt: Sequence[int], output: Output, temperature: float = 1.0) -> np.ndarray:
        """Reference logprobs of an answer that one version wrote."""
        (span,) = output.spans
        return self.reference.logprobs(self.seed_of_version[span.version], prompt, output.token_ids, temperature)


OpenHarness = Callable[..., AbstractAsyncContextManager[Harness]]


def prompt_of(length: int, shift: int = 0) -> list[int]:
    return [2 + (7 * i + 3 * i * i + shift) % 30 for i in range(length)]


class StreamingRequests:
    """Many long requests at once, with a way to wait until every one of them has moved on."""

    def __init__(
        self, harness: Harness, prompts: Sequence[Sequence[int]], max_new_tokens: int, **sampling: float
    ) -> None:
        self.outputs = [Output() for _ in prompts]
        self.requests = [harness.request(prompt, max_new_tokens=max_new_tokens, **sampling) for prompt in prompts]
        self._moved = asyncio.Condition()
        self._tasks = [
            asyncio.create_task(self._follow(harness, request, output))
            for request, output in zip(self.requests, self.outputs, strict=True)
        ]

    async def _follow(self, harness: Harness, request: GenerateRequest, output: Output) -> None:
        async for _ in harness.stream(request, output):
            async with self._moved:
                self._moved.notify_all()

    async def all_moved(self) -> None:
        """Return when every request has sent one more delta than now."""
        targets = [len(output.deltas) + 1 for output in self.outputs]
        async with self._moved:
            await within(
                self._moved.wait_for(
                    lambda: all(len(out.deltas) >= least for out, least in zip(self.outputs, targets, strict=True))
                )
            )

    async def all_finished(self) -> None:
        await within(asyncio.gather(*self._tasks))
