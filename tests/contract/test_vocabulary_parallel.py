"""Scores of a head that is split over ranks equal those of the whole head, with their gradients: two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing import spawn
from torch.nn import functional as F

from penstock.kernels.linear_logprob import linear_argmax, linear_logprob
from penstock.kernels.vocabulary_parallel import (
    VocabularyPart,
    vocabulary_parallel_argmax,
    vocabulary_parallel_logprob,
)

pytestmark = pytest.mark.integration

TOKENS, HIDDEN, VOCAB, FIRST = 9, 6, 11, 6  # rank 0 has ids 0..5, rank 1 has 6..10
TEMPERATURE = 0.7


def example() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, targets (ends of both parts among them) and weights of both results in a loss.

    The first two hold small integers, so that logits are exact and ties are ties.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).mul(2).round()
    head = torch.randn(VOCAB, HIDDEN, generator=generator).mul(2).round()
    head[8] = head[2]  # a tie between the ranks wherever one of them is the argmax
    targets = torch.tensor([0, 5, 6, 10, 2, 8, 3, 7, 10])
    return hidden, head, targets, *torch.randn(2, TOKENS, generator=generator)


class SummingHead(nn.Module):
    """This rank's rows; sums the gradient of its input over ranks, as a column-parallel layer does."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows.clone())

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.requires_grad:
            hidden = hidden.view_as(hidden)
            hidden.register_hook(_summed)
        return F.linear(hidden, self.weight)


def _summed(gradient: Tensor) -> Tensor:
    total = gradient.contiguous().clone()
    distributed.all_reduce(total)
    return total


def run_rank(rank: int, store: str, max_logits: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    hidden, rows, targets, of_logprob, of_entropy = example()
    start, stop = ((0, FIRST), (FIRST, VOCAB))[rank]
    head, part = SummingHead(rows[start:stop]), VocabularyPart(start, stop, None)
    best = vocabulary_parallel_argmax(hidden, head, part, max_logits=max_logits)
    hidden.requires_grad_()
    logprobs, entropies = vocabulary_parallel_logprob(
        hidden, head, targets, part, temperature=TEMPERATURE, max_logits=max_logits
    )
    (logprobs @ of_logprob + entropies @ of_entropy).backward()
    found = (logprobs.detach(), entropies.detach(), best, hidden.grad, head.weight.grad)
    torch.save(found, Path(folder) / str(rank))
    distributed.destroy_process_group()


@pytest.mark.parametrize("max_logits", [1 << 20, 2 * FIRST], ids=["whole", "chunks_of_two_tokens"])
def test_scores_and_gradients_of_a_split_head_are_those_of_the_whole(max_logits: int, tmp_path: Path) -> None:
    spawn(run_rank, (str(tmp_path / "store"), max_logits, str(tmp_path)), nprocs=2)
    hidden, rows, targets, of_logprob, of_entropy = example()
    hidden.requires_grad_()
    rows.requires_grad_()
    logprobs, entropies = linear_logprob(hidden, rows, targets, temperature=TEMPERATURE)
    (logprobs @ of_logprob + entropies @ of_entropy).backward()
    parts = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    best = linear_argmax(hidden, rows)
    assert 2 in best, "there is no tie between the ranks in this example"
    for found in parts:
        torch.testing.assert_close(found[0], logprobs.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[1], entropies.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(found[2], best)
        torch.testing.assert_close(found[3], hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([found[4] for found in parts]), rows.grad, rtol=1e-5, atol=1e-6)
