"""A rollout engine of plain torch over a Hugging Face model: for machines without vLLM, and for fast tests.

Consumes generate requests and weight manifests. One dedicated thread decodes; it waits for its inbox when nothing
runs, and empties it between decode steps otherwise: submissions, aborts and weight swaps happen there and nowhere
else, so version stamps are exact and a request in flight is never restarted. The event loop is unblocked once per
decode step, with all deltas that became due.

There is no prefix cache, so there is nothing to salt by version.

A version is verified twice. `_stage` compares the received bytes with the manifest while the old weights still serve,
so a damaged version harms nothing; `swap` reads the live parameters back after copying, so an update that changed other
memory (a copy, an untied head) is detected. In-place updates are compared bucket by bucket in `swap`
(weights/transport/in_place.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.dataflow.errors import ConfigError, EngineLostError, PlacementError, TrajectoryError, WeightSyncError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import EngineLoad, GenerateRequest, TokenDelta, WeightAck, WeightManifest
from penstock.envs.endpoint.answer_parser import ParsedAnswer, ParserNames, SampledTurn
from penstock.kernels.expert_choice import routers_of
from penstock.kernels.float32_head import use_float32_head
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engines.busy_clock import BusyClock
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.torch.cache import SlotCache
from penstock.rollout.engines.torch.decode_thread import DecodeThread
from penstock.rollout.engines.torch.decoding import BatchLimits, DecodeBatch, Deltas, RunningRequest
from penstock.rollout.engines.torch.support import ATTENTION
from penstock.weights.checksum import combine_checksums, entry_key, tensor_checksum
from penstock.weights.copies import copy_values
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.layout.algebra import Layout, TensorSpec
from penstock.weights.layout.checkpoint_names import loading_arguments
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.model_config import DType
from penstock.weights.transport.adapters import BaseWeights, entries_of
from penstock.weights.transport.device_memory import VersionBuffer, VersionBufferHandle, version_buffer_for
from penstock.weights.transport.in_place import IN_PLACE, ShardChunks
from penstock.weights.transport.process_group.endpoints import DeviceReceiver, TransferGroupSpec
from penstock.weights.transport.shards import forget_mappings, read_shard
from penstock.weights.transport.shared_memory import read_version

UNPUBLISHED = -1
SHUTDOWN_TIMEOUT_S = 5.0
Result = TypeVar("Result")
Told = TypeVar("Told")
StagedTensors = dict[str, torch.Tensor]
Incoming = Callable[[Mapping[str, torch.Tensor]], None]
"""Writes a version into live parameters bucket by bucket: name -> flat tensor (weights/transport/in_place.py)."""


class TorchEngine:
    """`LocalEngine` over a Hugging Face causal language model.

    Attributes:
        version: The policy version this engine has acknowledged; -1 before the first publish.
    """

    def __init__(self, spec: EngineSpec) -> None:
        assert isinstance(spec.engine, TorchEngineConfig)
        self.engine_id: EngineId = spec.engine_id
        self._spec = spec
        self._config = spec.engine
        self.version = UNPUBLISHED
        self._base = BaseWeights(rank=0)
        self._version_buffer: VersionBuffer | None = None
        self._device_receiver: DeviceReceiver | None = None
        self._busy = BusyClock()
        self._streams: dict[RequestId, asyncio.Queue[TokenDelta | EngineLostError]] = {}
        self._updating = asyncio.Lock()
        self._lost: str | None = "not started"
        self._is_asleep = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._decoder: DecodeThread | None = None

    async def start(self) -> None:
        """Load the model and start the decode thread."""
        batch = await asyncio.to_thread(load_batch, self._spec, self._config)
        self._loop = asyncio.get_running_loop()
        deliver, lose = partial(self._tell, self._deliver), partial(self._tell, self._lose)
        self._decoder = DecodeThread(batch, self._spec.threads, on_deltas=deliver, on_lost=lose)
        self._decoder.start()
        self._lost = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Stream the continuation of `request` as deltas of at most `journal_interval_tokens` tokens.

        Leaving the iterator early aborts the request.

        Raises:
            EngineLostError: Before the first acknowledged version (I8), or when the decode thread has failed or ended.
            TrajectoryError: kind `engine`, if the prompt is empty, fills the context or holds unknown ids.
        """
        decoder = self._open()
        self._check_request(request)
        running = RunningRequest.of(request, decoder.batch.limits)
        stream: asyncio.Queue[TokenDelta | EngineLostError] = asyncio.Queue()
        self._streams[request.request_id] = stream
        self._busy.enter()
        is_over = False
        try:
            decoder.call(lambda batch: batch.submit(running))
            while not is_over:
                item = await stream.get()
                if isinstance(item, EngineLostError):
                    raise item
                is_over = item.finish_reason is not None
                yield item
        finally:
            self._busy.leave()
            del self._streams[request.request_id]
            if not is_over:
                with suppress(EngineLostError):
                    decoder.abort(request.request_id)

    async def abort(self, request_id: RequestId) -> None:
        """Stop one request: its iterator ends with finish reason `abort` and the tokens so far. Unknown: a no-op."""
        if request_id in self._streams:
            await asyncio.wrap_future(self._open().abort(request_id))

    async def load(self) -> EngineLoad:
        """A snapshot; never waits for the decode thread."""
        batch = self._decoder.batch if self._decoder else None
        num_running = len(batch.running) if batch else 0
        return EngineLoad(
            version=self.version,
            num_running=num_running,
            num_waiting=max(len(self._streams) - num_running, 0),
            kv_cache_usage=batch.kv_cache_usage if batch else 0.0,
            tokens_generated=batch.tokens_generated if batch else 0,
            busy_s=self._busy.seconds,
            request_s=self._busy.request_seconds,
        )

    async def update_weights(self, manifest: WeightManifest) -> WeightAck:
        """Swap to `manifest` between two decode steps; requests in flight continue. See `LocalEngine`."""
        async with self._updating:
            started = time.monotonic()
            staged, sums = await asyncio.to_thread(self._stage, manifest)
            stage_s = time.monotonic() - started
            checksum, stall_s = await self._between_steps(lambda batch: self._swap(batch, staged, sums))
            if manifest.adapters is not None:
                checksum = manifest.checksum  # base, adapters and merged weights were each compared
            return WeightAck(self.engine_id, manifest.version, checksum, stage_s, stall_s)

    async def layout(self, tensors: Sequence[TensorSpec]) -> Layout:
        """Whole, under the trainer's own names. See `LocalEngine`."""
        return TrainingSharding(tuple(tensors)).layout()

    async def profile(self, name: str, seconds: float) -> None:
        """See `LocalEngine`."""
        profile = torch.profiler.profile()
        await self._between_steps(lambda _: profile.start())  # it records the thread that starts it
        try:
            await asyncio.sleep(seconds)
        finally:
            await self._between_steps(lambda _: profile.stop())
        path = Path(self._spec.profile_in) / f"{name}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(profile.export_chrome_trace, str(path))

    async def forget_versions(self) -> None:
        """See `LocalEngine`."""
        async with self._updating:  # an abandoned update may still be running
            for request_id in list(self._streams):
                await self.abort(request_id)
            await self._between_steps(lambda batch: setattr(batch, "version", UNPUBLISHED))
            self.version = UNPUBLISHED
            forget_mappings()

    async def make_version_buffers(
        self, buffers: Sequence[Mapping[str, int]], dtype: DType, num_writers: int
    ) -> list[list[VersionBufferHandle]]:
        """Allocate a version buffer in device memory. See `LocalEngine`."""
        (sizes,) = buffers
        device, known = torch.device(self._spec.device), self._version_buffer
        buffer = await asyncio.to_thread(version_buffer_for, known, sizes, TORCH_DTYPES[dtype], device)
        self._version_buffer = buffer
        return [buffer.handles(num_writers)]

    async def join_transfer_group(self, group_spec: TransferGroupSpec, replica: int) -> None:
        """See `LocalEngine`."""
        async with self._updating:  # an abandoned in-place update may still be running
            receiver = self._device_receiver or DeviceReceiver(0, torch.device(self._spec.device))
            self._device_receiver = receiver
            self._version_buffer = await asyncio.to_thread(receiver.join, group_spec, replica, self._version_buffer)

    async def receive(self, version: int) -> None:
        """See `LocalEngine`."""
        assert self._device_receiver is not None, "join_transfer_group comes first"
        await asyncio.to_thread(self._device_receiver.receive, version)

    async def parse_answer(self, turn: SampledTurn, names: ParserNames) -> ParsedAnswer:  # noqa: ARG002 - as vLLM's
        raise ConfigError([f"env.tool_calls={names.tool_calls}: {self.engine_id} is of torch, which has no parsers."])

    async def find_parsers(self, turns: Sequence[tuple[SampledTurn, ParsedAnswer]]) -> list[str]:  # noqa: ARG002
        return []

    async def sleep(self) -> None:
        """Give the KV cache back and, on an accelerator, move the weights to host memory.

        Raises:
            PlacementError: If requests are open.
        """
        if self._streams:
            raise PlacementError(
                f"{self.engine_id}: asked to sleep with {len(self._streams)} open requests; they would be lost. "
                "Wait for them or abort them first."
            )
        self._is_asleep = True
        await self._between_steps(lambda batch: _move(batch, "cpu"))

    async def wake(self) -> None:
        """Undo `sleep`. The version is unchanged; an update while asleep has reached the same parameters."""
        await self._between_steps(lambda batch: _move(batch, self._spec.device))
        self._is_asleep = False

    async def shutdown(self) -> None:
        """End the decode thread within 5 s and fail what is pending. Idempotent."""
        self._lose("shut down")
        if self._decoder is not None:
            decoder, self._decoder = self._decoder, None
            await asyncio.to_thread(decoder.stop, SHUTDOWN_TIMEOUT_S)

    def _open(self) -> DecodeThread:
        if self._lost is not None or self._decoder is None:
            raise EngineLostError.final(f"{self.engine_id}: {self._lost}")
        return self._decoder

    async def _between_steps(self, action: Callable[[DecodeBatch], Result]) -> Result:
        return await asyncio.wrap_future(self._open().call(action))

    def _check_request(self, request: GenerateRequest) -> None:
        if self.version == UNPUBLISHED:
            raise EngineLostError(f"{self.engine_id}: asked to generate before any weights were published (I8)")
        if self._is_asleep:
            raise PlacementError(f"{self.engine_id}: asked to generate while asleep. Wake it first.")
        assert request.request_id not in self._streams, f"request id {request.request_id} is already open"
        prompt, limit = request.prompt_token_ids, self._spec.model.max_context_tokens
        if not 0 < len(prompt) < limit:
            raise TrajectoryError(
                "engine",
                f"prompt of {len(prompt)} tokens; model.max_context_tokens={limit} allows 1 to {limit - 1}",
                is_final=True,
            )
        vocab_size = self._spec.model.shape.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise TrajectoryError(
                "engine", f"prompt holds token id {max(prompt)}; the vocabulary has {vocab_size}", is_final=True
            )

    def _stage(self, manifest: WeightManifest) -> tuple[StagedTensors | Incoming, WeightManifest]:
        """Read a version and check names, shapes and bytes. The model is not touched.

        Returns:
            HF name -> tensor in the wire dtype, in its version buffer or on the CPU, or a function that writes the
            version in place; and the manifest of the expected parameters.

        Raises:
            WeightSyncError: If a tensor is unknown, absent, of another shape, or differs from the manifest.
        """
        where = f"publish v{manifest.version} on {self.engine_id}"
        live = _parameters(self._open().batch.model)
        if manifest.adapters is not None:
            merged = self._base.merge(manifest, live, torch.device("cpu"))
            entries = entries_of(manifest, 0, merged)
            checksum = combine_checksums((entry_key(entry.rank, entry.name), entry.checksum) for entry in entries)
            sums = replace(manifest, entries=entries, checksum=checksum)
            return {name: values.view(live[name].shape) for name, values in merged.items()}, sums
        _check_entries(live, manifest, where)
        names = {entry.name for entry in manifest.entries}
        unknown = sorted(names - live.keys())
        if unknown:
            raise WeightSyncError(
                f"{where}: the policy has no parameter {unknown[0]} ({len(unknown)} such). Is it of another model?"
            )
        covered = {id(live[name]) for name in names}
        absent = [name for name, parameter in live.items() if id(parameter) not in covered]
        if absent:
            raise WeightSyncError(
                f"{where}: {len(absent)} of {len(live)} parameters are not in the manifest, first {absent[0]}. "
                "They would keep old weights. Publish whole versions."
            )
        if manifest.location == IN_PLACE:
            if self._device_receiver is None:
                raise WeightSyncError(f"{where}: it is sent in place, but this engine has joined no transfer group.")
            return partial(self._device_receiver.receive_in_place, manifest.version, manifest.bucket_sums), manifest
        shard = read_shard(manifest, 0, self._version_buffer) if manifest.num_shards else read_version(manifest)
        staged = dict(shard)
        if self._spec.bucket_bytes is not None and manifest.num_shards:
            device = next(iter(live.values())).device
            chunks = ShardChunks(staged, manifest.entries, manifest.version, self._spec.bucket_bytes, device)
            return chunks.apply, manifest
        for name, tensor in staged.items():
            staged[name] = tensor.view(live[name].shape)
        _compare(staged, manifest, f"{where}: received")
        return staged, manifest

    def _swap(
        self, batch: DecodeBatch, staged: StagedTensors | Incoming, manifest: WeightManifest
    ) -> tuple[int, float]:
        """Runs in the decode thread. If the read-back fails, or the version was applied only in part, decoding stays
        frozen until a later update succeeds (I8).
        """
        started = time.monotonic()
        if manifest.version < batch.version and batch.has_requests:
            raise WeightSyncError(
                f"publish v{manifest.version} on {self.engine_id}: it serves v{batch.version} and has requests in "
                "flight, whose versions would decrease (I4). Abort them first."
            )
        batch.is_frozen = True
        try:
            checksum = swap(batch.model, staged, manifest, self.engine_id)
            batch.version = manifest.version
            if self._spec.update_mode == "recompute_kv":
                batch.recompute()
            batch.is_frozen = False
        finally:
            # Reported here and not by update_weights, which may have been cancelled.
            self._tell(self._serve, UNPUBLISHED if batch.is_frozen else batch.version)
        return checksum, time.monotonic() - started

    def _serve(self, version: int) -> None:
        self.version = version

    def _tell(self, callback: Callable[[Told], None], what: Told) -> None:
        """From the decode thread to the event loop, which is woken up once for all deltas of a step."""
        assert self._loop is not None, "the decode thread starts after the loop is known"
        with suppress(RuntimeError):  # the event loop is closed, so no request is waiting
            self._loop.call_soon_threadsafe(callback, what)

    def _deliver(self, deltas: Deltas) -> None:
        for request_id, delta in deltas:
            if request_id in self._streams:
                self._streams[request_id].put_nowait(delta)

    def _lose(self, reason: str) -> None:
        """Fail everything pending, in the event loop. The first reason stays."""
        if self._lost is None:
            self._lost = reason
        for stream in self._streams.values():
            stream.put_nowait(EngineLostError.final(f"{self.engine_id}: {self._lost}"))


def load_batch(spec: EngineSpec, config: TorchEngineConfig) -> DecodeBatch:
    """Load the model of `spec` and build an empty batch over it.

    Whether the slot cache computes its class within the context has been asked before (support.py).
    """
    dtype, shape = TORCH_DTYPES[spec.model.dtype], spec.model.shape
    own = loading_arguments(AutoConfig.from_pretrained(spec.model_path))
    model = AutoModelForCausalLM.from_pretrained(spec.model_path, dtype=dtype, attn_implementation=ATTENTION, **own)
    if spec.model.head_dtype == "float32":
        use_float32_head(model)
    if config.deterministic and routers_of(model):
        model.set_experts_implementation("batched_mm")  # grouped by expert, a token's result depends on other rows'
    model = model.to(spec.device).eval().requires_grad_(requires_grad=False)
    cache = SlotCache(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype, spec.device)
    limits = BatchLimits(
        max_num_seqs=config.max_num_seqs,
        max_context_tokens=spec.model.max_context_tokens,
        journal_interval_tokens=config.journal_interval_tokens,
        device=spec.device,
        deterministic=config.deterministic,
    )
    return DecodeBatch(model, cache, spec.seed, limits, records_routes=spec.records_routes)


def _move(batch: DecodeBatch, device: str) -> None:
    """Drop the KV cache and move the weights; the parameters stay the same objects."""
    batch.cache.clear()
    batch.model.to(device)
    if batch.limits.device == "cuda":
        torch.cuda.empty_cache()


def _check_entries(live: Mapping[str, nn.Parameter], manifest: WeightManifest, where: str) -> None:
    """Compare what is announced with what the model has, before a byte of it is read."""
    for entry in manifest.entries:
        if entry.name not in live:
            continue  # all of those are named together
        shape, dtype = live[entry.name].shape, live[entry.name].dtype
        if prod(entry.shape) != shape.numel() or (not manifest.num_shards and entry.shape != tuple(shape)):
            raise WeightSyncError(
                f"{where}: {entry.name} has shape {entry.shape}, not {tuple(shape)}. Another model is published."
            )
        if TORCH_DTYPES[entry.dtype] != dtype:
            raise WeightSyncError(
                f"{where}: {entry.name} is published in {entry.dtype}, and the engine has it in {dtype}: the trainer "
                "and the engines have another model.dtype."
            )


@torch.no_grad()
def swap(model: nn.Module, staged: StagedTensors | Incoming, manifest: WeightManifest, engine_id: EngineId) -> int:
    """Copy staged tensors into the live parameters, or apply a version in place, and read the parameters back.

    Returns:
        The combined checksum of the live parameters.

    Raises:
        WeightSyncError: If a live parameter differs from the manifest, or a bucket is damaged or missing. The model
            then holds weights of no version.
    """
    live = _parameters(model)
    if isinstance(staged, dict):
        for name, tensor in staged.items():
            copy_values(live[name], tensor)
    else:
        staged({entry.name: live[entry.name].view(-1) for entry in manifest.entries})
    return _compare(live, manifest, f"publish v{manifest.version} on {engine_id}: live")


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by every name: a tied `lm_head.weight` is listed as well as the embedding it shares."""
    return dict(model.named_parameters(remove_duplicate=False))


def _compare(tensors: StagedTensors | dict[str, nn.Parameter], manifest: WeightManifest, what: str) -> int:
    """Compare each tensor's bytes, in the wire dtype, with the manifest; return the combined checksum."""
    found: list[tuple[str, int]] = []
    for entry in manifest.entries:
        checksum = tensor_checksum(tensors[entry.name].detach().to(TORCH_DTYPES[entry.dtype]))
        if checksum != entry.checksum:
            raise WeightSyncError(
                f"{what} {entry.name} checksum differs ({checksum:x} != {entry.checksum:x} in the manifest)."
            )
        found.append((entry_key(entry.rank, entry.name), checksum))
    combined = combine_checksums(found)
    if combined != manifest.checksum:
        raise WeightSyncError(f"{what} all tensors: combined checksum differs ({combined:x} != {manifest.checksum:x}).")
    return combined
