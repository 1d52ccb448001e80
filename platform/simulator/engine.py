"""A simulated generation engine: the `Engine` port over a batch in virtual time, with weights, and faults to plant.

Token ids tell the truth: they carry the weights that really sampled the token, so that what the platform believes of
it (spans, loss masks, order) is checked token by token (platform/simulator/checks.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import EngineLoad, GenerateRequest, TokenDelta, WeightAck, WeightManifest
from penstock.dataflow.trajectory import FinishReason
from penstock.dataflow.versions import Spans
from penstock.platform.simulator.decoding import DELTA_TOKENS, Counters, DecodeBatch, EngineCost, Sequence
from penstock.platform.simulator.stream import TokenStream
from penstock.platform.simulator.world import World, member_of, sampled_ids, task_of

LOAD_TIMEOUT_S = 60.0
"""Longest wait for `load`, as the client of an engine has it (actors/engine_client.py)."""
_LOGPROBS = tuple((-1.0,) * count for count in range(DELTA_TOKENS + 1))


@dataclass(slots=True)
class _Health:
    """What faults and updates change."""

    speed: float
    is_lost: bool = False
    is_frozen: bool = False
    responds: asyncio.Event = field(default_factory=asyncio.Event)


class SimulatedEngine:
    """`Engine` that also takes weights, sleeps and fails.

    Attributes:
        version: The version whose acknowledgement the driver has heard; -1 before the first.
        node_id: Where the publisher thinks it runs.
        clock_rate: Of its own clock, relative to the driver's: every duration that it reports is measured with it.
        lost_acks: Probability that the first acknowledgement of a version is not heard.
    """

    def __init__(self, engine_id: EngineId, cost: EngineCost, world: World, speed: float = 1.0) -> None:
        self.engine_id = engine_id
        self.node_id = "simulated"
        self.version = -1
        self.clock_rate = 1.0
        self.lost_acks = 0.0
        self._loaded = -1
        self._unheard = -1
        self._rng = world.rng(f"acknowledgements of {engine_id}")
        self._world = world
        self._batch = DecodeBatch(cost, world.prompt_tokens, self._emit)
        self._health = _Health(speed)
        self._health.responds.set()
        self._loop = asyncio.get_running_loop()
        self._settled_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._is_settling = False

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Queue a request; the stream raises `EngineLostError` if the engine dies."""
        stream = TokenStream(self._loop)
        if self._health.is_lost or self.version < 0:
            stream.put(EngineLostError(f"{self.engine_id} is down or has no weights"))
            return stream
        world = self._world
        world.on_request(self.engine_id, self.version, request.request_id)
        task = task_of(request.prompt_token_ids[0])
        start = world.num_sampled(request.prompt_token_ids)
        left = world.lengths.turn_end(task, member_of(request.request_id), start) - start
        limit = request.sampling.max_new_tokens
        reason: FinishReason = "length" if left > limit else "stop"
        sequence = Sequence(request, stream, task, start, min(left, limit), reason, self._loaded)
        self._batch.waiting.append(sequence)
        self._touch()
        return stream

    async def abort(self, request_id: RequestId) -> None:
        """Stop a request; its stream ends with the tokens it has."""
        self._advance()
        self._batch.abort(request_id)
        self._touch()

    async def load(self) -> EngineLoad:
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await self._health.responds.wait()
        except TimeoutError:
            raise EngineLostError(f"{self.engine_id}: load() took longer than {LOAD_TIMEOUT_S:.0f} s") from None
        if self._health.is_lost:
            raise EngineLostError(f"{self.engine_id}: load() failed")
        self._advance()
        batch = self._batch
        return EngineLoad(
            version=self._loaded,
            num_running=len(batch.running),
            num_waiting=len(batch.waiting),
            kv_cache_usage=min(batch.kv_used / batch.cost.kv_tokens, 1.0),
            tokens_generated=batch.counters.tokens,
            busy_s=batch.counters.busy_s * self.clock_rate,
            num_preemptions=batch.counters.preempted,
        )

    async def update_weights(self, manifest: WeightManifest, _payload: Any = None) -> WeightAck:
        """Stage beside generation, freeze, swap, acknowledge, go on; an acknowledgement may get lost, once.

        Raises:
            EngineLostError: If the engine is or goes down. It stays frozen if only the caller gave up.
        """
        cost, health = self._batch.cost, self._health
        await self._answering(cost.stage_s, manifest)
        self._settle()
        health.is_frozen = True
        self._reschedule()
        await self._answering(cost.swap_s, manifest)
        self._advance()
        if manifest.version != self._loaded:
            self._batch.swap(manifest.version)
        self._loaded = manifest.version
        health.is_frozen = False
        self._touch()
        if self._unheard != manifest.version and self._rng.random() < self.lost_acks:
            self._unheard = manifest.version
            self._world.faults["acknowledgement lost"] += 1
            await asyncio.Event().wait()  # until the caller gives up; it sends the version once more
        self.version = manifest.version
        rate = self.clock_rate
        return WeightAck(self.engine_id, manifest.version, manifest.checksum, cost.stage_s * rate, cost.swap_s * rate)

    async def sleep(self) -> None:
        """Give the devices to the trainer (colocated)."""
        self._settle()
        self._health.is_frozen = True

    async def wake(self) -> None:
        self._advance()
        self._health.is_frozen = False
        self._touch()

    def crash(self) -> None:
        """Every request is lost, with its KV and the weights."""
        self._advance()
        self._health.is_lost = True
        self._world.left(self.engine_id)
        lost = EngineLostError(f"{self.engine_id} died")
        for sequence in self._batch.clear():
            sequence.stream.put(lost)
        self._health.responds.set()
        self._reschedule()

    def restart(self) -> None:
        """Up again, without weights: it serves nothing until a version is published to it."""
        self._advance()
        self.version = self._loaded = -1
        self._health.is_lost = self._health.is_frozen = False

    def hang(self) -> None:
        """Stop making progress and stop answering, without dying."""
        self._settle()
        self._health.responds.clear()
        self._reschedule()

    def recover(self) -> None:
        """Go on after a hang."""
        self._advance()
        self._health.responds.set()
        self._touch()

    def set_speed(self, speed: float) -> None:
        """Change the relative speed: throttling, a noisy neighbour."""
        self._advance()
        self._health.speed = speed
        self._touch()

    @property
    def speed(self) -> float:
        return self._health.speed

    @property
    def counters(self) -> Counters:
        """What it has done, up to its last event."""
        return self._batch.counters

    def stamp(self, spans: Spans) -> Spans:
        """The engine stamps what sampled the tokens. A seam for planted bugs."""
        return spans

    async def _answering(self, delay_s: float, manifest: WeightManifest) -> None:
        await asyncio.sleep(delay_s)
        await self._health.responds.wait()
        if self._health.is_lost:
            raise EngineLostError(f"{self.engine_id} died during publish v{manifest.version}")

    @property
    def _is_working(self) -> bool:
        return not self._health.is_frozen and not self._health.is_lost and self._health.responds.is_set()

    def _advance(self) -> None:
        """Bring the batch up to now."""
        now = self._loop.time()
        elapsed_s, self._settled_at = now - self._settled_at, now
        if elapsed_s > 0 and self._batch.running and self._is_working:
            self._batch.advance(elapsed_s, self._health.speed)

    def _touch(self) -> None:
        """Settle once at the end of this turn of the event loop, however much changes in it."""
        if not self._is_settling:
            self._is_settling = True
            self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        self._is_settling = False
        self._advance()
        if self._is_working:
            self._batch.settle(self._loaded, self._health.speed)
        self._reschedule()

    def _reschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        upcoming = self._batch.next_event(self._health.speed) if self._is_working else None
        if upcoming is not None:
            wait_s, tau = upcoming
            self._timer = self._loop.call_later(wait_s, self._on_timer, tau)

    def _on_timer(self, tau: float) -> None:
        self._timer = None
        self._advance()
        self._batch.tau = max(self._batch.tau, tau)  # no drift by rounding
        self._settle()

    def _emit(self, sequence: Sequence, upto: int, reason: FinishReason | None) -> None:
        """Deliver the tokens up to `upto`, in deltas of at most 64."""
        while True:
            stop = min(upto, sequence.emitted + DELTA_TOKENS)
            count, is_last = stop - sequence.emitted, stop == upto
            if count or reason is not None:
                truth = self._batch.true_spans(sequence, stop)
                spans = self.stamp(truth)
                self._world.on_tokens(self.engine_id, self._loaded, spans)
                ids = sampled_ids(truth, sequence.start + sequence.emitted)
                sequence.emitted = stop
                self._batch.counters.tokens += count
                self._world.deliver(
                    sequence.stream, TokenDelta(ids, _LOGPROBS[count], spans, reason if is_last else None)
                )
            if is_last:
                return
