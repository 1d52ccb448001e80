"""Logprobs over the support of a truncated distribution, against the whole matrix with −∞ outside of it, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.kernels.linear_logprob import linear_logprobs
from penstock.kernels.portable import truncated_logprob
from tests.unit.kernels.problems import (
    HeadProblem,
    expected_scores,
    expected_truncated_scores,
    head_problem,
    some_alternatives,
)


class Biased(nn.Module):
    """A head that can only be called."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.out_features = len(weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T + 3.0  # the same for all tokens, so it changes no probability


def plain(weight: torch.Tensor) -> nn.Linear:
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight = nn.Parameter(weight.detach().clone())
    return head


@pytest.fixture
def problem() -> HeadProblem:
    return head_problem(num_tokens=13, vocab_size=177, hidden_size=8, seed=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("head_of", [plain, Biased])
@pytest.mark.parametrize("chunk", [1, 24, 1 << 19])
def test_values_and_gradients_are_those_of_the_renormalised_distribution(
    problem: HeadProblem, monkeypatch: pytest.MonkeyPatch, temperature: float, head_of: type, chunk: int
) -> None:
    monkeypatch.setattr(truncated_logprob, "_CPU_CHUNK", chunk)
    hidden, head, alternatives = (
        problem.hidden.clone().requires_grad_(),
        head_of(problem.weight),
        some_alternatives(problem, 5),
    )
    scored = linear_logprobs(
        hidden, head, problem.targets, temperature=temperature, alternatives=alternatives, max_logits=400
    )
    (scored.logprobs @ problem.upstream[0] + scored.entropies @ problem.upstream[1]).backward()
    actual = [scored.logprobs.detach(), scored.entropies.detach(), hidden.grad, head.weight.grad]
    for mine, theirs in zip(actual, expected_truncated_scores(problem, alternatives, temperature), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def test_over_the_whole_vocabulary_it_is_what_it_is_without_truncation() -> None:
    problem = head_problem(num_tokens=7, vocab_size=11, hidden_size=8, seed=2)
    others = torch.stack([torch.tensor([one for one in range(11) if one != t]) for t in problem.targets.tolist()])
    hidden, weight = problem.leaves()
    scored = linear_logprobs(hidden, weight, problem.targets, temperature=0.7, alternatives=others)
    (scored.logprobs @ problem.upstream[0] + scored.entropies @ problem.upstream[1]).backward()
    actual = [scored.logprobs.detach(), scored.entropies.detach(), hidden.grad, weight.grad]
    for mine, theirs in zip(actual, expected_scores(problem, 0.7), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(scored.is_most_likely, (hidden @ weight.T).argmax(-1) == problem.targets)


def test_gradients_pass_a_finite_difference_check_in_float64(problem: HeadProblem) -> None:
    hidden, weight = (each.detach().double()[:5].requires_grad_() for each in problem.leaves())
    targets, alternatives = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([[1, 2], [4, -1], [-1, -1], [0, 4], [3, -1]])
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprobs(h, w, targets, temperature=0.7, alternatives=alternatives)[:2], (hidden, weight)
    )


def test_a_token_without_alternatives_has_logprob_and_gradient_exactly_0(problem: HeadProblem) -> None:
    hidden, weight = problem.leaves()
    nothing = torch.full((len(hidden), 3), -1)
    scored = linear_logprobs(hidden, weight, problem.targets, alternatives=nothing)
    (scored.logprobs.sum() + scored.entropies.sum()).backward()
    for result in (scored.logprobs, scored.entropies, hidden.grad, weight.grad):
        assert torch.equal(result, torch.zeros_like(result))


def test_the_gradient_of_a_frequent_token_is_rounded_once_in_bfloat16() -> None:
    num_tokens = 4096  # summed in bfloat16, the gradient of row 0 would stop growing at 256 ulp
    hidden, weight = torch.ones(num_tokens, 4, dtype=torch.bfloat16), torch.zeros(9, 4, dtype=torch.bfloat16)
    weight.requires_grad_()
    targets, alternatives = torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens, 1, dtype=torch.int64)
    linear_logprobs(hidden, weight, targets, alternatives=alternatives).logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad[:3].tolist() == [[num_tokens / 2] * 4, [-num_tokens / 2] * 4, [0.0] * 4]


def test_no_tokens_give_no_results_and_zero_gradients(problem: HeadProblem) -> None:
    hidden, weight = problem.leaves()
    empty = torch.zeros(0, 4, dtype=torch.int64)
    scored = linear_logprobs(hidden[:0], weight, problem.targets[:0], alternatives=empty)
    (scored.logprobs.sum() + scored.entropies.sum()).backward()
    assert scored.logprobs.shape == scored.entropies.shape == (0,)
    assert not weight.grad.any()
