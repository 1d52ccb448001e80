"""Random inputs of the kernels, and expected results from straightforward float64 code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class HeadProblem:
    """Hidden states `[T, H]`, a head `[V, H]`, targets `[T]` and the gradients `[2, T]` of logprobs and entropies."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    upstream: Tensor

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()


def head_problem(*, num_tokens: int, vocab_size: int, hidden_size: int, seed: int) -> HeadProblem:
    generator = torch.Generator().manual_seed(seed)
    return HeadProblem(
        torch.randn(num_tokens, hidden_size, generator=generator),
        torch.randn(vocab_size, hidden_size, generator=generator),
        torch.randint(0, vocab_size, (num_tokens,), generator=generator),
        torch.randn(2, num_tokens, generator=generator),
    )


def expected_scores(problem: HeadProblem, temperature: float) -> list[Tensor]:
    """Logprobs, entropies and the gradients of hidden states and head, through the whole `[T, V]` matrix."""
    hidden, weight = problem.hidden.double().requires_grad_(), problem.weight.double().requires_grad_()
    logprobs = (hidden @ weight.T / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, problem.targets[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    (chosen @ problem.upstream[0].double() + entropy @ problem.upstream[1].double()).backward()
    return [chosen.detach(), entropy.detach(), hidden.grad, weight.grad]


def some_alternatives(problem: HeadProblem, most: int) -> Tensor:
    """`[T, most] int64`: 0 to `most` other ids per target, in random order, then −1."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.full((len(problem.targets), most), -1)
    for token, target in enumerate(problem.targets.tolist()):
        others = [one for one in torch.randperm(len(problem.weight), generator=generator).tolist() if one != target]
        count = token % (most + 1)
        chosen[token, :count] = torch.tensor(others[:count], dtype=torch.int64)
    return chosen


def expected_truncated_scores(problem: HeadProblem, alternatives: Tensor, temperature: float) -> list[Tensor]:
    """As `expected_scores`, of the whole `[T, V]` matrix in which everything outside of the support is −∞."""
    hidden, weight = problem.hidden.double().requires_grad_(), problem.weight.double().requires_grad_()
    is_kept = torch.zeros(len(hidden), len(weight), dtype=torch.bool)
    for token, others in enumerate(alternatives.tolist()):
        is_kept[token, [int(problem.targets[token]), *(one for one in others if one >= 0)]] = True
    logprobs = (hidden @ weight.T / temperature).masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    chosen = logprobs.gather(-1, problem.targets[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs.masked_fill(~is_kept, 0.0)).sum(-1)
    (chosen @ problem.upstream[0].double() + entropy @ problem.upstream[1].double()).backward()
    return [chosen.detach(), entropy.detach(), hidden.grad, weight.grad]
