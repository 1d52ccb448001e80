"""Continuous batching for the torch engine: the batch that decodes over the slot-based KV cache.

Shape legend: N running requests, V vocabulary.

No thread, clock or event loop here: `TorchEngine` calls `DecodeBatch` between and for decode steps, always from one
thread. Running requests occupy slots 0..N-1 without holes, so a decode step works on views of the cache and never
gathers. Prefilling means "fill the cache for all tokens but the last"; the last one is the input of the next decode
step, which alone samples. So a prompt, a resumed request and a recomputed cache are all the same operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from penstock.dataflow.ids import RequestId
from penstock.dataflow.ports import GenerateRequest, TokenDelta
from penstock.dataflow.trajectory import FinishReason
from penstock.dataflow.versions import Span, join_spans
from penstock.rollout.torch_cache import SlotCache

PREFILL_BUDGET_TOKENS = 8192
"""Padded tokens of one prefill pass: bounds its memory, and how long it holds up those already decoding."""

_SMALLEST_FLOAT = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Sizes of a `DecodeBatch`, and the device its tensors are on."""

    max_num_seqs: int
    max_context_tokens: int
    journal_interval_tokens: int
    device: str


@dataclass(slots=True)
class RunningRequest:
    """One request and what it has sampled.

    Attributes:
        token_ids: Prompt and sampled tokens; all but the last are in the cache while it runs.
        generator: Its own random stream if the request has a seed.
        unreported_*: Sampled since the last delta; spans as (version, count) pairs.
    """

    request: GenerateRequest
    token_ids: list[int]
    max_tokens: int
    stop_token_ids: frozenset[int]
    generator: torch.Generator | None
    unreported_ids: list[int] = field(default_factory=list)
    unreported_logprobs: list[float] = field(default_factory=list)
    unreported_spans: list[Span] = field(default_factory=list)

    @classmethod
    def of(cls, request: GenerateRequest, limits: BatchLimits) -> RunningRequest:
        """A request that has not sampled yet."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        seeded = None if sampling.seed is None else torch.Generator(limits.device).manual_seed(sampling.seed)
        return cls(
            request=request,
            token_ids=list(prompt),
            max_tokens=min(len(prompt) + sampling.max_new_tokens, limits.max_context_tokens),
            stop_token_ids=frozenset(sampling.stop_token_ids),
            generator=seeded,
        )

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    def append(self, token_id: int, logprob: float, version: int) -> FinishReason | None:
        """Take one sampled token; return why the request ends with it, if it does."""
        self.token_ids.append(token_id)
        self.unreported_ids.append(token_id)
        self.unreported_logprobs.append(logprob)
        if self.unreported_spans and self.unreported_spans[-1].version == version:
            self.unreported_spans[-1] = Span(version, self.unreported_spans[-1].num_tokens + 1)
        else:
            self.unreported_spans.append(Span(version, 1))
        if token_id in self.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None

    def report(self, finish_reason: FinishReason | None) -> TokenDelta:
        """Hand out what was sampled since the last delta."""
        delta = TokenDelta(
            tuple(self.unreported_ids),
            tuple(self.unreported_logprobs),
            join_spans(self.unreported_spans),
            finish_reason,
        )
        self.unreported_ids.clear()
        self.unreported_logprobs.clear()
        self.unreported_spans.clear()
        return delta


Deltas = list[tuple[RequestId, TokenDelta]]


class DecodeBatch:
    """Waiting and running requests of one model. Invariant: request i of `running` owns slot i.

    Attributes:
        version: Stamped on every sampled token; the engine sets it when it swaps weights.
        is_frozen: The weights are of no version: nothing may be sampled.
        tokens_generated: Absolute counter.
    """

    def __init__(self, model: nn.Module, cache: SlotCache, seed: int, limits: BatchLimits) -> None:
        self.model = model
        self.cache = cache
        self.limits = limits
        self.version = -1
        self.is_frozen = False
        self.tokens_generated = 0
        self.waiting: deque[RunningRequest] = deque()
        self.running: list[RunningRequest] = []
        self._device = torch.device(limits.device)
        self._generator = torch.Generator(self._device).manual_seed(seed)

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def can_step(self) -> bool:
        return self.has_requests and not self.is_frozen

    @property
    def kv_cache_usage(self) -> float:
        """Cached tokens over all positions of all slots, 0..1. Safe to ask from any thread."""
        capacity = self.limits.max_num_seqs * self.limits.max_context_tokens
        return sum(len(request.token_ids) for request in tuple(self.running)) / capacity

    def submit(self, request: RunningRequest) -> None:
        """Queue a request; it joins at the next step that has a free slot."""
        self.waiting.append(request)

    @torch.inference_mode()
    def abort(self, request_id: RequestId) -> Deltas:
        """End one request at once; its last delta carries the tokens so far. Unknown ids are finished ones: nothing."""
        for request in self.waiting:
            if request.request_id == request_id:
                self.waiting.remove(request)
                return [(request_id, request.report("abort"))]
        for slot, request in enumerate(self.running):
            if request.request_id == request_id:
                self._release(slot)
                return [(request_id, request.report("abort"))]
        return []

    @torch.inference_mode()
    def step(self) -> Deltas:
        """Admit what fits, then sample one token for every running request. Deltas that became due are returned."""
        if self.is_frozen:
            return []
        self._admit()
        if not self.running:
            return []
        logits = self._forward_last_tokens()
        token_ids, logprobs = self._sample(logits)
        self.tokens_generated += len(self.running)
        deltas: Deltas = []
        finished: list[int] = []
        for slot, request in enumerate(self.running):
            reason = request.append(token_ids[slot], logprobs[slot], self.version)
            if reason is not None:
                finished.append(slot)
            if reason is not None or len(request.unreported_ids) >= self.limits.journal_interval_tokens:
                deltas.append((request.request_id, request.report(reason)))
        for slot in reversed(finished):
            self._release(slot)
        return deltas

    @torch.inference_mode()
    def recompute(self) -> None:
        """Fill the cache of every running request anew under the model's present weights."""
        self._prefill(self.running, first_slot=0)

    def _admit(self) -> None:
        free = self.limits.max_num_seqs - len(self.running)
        joining = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        if joining:
            self._prefill(joining, first_slot=len(self.running))
            self.running += joining

    def _prefill(self, requests: Sequence[RunningRequest], first_slot: int) -> None:
        """Cache all tokens but the last of `requests`, which own the slots from `first_slot` on."""
        slot = first_slot
        for chunk in _chunks(requests, PREFILL_BUDGET_TOKENS):
            length = max(len(request.token_ids) for request in chunk) - 1
            self.cache.reserve(slot + len(chunk), length)
            if length > 0:
                rows = [request.token_ids[:-1] + [0] * (length + 1 - len(request.token_ids)) for request in chunk]
                order = torch.arange(length, device=self._device)
                positions = order.expand(len(chunk), -1)
                self.cache.aim(slot, positions, length)
                self.model.base_model(  # type: ignore[operator]  # no logits: decoding samples the next token
                    input_ids=torch.tensor(rows, device=self._device),
                    attention_mask=(order[None, :] <= order[:, None])[None, None],
                    position_ids=positions,
                    past_key_values=self.cache,
                )
            slot += len(chunk)

    def _forward_last_tokens(self) -> torch.Tensor:
        """One forward pass over the newest token of every running request: logits `[N, V] float32`."""
        last = torch.tensor([request.token_ids[-1] for request in self.running], device=self._device)
        lengths = [len(request.token_ids) for request in self.running]
        positions = torch.tensor(lengths, device=self._device)[:, None] - 1
        length = max(lengths)
        self.cache.reserve(len(lengths), length)
        self.cache.aim(0, positions, length)
        visible = torch.arange(length, device=self._device)[None, :] <= positions
        output = self.model(
            input_ids=last[:, None],
            attention_mask=visible[:, None, None, :],
            position_ids=positions,
            past_key_values=self.cache,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()

    def _sample(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """Draw one token per row and its behavior logprob.

        Gumbel-max: `argmax(log p − log e)` with e ~ Exp(1) draws from p. Temperature 0 takes the arg max, with
        logprobs at temperature 1.
        """
        temperatures = torch.tensor([request.request.sampling.temperature for request in self.running])
        temperatures = temperatures.to(self._device)[:, None]
        is_greedy = temperatures == 0
        logprobs = torch.log_softmax(logits / temperatures.masked_fill(is_greedy, 1.0), dim=-1)
        noise = torch.empty_like(logprobs).exponential_(generator=self._generator)
        for slot, request in enumerate(self.running):
            if request.generator is not None:
                noise[slot].exponential_(generator=request.generator)
        gumbel = noise.clamp_(min=_SMALLEST_FLOAT).log_().neg_()
        token_ids = (logprobs + gumbel.masked_fill_(is_greedy, 0.0)).argmax(dim=-1)
        chosen = logprobs.gather(1, token_ids[:, None])[:, 0]
        return token_ids.tolist(), chosen.tolist()

    def _release(self, slot: int) -> None:
        """Free a slot: the last running request moves into it, so that running slots stay without holes."""
        last = self.running.pop()
        if slot < len(self.running):
            self.cache.move(len(self.running), slot, len(last.token_ids) - 1)
            self.running[slot] = last


def _chunks(requests: Sequence[RunningRequest], budget_tokens: int) -> Iterator[list[RunningRequest]]:
    """Neighbouring requests whose padded size stays within the budget; at least one each."""
    chunk: list[RunningRequest] = []
    longest = 0
    for request in requests:
        longest_with = max(longest, len(request.token_ids))
        if chunk and longest_with * (len(chunk) + 1) > budget_tokens:
            yield chunk
            chunk, longest_with = [], len(request.token_ids)
        chunk.append(request)
        longest = longest_with
    if chunk:
        yield chunk
