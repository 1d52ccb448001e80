"""Whether the torch engine computes a class of models: a tiny instance of it decodes over the engine's cache."""

from __future__ import annotations

from typing import Any

import torch

from penstock.dataflow.ids import RequestId
from penstock.dataflow.ports import GenerateRequest
from penstock.dataflow.sampling import SamplingParams
from penstock.rollout.engines.torch.cache import SlotCache
from penstock.rollout.engines.torch.decoding import BatchLimits, DecodeBatch, RunningRequest
from penstock.weights.model_config import ModelShape

ATTENTION = "sdpa"
"""That with which the engine loads every model."""
TOLERANCE = 1e-4
"""Nats, in float32. Rounding is below a tenth of it; what a wrong cache or mask changes, far above."""
_REQUESTS = ((9, 12), (3, 24), (1, 17))
"""Tokens of each prompt and answer, more and fewer than a tiny instance's windows. Two are decoded at a time, so the
third one gets a slot that another one has left."""


@torch.no_grad()
def unsupported(served: Any, whole: Any, shape: ModelShape) -> list[str]:
    """Why the engine cannot serve this class; empty if it can.

    Args:
        served: A tiny instance in float32 on the CPU, with the engine's `ATTENTION`.
        whole: One with the same weights and the model's own attention, whose forward pass over a sequence is the truth.
        shape: Of both.
    """
    longest = max(prompt + answer for prompt, answer in _REQUESTS)
    cache = SlotCache(shape.num_layers, shape.num_kv_heads, shape.head_dim, torch.float32, "cpu")
    batch = DecodeBatch(served, cache, 0, BatchLimits(2, longest, 64, "cpu"))
    logprobs: dict[int, list[float]] = {index: [] for index in range(len(_REQUESTS))}
    running = []
    # Of large logits only one token would be sampled, with a logprob of 0, whatever came before it.
    temperature = max(1.0, float(whole(input_ids=torch.arange(longest)[None], use_cache=False).logits.std()))
    for index, (num_prompt, num_answer) in enumerate(_REQUESTS):
        prompt = tuple(int(token) for token in (torch.arange(num_prompt) * 7 + index) % (shape.vocab_size - 2) + 2)
        request = GenerateRequest(RequestId(str(index)), prompt, SamplingParams(num_answer, temperature))
        running.append(RunningRequest.of(request, batch.limits))
        batch.submit(running[-1])
    try:
        while batch.has_requests:
            for request_id, delta in batch.step():
                logprobs[int(request_id)] += delta.logprobs
    except Exception as error:  # noqa: BLE001 - a class refuses the cache in its own way
        return [f"it cannot decode over its cache of keys and values ({type(error).__name__}: {error!s:.200})"]
    for index, (num_prompt, _) in enumerate(_REQUESTS):
        ids = torch.tensor(running[index].token_ids)
        logits = whole(input_ids=ids[None, :-1], use_cache=False).logits[0, num_prompt - 1 :] / temperature
        expected = logits.log_softmax(-1).gather(-1, ids[num_prompt:, None])[:, 0]
        if (most := float((expected - torch.tensor(logprobs[index])).abs().max())) > TOLERANCE:
            return [
                f"decoded over its cache, with {ATTENTION} attention to the whole context, a logprob of a tiny "
                f"instance differs by {most:.2g} nats from that of the model's own forward pass"
            ]
    return []
