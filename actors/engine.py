"""The Ray actor around one rollout engine: requests come in batches, deltas leave in batches.

Two calls carry all traffic. `submit` takes every request of one tick of the driver's loop; `collect`
is a long poll that returns whatever all requests sampled since the last one. So the cost in Ray
calls does not grow with the number of trajectories. The outbox is bounded by what the submitted
requests may sample; the client keeps their number within the engine's slots.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import ray

from penstock.dataflow.errors import EngineLostError, PenstockError, TrajectoryError
from penstock.dataflow.ids import RequestId
from penstock.dataflow.ports import EngineLoad, GenerateRequest, TokenDelta, WeightAck, WeightManifest
from penstock.rollout.local_engine import EngineSpec, LocalEngine
from penstock.weights.layout.algebra import Layout, TensorSpec
from penstock.weights.model_config import DType
from penstock.weights.transport.crossing import Crossing
from penstock.weights.transport.device_memory import SlotHandle
from penstock.weights.transport.shared_memory import private_directory

Answer = TokenDelta | EngineLostError | TrajectoryError
Parcel = tuple[RequestId, Answer]


class Outbox:
    """Answers in order. Bounded by what the client has asked for and not yet collected."""

    def __init__(self) -> None:
        self._parcels: list[Parcel] = []
        self._has_parcels = asyncio.Event()

    def send(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._has_parcels.set()

    async def collect(self, wait_s: float) -> list[Parcel]:
        """Everything sent since the last call; waits at most `wait_s` seconds for the first of it."""
        try:
            await asyncio.wait_for(self._has_parcels.wait(), wait_s)
        except TimeoutError:
            return []
        self._has_parcels.clear()
        parcels, self._parcels = self._parcels, []
        return parcels


def create_engine(spec: EngineSpec) -> LocalEngine:
    """The engine class that the config names; imported here, in its own process."""
    if spec.engine.type == "vllm":
        from penstock.rollout.vllm_engine import VllmEngine

        return VllmEngine(spec)
    from penstock.rollout.torch_engine import TorchEngine

    return TorchEngine(spec)


class EngineActor:
    """One engine in its own process."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._engine: LocalEngine | None = None
        self._requests: dict[RequestId, asyncio.Task[None]] = {}
        self._aborted: set[RequestId] = set()
        self._outbox = Outbox()
        self._inbound = private_directory(spec.publish_in)

    async def start(self) -> str:
        """Load the model; returns the node this engine runs on."""
        self._engine = create_engine(self._spec)
        await self._engine.start()
        return ray.get_runtime_context().get_node_id()

    async def submit(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self._requests[request.request_id] = asyncio.create_task(self._pump(request))

    async def collect(self, wait_s: float) -> list[Parcel]:
        """Everything sampled since the last call; waits at most `wait_s` seconds for the first of it."""
        return await self._outbox.collect(wait_s)

    async def abort(self, request_ids: list[RequestId]) -> None:
        """Stop requests. One that the engine does not know yet is stopped as soon as it does."""
        for request_id in request_ids:
            if request_id in self._requests:
                self._aborted.add(request_id)
            await self._running().abort(request_id)

    async def load(self) -> EngineLoad:
        return await self._running().load()

    async def update_weights(self, manifest: WeightManifest, payload: np.ndarray | None = None) -> WeightAck:
        """Swap weights in flight. `payload` carries the version's file for engines on other nodes."""
        if payload is None:
            return await self._running().update_weights(manifest)
        path = self._inbound / f"v{manifest.version}.safetensors"
        try:
            await asyncio.to_thread(payload.tofile, path)
            return await self._running().update_weights(replace(manifest, location=str(path)))
        finally:
            path.unlink(missing_ok=True)

    async def layout(self, tensors: Sequence[TensorSpec]) -> Layout:
        return await self._running().layout(tensors)

    async def make_slots(
        self, buffers: Sequence[Mapping[str, int]], dtype: DType, num_writers: int
    ) -> list[list[SlotHandle]]:
        return await self._running().make_slots(buffers, dtype, num_writers)

    async def join_crossing(self, crossing: Crossing, replica: int) -> None:
        await self._running().join_crossing(crossing, replica)

    async def receive(self, version: int) -> None:
        await self._running().receive(version)

    async def sleep(self) -> None:
        await self._running().sleep()

    async def wake(self) -> None:
        await self._running().wake()

    async def shutdown(self) -> None:
        shutil.rmtree(self._inbound, ignore_errors=True)
        for job in self._requests.values():
            job.cancel()
        if self._engine is not None:
            await self._engine.shutdown()

    def _running(self) -> LocalEngine:
        if self._engine is None:
            raise EngineLostError(f"{self._spec.engine_id}: not started")
        return self._engine

    async def _pump(self, request: GenerateRequest) -> None:
        """Answer one request. Engines say by `EngineLostError` what concerns all; anything else is its own failure."""
        request_id = request.request_id
        try:
            if request_id in self._aborted:  # in the same tick as it was submitted
                self._outbox.send((request_id, TokenDelta((), (), (), "abort")))
                return
            async for delta in self._running().generate(request):
                self._outbox.send((request_id, delta))
                if request_id in self._aborted and delta.finish_reason is None:
                    await self._running().abort(request_id)  # again: the first may have come before the engine had it
        except (EngineLostError, TrajectoryError) as error:
            self._outbox.send((request_id, error))
        except PenstockError as error:  # the engine is in no state to answer anyone
            self._outbox.send((request_id, EngineLostError(f"{self._spec.engine_id}: {error}")))
        except Exception as error:  # noqa: BLE001 - whatever an engine raises is this request's failure, reported as such
            cause = f"{self._spec.engine_id}: {request_id} failed with {type(error).__name__}: {error}"
            self._outbox.send((request_id, TrajectoryError("engine", cause)))
        finally:
            self._requests.pop(request_id, None)
            self._aborted.discard(request_id)
