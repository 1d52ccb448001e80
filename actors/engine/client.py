"""The driver's client of an engine actor: implements the `Engine` port over batched Ray calls.

Consumes: the outputs of the actor's long poll. Waits for: the next output of each request. Unblocked by: a delta, or
the engine's death, which fails every pending request at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
from ray.actor import ActorHandle

from penstock.actors import batched_calls
from penstock.actors.batched_calls import Outgoing, collect
from penstock.actors.engine.actor import Answer
from penstock.actors.ray_errors import answer_of, first_line, silence_limit
from penstock.dataflow.errors import ConfigError, EngineLostError, WeightSyncError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import EngineLoad, GenerateRequest, TokenDelta, WeightAck, WeightManifest
from penstock.envs.endpoint.answer_parser import ParsedAnswer, ParserNames, SampledTurn
from penstock.rollout.engine_pool.pool import EnginePool
from penstock.weights.layout.algebra import Layout, TensorSpec
from penstock.weights.model_config import DType
from penstock.weights.transport.device_memory import VersionBufferHandle
from penstock.weights.transport.shards import manifest_of

PARSE_S = 30.0
"""Longest wait for an engine to read one turn, seconds; it takes milliseconds, and an import before the first."""
SWITCH_S = 300.0
"""Longest wait for an engine to free or restore its device memory, seconds: a whole model may be moved."""


@dataclass(frozen=True, slots=True)
class Locations:
    """Node -> folder in its shared memory."""

    by_node: Mapping[str, str]


def at_node(manifest: WeightManifest, payload: Any, node_id: str) -> tuple[WeightManifest, Any]:
    """Manifest and payload of an update, for an engine on a node.

    Raises:
        WeightSyncError: If the version was not sent to its node.
    """
    if not isinstance(payload, Locations):
        return manifest, payload
    if node_id not in payload.by_node:
        raise WeightSyncError(
            f"publish v{manifest.version}: it was sent to {len(payload.by_node)} nodes, not to node {node_id}. Engines "
            "may join on nodes that have engines already; a new node receives versions from the next publish on."
        )
    return replace(manifest, location=payload.by_node[node_id]), None


class InPlaceUpdate:
    """A version that frozen engines receive into their live parameters (`weights.staging=bucket`), once.

    Consumes: the engines' updates. Waits for: nothing; the first update makes the training ranks send, since only then
    engines receive. Unblocked by: the acknowledgements. The failure of one participant ends the transfer for all, so
    none waits for its messages.
    """

    def __init__(
        self,
        version: int,
        engines: Collection[str],
        send: Callable[[], Coroutine[Any, Any, None]],
        interrupt: Callable[[str], None],
    ) -> None:
        """Prepare the update; the first engine starts it.

        Args:
            version: Of the policy.
            engines: Receivers of the transfer; each may take the version once.
            send: Makes the training ranks send it.
            interrupt: Ends the transfer, with the cause.
        """
        self._version = version
        self._left = set(engines)
        self._send = send
        self._interrupt = interrupt
        self._sending: asyncio.Task[None] | None = None

    async def run(self, engine_id: EngineId, update: Awaitable[WeightAck]) -> WeightAck:
        """Update one engine.

        Args:
            engine_id: The engine.
            update: Its update, not started.

        Raises:
            WeightSyncError: If it is not among the receivers, or has had its attempt.
        """
        if engine_id not in self._left:
            if isinstance(update, Coroutine):
                update.close()
            raise WeightSyncError(
                f"publish v{self._version}: it cannot be sent to {engine_id} again, which gets the next version."
            )
        self._left.remove(engine_id)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name=f"send v{self._version}")
            self._sending.add_done_callback(self._sent)
        try:
            return await update
        except BaseException as error:
            self._interrupt(first_line(error))
            raise

    async def wait_sent(self) -> None:
        """Wait until the training ranks have stopped sending it. The engines report a failure, not this call."""
        if self._sending is not None:
            await asyncio.wait([self._sending])

    def _sent(self, sending: asyncio.Task[None]) -> None:
        if not sending.cancelled() and (error := sending.exception()) is not None:
            self._interrupt(first_line(error))


class RemoteEngine:
    """An engine in another process.

    Attributes:
        node_id: The Ray node of the engine; the weight transport depends on it.
        shards: Its ranks in the layout that versions are written in; None: all of them.
    """

    def __init__(self, engine_id: EngineId, actor: ActorHandle, node_id: str) -> None:
        self.engine_id = engine_id
        self.node_id = node_id
        self.shards: range | None = None
        self._actor = actor
        self._version = -1
        self._inboxes: dict[RequestId, asyncio.Queue[Answer]] = {}
        self._outgoing: Outgoing[GenerateRequest] = Outgoing(
            lambda requests: self._spawn(self._call("submit", requests))
        )
        self._calls: set[asyncio.Task[None]] = set()
        self._lost: EngineLostError | None = None
        self._poll = asyncio.create_task(self._collect(), name=f"collect {engine_id}")

    @property
    def version(self) -> int:
        """The version this engine has acknowledged; -1 before the first publish."""
        return self._version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        if self._lost is not None:
            raise self._lost
        inbox: asyncio.Queue[Answer] = asyncio.Queue()
        self._inboxes[request.request_id] = inbox
        self._outgoing.send(request)
        try:
            while True:
                output = await inbox.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            del self._inboxes[request.request_id]

    async def abort(self, request_id: RequestId) -> None:
        self._spawn(self._call("abort", [request_id]))

    async def load(self) -> EngineLoad:
        what = f"{self.engine_id}: load"
        load: EngineLoad = await answer_of(
            self._actor.call.remote("load"), batched_calls.SILENCE_S, EngineLostError, what
        )
        return load

    async def parse_answer(self, turn: SampledTurn, names: ParserNames) -> ParsedAnswer:
        """Read a turn by a parser of the engine's library.

        Raises:
            ConfigError: If the library has no such parser, or it does not fit the tokenizer.
            EngineLostError: If it is lost, or does not answer in time.
        """
        call, what = self._actor.call.remote("parse_answer", turn, names), f"{self.engine_id}: reading a turn"
        try:
            parsed: ParsedAnswer = await answer_of(call, PARSE_S, EngineLostError, what)
        except EngineLostError as error:
            failed = error.__cause__
            if isinstance(failed, ray.exceptions.RayTaskError) and isinstance(failed.cause, ConfigError):
                raise failed.cause from error
            raise
        return parsed

    async def find_parsers(self, turns: Sequence[tuple[SampledTurn, ParsedAnswer]]) -> list[str]:
        """Names of its library's parsers that read every turn as these calls.

        Raises:
            EngineLostError: If it is lost, or does not answer in time.
        """
        call, what = self._actor.call.remote("find_parsers", turns), f"{self.engine_id}: looking for a parser"
        names: list[str] = await answer_of(call, SWITCH_S, EngineLostError, what)
        return names

    async def update_weights(self, manifest: WeightManifest, payload: Any = None) -> WeightAck:
        """Swap weights in flight; the engine serves `manifest.version` once this returns.

        Raises:
            WeightSyncError: The engine refused them.
            EngineLostError: The engine died.
        """
        if isinstance(payload, InPlaceUpdate):
            return await payload.run(self.engine_id, self._update_weights(manifest, None))
        return await self._update_weights(manifest, payload)

    async def _update_weights(self, manifest: WeightManifest, payload: Any) -> WeightAck:
        if self.shards is not None and manifest.num_shards:
            manifest = manifest_of(manifest, self.shards)
        call = self._actor.update_weights.remote(*at_node(manifest, payload, self.node_id))
        ack: WeightAck = await self._answered(f"publish v{manifest.version}", call)
        if ack.checksum != manifest.checksum or ack.version != manifest.version:
            raise WeightSyncError(
                f"publish v{manifest.version}: {self.engine_id} acknowledged v{ack.version} with checksum "
                f"{ack.checksum:x}, but v{manifest.version} was sent with {manifest.checksum:x}"
            )
        self._version = ack.version
        return ack

    async def forget_versions(self) -> None:
        """Drop all requests and go back to no version, for a trainer that was rolled back.

        Raises:
            EngineLostError: If it did not; its process is ended then, so that it serves nothing of the lost lineage.
        """
        await self._answered_or_ended("forget_versions", self._actor.forget_versions.remote())
        self._version = -1

    async def layout(self, tensors: Sequence[TensorSpec]) -> Layout:
        """Where its ranks hold the tensors of a trainer.

        Raises:
            WeightSyncError: If the layout is not known.
            EngineLostError: The engine died.
        """
        try:
            async with silence_limit(SWITCH_S):
                layout: Layout = await self._answered("weights: layout", self._actor.call.remote("layout", tensors))
        except TimeoutError:
            raise EngineLostError(f"{self.engine_id}: weights: layout: no answer within {SWITCH_S:g} s") from None
        return layout

    async def seen_devices(self) -> list[str]:
        """The GPUs of its ranks, by their names on the node.

        Raises:
            EngineLostError: The engine died.
        """
        call = self._actor.seen_devices.remote()
        found: list[str] = await answer_of(call, SWITCH_S, EngineLostError, f"{self.engine_id}: devices")
        return found

    async def make_version_buffers(
        self, buffers: Sequence[Mapping[str, int]], dtype: DType, num_writers: int
    ) -> list[list[VersionBufferHandle]]:
        """Handles of the engine's version buffers, by engine rank and training rank.

        Raises:
            WeightSyncError: The engine refused.
            EngineLostError: The engine died.
        """
        call = self._actor.call.remote("make_version_buffers", buffers, dtype, num_writers)
        handles: list[list[VersionBufferHandle]] = await self._answered("publish: version buffers", call)
        return handles

    async def _answered(self, what: str, call: Awaitable[Any]) -> Any:
        """The answer to a call of a publish; the caller limits the wait (`weights.timeout_s`)."""
        try:
            return await call
        except ray.exceptions.RayTaskError as error:
            raise WeightSyncError(f"{what}: {self.engine_id}: {error.cause}") from error
        except ray.exceptions.RayError as error:  # broader than RayActorError: an out-of-memory kill is not one
            raise self._lose(f"died during {what}: {first_line(error)}") from error

    def join_transfer_group(self, group_spec: Any, replica: int) -> Awaitable[None]:
        """Join a transfer group (a Ray handle of its specification) as a receiver; raises Ray's errors unchanged."""
        call: Awaitable[None] = self._actor.call.remote("join_transfer_group", group_spec, replica)
        return call

    def receive(self, version: int) -> Awaitable[None]:
        """Receive a version from the transfer group; raises Ray's errors unchanged."""
        call: Awaitable[None] = self._actor.call.remote("receive", version)
        return call

    async def sleep(self) -> None:
        """Free its device memory.

        Raises:
            EngineLostError: If it did not. Its process is ended then, so that the memory is free in any case.
        """
        await self._answered_or_ended("sleep", self._actor.call.remote("sleep"))

    async def wake(self) -> None:
        """Restore its device memory.

        Raises:
            EngineLostError: If it did not; its process is ended then.
        """
        await self._answered_or_ended("wake", self._actor.call.remote("wake"))

    async def _answered_or_ended(self, what: str, call: Awaitable[Any]) -> None:
        try:
            await answer_of(call, SWITCH_S, EngineLostError, f"{self.engine_id}: {what}")
        except EngineLostError as error:
            self.kill()
            raise EngineLostError.final(str(error)) from error

    async def close(self, timeout_s: float = 5.0) -> None:
        """Stop polling and shut the engine down; the cluster ends its process in any case."""
        for job in (self._poll, *self._calls):
            job.cancel()
        with suppress(TimeoutError, ray.exceptions.RayError):
            async with asyncio.timeout(timeout_s):
                await self._actor.shutdown.remote()

    def kill(self) -> None:
        """End its process now; its requests are lost."""
        self._poll.cancel()
        self._lose("was ended")
        self._end_process()

    def _end_process(self) -> None:
        # Overridden where the actor is not Ray's (platform/simulator/engine_processes.py).
        ray.kill(self._actor)

    def _spawn(self, call: Any) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self, method: str, argument: list[Any]) -> None:
        call, what = getattr(self._actor, method).remote(argument), f"{self.engine_id}: {method}"
        try:
            await answer_of(call, batched_calls.POLL_S + batched_calls.SILENCE_S, EngineLostError, what)
        except EngineLostError as error:
            self._lose(f"is lost: {error}")

    async def _collect(self) -> None:
        while True:
            try:
                outputs = await collect(self._actor.collect.remote)
            except TimeoutError:
                self._lose(f"did not answer for {batched_calls.POLL_S + batched_calls.SILENCE_S:.0f} s")
                return
            except ray.exceptions.RayError as error:
                self._lose(f"died: {first_line(error)}")
                return
            for request_id, output in outputs:
                if (inbox := self._inboxes.get(request_id)) is not None:
                    inbox.put_nowait(output)

    def _lose(self, what: str) -> EngineLostError:
        """Fail every pending request, now and later."""
        if self._lost is None:
            self._lost = EngineLostError.final(f"{self.engine_id} {what}")
        for inbox in self._inboxes.values():
            inbox.put_nowait(self._lost)
        return self._lost


def in_service(pool: EnginePool) -> list[RemoteEngine]:
    """Engines of a pool of actors that are not fenced."""
    return cast("list[RemoteEngine]", pool.engines())
