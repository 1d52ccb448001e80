"""Two processes, each with a slice of the head, against the whole `[T, V]` matrix in float64."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from penstock.kernels.linear_logprob import VocabularyShard, linear_logprobs
from tests.unit.kernels.problems import expected_scores, expected_truncated_scores, head_problem, some_alternatives

TEMPERATURE = 0.6
SLICES = {"even": (0, 88, 176), "uneven": (0, 171, 176)}


def run_rank(rank: int, folder: str) -> None:
    """Score and differentiate with this rank's rows of every case; leave the results in files."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for (name, bounds), is_truncated in product(SLICES.items(), (False, True)):
        problem = head_problem(num_tokens=13, vocab_size=bounds[-1], hidden_size=8, seed=5)
        hidden = problem.hidden.clone().requires_grad_()
        weight = problem.weight[bounds[rank] : bounds[rank + 1]].clone().requires_grad_()
        group = dist.group.WORLD
        assert group is not None
        part = VocabularyShard(bounds[rank], bounds[rank + 1], group)
        scored = linear_logprobs(
            hidden,
            weight,
            problem.targets,
            part=part,
            temperature=TEMPERATURE,
            alternatives=some_alternatives(problem, 5) if is_truncated else None,
            max_logits=160,
        )
        (scored.logprobs @ problem.upstream[0] + scored.entropies @ problem.upstream[1]).backward()
        results = [scored.logprobs.detach(), scored.entropies.detach(), hidden.grad, weight.grad, scored.is_most_likely]
        torch.save(results, f"{folder}/{name}-{is_truncated}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what both ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(run_rank, (str(folder),), nprocs=2)
    return folder


@pytest.mark.parametrize("name", SLICES)
def test_slices_of_the_head_give_what_the_whole_gives(results: Path, name: str) -> None:
    bounds = SLICES[name]
    problem = head_problem(num_tokens=13, vocab_size=bounds[-1], hidden_size=8, seed=5)
    logprobs, entropies, grad_hidden, grad_weight = expected_scores(problem, TEMPERATURE)
    is_best = (problem.hidden @ problem.weight.T).argmax(-1) == problem.targets
    for rank in range(2):
        *actual, is_most_likely = torch.load(results / f"{name}-False-{rank}.pt")
        expected = [logprobs, entropies, grad_hidden, grad_weight[bounds[rank] : bounds[rank + 1]]]
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
        assert is_most_likely.tolist() == is_best.tolist()


@pytest.mark.parametrize("name", SLICES)
def test_slices_of_the_head_give_what_the_whole_gives_over_a_truncated_support(results: Path, name: str) -> None:
    bounds = SLICES[name]
    problem = head_problem(num_tokens=13, vocab_size=bounds[-1], hidden_size=8, seed=5)
    expected = expected_truncated_scores(problem, some_alternatives(problem, 5), TEMPERATURE)
    for rank in range(2):
        *actual, _ = torch.load(results / f"{name}-True-{rank}.pt")
        for mine, theirs in zip(actual, [*expected[:3], expected[3][bounds[rank] : bounds[rank + 1]]], strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
