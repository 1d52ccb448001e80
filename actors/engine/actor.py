"""The Ray actor around one rollout engine: requests are submitted in batches, deltas are collected in batches.

Its outbox (actors/batched_calls.py) is bounded by the tokens that the submitted requests may sample; the client keeps
their number within the engine's slots.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import ray

from penstock.actors.batched_calls import Outbox
from penstock.actors.devices import seen_devices
from penstock.actors.worker_log import keep_output, last_error
from penstock.dataflow.errors import ConfigError, EngineLostError, PenstockError, TrajectoryError
from penstock.dataflow.ids import RequestId
from penstock.dataflow.ports import GenerateRequest, TokenDelta, WeightAck, WeightManifest
from penstock.rollout.engines.local_engine import EngineSpec, LocalEngine
from penstock.weights.transport.shared_memory import private_directory

Answer = TokenDelta | EngineLostError | TrajectoryError
EngineOutput = tuple[RequestId, Answer]


PROFILE_S = 5.0
"""Length of a profile of an engine, seconds."""
_LACKS_MEMORY = re.compile("Free memory on device|No available memory for the cache|out of memory", re.IGNORECASE)
_MORE_MEMORY = (
    "The device has less free memory than planned. End the other processes on it (nvidia-smi), set "
    "cluster.pools.POOL.memory_gib to what it really has, or lower rollout.engine.kv_cache_gib or "
    "gpu_memory_utilization."
)


def create_engine(spec: EngineSpec) -> LocalEngine:
    """The engine class of the configuration, imported in its own process."""
    if spec.engine.type == "vllm":
        from penstock.rollout.engines.vllm.engine import VllmEngine

        return VllmEngine(spec)
    from penstock.rollout.engines.torch.engine import TorchEngine

    return TorchEngine(spec)


class EngineActor:
    """One engine in its own process."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._engine: LocalEngine | None = None
        self._requests: dict[RequestId, asyncio.Task[None]] = {}
        self._aborted: set[RequestId] = set()
        self._outbox: Outbox[EngineOutput] = Outbox()
        self._inbound: Path | None = None
        self._attempts = count()
        self._profiling: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Load the model; returns the node this engine runs on.

        Raises:
            EngineLostError: If the engine cannot start, with its last error.
        """
        keep_output(self._spec.engine_id)
        try:
            self._engine = create_engine(self._spec)
            await self._engine.start()
        except ConfigError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}; {last_error(self._spec.engine_id)}".removesuffix("; ")
            if _LACKS_MEMORY.search(said):
                said += f". {_MORE_MEMORY}"
            raise EngineLostError(f"{self._spec.engine_id} cannot start: {said}") from error
        return ray.get_runtime_context().get_node_id()

    async def submit(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self._requests[request.request_id] = asyncio.create_task(self._pump(request))

    async def collect(self, wait_s: float) -> list[EngineOutput]:
        """All answers since the last call; waits at most `wait_s` seconds for the first one."""
        return await self._outbox.collect(wait_s)

    async def abort(self, request_ids: list[RequestId]) -> None:
        """Stop requests. A request that the engine has not received yet is stopped as soon as it has."""
        for request_id in request_ids:
            if request_id in self._requests:
                self._aborted.add(request_id)
            await self._running().abort(request_id)

    async def update_weights(self, manifest: WeightManifest, payload: np.ndarray | None = None) -> WeightAck:
        """Swap weights in flight. `payload` carries the version's file for engines on other nodes."""
        ack = await self._update(manifest, payload)
        step = manifest.version + 1  # that is trained from this version
        if step in self._spec.profile_steps and (self._profiling is None or self._profiling.done()):
            self._profiling = asyncio.create_task(self._profile(f"{self._spec.engine_id}-step-{step}"))
        return ack

    async def _update(self, manifest: WeightManifest, payload: np.ndarray | None) -> WeightAck:
        if payload is None:
            return await self._running().update_weights(manifest)
        if self._inbound is None:
            self._inbound = private_directory(self._spec.publish_in)
        # The second attempt at a version may begin while the engine still reads the file of the first.
        path = self._inbound / f"v{manifest.version}-{next(self._attempts)}.safetensors"
        try:
            await asyncio.to_thread(payload.tofile, path)
            return await self._running().update_weights(replace(manifest, location=str(path)))
        finally:
            path.unlink(missing_ok=True)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call any other method of `LocalEngine`: load, layout, version buffers, transfer groups, sleep."""
        return await getattr(self._running(), method)(*arguments)

    async def seen_devices(self) -> list[str]:
        """The GPUs of its ranks, by their names on the node."""
        return seen_devices()

    async def forget_versions(self) -> None:
        """Drop all requests and answers, and go back to no version. See `LocalEngine`."""
        requests = list(self._requests.values())
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await self._running().forget_versions()
        self._outbox.clear()

    async def shutdown(self) -> None:
        if self._inbound is not None:
            shutil.rmtree(self._inbound, ignore_errors=True)
        if self._profiling is not None:
            self._profiling.cancel()
        for job in self._requests.values():
            job.cancel()
        if self._engine is not None:
            await self._engine.shutdown()

    def _running(self) -> LocalEngine:
        if self._engine is None:
            raise EngineLostError(f"{self._spec.engine_id}: not started")
        return self._engine

    async def _profile(self, name: str) -> None:
        try:
            await self._running().profile(name, PROFILE_S)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a profile, the engine serves
            print(f"trainer.profile_steps: no profile {name}: {type(error).__name__}: {error}; the engine serves on.")

    async def _pump(self, request: GenerateRequest) -> None:
        """Answer one request. `EngineLostError` concerns all requests of the engine, any other error only this one."""
        request_id = request.request_id

        def send(answer: Answer) -> None:
            self._outbox.put((request_id, answer))

        try:
            if request_id in self._aborted:  # in the same tick as it was submitted
                send(TokenDelta((), (), (), "abort"))
                return
            async for delta in self._running().generate(request):
                send(delta)
                if request_id in self._aborted and delta.finish_reason is None:
                    await self._running().abort(request_id)  # again: the engine may not have had it the first time
        except EngineLostError as error:
            # What ended the engine core is in its log only.
            why = last_error(self._spec.engine_id) if error.is_final else ""
            send(EngineLostError.final(f"{error}; {why}") if why else error)
        except TrajectoryError as error:
            send(error)
        except PenstockError as error:  # the engine cannot answer any request
            send(EngineLostError(f"{self._spec.engine_id}: {error}"))
        except Exception as error:  # noqa: BLE001 - any other exception fails this request only
            cause = f"{self._spec.engine_id}: {request_id} failed with {type(error).__name__}: {error}"
            send(TrajectoryError("engine", cause))
        finally:
            self._requests.pop(request_id, None)
            self._aborted.discard(request_id)
