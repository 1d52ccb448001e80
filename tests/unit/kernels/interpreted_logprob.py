"""Run by test_triton_kernels.py with TRITON_INTERPRET=1: fused forward and backward against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.gpu.dispatch import is_interpreted
from penstock.kernels.gpu.logprob_backward import logits_gradient
from penstock.kernels.gpu.logprob_forward import fused_statistics
from penstock.kernels.linear_logprob import linear_logprobs
from penstock.kernels.portable.logprob import LogprobGradient, gradient_of_tile
from tests.tiers import by_tier
from tests.unit.kernels.problems import HeadProblem, expected_scores, head_problem


def test_this_process_interprets() -> None:
    assert is_interpreted()


@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "hidden_size"),
    [(13, 177, 24), (16, 64, 16), (1, 33, 8), (33, 65, 20), (9, 65, 7)],
    ids=["several splits", "nothing ragged", "one token", "ragged everywhere", "rows that are not aligned"],
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_full_log_softmax(num_tokens, vocab_size, hidden_size, temperature) -> None:
    problem = head_problem(num_tokens=num_tokens, vocab_size=vocab_size, hidden_size=hidden_size, seed=1)
    hidden, weight = problem.leaves()
    scored = linear_logprobs(hidden, weight, problem.targets, temperature=temperature, max_logits=800)
    (scored.logprobs @ problem.upstream[0] + scored.entropies @ problem.upstream[1]).backward()
    actual = [scored.logprobs.detach(), scored.entropies.detach(), hidden.grad, weight.grad]
    for mine, theirs in zip(actual, expected_scores(problem, temperature), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-5, atol=2e-5)
    is_best = (problem.hidden @ problem.weight.T).argmax(-1) == problem.targets
    assert scored.is_most_likely.tolist() == is_best.tolist()


def test_half_precision_operands_are_accumulated_in_float32() -> None:
    """float16, because this interpreter multiplies the bit patterns of bfloat16 (Triton 3.9, `create_dot`)."""
    problem = head_problem(num_tokens=19, vocab_size=150, hidden_size=40, seed=2)
    hidden, weight = problem.hidden.half(), problem.weight.half()
    statistics = fused_statistics(hidden, weight, problem.targets, 1.0)
    rounded = HeadProblem(hidden.float(), weight.float(), problem.targets, problem.upstream)
    wanted = expected_scores(rounded, 1.0)
    torch.testing.assert_close(statistics.logprob().double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.entropy().double(), wanted[1], rtol=1e-5, atol=1e-5)


@settings(max_examples=by_tier(4, full=12), deadline=None)
@given(
    num_tokens=st.integers(1, 20),
    vocab_size=st.integers(1, 140),
    hidden_size=st.sampled_from([4, 8, 12, 20]),
    temperature=st.floats(0.3, 3.0),
    seed=st.integers(0, 99),
)
def test_statistics_of_any_shape(num_tokens, vocab_size, hidden_size, temperature, seed) -> None:
    problem = head_problem(num_tokens=num_tokens, vocab_size=vocab_size, hidden_size=hidden_size, seed=seed)
    statistics = fused_statistics(problem.hidden, problem.weight, problem.targets, 1.0 / temperature)
    wanted = expected_scores(problem, temperature)
    torch.testing.assert_close(statistics.logprob().double(), wanted[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(statistics.entropy().double(), wanted[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("has_entropy", [True, False], ids=["with entropy", "logprobs alone"])
@pytest.mark.parametrize("vocab_size", [5, 2049])
def test_the_gradient_of_a_tile_is_that_of_the_portable_version(vocab_size, has_entropy) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, vocab_size, generator=generator)
    columns = torch.tensor([0, vocab_size - 1, vocab_size, -1, 3, 1, -5])  # three lie in other tiles
    g, e, maximum, log_total, entropies = torch.randn(5, 7, generator=generator).unbind()
    gradient = LogprobGradient(g, e if has_entropy else None, maximum, log_total, entropies)
    mine = logits_gradient(logits.clone(), columns, gradient, 0.5, torch.float32)
    torch.testing.assert_close(mine, gradient_of_tile(logits * 0.5, columns, gradient), rtol=1e-5, atol=1e-6)
    assert logits_gradient(logits, columns, gradient, 0.5, torch.bfloat16).dtype == torch.bfloat16


def test_a_target_of_another_rank_has_no_logit_here() -> None:
    problem = head_problem(num_tokens=3, vocab_size=9, hidden_size=4, seed=4)
    statistics = fused_statistics(problem.hidden, problem.weight, torch.tensor([-2, 9, 11]), 1.0)
    assert statistics.target.tolist() == [0.0, 0.0, 0.0]
