"""vLLM's schedulers, which report the tokens of a request by the dozen instead of after every engine step.

vLLM serializes each token of each request on its own, and the process with our event loop decodes and counts each of
them, only to join them again into deltas (benchmarks/results/step_profile.md has what that costs).

Invariant: nothing is held over a pause. vLLM labels tokens with the weight version at the time when they are sent, and
versions change only in a pause, so a paused scheduler has work until it has sent what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from penstock.rollout.engines.vllm.routes import RequestRoutes

MAX_HELD_TOKENS = 16
"""Tokens of a request that are held at most. A request that is aborted loses what was not sent yet."""
_CLIENT = 0
"""Index of the only client of an engine core: our AsyncLLM."""


@dataclass(slots=True)
class Pieces:
    """Outputs of one request that were not sent yet."""

    outputs: list[EngineCoreOutput]
    num_tokens: int
    """Tokens of `outputs`."""
    interval: int
    """Tokens with which they are sent."""


class HeldOutputs:
    """Holds the outputs of a request until they have as many tokens as its `stream_interval`, `MAX_HELD_TOKENS` at
    most. It is a base that goes before a scheduler of vLLM.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._held: dict[str, Pieces] = {}
        self._routes = RequestRoutes()

    def update_from_output(self, scheduled: Any, computed: Any) -> Any:
        """Messages of one step: the outputs of requests that have ended or enough tokens, of all in a pause."""
        recorded = computed.aux_output_connector_output if self.aux_output_connector is None else None  # type: ignore[attr-defined]
        if recorded:
            self._routes.add(recorded, self.requests)  # type: ignore[attr-defined]
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(scheduled, computed)  # type: ignore[misc]
        for message in messages.values():
            if recorded:
                self._routes.attach(message.outputs)
            message.outputs = [ready for one in message.outputs for ready in self._ready(one)]
        if self._must_send():
            rest = [joined(pieces.outputs) for pieces in self._held.values()]
            self._held.clear()
            messages.setdefault(_CLIENT, EngineCoreOutputs()).outputs += rest
        return messages

    def _ready(self, output: EngineCoreOutput) -> Iterator[EngineCoreOutput]:
        """What is to be sent of a request, now that it has one more output."""
        request_id = output.request_id
        pieces = self._held.get(request_id)
        if pieces is None:
            pieces = self._held[request_id] = Pieces([], 0, self._interval(output))
        elif not can_join(pieces.outputs[-1], output):
            yield joined(pieces.outputs)
            pieces.outputs, pieces.num_tokens = [], 0
        pieces.outputs.append(output)
        pieces.num_tokens += len(output.new_token_ids)
        if pieces.num_tokens >= pieces.interval or output.finish_reason is not None:
            yield joined(self._held.pop(request_id).outputs)

    def _interval(self, output: EngineCoreOutput) -> int:
        """Tokens with which to send a request; vLLM has already removed one that ends with its first output."""
        request: Request | None = self.requests.get(output.request_id)  # type: ignore[attr-defined]
        wanted = None if request is None or request.sampling_params is None else request.sampling_params.stream_interval
        return min(wanted or 1, MAX_HELD_TOKENS)

    def _must_send(self) -> bool:
        return bool(self._held) and self.pause_state == PauseState.PAUSED_ALL  # type: ignore[attr-defined]

    def has_requests(self) -> bool:
        """Whether another step is needed. The step of a paused scheduler computes nothing and sends what is held."""
        return self._must_send() or super().has_requests()  # type: ignore[misc]

    def finish_requests(self, *which: Any) -> Any:
        """Abort requests, for all of which vLLM has reported the end already."""
        aborted = super().finish_requests(*which)  # type: ignore[misc]
        for request in aborted:
            self._held.pop(request.request_id, None)
            self._routes.forget(request.request_id)
        return aborted


class HoldingScheduler(HeldOutputs, Scheduler):
    """For an engine that computes a step before it schedules the next one, as on CPUs."""


class HoldingAsyncScheduler(HeldOutputs, AsyncScheduler):
    """For an engine that schedules a step while it computes the one before, as on GPUs."""


def holding_scheduler(vllm_config: VllmConfig, **settings: Any) -> HoldingScheduler | HoldingAsyncScheduler:
    """The scheduler of an engine core; vLLM finds this by the name in its arguments and calls it as a class."""
    kind = HoldingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else HoldingScheduler
    return kind(vllm_config=vllm_config, **settings)


def can_join(earlier: EngineCoreOutput, later: EngineCoreOutput) -> bool:
    """Whether two outputs of a request are tokens, equally many logprobs for each and routes, and nothing else."""
    if earlier.new_sampling_mask is not None or later.new_sampling_mask is not None:
        return False
    if earlier.new_logprobs is None or later.new_logprobs is None:
        return True
    return bool(earlier.new_logprobs.logprobs.shape[1] == later.new_logprobs.logprobs.shape[1])


def joined(pieces: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Consecutive outputs of one request as one: all tokens, logprobs, routes and events, and the end of the last."""
    first, last = pieces[0], pieces[-1]
    if first is last:
        return last
    last.new_token_ids = [token for one in pieces for token in one.new_token_ids]
    logprobs = [one.new_logprobs[:3] for one in pieces if one.new_logprobs is not None]
    if logprobs:
        last.new_logprobs = LogprobsLists(*(np.concatenate(column) for column in zip(*logprobs, strict=True)))
    routes = [one.routed_experts for one in pieces if one.routed_experts is not None]
    last.routed_experts = np.concatenate(routes) if routes else None
    last.events = [event for one in pieces for event in one.events or ()] or None
    last.prefill_stats = first.prefill_stats
    return last
