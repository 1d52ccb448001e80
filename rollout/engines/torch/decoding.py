"""Continuous batching for the torch engine: the batch that decodes over the slot-based KV cache.

Shape legend: N running requests, V vocabulary.

No thread, clock or event loop here: `TorchEngine` calls `DecodeBatch` for and between decode steps, always from one
thread. Running requests occupy the contiguous slots 0..N-1, so a decode step works on views of the cache and never
gathers. Prefilling caches all tokens but the last; the last one is the input of the next decode step. Only decode steps
sample, so a prompt, a resumed request and a recomputed cache are the same operation.

Float32 results depend on the shape of a forward pass, not on the contents of other rows. With `deterministic` there is
one shape: decode steps of `max_num_seqs` rows over `max_context_tokens` positions; prompts go through these steps too,
token by token. Draws are keyed by (seed, position). So the sampled tokens depend only on the request and the weights
(docs/concepts/determinism.md).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from penstock.dataflow.ids import RequestId
from penstock.dataflow.ports import GenerateRequest, TokenDelta
from penstock.dataflow.sampling import SamplingParams, derive_seed, uniforms
from penstock.dataflow.trajectory import Alternatives, FinishReason, Routes, dtype_for, joined_routes
from penstock.dataflow.versions import Span, join_spans
from penstock.kernels.expert_choice import ExpertChoice
from penstock.rollout.engines.torch.cache import SlotCache
from penstock.weights.layout.checkpoint_names import body_of

PREFILL_BUDGET_TOKENS = 8192
"""Padded tokens of one prefill pass: bounds its memory and how long it delays the requests that are decoding."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Sizes of a `DecodeBatch`, and the device its tensors are on."""

    max_num_seqs: int
    max_context_tokens: int
    journal_interval_tokens: int
    device: str
    deterministic: bool = False
    """Every forward pass has the same shape."""


@dataclass(slots=True)
class RunningRequest:
    """One request and its tokens."""

    request: GenerateRequest
    token_ids: list[int]
    """Prompt and sampled tokens."""
    max_tokens: int
    stop_token_ids: frozenset[int]
    seed: int | None
    """Key of its draws; None until the batch assigns one to a request without a seed."""
    num_cached: int = 0
    """Leading tokens that are in the cache. The next step takes the token after them; it samples if that is the last
    one."""
    num_routed: int = 0
    """Leading tokens whose routes were recorded, or are not asked for."""
    unreported_ids: list[int] = field(default_factory=list)
    unreported_logprobs: list[float] = field(default_factory=list)
    unreported_spans: list[Span] = field(default_factory=list)
    unreported_alternatives: list[tuple[int, ...]] = field(default_factory=list)
    unreported_routes: list[Routes] = field(default_factory=list)

    @classmethod
    def of(cls, request: GenerateRequest, limits: BatchLimits) -> RunningRequest:
        """A request that has not sampled yet."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        return cls(
            request=request,
            token_ids=list(prompt),
            max_tokens=min(len(prompt) + sampling.max_new_tokens, limits.max_context_tokens),
            stop_token_ids=frozenset(sampling.stop_token_ids),
            seed=sampling.seed,
            num_routed=request.routes_from,
        )

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def is_at_end(self) -> bool:
        """All tokens are in the cache: the newest logits are those of the next token."""
        return self.num_cached == len(self.token_ids)

    def append(
        self, token_id: int, logprob: float, version: int, alternatives: tuple[int, ...] | None = None
    ) -> FinishReason | None:
        """Append one sampled token; return the finish reason if the request ends with it."""
        self.token_ids.append(token_id)
        self.unreported_ids.append(token_id)
        self.unreported_logprobs.append(logprob)
        if alternatives is not None:
            self.unreported_alternatives.append(alternatives)
        if self.unreported_spans and self.unreported_spans[-1].version == version:
            self.unreported_spans[-1] = Span(version, self.unreported_spans[-1].num_tokens + 1)
        else:
            self.unreported_spans.append(Span(version, 1))
        if token_id in self.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None

    def route(self, start: int, routes: Routes) -> None:
        """Keep the routes of the tokens from `start` on; those of a token that is computed again are known."""
        self.unreported_routes.append(routes[max(self.num_routed - start, 0) :])
        self.num_routed = max(self.num_routed, start + len(routes))

    def report(self, finish_reason: FinishReason | None) -> TokenDelta:
        """Return the tokens sampled since the last delta."""
        delta = TokenDelta(
            tuple(self.unreported_ids),
            tuple(self.unreported_logprobs),
            join_spans(self.unreported_spans),
            finish_reason,
            Alternatives.of(self.unreported_alternatives) if self.request.sampling.is_truncated else None,
            joined_routes(self.unreported_routes) if self.unreported_ids else None,
        )
        self.unreported_ids.clear()
        self.unreported_logprobs.clear()
        self.unreported_spans.clear()
        self.unreported_alternatives.clear()
        self.unreported_routes.clear()
        return delta


Deltas = list[tuple[RequestId, TokenDelta]]


class DecodeBatch:
    """Waiting and running requests of one model. Invariant: request i of `running` owns slot i.

    Args:
        records_routes: Deltas tell which experts each token was sent to.

    Attributes:
        version: Recorded for every sampled token; the engine sets it when it swaps weights.
        is_frozen: The weights belong to no version, so nothing may be sampled.
        tokens_generated: Absolute counter.
    """

    def __init__(
        self, model: nn.Module, cache: SlotCache, seed: int, limits: BatchLimits, *, records_routes: bool = False
    ) -> None:
        self.model = model
        _, self._body = body_of(model)
        self.cache = cache
        self.limits = limits
        self.version = -1
        self.is_frozen = False
        self.tokens_generated = 0
        self.waiting: deque[RunningRequest] = deque()
        self.running: list[RunningRequest] = []
        self._device = torch.device(limits.device)
        self._seed = seed
        self._unseeded = itertools.count()
        choice = ExpertChoice(model) if records_routes else None
        self._choice = choice if choice is not None and choice.routers else None

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def can_step(self) -> bool:
        return self.has_requests and not self.is_frozen

    @property
    def kv_cache_usage(self) -> float:
        """Cached tokens over all positions of all slots, 0..1. Safe to read from any thread."""
        capacity = self.limits.max_num_seqs * self.limits.max_context_tokens
        return sum(len(request.token_ids) for request in tuple(self.running)) / capacity

    def submit(self, request: RunningRequest) -> None:
        """Queue a request; it joins at the next step that has a free slot."""
        if request.seed is None:
            request.seed = derive_seed(self._seed, next(self._unseeded))
        self.waiting.append(request)

    @torch.inference_mode()
    def abort(self, request_id: RequestId) -> Deltas:
        """End one request at once; its last delta carries the tokens so far. An unknown id is finished: no delta."""
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
        """Admit the requests that fit, then advance every running request by one token. Return the deltas due."""
        if self.is_frozen:
            return []
        self._admit()
        if not self.running:
            return []
        token_ids, logprobs, alternatives = self._sample(self._forward())
        deltas: Deltas = []
        finished: list[int] = []
        for slot, request in enumerate(self.running):
            request.num_cached += 1
            if not request.is_at_end:  # its prompt is still being cached
                continue
            self.tokens_generated += 1
            reason = request.append(token_ids[slot], logprobs[slot], self.version, alternatives.get(slot))
            if reason is not None:
                finished.append(slot)
            if reason is not None or len(request.unreported_ids) >= self.limits.journal_interval_tokens:
                deltas.append((request.request_id, request.report(reason)))
        for slot in reversed(finished):
            self._release(slot)
        return deltas

    @torch.inference_mode()
    def recompute(self) -> None:
        """Recompute the cache of every running request with the model's current weights."""
        self._prefill(self.running, first_slot=0)

    def _admit(self) -> None:
        free = self.limits.max_num_seqs - len(self.running)
        joining = [self.waiting.popleft() for _ in range(min(free, len(self.waiting)))]
        if joining:
            self._prefill(joining, first_slot=len(self.running))
            self.running += joining

    def _prefill(self, requests: Sequence[RunningRequest], first_slot: int) -> None:
        """Cache all tokens but the last of `requests`, which own the slots from `first_slot` on.

        Deterministic batches do it in the following decode steps, which all have one shape.
        """
        for request in requests:
            request.num_cached = 0 if self.limits.deterministic else len(request.token_ids) - 1
        slot = first_slot
        for chunk in _chunks([] if self.limits.deterministic else requests, PREFILL_BUDGET_TOKENS):
            length = max(request.num_cached for request in chunk)
            self.cache.reserve(slot + len(chunk), length)
            if length > 0:
                rows = [request.token_ids[:-1] + [0] * (length - request.num_cached) for request in chunk]
                order = torch.arange(length, device=self._device)
                positions = order.expand(len(chunk), -1)
                self.cache.aim(slot, positions, length)
                with self._routing(chunk, length, start=0):
                    self._body(  # no logits: decoding samples the next token
                        input_ids=torch.tensor(rows, device=self._device),
                        attention_mask=(order[None, :] <= order[:, None])[None, None],
                        position_ids=positions,
                        past_key_values=self.cache,
                    )
            slot += len(chunk)

    def _forward(self) -> torch.Tensor:
        """One forward pass over the next token of every running request: logits `[R, V] float32`.

        R is N, or in a deterministic batch `max_num_seqs`: rows from N on are idle and hold arbitrary finite values.
        """
        num_rows, length = len(self.running), 1 + max(request.num_cached for request in self.running)
        if self.limits.deterministic:
            num_rows, length = self.limits.max_num_seqs, self.limits.max_context_tokens
        inputs = self._column([request.token_ids[request.num_cached] for request in self.running], num_rows)
        positions = self._column([request.num_cached for request in self.running], num_rows)
        self.cache.reserve(num_rows, length)
        self.cache.aim(0, positions, length)
        visible = torch.arange(length, device=self._device)[None, :] <= positions
        with self._routing(self.running, 1):
            output = self.model(
                input_ids=inputs,
                attention_mask=visible[:, None, None, :],
                position_ids=positions,
                past_key_values=self.cache,
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()

    @contextmanager
    def _routing(self, requests: Sequence[RunningRequest], length: int, start: int | None = None) -> Iterator[None]:
        """Around a pass: give each request the routes of its row of `length` tokens, as far as they are its own.

        Args:
            requests: The first rows of the pass.
            length: Tokens of a row.
            start: Position of its first token, up to the last one that is cached; None: the token after that one.
        """
        if self._choice is None:
            yield
            return
        with self._choice.recording() as chosen:
            yield
        routes = torch.stack([chosen[layer] for layer in range(len(chosen))], dim=1).cpu().numpy()
        routes = routes.astype(dtype_for(self._choice.num_experts))
        for row, request in enumerate(requests):
            own = routes[row * length : (row + 1) * length]
            if start is None:
                request.route(request.num_cached, own)
            else:
                request.route(start, own[: request.num_cached])

    def _sample(self, logits: torch.Tensor) -> tuple[list[int], list[float], dict[int, tuple[int, ...]]]:
        """Draw one token per row of `[R, V]`; returns them, their behavior logprobs, and slot -> alternatives.

        Inverse CDF: with u from [0, 1), keyed by (seed, position), take the first token whose cumulative probability
        exceeds u. Temperature 0 takes the arg max, with logprobs at temperature 1.
        """
        num_rows = len(logits)
        temperatures = self._column([request.request.sampling.temperature for request in self.running], num_rows)
        draws = uniforms(
            [request.seed or 0 for request in self.running], [request.num_cached + 1 for request in self.running]
        )
        is_greedy = temperatures == 0
        scaled = logits / temperatures.masked_fill(is_greedy, 1.0).float()
        logprobs, uniform = torch.log_softmax(scaled, dim=-1), self._column(draws, num_rows)
        token_ids = torch.where(is_greedy, logprobs.argmax(dim=-1, keepdim=True), _drawn(logprobs, uniform))
        drawn, behavior = token_ids[:, 0].tolist(), logprobs.gather(1, token_ids)[:, 0].tolist()
        alternatives: dict[int, tuple[int, ...]] = {}
        slots = [slot for slot, request in enumerate(self.running) if request.request.sampling.is_truncated]
        if slots:
            limits = [self.running[slot].request.sampling for slot in slots]
            kept_logprobs, ids = truncated(scaled[slots], limits)
            chosen = _drawn(kept_logprobs, uniform[slots])
            values, counts = kept_logprobs.gather(1, chosen)[:, 0].tolist(), kept_logprobs.isfinite().sum(1).tolist()
            for row, slot in enumerate(slots):
                support, place = ids[row, : counts[row]].tolist(), int(chosen[row])
                drawn[slot], behavior[slot] = support[place], values[row]
                alternatives[slot] = (*support[:place], *support[place + 1 :])
        return drawn, behavior, alternatives

    def _column(self, values: Sequence[float] | NDArray[np.float64], num_rows: int) -> torch.Tensor:
        """`[num_rows, 1]` int64, or float64 for floats: one value per running request, 0 in idle rows."""
        column = torch.tensor(np.asarray(values))[:, None]
        return functional.pad(column, (0, 0, 0, num_rows - len(column))).to(self._device)

    def _release(self, slot: int) -> None:
        """Free a slot: the last running request moves into it, so that the running slots stay contiguous."""
        last = self.running.pop()
        if slot < len(self.running):
            self.cache.move(len(self.running), slot, last.num_cached)
            self.running[slot] = last


def _drawn(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`[N, 1] int64`: by inverse CDF from `[N, V]` logprobs, with draws from [0, 1), `[N, 1] float64`."""
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)


def truncated(scaled: torch.Tensor, limits: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncate distributions by min-p, then top-k, then top-p of what is left (vLLM's order), and renormalise them.

    Args:
        scaled: `[N, V] float32`, logits after the temperature.
        limits: Of each row.

    Returns:
        Logprobs, −∞ behind the end of the support, and ids, by falling probability: `[N, K]` each, K the largest top-k.
    """
    num_kept = torch.tensor([limit.top_k or scaled.shape[1] for limit in limits], device=scaled.device)[:, None]
    top_p, min_p = (
        torch.tensor([getattr(limit, name) for limit in limits], device=scaled.device)[:, None]
        for name in ("top_p", "min_p")
    )
    values, ids = scaled.topk(min(int(num_kept.max()), scaled.shape[1]), dim=-1)
    is_cut = (torch.arange(values.shape[1], device=scaled.device) >= num_kept) | (values < values[:, :1] + min_p.log())
    probabilities = values.masked_fill(is_cut, -torch.inf).softmax(dim=-1)
    # A token is not needed if enough are more likely. Rounding must not remove any where nothing is to be removed.
    is_cut |= (probabilities.cumsum(dim=-1) - probabilities >= top_p) & (top_p < 1)
    return values.masked_fill(is_cut, -torch.inf).log_softmax(dim=-1), ids


def _chunks(requests: Sequence[RunningRequest], budget_tokens: int) -> Iterator[list[RunningRequest]]:
    """Split requests, in order, into chunks whose padded size stays within the budget; at least one request each."""
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
