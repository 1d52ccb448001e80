"""Continuous batching as processor sharing: one number says where every running sequence is.

All running sequences advance together, one token per decode step, and a step takes `base + per_sequence · n` seconds
for n sequences. Let τ count the steps: a sequence admitted at τ₀ has sampled ⌊τ − τ₀⌋ tokens. So nothing happens per
token; there are events for deltas, ends, a full KV cache and swaps of the weights.

Prefilling is a debt in seconds that is paid before τ moves on: decoding stands still for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.dataflow.ids import RequestId
from penstock.dataflow.ports import GenerateRequest
from penstock.dataflow.trajectory import FinishReason
from penstock.dataflow.versions import Span, Spans
from penstock.platform.simulator.prefix_cache import PrefixCache
from penstock.platform.simulator.stream import TokenStream

DELTA_TOKENS = 64
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Costs of one engine in simulated tokens.

    Attributes:
        base_s: Seconds of a decode step with an empty batch.
        per_sequence_s: Seconds each running sequence adds to a step.
        prefill_s: Seconds to prefill a token; decoding stands still meanwhile.
        slots: Sequences decoded at once.
        kv_tokens: KV-cache capacity; when it is full the youngest sequence is preempted and prefilled again later.
        cache_tokens: Prompts kept for reuse, in tokens.
        stage_s: Seconds for new weights to arrive, beside generation.
        swap_s: Seconds the engine stands still for a swap.
        recomputes_kv: What runs is prefilled again after a swap.
    """

    base_s: float
    per_sequence_s: float
    prefill_s: float
    slots: int
    kv_tokens: int
    cache_tokens: int
    stage_s: float
    swap_s: float
    recomputes_kv: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine.

    Attributes:
        start: Position of its first new token in the trajectory; above 0 when it resumes a partial one.
        target: Tokens it will sample.
        salt: Version the engine had acknowledged when it was submitted.
        origin: τ at which it had sampled nothing.
        emitted: Tokens delivered.
        version: Weights that sample its next token, once `marks_seen` swaps are applied.
        event: Number of its next event; an older one in the heap is void.
    """

    request: GenerateRequest
    stream: TokenStream
    task: int
    start: int
    target: int
    finish_reason: FinishReason
    salt: int
    origin: float = 0.0
    emitted: int = 0
    version: int = -1
    marks_seen: int = 0
    event: int = 0

    @property
    def kv_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + self.emitted


@dataclass(slots=True)
class Counters:
    """Absolute counters since the engine was made. `slot_s` is busy seconds summed over occupied slots."""

    tokens: int = 0
    busy_s: float = 0.0
    slot_s: float = 0.0
    prefilled: int = 0
    prefix_hits: int = 0
    preempted: int = 0

    def add(self, other: Counters) -> None:
        """Sum over engines."""
        self.tokens += other.tokens
        self.busy_s += other.busy_s
        self.slot_s += other.slot_s
        self.prefilled += other.prefilled
        self.prefix_hits += other.prefix_hits
        self.preempted += other.preempted


Emit = Callable[[Sequence, int, FinishReason | None], None]
"""Deliver a sequence's tokens up to a count, then perhaps its end."""


class DecodeBatch:
    """What runs and what waits inside one engine. Knows no event loop: it is told how much time has passed.

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
        self._prefixes = PrefixCache(cost.cache_tokens)
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
        """Tokens a running sequence has sampled."""
        return min(int(self.tau - sequence.origin + _EPSILON), sequence.target)

    def step_s(self, speed: float) -> float:
        return (self.cost.base_s + self.cost.per_sequence_s * len(self.running)) / speed

    def advance(self, elapsed_s: float, speed: float) -> None:
        """Decode for some seconds."""
        counters = self.counters
        counters.busy_s += elapsed_s
        counters.slot_s += elapsed_s * len(self.running)
        paid = min(elapsed_s, self._prefill_debt_s)
        self._prefill_debt_s -= paid
        self.tau += (elapsed_s - paid) / self.step_s(speed)

    def settle(self, version: int, speed: float) -> None:
        """Deliver what is due, then let sequences in and out."""
        self._deliver_due()
        self._admit(version, speed)
        self._preempt_if_full()

    def next_event(self, speed: float) -> tuple[float, float] | None:
        """`(seconds from now, τ)` of the next event, if nothing changes before."""
        if not self.running:
            return None
        while self._due and self._due[0][1] != self._due[0][2].event:
            heapq.heappop(self._due)
        tau = self._due[0][0]
        if len(self.running) > 1:
            room = max(self.cost.kv_tokens - self.kv_used, 0.0)
            tau = min(tau, self.tau + room / len(self.running) + 1)
        return max(self._prefill_debt_s + (tau - self.tau) * self.step_s(speed), 0.0), tau

    def swap(self, version: int) -> None:
        """New weights sample from here on."""
        self._marks.append((self.tau, version))
        if self.cost.recomputes_kv:
            self._prefill_debt_s += self.kv_used * self.cost.prefill_s

    def abort(self, request_id: RequestId) -> None:
        """End a request with the tokens it has."""
        sequence = self.running.get(request_id)
        if sequence is not None:
            self._emit(sequence, self.count(sequence), "abort")
            self._remove(sequence)
        else:
            self.waiting = deque(waiting for waiting in self.waiting if waiting.request.request_id != request_id)

    def clear(self) -> list[Sequence]:
        """Forget everything, KV included; returns what was running or waiting."""
        lost = [*self.running.values(), *self.waiting]
        self.running.clear()
        self.waiting.clear()
        self._due.clear()
        self._prefixes.clear()
        self._kv_offset = self._prefill_debt_s = 0.0
        return lost

    def true_spans(self, sequence: Sequence, stop: int) -> Spans:
        """Which weights sampled its tokens from `emitted` to `stop`: cut at the swaps since the last delivery."""
        start = sequence.emitted
        if sequence.marks_seen == len(self._marks):
            return (Span(sequence.version, stop - start),) if stop > start else ()
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

    def _deliver_due(self) -> None:
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

    def _push(self, sequence: Sequence) -> None:
        self._serial += 1
        sequence.event = self._serial
        upto = min(sequence.emitted + DELTA_TOKENS, sequence.target)
        heapq.heappush(self._due, (sequence.origin + upto, self._serial, sequence))

    def _admit(self, version: int, speed: float) -> None:
        cost = self.cost
        while self.waiting and len(self.running) < cost.slots:
            sequence = self.waiting[0]
            kv_tokens = sequence.kv_tokens
            if self.running and self.kv_used + kv_tokens + DELTA_TOKENS > cost.kv_tokens:
                return
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

    def _preempt_if_full(self) -> None:
        while len(self.running) > 1 and self.kv_used > self.cost.kv_tokens:
            youngest = next(reversed(self.running.values()))
            self._emit(youngest, self.count(youngest), None)
            self._remove(youngest)
            self.waiting.appendleft(youngest)
            self.counters.preempted += 1

    def _remove(self, sequence: Sequence) -> None:
        del self.running[sequence.request.request_id]
        sequence.event = 0
        self._kv_offset -= len(sequence.request.prompt_token_ids) - sequence.origin
        if not self.running:
            self._kv_offset = self._prefill_debt_s = 0.0
