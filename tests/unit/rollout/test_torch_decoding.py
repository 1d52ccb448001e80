from __future__ import annotations

import torch

from penstock.dataflow.ids import RequestId
from penstock.dataflow.ports import GenerateRequest
from penstock.dataflow.sampling import SamplingParams
from penstock.rollout.engines.torch.cache import SlotCache
from penstock.rollout.engines.torch.decoding import BatchLimits, RunningRequest, _chunks

LIMITS = BatchLimits(max_num_seqs=4, max_context_tokens=20, journal_interval_tokens=8, device="cpu")


def running(num_prompt_tokens: int, **sampling: object) -> RunningRequest:
    params = SamplingParams(**{"max_new_tokens": 5, **sampling})  # type: ignore[arg-type]
    return RunningRequest.of(GenerateRequest(RequestId("r"), (2,) * num_prompt_tokens, params), LIMITS)


def test_a_delta_carries_the_spans_of_exactly_its_tokens() -> None:
    request = running(3)
    for token, version in [(5, 0), (6, 0), (7, 1)]:
        assert request.append(token, -0.5, version) is None
    first = request.report(None)
    assert (first.token_ids, first.spans, first.finish_reason) == ((5, 6, 7), ((0, 2), (1, 1)), None)
    request.append(8, -0.25, 1)
    last = request.report("abort")
    assert (last.token_ids, last.logprobs, last.spans, last.finish_reason) == ((8,), (-0.25,), ((1, 1),), "abort")


def test_a_request_ends_by_stop_token_before_length_and_at_the_context_limit() -> None:
    both = running(3, max_new_tokens=1, stop_token_ids=(9,))
    assert both.append(9, 0.0, 0) == "stop"
    at_limit = running(19, max_new_tokens=100)
    assert at_limit.append(3, 0.0, 0) == "length"


def test_prefill_chunks_keep_order_and_stay_within_the_padded_budget() -> None:
    requests = [running(length) for length in (10, 2, 12, 1, 1, 50, 3)]
    chunks = list(_chunks(requests, budget_tokens=24))
    assert [request for chunk in chunks for request in chunk] == requests
    assert [len(chunk) for chunk in chunks] == [2, 2, 1, 1, 1]
    assert all(len(c) == 1 or len(c) * max(len(r.token_ids) for r in c) <= 24 for c in chunks)


def test_the_cache_grows_without_losing_what_is_in_it_and_writes_only_where_aimed() -> None:
    cache = SlotCache(num_layers=1, num_kv_heads=2, head_dim=4, dtype=torch.float32, device="cpu")
    cache.reserve(2, 3)
    new = torch.randn(1, 2, 3, 4)
    cache.aim(1, torch.arange(3)[None], 3)
    keys, values = cache.update(new, -new, 0)
    assert keys.equal(new)
    assert values.equal(-new)
    cache.reserve(3, 5)
    assert cache.keys[0].shape == (4, 2, 6, 4)  # doubled
    assert cache.keys[0][1, :, :3].equal(new[0])
    assert cache.keys[0][0].count_nonzero() == cache.keys[0][1, :, 3:].count_nonzero() == 0
    cache.move(1, 0, 2)
    assert cache.values[0][0, :, :2].equal(-new[0, :, :2])
    assert cache.values[0][0, :, 2:].count_nonzero() == 0
    cache.clear()
    assert cache.keys[0].numel() == 0
