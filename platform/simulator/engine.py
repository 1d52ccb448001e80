"""A simulated generation engine: a `LocalEngine` over a batch in virtual time.

Continuous batching is processor sharing: all running sequences advance together, one token per decode step, and a step
takes `base + per_sequence · n` seconds for n sequences. τ counts the steps, so a sequence admitted at τ₀ has sampled
⌊τ − τ₀⌋ tokens. There are no events per token, only for deltas, ends, a full KV cache and weight swaps. Prefill time is
added as a debt in seconds, and τ advances again once the debt is paid.

Token ids encode the version that actually sampled the token. The spans, loss masks and token order that the platform
records are compared with it token by token (tests/simulation/checks.py).
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import EngineLoad, GenerateRequest, TokenDelta, WeightAck, WeightManifest
from penstock.dataflow.trajectory import FinishReason
from penstock.dataflow.versions import Span, Spans
from penstock.platform.simulator.world import World, member_of, sampled_ids, task_of

DELTA_TOKENS = 64
_EPSILON = 1e-6


class TokenStream:
    """Token deltas of one request, in order. Ends after a delta with a finish reason, or with the error.

    It is not an async generator, because the garbage collector would close an abandoned one at a random time.
    """

    def __init__(self) -> None:
        self._inbox: asyncio.Queue[TokenDelta | Exception] = asyncio.Queue()
        self.put = self._inbox.put_nowait
        self._is_over = False

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._is_over and self._inbox.empty():
            raise StopAsyncIteration
        item = await self._inbox.get()
        if isinstance(item, Exception):
            self._is_over = True
            raise item
        self._is_over = item.finish_reason is not None
        return item


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Costs of one engine in simulated tokens."""

    base_s: float
    """Seconds of a decode step with an empty batch."""
    per_sequence_s: float
    """Seconds each running sequence adds to a step."""
    prefill_s: float
    """Seconds to prefill a token; decoding is paused during prefill."""
    slots: int
    """Sequences decoded at once."""
    kv_tokens: int
    """KV-cache capacity; when it is full the youngest sequence is preempted and prefilled again later."""
    stage_s: float
    """Seconds to stage new weights while generation continues."""
    swap_s: float
    """Seconds that the engine is paused for a swap."""
    recomputes_kv: bool = False
    """Whether running sequences are prefilled again after a swap."""


class PrefixCache:
    """Prompts with cached KV, up to a capacity in tokens. The least recently used one is evicted first.

    A prefix is (salt, task): blocks are shared only between requests of one salt (docs/concepts/weights.md).
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._tokens: dict[tuple[int, int], int] = {}
        self._used_tokens = 0

    def take(self, prefix: tuple[int, int], num_tokens: int) -> int:
        """Cache the whole prefix and return how many of its tokens need no prefill."""
        cached = self._tokens.pop(prefix, 0)
        self._tokens[prefix] = num_tokens
        self._used_tokens += num_tokens - cached
        while self._used_tokens > self._capacity_tokens and len(self._tokens) > 1:
            oldest = next(iter(self._tokens))
            self._used_tokens -= self._tokens.pop(oldest)
        return min(cached, num_tokens)

    def clear(self) -> None:
        self._tokens.clear()
        self._used_tokens = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine."""

    request: GenerateRequest
    stream: TokenStream
    task: int
    start: int
    """Position of its first new token in the trajectory; above 0 when it resumes a partial one."""
    target: int
    """Number of tokens that it will sample."""
    finish_reason: FinishReason
    salt: int
    """Version the engine had acknowledged when it was submitted."""
    origin: float = 0.0
    """τ at which it had sampled nothing."""
    emitted: int = 0
    """Tokens delivered."""
    version: int = -1
    """Weights that sample its next token, once `marks_seen` swaps are applied."""
    marks_seen: int = 0
    event: int = 0
    """Number of its next event; older events in the heap are invalid."""


@dataclass(slots=True)
class Counters:
    """Absolute counters since the engine was created."""

    tokens: int = 0
    busy_s: float = 0.0
    request_s: float = 0.0
    prefilled: int = 0
    prefix_hits: int = 0
    preempted: int = 0

    def add(self, other: Counters) -> None:
        """Sum over engines."""
        self.tokens += other.tokens
        self.busy_s += other.busy_s
        self.request_s += other.request_s
        self.prefilled += other.prefilled
        self.prefix_hits += other.prefix_hits
        self.preempted += other.preempted


Emit = Callable[[Sequence, int, FinishReason | None], None]
"""Delivers a sequence's tokens up to a count, and its end if there is a finish reason."""


class DecodeBatch:
    """The running and waiting sequences of one engine. It has no clock; the caller passes the elapsed time.

    Attributes:
        tau: Decode steps so far.
    """

    def __init__(self, cost: EngineCost, prompt_tokens: int, emit: Emit) -> None:
        self.cost = cost
        self.tau = 0.0
        self.counters = Counters()
        self.running: dict[RequestId, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self._prompt_tokens = prompt_tokens
        self._emit = emit
        self._prefixes = PrefixCache(cost.kv_tokens)
        self._prefill_debt_s = 0.0
        self._kv_offset = 0.0
        self._due: list[tuple[float, int, Sequence]] = []
        self._serial = 0
        self._marks: list[tuple[float, int]] = []

    @property
    def kv_used(self) -> float:
        """Tokens in the KV cache."""
        return self._kv_offset + len(self.running) * self.tau

    def count(self, sequence: Sequence) -> int:
        """Number of tokens that a running sequence has sampled."""
        return min(int(self.tau - sequence.origin + _EPSILON), sequence.target)

    def step_s(self, speed: float) -> float:
        return (self.cost.base_s + self.cost.per_sequence_s * len(self.running)) / speed

    def advance(self, elapsed_s: float, speed: float) -> None:
        """Decode for some seconds."""
        self.counters.busy_s += elapsed_s
        self.counters.request_s += elapsed_s * (len(self.running) + len(self.waiting))
        paid = min(elapsed_s, self._prefill_debt_s)
        self._prefill_debt_s -= paid
        self.tau += (elapsed_s - paid) / self.step_s(speed)

    def settle(self, version: int, speed: float) -> None:
        """Deliver due tokens, admit waiting sequences, and preempt the youngest while the KV cache is too full."""
        cost = self.cost
        while self._due and self._due[0][0] <= self.tau + _EPSILON:
            _, event, sequence = heapq.heappop(self._due)
            if event != sequence.event:
                continue
            upto = self.count(sequence)
            if upto >= sequence.target:
                self._emit(sequence, upto, sequence.finish_reason)
                self._remove(sequence)
            else:
                self._emit(sequence, upto, None)
                self._push(sequence)
        while self.waiting and len(self.running) < cost.slots:
            sequence = self.waiting[0]
            kv_tokens = len(sequence.request.prompt_token_ids) + sequence.emitted
            if self.running and self.kv_used + kv_tokens + DELTA_TOKENS > cost.kv_tokens:
                break
            self.waiting.popleft()
            cached = self._prefixes.take((sequence.salt, sequence.task), self._prompt_tokens)
            self.counters.prefix_hits += cached
            self.counters.prefilled += kv_tokens - cached
            self._prefill_debt_s += (kv_tokens - cached) * cost.prefill_s / speed
            sequence.origin = self.tau - sequence.emitted
            sequence.version, sequence.marks_seen = version, len(self._marks)
            self._kv_offset += kv_tokens - self.tau
            self.running[sequence.request.request_id] = sequence
            self._push(sequence)
        while len(self.running) > 1 and self.kv_used > cost.kv_tokens:
            youngest = next(reversed(self.running.values()))
            self._emit(youngest, self.count(youngest), None)
            self._remove(youngest)
            self.waiting.appendleft(youngest)
            self.counters.preempted += 1

    def next_event(self, speed: float) -> tuple[float, float] | None:
        """`(seconds from now, τ)` of the next event, if nothing changes before it."""
        if not self.running:
            return None
        while self._due and self._due[0][1] != self._due[0][2].event:
            heapq.heappop(self._due)
        tau = self._due[0][0]
        if len(self.running) > 1:
            kv_free = max(self.cost.kv_tokens - self.kv_used, 0.0)
            tau = min(tau, self.tau + kv_free / len(self.running) + 1)
        return max(self._prefill_debt_s + (tau - self.tau) * self.step_s(speed), 0.0), tau

    def swap(self, version: int) -> None:
        """Sample with new weights from now on."""
        self._marks.append((self.tau, version))
        if self.cost.recomputes_kv:
            self._prefill_debt_s += self.kv_used * self.cost.prefill_s

    def abort(self, request_id: RequestId) -> None:
        """End a request with the tokens it has."""
        sequence = self.running.get(request_id)
        if sequence is not None:
            self._emit(sequence, self.count(sequence), "abort")
            self._remove(sequence)
            return
        waiting = next((one for one in self.waiting if one.request.request_id == request_id), None)
        if waiting is not None:
            self.waiting.remove(waiting)
            self._emit(waiting, waiting.emitted, "abort")

    def clear(self) -> None:
        """Remove all sequences and their KV."""
        self.running.clear()
        self.waiting.clear()
        self._due.clear()
        self._prefixes.clear()
        self._kv_offset = self._prefill_debt_s = 0.0

    def true_spans(self, sequence: Sequence, stop: int) -> Spans:
        """Versions that sampled its tokens from `emitted` to `stop`, split at the swaps since the last delivery."""
        start = sequence.emitted
        spans = []
        while sequence.marks_seen < len(self._marks):
            tau, version = self._marks[sequence.marks_seen]
            cut = int(tau - sequence.origin + _EPSILON)
            if cut > stop:
                break
            if cut > start:
                spans.append(Span(sequence.version, cut - start))
                start = cut
            sequence.version = version
            sequence.marks_seen += 1
        if stop > start:
            spans.append(Span(sequence.version, stop - start))
        return tuple(spans)

    def _push(self, sequence: Sequence) -> None:
        self._serial += 1
        sequence.event = self._serial
        upto = min(sequence.emitted + DELTA_TOKENS, sequence.target)
        heapq.heappush(self._due, (sequence.origin + upto, self._serial, sequence))

    def _remove(self, sequence: Sequence) -> None:
        del self.running[sequence.request.request_id]
        sequence.event = 0
        self._kv_offset -= len(sequence.request.prompt_token_ids) - sequence.origin
        if not self.running:
            self._kv_offset = self._prefill_debt_s = 0.0


class SimulatedEngine:
    """A `LocalEngine`: what runs in the process of an engine, behind the shipping `EngineActor`.

    Attributes:
        version: The version it has loaded; -1 before the first one.
        speed: Speed relative to its costs.
        world: The simulated run.
    """

    def __init__(self, engine_id: EngineId, cost: EngineCost, world: World, speed: float = 1.0) -> None:
        self.engine_id = engine_id
        self.version = -1
        self.speed = speed
        self.world = world
        self._batch = DecodeBatch(cost, world.prompt_tokens, self._emit)
        self._is_lost = False
        self._is_frozen = False
        self._updating = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._settled_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._is_settling = False

    def generate(self, request: GenerateRequest) -> TokenStream:
        """Queue a request; the stream raises `EngineLostError` if there are no weights yet."""
        stream = TokenStream()
        if self.version < 0:
            stream.put(EngineLostError(f"{self.engine_id} has no weights"))
            return stream
        world = self.world
        task = task_of(request.prompt_token_ids[0])
        start = world.num_sampled(request.prompt_token_ids)
        left = world.lengths.turn_end(task, member_of(request.request_id), start) - start
        limit = request.sampling.max_new_tokens
        reason: FinishReason = "length" if left > limit else "stop"
        sequence = Sequence(request, stream, task, start, min(left, limit), reason, self.version)
        self._batch.waiting.append(sequence)
        self._touch()
        return stream

    async def abort(self, request_id: RequestId) -> None:
        """Stop a request; its stream ends with the tokens it has."""
        self._advance()
        self._batch.abort(request_id)
        self._touch()

    async def load(self) -> EngineLoad:
        self._advance()
        batch = self._batch
        return EngineLoad(
            version=self.version,
            num_running=len(batch.running),
            num_waiting=len(batch.waiting),
            kv_cache_usage=min(batch.kv_used / batch.cost.kv_tokens, 1.0),
            tokens_generated=batch.counters.tokens,
            busy_s=batch.counters.busy_s,
            request_s=batch.counters.request_s,
            num_preemptions=batch.counters.preempted,
        )

    async def update_weights(self, manifest: WeightManifest) -> WeightAck:
        """Stage during generation, freeze, swap, resume and acknowledge."""
        cost = self._batch.cost
        async with self._updating:
            await self._work(cost.stage_s)
            self._settle()
            self._is_frozen = True
            self._reschedule()
            await self._work(cost.swap_s)
            self._advance()
            if manifest.version != self.version:
                self._batch.swap(manifest.version)
            self.version = manifest.version
            self._is_frozen = False
            self._touch()
        return WeightAck(self.engine_id, manifest.version, manifest.checksum, cost.stage_s, cost.swap_s)

    async def sleep(self) -> None:
        """Release the devices to the trainer (colocated)."""
        self._settle()
        self._is_frozen = True

    async def wake(self) -> None:
        self._advance()
        self._is_frozen = False
        self._touch()

    async def shutdown(self) -> None:
        self.crash()

    def crash(self) -> None:
        """End, with all requests."""
        self._advance()
        self._is_lost = True
        self._batch.clear()
        self._reschedule()

    @property
    def counters(self) -> Counters:
        """Its counters up to its last event."""
        return self._batch.counters

    async def _work(self, work_s: float) -> None:
        await asyncio.sleep(work_s)

    @property
    def _is_working(self) -> bool:
        return not self._is_frozen and not self._is_lost

    def _advance(self) -> None:
        """Advance the batch to the current time."""
        now = self._loop.time()
        elapsed_s, self._settled_at = now - self._settled_at, now
        if elapsed_s > 0 and self._batch.running and self._is_working:
            self._batch.advance(elapsed_s, self.speed)

    def _touch(self) -> None:
        """Settle once at the end of this iteration of the event loop, regardless of the number of changes."""
        if not self._is_settling:
            self._is_settling = True
            self._loop.call_soon(self._settle)

    def _settle(self) -> None:
        self._is_settling = False
        self._advance()
        if self._is_working:
            self._batch.settle(self.version, self.speed)
        self._reschedule()

    def _reschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        upcoming = self._batch.next_event(self.speed) if self._is_working else None
        if upcoming is not None:
            wait_s, tau = upcoming
            self._timer = self._loop.call_later(wait_s, self._on_timer, tau)

    def _on_timer(self, tau: float) -> None:
        self._timer = None
        self._advance()
        self._batch.tau = max(self._batch.tau, tau)  # avoids drift by rounding
        self._settle()

    def _emit(self, sequence: Sequence, upto: int, reason: FinishReason | None) -> None:
        """Deliver the tokens up to `upto`, in deltas of at most 64."""
        while True:
            stop = min(upto, sequence.emitted + DELTA_TOKENS)
            count, is_last = stop - sequence.emitted, stop == upto
            if count or reason is not None:
                truth = self._batch.true_spans(sequence, stop)
                ids = sampled_ids(truth, sequence.start + sequence.emitted)
                sequence.emitted = stop
                self._batch.counters.tokens += count
                self._deliver(sequence, TokenDelta(ids, (-1.0,) * count, truth, reason if is_last else None))
            if is_last:
                return

    def _deliver(self, sequence: Sequence, delta: TokenDelta) -> None:
        sequence.stream.put(delta)
