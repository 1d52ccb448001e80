"""Logprobs from hidden states: values and gradients against float64 log_softmax over the whole matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.kernels.linear_logprob import linear_argmax, linear_logprob

NUM_TOKENS, VOCAB, HIDDEN = 13, 17, 8


@pytest.fixture
def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator)
    upstream = torch.randn(2, NUM_TOKENS, generator=generator)
    return hidden, weight, targets, upstream


def expected(problem, temperature: float) -> list[torch.Tensor]:
    hidden, weight, targets, upstream = problem
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logprobs = (hidden @ weight.T / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, targets[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    (chosen @ upstream[0].double() + entropy @ upstream[1].double()).backward()
    return [chosen.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("max_logits", [1 << 20, 4 * VOCAB, 1], ids=["one chunk", "ragged chunks", "token by token"])
def test_values_and_gradients_equal_full_log_softmax(problem, temperature, max_logits) -> None:
    hidden, weight, targets, upstream = problem
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropies = linear_logprob(hidden, weight, targets, temperature=temperature, max_logits=max_logits)
    assert logprobs.dtype == entropies.dtype == torch.float32
    (logprobs @ upstream[0] + entropies @ upstream[1]).backward()
    actual = [logprobs.detach(), entropies.detach(), hidden.grad, weight.grad]
    for mine, theirs in zip(actual, expected(problem, temperature), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def test_a_module_head_gives_what_its_weight_gives(problem) -> None:
    hidden, weight, targets, _ = problem
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    head.weight.data.copy_(weight)
    for mine, theirs in zip(
        linear_logprob(hidden, head, targets, max_logits=1), linear_logprob(hidden, weight, targets), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(linear_argmax(hidden, head, max_logits=1), (hidden @ weight.T).argmax(-1))


def test_bfloat16_hidden_states_are_scored_in_float32(problem) -> None:
    hidden, weight, targets, _ = problem
    logprobs, entropies = linear_logprob(hidden.bfloat16(), weight.bfloat16(), targets)
    assert logprobs.dtype == entropies.dtype == torch.float32


def test_chunks_never_hold_more_logits_than_allowed(problem) -> None:
    hidden, _, targets, _ = problem
    seen = []

    class Head(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            logits = super().forward(rows)
            seen.append(logits.numel())
            return logits

    linear_logprob(hidden, Head(HIDDEN, VOCAB), targets, max_logits=5 * VOCAB)[0].sum().backward()
    assert max(seen) <= 5 * VOCAB
    assert sum(seen) == 2 * NUM_TOKENS * VOCAB, "each chunk is computed once forward and once in backward"
