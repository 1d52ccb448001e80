"""Logprobs from hidden states: values and gradients against float64 log_softmax over the whole matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.dataflow.errors import ShapeError
from penstock.kernels.float32_head import Float32Head
from penstock.kernels.linear_logprob import linear_logprobs
from tests.unit.kernels.problems import HeadProblem, expected_scores, head_problem

MAX_LOGITS = {"one tile": 1 << 20, "ragged tiles": 160, "logit by logit": 1}


@pytest.fixture
def problem() -> HeadProblem:
    return head_problem(num_tokens=13, vocab_size=177, hidden_size=8, seed=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("max_logits", MAX_LOGITS.values(), ids=MAX_LOGITS)
def test_values_and_gradients_equal_full_log_softmax(problem, temperature, max_logits) -> None:
    hidden, weight = problem.leaves()
    logprobs, entropies = linear_logprobs(
        hidden, weight, problem.targets, temperature=temperature, max_logits=max_logits
    )[:2]
    assert logprobs.dtype == entropies.dtype == torch.float32
    (logprobs @ problem.upstream[0] + entropies @ problem.upstream[1]).backward()
    actual = [logprobs.detach(), entropies.detach(), hidden.grad, weight.grad]
    for mine, theirs in zip(actual, expected_scores(problem, temperature), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", [0, 1], ids=["logprobs alone", "entropies alone"])
def test_a_loss_of_one_result_alone_has_its_gradient(problem, which) -> None:
    hidden, weight = problem.leaves()
    (linear_logprobs(hidden, weight, problem.targets, max_logits=160)[:2][which] @ problem.upstream[which]).backward()
    problem.upstream[1 - which] = 0.0
    for mine, theirs in zip((hidden.grad, weight.grad), expected_scores(problem, 1.0)[2:], strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def test_gradients_pass_a_finite_difference_check_in_float64(problem) -> None:
    hidden, weight = (each.detach().double()[:5].requires_grad_() for each in problem.leaves())
    targets = problem.targets[:5] % 5
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprobs(h, w, targets, temperature=0.7, max_logits=6)[:2], (hidden, weight)
    )


def test_large_logits_with_a_common_offset_keep_their_entropy() -> None:
    hidden, weight = torch.ones(3, 1), torch.tensor([[1000.0], [1001.0], [1003.0]])
    _, entropies = linear_logprobs(hidden, weight, torch.tensor([0, 1, 2]), max_logits=2)[:2]
    logits = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64).log_softmax(0)
    torch.testing.assert_close(entropies.double(), -(logits.exp() * logits).sum().expand(3), rtol=1e-6, atol=0)


def test_large_logits_with_a_common_offset_keep_their_logprobs_and_gradients() -> None:
    hidden = torch.ones(1, 1).requires_grad_()
    weight = torch.tensor([[4096.0], [4097.0], [4099.0]]).requires_grad_()
    logprobs, entropies = linear_logprobs(hidden, weight, torch.tensor([1]), max_logits=2)[:2]
    (logprobs + entropies).sum().backward()
    exact = weight.detach().double().requires_grad_()
    full = exact[:, 0].log_softmax(0)
    (full[1] - (full.exp() * full).sum()).backward()
    torch.testing.assert_close(logprobs[0].double(), full[1].detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-6, atol=1e-7)


def test_no_tokens_give_no_results_and_zero_gradients(problem) -> None:
    hidden, weight = problem.leaves()
    logprobs, entropies = linear_logprobs(hidden[:0], weight, problem.targets[:0])[:2]
    (logprobs.sum() + entropies.sum()).backward()
    assert logprobs.shape == entropies.shape == (0,)
    assert not weight.grad.any()
    assert weight.grad.shape == weight.shape


def test_a_frozen_head_gets_no_gradient_and_costs_none(problem) -> None:
    hidden, weight = problem.leaves()
    linear_logprobs(hidden, weight.detach(), problem.targets)[:2][0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_is_most_likely_says_where_the_target_is_the_argmax(problem) -> None:
    hidden, weight = (each.detach() for each in problem.leaves())
    best = (hidden @ weight.T).argmax(-1)
    targets = torch.where(torch.arange(len(best)) % 2 == 0, best, (best + 1) % len(weight))
    for head in (weight, module(weight), Biased(weight)):
        scored = linear_logprobs(hidden, head, targets, max_logits=160)
        assert scored.is_most_likely.tolist() == (targets == best).tolist()
        assert not scored.is_most_likely.requires_grad


def test_bfloat16_hidden_states_are_scored_in_float32(problem) -> None:
    hidden, weight = (each.detach().bfloat16().requires_grad_() for each in problem.leaves())
    logprobs, entropies = linear_logprobs(hidden, weight, problem.targets, max_logits=160)[:2]
    assert logprobs.dtype == entropies.dtype == torch.float32
    (logprobs @ problem.upstream[0] + entropies @ problem.upstream[1]).backward()
    rounded = HeadProblem(hidden.detach().float(), weight.detach().float(), problem.targets, problem.upstream)
    wanted = expected_scores(rounded, 1.0)
    torch.testing.assert_close(logprobs.double(), wanted[0], rtol=1e-5, atol=1e-5)
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    for mine, theirs in zip((hidden.grad, weight.grad), wanted[2:], strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2**-8, atol=1e-4)  # one rounding, at the end


@pytest.mark.parametrize("wrong", ["dtype", "width", "targets"])
def test_what_does_not_fit_is_refused_with_both_shapes(problem, wrong) -> None:
    hidden, weight, targets = problem.hidden, problem.weight, problem.targets
    hidden = {"dtype": hidden.double(), "width": hidden[:, 1:]}.get(wrong, hidden)
    targets = targets[1:] if wrong == "targets" else targets
    with pytest.raises(ShapeError, match=r"hidden is \[13, .*weight \[177, 8\]"):
        linear_logprobs(hidden, weight, targets)[:2]


def module(weight: torch.Tensor) -> nn.Linear:
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight.data.copy_(weight)
    return head


class Biased(nn.Linear):
    """A head that is not `hidden weightᵀ` by its type, so it can only be called; its bias happens to be zero."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self.weight.data.copy_(weight)
        self.bias.data.zero_()
        self.num_logits: list[int] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits = super().forward(rows)
        self.num_logits.append(logits.numel())
        return logits


def float32_head(weight: torch.Tensor) -> Float32Head:
    head = module(weight)
    head.__class__ = Float32Head
    return head


@pytest.mark.parametrize("kind", [module, Biased, float32_head])
def test_a_module_head_gives_what_its_weight_gives(problem, kind) -> None:
    hidden, _ = problem.leaves()
    head = kind(problem.weight)
    logprobs, entropies = linear_logprobs(hidden, head, problem.targets, temperature=0.6, max_logits=5 * 177)[:2]
    (logprobs @ problem.upstream[0] + entropies @ problem.upstream[1]).backward()
    actual = [logprobs.detach(), entropies.detach(), hidden.grad, head.weight.grad]
    for mine, theirs in zip(actual, expected_scores(problem, 0.6), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def test_a_head_that_can_only_be_called_never_holds_more_logits_than_allowed(problem) -> None:
    hidden, _ = problem.leaves()
    head = Biased(problem.weight)
    linear_logprobs(hidden, head, problem.targets, max_logits=5 * 177)[:2][0].sum().backward()
    assert max(head.num_logits) <= 5 * 177
    assert sum(head.num_logits) == 2 * 13 * 177, "each chunk is computed once forward and once in backward"


class Partitioned:
    """Hooks as ZeRO-3's: the weight's storage exists only while the module is called, or its gradient is computed."""

    def __init__(self, head: nn.Linear) -> None:
        self.num_gathers = 0
        self._head, self._whole = head, head.weight.data.clone()
        head.register_forward_pre_hook(lambda *_: self._gather())
        head.register_forward_hook(self._after_forward)
        self._release()

    def _gather(self) -> None:
        self.num_gathers += 1
        self._head.weight.data = self._whole.clone()

    def _release(self) -> None:
        self._head.weight.data = torch.empty(0)

    def _after_forward(self, _module: nn.Module, _inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        self._release()
        outputs[0].register_hook(lambda _: self._gather())


def test_the_hooks_of_a_partitioned_head_run_once_forward_and_once_backward(problem) -> None:
    hidden, _ = problem.leaves()
    head = module(problem.weight)
    hooks = Partitioned(head)
    logprobs, entropies = linear_logprobs(hidden, head, problem.targets, max_logits=160)[:2]
    assert hooks.num_gathers == 1
    assert head.weight.numel() == 0
    (logprobs @ problem.upstream[0] + entropies @ problem.upstream[1]).backward()
    assert hooks.num_gathers == 2
    wanted = expected_scores(problem, 1.0)
    torch.testing.assert_close(head.weight.grad.double(), wanted[3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad.double(), wanted[2], rtol=1e-5, atol=1e-5)
    assert "forward" not in vars(head)


def test_autocast_rounds_neither_logits_nor_gradients(problem) -> None:
    hidden, weight = problem.leaves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, entropies = linear_logprobs(hidden, weight, problem.targets)[:2]
        torch.autograd.backward([logprobs, entropies], list(problem.upstream))
    actual = [logprobs.detach(), entropies.detach(), hidden.grad, weight.grad]
    for mine, theirs in zip(actual, expected_scores(problem, 1.0), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def test_autocast_does_not_round_products_of_bfloat16(problem) -> None:
    hidden, weight = problem.hidden.bfloat16(), problem.weight.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = linear_logprobs(hidden, weight, problem.targets)[:2]
    for mine, theirs in zip(rounded, linear_logprobs(hidden, weight, problem.targets)[:2], strict=True):
        assert torch.equal(mine, theirs)


def test_a_head_whose_forward_was_replaced_is_called(problem) -> None:
    head = module(problem.weight)
    head.forward = lambda rows: nn.functional.linear(rows, head.weight) * 2.0
    logprobs, _ = linear_logprobs(problem.hidden, head, problem.targets)[:2]
    twice, _ = linear_logprobs(problem.hidden, problem.weight * 2.0, problem.targets)[:2]
    torch.testing.assert_close(logprobs, twice)
