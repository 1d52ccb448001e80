"""vLLM as a rollout engine: token-in token-out, versions recorded by the engine, weights swapped in flight.

Consumes generate requests and weight manifests. A weight update pauses the scheduler and keeps its requests, swaps the
weights, reads them back, and resumes: a request in flight continues from its tokens. The engine serves nothing before
the first acknowledged version (I8).
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerBase

from penstock.dataflow.errors import EngineLostError, TrajectoryError, WeightSyncError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import (
    EngineLoad,
    GenerateRequest,
    TensorEntry,
    TokenDelta,
    WeightAck,
    WeightManifest,
)
from penstock.dataflow.trajectory import Alternatives, FinishReason, Routes
from penstock.dataflow.versions import Span, Spans, join_spans
from penstock.envs.endpoint.answer_parser import ParsedAnswer, ParserNames, SampledTurn
from penstock.rollout.config import VllmEngineConfig
from penstock.rollout.engines.busy_clock import BusyClock
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.vllm.answer_parser import VllmAnswerParser, parsers_that_read
from penstock.rollout.engines.vllm.arguments import USAGE, engine_args
from penstock.rollout.engines.vllm.channel import WorkerCalls
from penstock.rollout.engines.vllm.layout import joined
from penstock.rollout.engines.vllm.routes import ReceivedRoutes
from penstock.weights.checksum import combine_checksums, entry_key
from penstock.weights.layout.algebra import Layout, TensorSpec
from penstock.weights.model_config import DType
from penstock.weights.transport.device_memory import VersionBufferHandle
from penstock.weights.transport.in_place import IN_PLACE
from penstock.weights.transport.process_group.endpoints import TransferGroupSpec

UNPUBLISHED = -1
PROFILED_STEPS = 256
"""Steps of the engine in one profile: writing a long one would keep a publish waiting."""
MAX_LOST_PROBABILITY = 1e-3
"""Of tokens that a truncated distribution kept and that vLLM did not list; rounding in float32 explains 1e-5."""


class CacheUsage(StatLoggerBase):
    """Keeps the newest scheduler figures instead of logging them."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:  # noqa: ARG002 - vLLM's signature
        self.kv_cache_usage = 0.0
        self.num_waiting = 0
        self.num_preemptions = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_args: Any, **_kwargs: Any) -> None:
        if scheduler_stats is not None:
            self.kv_cache_usage = scheduler_stats.kv_cache_usage
            self.num_waiting = scheduler_stats.num_waiting_reqs
        if iteration_stats is not None:
            self.num_preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        pass


class VllmEngine:
    """`LocalEngine` over vLLM's AsyncLLM.

    Attributes:
        version: The policy version this engine has acknowledged; -1 before the first publish.
    """

    def __init__(self, spec: EngineSpec) -> None:
        assert isinstance(spec.engine, VllmEngineConfig)
        self.engine_id: EngineId = spec.engine_id
        self._spec = spec
        self._config = spec.engine
        self.version = UNPUBLISHED
        self._ack: WeightAck | None = None
        self._tokens_generated = 0
        self._busy = BusyClock()
        self._updating = asyncio.Lock()
        self._usage: CacheUsage | None = None
        self._llm: AsyncLLM | None = None
        self._calls: WorkerCalls | None = None
        self._routes: ReceivedRoutes | None = None
        self._parsers: dict[ParserNames, VllmAnswerParser] = {}

    async def start(self) -> None:
        """Load the model. vLLM starts its output loop in the running event loop."""

        def usage_logger(vllm_config: Any, engine_index: int) -> CacheUsage:
            self._usage = CacheUsage(vllm_config, engine_index)
            return self._usage

        args = engine_args(self._spec, self._config)
        self._llm = AsyncLLM.from_engine_args(args, usage_context=USAGE, stat_loggers=[usage_logger])
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        self._calls = WorkerCalls(self.engine_id, dict(await self._llm.collective_rpc("penstock_serve")))
        if self._spec.records_routes:
            (layers, *_) = await self._llm.collective_rpc("penstock_record_routes")
            if layers:
                num_experts = self._llm.model_config.get_num_experts()
                self._routes = ReceivedRoutes(self._llm.output_processor, layers, num_experts)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Stream the continuation of `request` as deltas of at most `journal_interval_tokens` tokens.

        Raises:
            EngineLostError: Before the first acknowledged version (I8), or when the engine core died.
            TrajectoryError: kind `engine`, if vLLM refuses this request or fails over it, and serves the others.
        """
        if self._updating.locked():
            async with self._updating:  # a request that arrives during an update waits for the new version
                pass
        if self.version == UNPUBLISHED:
            raise EngineLostError(f"{self.engine_id}: asked to generate before any weights were published (I8)")
        # Of this type vLLM encodes nothing, and so does not pass it through a thread.
        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=f"v{self.version}")
        progress = 0
        if self._routes is not None:
            self._routes.open(request.request_id)
        self._busy.enter()
        try:
            async for output in self._open().generate(prompt, self._sampling(request), request.request_id):
                delta = self._delta(request, output, progress)
                progress += len(delta.token_ids)
                self._tokens_generated += len(delta.token_ids)
                for piece in split(delta, self._config.journal_interval_tokens):
                    yield piece
        except (EngineLostError, TrajectoryError):
            raise
        except Exception as error:
            raise self._classified(error, request) from error
        finally:
            self._busy.leave()
            if self._routes is not None:
                self._routes.close(request.request_id)

    def _classified(self, error: Exception, request: GenerateRequest) -> EngineLostError | TrajectoryError:
        """Classify an error of vLLM: it is dead, or only this request has failed. A refused request is final."""
        if isinstance(error, EngineDeadError) or self._llm is None or self._llm.errored:
            return EngineLostError.final(f"{self.engine_id}: the vLLM engine core died")
        cause = error.__cause__ if isinstance(error, EngineGenerateError) and error.__cause__ else error
        return TrajectoryError(
            "engine",
            f"{self.engine_id}: vLLM cannot answer {request.request_id}, {len(request.prompt_token_ids)} tokens at "
            f"model.max_context_tokens={self._spec.model.max_context_tokens}: {type(cause).__name__}: {cause}",
            is_final=isinstance(cause, (VLLMClientError, ValueError, TypeError)),
        )

    async def abort(self, request_id: RequestId) -> None:
        """Stop one request; its generator ends with finish reason `abort` and the tokens so far."""
        await self._open().abort(request_id)

    async def load(self) -> EngineLoad:
        waiting = self._usage.num_waiting if self._usage else 0
        return EngineLoad(
            version=self.version,
            num_running=max(self._busy.active - waiting, 0),
            num_waiting=waiting,
            kv_cache_usage=self._usage.kv_cache_usage if self._usage else 0.0,
            tokens_generated=self._tokens_generated,
            busy_s=self._busy.seconds,
            request_s=self._busy.request_seconds,
            num_preemptions=self._usage.num_preemptions if self._usage else 0,
        )

    async def update_weights(self, manifest: WeightManifest) -> WeightAck:
        """Swap to `manifest` under pause, verify by reading back, resume. See `LocalEngine`."""
        async with self._updating:
            if self._ack is not None and manifest.version == self.version:
                return self._ack
            started = time.monotonic()
            entries = await self._stage(manifest)
            staged = time.monotonic()
            checksum, stall_s = await self._swap(replace(manifest, entries=entries))
            self._ack = WeightAck(self.engine_id, manifest.version, checksum, staged - started, stall_s)
            return self._ack

    async def _stage(self, manifest: WeightManifest) -> tuple[TensorEntry, ...]:
        """Let the workers fetch and check their shards while requests run; returns the expected parameters.

        Raises:
            WeightSyncError: If the engine cannot take the version, or received other bytes than were sent.
        """
        what = f"publish v{manifest.version}: staging"
        found = await self._workers("penstock_stage", what, manifest, self._spec.bucket_bytes)
        return manifest.entries if manifest.location == IN_PLACE else tuple(entry for one in found for entry in one)

    async def _workers(self, method: str, what: str, *arguments: Any) -> list[Any]:
        """Call a method of all workers that does not wait for the engine's step."""
        assert self._calls is not None, "not started"
        return await self._calls.call(what, self._spec.stage_timeout_s, method, *arguments)

    async def _swap(self, manifest: WeightManifest) -> tuple[int, float]:
        """Freeze, take the new weights, read them back, resume; returns their checksum and the seconds it was frozen.

        The pause begins when the running step of the engine has ended.
        """
        llm = self._open()
        await llm.pause_generation(mode="keep", clear_cache=self._spec.update_mode == "recompute_kv")
        frozen = time.monotonic()
        self.version, self._ack = UNPUBLISHED, None  # after a failure from here on the engine stays paused
        if manifest.location == IN_PLACE:
            await self._workers("penstock_receive_in_place", f"publish v{manifest.version}: receiving in place")
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info={"version": manifest.version}))
        answers = await llm.collective_rpc("penstock_live_checksums")
        live: dict[tuple[int, str], int] = {}
        for packed, _ in answers:
            live |= pickle.loads(packed)  # noqa: S301 - from our own workers
        # Finish a bad update too, so that another one may follow.
        await llm.finish_weight_update(weight_version=str(manifest.version))
        if wrong := [problem for _, problem in answers if problem]:
            raise WeightSyncError(f"publish v{manifest.version}: {self.engine_id}: {wrong[0]}")
        checksum = self._verify(manifest, live)  # a mismatch leaves the engine paused: wrong weights serve nothing
        self.version = manifest.version
        await llm.resume_generation()
        return checksum, time.monotonic() - frozen

    async def profile(self, name: str, seconds: float) -> None:
        """See `LocalEngine`."""
        llm = self._open()
        await llm.start_profile(profile_prefix=name, max_iterations=PROFILED_STEPS)
        try:
            await asyncio.sleep(seconds)
        finally:
            await llm.stop_profile()

    async def forget_versions(self) -> None:
        """See `LocalEngine`."""
        async with self._updating:
            llm = self._open()
            await llm.pause_generation(mode="abort", clear_cache=True)
            self.version, self._ack = UNPUBLISHED, None
            await llm.collective_rpc("penstock_forget_versions")
            await llm.resume_generation()

    async def layout(self, tensors: Sequence[TensorSpec]) -> Layout:
        """Trace each worker's loader on the meta device. See `LocalEngine`."""
        rows = [(name, list(shape)) for name, shape in tensors]
        answers = await self._open().collective_rpc("penstock_layout", args=(rows, self._spec.model.dtype))
        if refusals := [refusal for _, refusal, _ in answers if refusal]:
            raise WeightSyncError(f"{self.engine_id}: {refusals[0]}")
        return joined([pickle.loads(packed) for _, _, packed in sorted(answers)])  # noqa: S301 - from our own workers

    async def make_version_buffers(
        self, buffers: Sequence[Mapping[str, int]], dtype: DType, num_writers: int
    ) -> list[list[VersionBufferHandle]]:
        """Allocate memory on the workers' devices, into which versions are written. See `LocalEngine`."""
        answers = await self._open().collective_rpc(
            "penstock_make_version_buffer", args=(list(buffers), dtype, num_writers)
        )
        if refusals := [refusal for _, refusal, _ in answers if refusal]:
            raise WeightSyncError(f"{self.engine_id}: {refusals[0]}")
        return [[VersionBufferHandle(*row) for row in rows] for _, _, rows in sorted(answers)]

    async def join_transfer_group(self, group_spec: TransferGroupSpec, replica: int) -> None:
        """See `LocalEngine`."""
        await self._workers("penstock_join", "weights: joining the transfer group", group_spec, replica)

    async def receive(self, version: int) -> None:
        """See `LocalEngine`."""
        await self._workers("penstock_receive", f"publish v{version}: receiving", version)

    async def parse_answer(self, turn: SampledTurn, names: ParserNames) -> ParsedAnswer:
        """In a thread, since a parser of many thousand characters takes tenths of a second. See `LocalEngine`."""
        if names not in self._parsers:
            self._parsers[names] = VllmAnswerParser(self._open().get_tokenizer(), names)
        return await asyncio.to_thread(self._parsers[names].parse, turn)

    async def find_parsers(self, turns: Sequence[tuple[SampledTurn, ParsedAnswer]]) -> list[str]:
        """See `LocalEngine`."""
        return await asyncio.to_thread(parsers_that_read, self._open().get_tokenizer(), turns)

    async def sleep(self) -> None:
        """Level 1: weights move to host memory, the KV cache is given back. Level 2 would lose weights."""
        await self._open().sleep(level=1, mode="wait")

    async def wake(self) -> None:
        await self._open().wake_up()

    async def shutdown(self) -> None:
        if self._calls is not None:
            self._calls.close()
            self._calls = None
        if self._llm is not None:
            self._llm.shutdown(timeout=5.0)
            self._llm = None

    def _open(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineLostError(f"{self.engine_id}: not started, or shut down")
        return self._llm

    def _sampling(self, request: GenerateRequest) -> VllmSamplingParams:
        sampling = request.sampling
        return VllmSamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # only what the request names stops it
            seed=sampling.seed,
            logprobs=sampling.top_k if sampling.is_truncated else 0,
            flat_logprobs=sampling.is_truncated,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=self._config.journal_interval_tokens,
            routed_experts_prompt_start=request.routes_from,
        )

    def _delta(self, request: GenerateRequest, output: RequestOutput, progress: int) -> TokenDelta:
        request_id, completion = request.request_id, output.outputs[0]
        ids, reason = tuple(completion.token_ids), completion.finish_reason
        alternatives = None
        if isinstance(completion.logprobs, FlatLogprobs):
            logprobs, alternatives = support(completion.logprobs, f"{self.engine_id}: {request_id}")
        else:
            logprobs = tuple(step[token].logprob for step, token in zip(completion.logprobs or (), ids, strict=True))
        spans = self._stamps(request_id, output, progress, progress + len(ids))
        known: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
        finish_reason = None if reason is None else known.get(reason, "abort")
        routes = None
        if self._routes is not None and ids:
            of_prompt = 0 if progress else len(request.prompt_token_ids) - 1 - request.routes_from
            routes = self._routes.take(request_id, of_prompt + len(ids))
        return TokenDelta(ids, logprobs, spans, finish_reason, alternatives, routes)

    def _stamps(self, request_id: RequestId, output: RequestOutput, start: int, end: int) -> Spans:
        """Versions of output tokens start..end, from vLLM's own label of each engine step.

        vLLM returns the labels with the final output only. For earlier deltas, the same record is read from its output
        processor (private API of the pinned version).
        """
        if start == end:
            return ()
        final = output.outputs[0].weight_versions
        if final is not None:
            starts = [(int(span.version), span.start) for span in final]
        else:
            processor = self._open().output_processor
            state = processor.request_states[processor.external_req_ids[request_id][0]]
            starts = [(int(version), first) for version, first in state.weight_version_starts]
        ends = [first for _, first in starts[1:]] + [end]
        spans = [
            Span(version, max(min(last, end) - max(first, start), 0))
            for (version, first), last in zip(starts, ends, strict=True)
        ]
        return join_spans(spans)

    def _verify(self, manifest: WeightManifest, live: dict[tuple[int, str], int]) -> int:
        """Compare every entry with the live parameters; returns the checksum of all."""
        for entry in manifest.entries:
            if live[entry.rank, entry.name] != entry.checksum:
                raise WeightSyncError(
                    f"publish v{manifest.version}: {entry.name} checksum differs on {self.engine_id} "
                    f"({live[entry.rank, entry.name]:x} != {entry.checksum:x}). The engine stays paused and serves "
                    "nothing."
                )
        if manifest.adapters is not None:
            return manifest.checksum  # the base, the adapters and their sums were each compared
        return combine_checksums((entry_key(rank, name), checksum) for (rank, name), checksum in live.items())


def split(delta: TokenDelta, most: int) -> list[TokenDelta]:
    """Cut a delta into pieces of at most `most` tokens (vLLM merges deltas that wait for a slow consumer)."""
    if len(delta.token_ids) <= most:
        return [delta]
    versions = [span.version for span in delta.spans for _ in range(span.num_tokens)]
    starts = range(0, len(delta.token_ids), most)
    ends = [*starts[1:], len(delta.token_ids)]
    routes: list[Routes | None] = [None] * len(starts)
    if delta.routes is not None:  # those of the prompt come with the first piece
        routes = list(np.split(delta.routes, [len(delta.routes) - len(delta.token_ids) + end for end in ends[:-1]]))
    return [
        TokenDelta(
            token_ids=delta.token_ids[start : start + most],
            logprobs=delta.logprobs[start : start + most],
            spans=join_spans([Span(version, 1) for version in versions[start : start + most]]),
            finish_reason=delta.finish_reason if start == starts[-1] else None,
            alternatives=delta.alternatives and delta.alternatives.part(start, start + most),
            routes=of_piece,
        )
        for start, of_piece in zip(starts, routes, strict=True)
    ]


def support(listed: FlatLogprobs, where: str) -> tuple[tuple[float, ...], Alternatives]:
    """Logprobs of the tokens of a truncated request, and their alternatives.

    For each token, vLLM lists the sampled id and then the top-k, −∞ where top-p or min-p removed one. The sampled id is
    listed twice, or once if vLLM has joined outputs that were not fetched in time. Of all ids that tie with the k-th,
    which vLLM keeps, only k are listed: then the listed probabilities do not sum to 1.

    Args:
        listed: As returned.
        where: Begin of the message.

    Raises:
        TrajectoryError: kind `engine`, if ids that could have been sampled are not listed.
    """
    ids, logprobs = np.array(listed.token_ids, np.int32), np.array(listed.logprobs, np.float64)
    starts = np.array(listed.start_indices, np.int64)
    sizes = np.diff(starts, append=len(ids))
    token_of = np.repeat(np.arange(len(starts)), sizes)
    is_other = np.isfinite(logprobs) & (ids != ids[starts][token_of])
    others = token_of[is_other]
    kept = np.exp(logprobs[starts]) + np.bincount(others, np.exp(logprobs[is_other]), len(starts))
    if np.any(np.abs(kept - 1.0) > MAX_LOST_PROBABILITY):
        raise TrajectoryError(
            "engine",
            f"{where}: the listed tokens of a truncated distribution have a probability of "
            f"{kept[np.abs(kept - 1.0).argmax()]:.4f}, not 1: others tie with the least likely one. The trainer could "
            "not renormalise over them. Use another rollout.sampling.top_k.",
        )
    counts = np.bincount(others, minlength=len(starts)).astype(np.int32)
    return tuple(logprobs[starts].tolist()), Alternatives(ids[is_other], counts)
