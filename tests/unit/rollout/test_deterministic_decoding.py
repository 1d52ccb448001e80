"""Bit for bit: what a request samples in a deterministic batch depends on nothing but itself and the weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.ports import GenerateRequest
from penstock.dataflow.sampling import SamplingParams
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.torch.decoding import DecodeBatch, RunningRequest
from penstock.rollout.engines.torch.engine import load_batch
from penstock.weights.model_config import ModelConfig

PROMPT = (2, 9, 20, 4, 17, 8, 30)
Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def open_batch(model: ModelConfig, *, deterministic: bool = True, rows: int = 13) -> DecodeBatch:
    """13 rows and 96 positions: no multiples of a vector's or a tile's width."""
    config = TorchEngineConfig(type="torch", max_num_seqs=rows, deterministic=deterministic)
    short = model.model_copy(update={"max_context_tokens": 96})
    return load_batch(EngineSpec(EngineId("e"), str(model.path), short, config, "cpu", "keep_kv", 7, 1), config)


class Client:
    """Submits requests to a batch and gathers what they sample."""

    def __init__(self, batch: DecodeBatch) -> None:
        self.batch = batch
        self.answers: dict[RequestId, Answer] = {}

    def submit(self, name: str, prompt: tuple[int, ...], seed: int | None, max_new_tokens: int) -> None:
        request = GenerateRequest(RequestId(name), prompt, SamplingParams(max_new_tokens, seed=seed))
        self.answers[request.request_id] = ([], [])
        self.batch.submit(RunningRequest.of(request, self.batch.limits))

    def step(self, count: int) -> None:
        for _ in range(count):
            for request_id, delta in self.batch.step():
                self.answers[request_id][0].extend(delta.token_ids)
                self.answers[request_id][1].extend(delta.logprobs)

    def finish(self) -> None:
        while self.batch.has_requests:
            self.step(1)

    def crowd(self, label: str, count: int) -> None:
        """Requests of various lengths, some without a seed."""
        for i in range(count):
            prompt = tuple(2 + (5 * i + j) % 30 for j in range(1 + i % 9))
            self.submit(f"{label}{i}", prompt, None if i % 3 else i, 5 + 7 * i % 43)


def alone(model: ModelConfig, *, deterministic: bool = True) -> Answer:
    client = Client(open_batch(model, deterministic=deterministic))
    client.submit("mine", PROMPT, seed=3, max_new_tokens=60)
    client.finish()
    return client.answers[RequestId("mine")]


@pytest.fixture(scope="module")
def mine(tiny_model_config: ModelConfig) -> Answer:
    """What the request samples alone."""
    return alone(tiny_model_config)


@pytest.mark.some(2)
@pytest.mark.parametrize(("before", "steps", "after"), [(0, 0, 12), (5, 3, 7), (12, 40, 20), (30, 25, 30)])
def test_a_request_samples_the_same_bits_alone_and_among_others_early_and_late_in_any_slot(
    tiny_model_config: ModelConfig, mine: Answer, before: int, steps: int, after: int
) -> None:
    client = Client(open_batch(tiny_model_config))
    client.crowd("before", before)
    client.step(steps)
    client.submit("mine", PROMPT, seed=3, max_new_tokens=60)
    client.crowd("after", after)
    client.finish()
    assert client.answers[RequestId("mine")] == mine


def test_a_resumed_request_goes_on_with_the_same_bits(tiny_model_config: ModelConfig, mine: Answer) -> None:
    tokens, logprobs = mine
    for cut in (1, 17, 59):
        client = Client(open_batch(tiny_model_config))
        client.crowd("other", 6)
        client.step(9)
        client.submit("rest", PROMPT + tuple(tokens[:cut]), seed=3, max_new_tokens=60 - cut)
        client.finish()
        assert client.answers[RequestId("rest")] == (tokens[cut:], logprobs[cut:])


def test_recomputing_the_cache_under_equal_weights_changes_no_bit(tiny_model_config: ModelConfig, mine: Answer) -> None:
    client = Client(open_batch(tiny_model_config))
    client.submit("mine", PROMPT, seed=3, max_new_tokens=60)
    client.step(20)
    client.crowd("other", 4)
    client.step(10)
    client.batch.recompute()
    client.finish()
    assert client.answers[RequestId("mine")] == mine


def test_in_normal_mode_company_changes_the_last_bits_but_hardly_the_draws(
    tiny_model_config: ModelConfig, mine: Answer
) -> None:
    """Why the mode exists: one row goes through another matrix routine than thirteen."""
    tokens, logprobs = alone(tiny_model_config, deterministic=False)
    client = Client(open_batch(tiny_model_config, deterministic=False))
    client.crowd("before", 12)
    client.submit("mine", PROMPT, seed=3, max_new_tokens=60)
    client.finish()
    others_tokens, others_logprobs = client.answers[RequestId("mine")]
    assert others_tokens == tokens  # the draws are keyed in both modes
    assert others_logprobs != logprobs
    assert others_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert mine[0] == tokens


def test_draws_follow_the_distribution_and_differ_between_seeds(tiny_model_config: ModelConfig) -> None:
    batch = open_batch(tiny_model_config, rows=250)
    client = Client(batch)
    for seed in range(500):
        client.submit(f"r{seed}", PROMPT, seed, 1)
    client.finish()
    with torch.no_grad():
        expected = torch.softmax(batch.model(torch.tensor([PROMPT])).logits[0, -1].double(), dim=-1)
    drawn = torch.bincount(torch.tensor([tokens[0] for tokens, _ in client.answers.values()]), minlength=32) / 500
    assert (drawn - expected).abs().max() < 0.11  # 5 sigma at p = 0.5
