"""What our scheduler holds back of vLLM's outputs, and when it sends it: on a scheduler that computes nothing."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed (extras cpu or cuda)", allow_module_level=True)

from vllm.distributed.aux_output_connector.connector import AuxRequestOutput
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

from penstock.rollout.engines.vllm.scheduler import MAX_HELD_TOKENS, HeldOutputs

pytestmark = pytest.mark.integration


class Steps:
    """A scheduler whose steps give what the test says."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.pause_state = PauseState.UNPAUSED
        self.aux_output_connector = None

    def update_from_output(self, _scheduled: object, computed: Any) -> dict[int, EngineCoreOutputs]:
        return {0: EngineCoreOutputs(outputs=computed.outputs)} if computed.outputs else {}

    def has_requests(self) -> bool:
        return False

    def finish_requests(self, names: list[str]) -> list[Any]:
        return [SimpleNamespace(request_id=name) for name in names]


class Held(HeldOutputs, Steps):
    def step(
        self, *outputs: EngineCoreOutput, routes: dict[str, AuxRequestOutput] | None = None
    ) -> list[EngineCoreOutput]:
        """What is sent after a step with these outputs, in which these routes were recorded."""
        computed = SimpleNamespace(outputs=list(outputs), aux_output_connector_output=routes)
        messages = self.update_from_output(None, computed)
        return [one for message in messages.values() for one in message.outputs]


def scheduler(**intervals: int | None) -> Held:
    """A scheduler with requests of these `stream_interval`s."""
    held = Held()
    for name, interval in intervals.items():
        held.requests[name] = SimpleNamespace(sampling_params=SimpleNamespace(stream_interval=interval))
    return held


def token(name: str, value: int, *, width: int = 1, **more: Any) -> EngineCoreOutput:
    """One token with its logprob, −value / 4."""
    row = np.full((1, width), value)
    return EngineCoreOutput(name, [value], LogprobsLists(row, -row / 4, row[:, 0], None), **more)


def test_tokens_of_an_interval_are_sent_as_one_output_with_their_logprobs_in_order() -> None:
    held = scheduler(a=3)
    assert held.step(token("a", 1)) == held.step(token("a", 2)) == []
    (sent,) = held.step(token("a", 3))
    assert sent.new_token_ids == [1, 2, 3]
    assert sent.new_logprobs is not None
    assert sent.new_logprobs.logprobs.tolist() == [[-0.25], [-0.5], [-0.75]]
    assert sent.new_logprobs.logprob_token_ids.tolist() == [[1], [2], [3]]
    assert held.step(token("a", 4)) == [], "the next interval starts from zero"


def test_no_request_is_held_for_longer_than_the_largest_interval() -> None:
    held = scheduler(a=10 * MAX_HELD_TOKENS)
    counts = [len(held.step(token("a", value))) for value in range(2 * MAX_HELD_TOKENS)]
    assert [step for step, count in enumerate(counts) if count] == [MAX_HELD_TOKENS - 1, 2 * MAX_HELD_TOKENS - 1]


@pytest.mark.parametrize("interval", [1, None])
def test_a_request_without_an_interval_is_sent_token_by_token(interval: int | None) -> None:
    held = scheduler(a=interval)
    assert [one.new_token_ids for value in (1, 2) for one in held.step(token("a", value))] == [[1], [2]]


def test_the_end_of_a_request_is_sent_at_once_with_all_that_was_held_of_it_only() -> None:
    held = scheduler(a=8, b=8)
    held.step(token("a", 1), token("b", 5))
    (sent,) = held.step(token("a", 2, finish_reason=FinishReason.STOP, stop_reason=7), token("b", 6))
    assert (sent.request_id, sent.new_token_ids) == ("a", [1, 2])
    assert (sent.finish_reason, sent.stop_reason) == (FinishReason.STOP, 7)
    (sent,) = held.step(token("b", 7, finish_reason=FinishReason.LENGTH))
    assert sent.new_token_ids == [5, 6, 7]


def test_a_request_that_ends_with_its_first_output_is_sent_though_vllm_has_removed_it() -> None:
    (sent,) = scheduler().step(token("a", 1, finish_reason=FinishReason.STOP))
    assert (sent.new_token_ids, sent.finish_reason) == ([1], FinishReason.STOP)


def test_a_pause_has_work_until_all_is_sent_so_that_tokens_keep_their_version() -> None:
    held = scheduler(a=8, b=8)
    held.step(token("a", 1), token("b", 5))
    assert not held.has_requests(), "an engine that is not paused does not step for it"
    held.pause_state = PauseState.PAUSED_ALL
    assert held.has_requests()
    assert [one.new_token_ids for one in held.step()] == [[1], [5]]
    assert not held.has_requests()


def test_what_was_held_of_an_aborted_request_is_dropped() -> None:
    held = scheduler(a=8, b=8)
    held.step(token("a", 1), token("b", 5))
    held.finish_requests(["a"])
    held.pause_state = PauseState.PAUSED_ALL
    assert [one.request_id for one in held.step()] == ["b"]


def test_events_and_the_figures_of_the_prefill_survive_the_joining() -> None:
    held, preempted = scheduler(a=3), EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED, 1.0)
    figures: Any = object()
    held.step(token("a", 1, prefill_stats=figures))
    held.step(token("a", 2, events=[preempted]))
    (sent,) = held.step(token("a", 3))
    assert sent.events == [preempted]
    assert sent.prefill_stats is figures


def rows(start: int, *values: int) -> AuxRequestOutput:
    """Routes of consecutive tokens, in one layer to one expert."""
    return AuxRequestOutput(start, np.array(values, np.uint8).reshape(-1, 1, 1))


def test_routes_go_with_the_tokens_that_they_predicted_and_are_those_of_the_first_pass() -> None:
    held = scheduler(a=2)
    held.requests["a"].sampling_params.routed_experts_prompt_start = 1
    assert held.step(routes={"a": rows(0, 10, 11)}) == [], "a part of its prompt"
    assert held.step(token("a", 1), routes={"a": rows(2, 12)}) == []
    (sent,) = held.step(token("a", 2), routes={"a": rows(3, 13)})
    assert sent.routed_experts is not None
    assert sent.routed_experts.flatten().tolist() == [11, 12, 13]
    held.step(routes={"a": rows(0, 90, 91, 92, 93)})  # its cache is computed again
    (last,) = held.step(token("a", 3, finish_reason=FinishReason.LENGTH), routes={"a": rows(4, 14)})
    assert last.routed_experts is not None
    assert last.routed_experts.flatten().tolist() == [14]
    assert not held._routes._parts
    assert not held._routes._ends
    held.requests["b"] = held.requests["a"]
    held.step(token("b", 1), routes={"b": rows(0, 1, 2)})
    held.finish_requests(["b"])
    assert not held._routes._ends, "of an aborted request nothing is kept"


def test_outputs_that_cannot_be_joined_are_sent_one_after_the_other() -> None:
    held = scheduler(a=2)
    held.step(token("a", 1))
    (before,) = held.step(token("a", 2, width=3))
    assert before.new_token_ids == [1], "the logprobs of the second token have another width"
    (after,) = held.step(token("a", 3, width=3))
    assert after.new_token_ids == [2, 3]
    held.step(token("a", 4))
    mask = SamplingMaskLists(np.array([4]))
    (before,) = held.step(token("a", 5, new_sampling_mask=mask))
    (kept,) = held.step(token("a", 6))
    assert before.new_token_ids == [4]
    assert kept.new_sampling_mask is mask
