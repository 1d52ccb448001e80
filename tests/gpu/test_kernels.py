"""The Triton kernels on a GPU against float64 on the CPU: what tests/unit/kernels/ shows of them interpreted."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.linear_logprob import linear_logprobs
from tests.unit.kernels.problems import HeadProblem, expected_scores, head_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
GPU = torch.device("cuda")


def test_tensors_of_a_gpu_go_to_triton() -> None:
    assert runs_on_triton(torch.zeros(1, device=GPU))


@pytest.mark.parametrize(
    ("num_tokens", "vocab_size", "hidden_size"),
    [(13, 177, 24), (1, 33, 8), (300, 4099, 256), (1024, 32_000, 512)],
    ids=["small", "one token", "ragged", "large"],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-3)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_gradients_equal_full_log_softmax(
    num_tokens: int, vocab_size: int, hidden_size: int, dtype: torch.dtype, tolerance: float, temperature: float
) -> None:
    drawn = head_problem(num_tokens=num_tokens, vocab_size=vocab_size, hidden_size=hidden_size, seed=1)
    # As large as in a model, where hidden states are normalised and logits are of order 10.
    hidden, weight = drawn.hidden.to(dtype), (drawn.weight * hidden_size**-0.5 * 3).to(dtype)
    wanted = expected_scores(HeadProblem(hidden, weight, drawn.targets, drawn.upstream), temperature)
    leaves = [one.to(GPU).requires_grad_() for one in (hidden, weight)]
    scored = linear_logprobs(leaves[0], leaves[1], drawn.targets.to(GPU), temperature=temperature)
    upstream = drawn.upstream.to(GPU)
    (scored.logprobs @ upstream[0] + scored.entropies @ upstream[1]).backward()
    found = [scored.logprobs, scored.entropies, *(leaf.grad for leaf in leaves)]
    for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert mine is not None
        error = (mine.detach().double().cpu() - theirs).norm() / theirs.norm()
        # Gradients are rounded to the dtype of their operand; bfloat16 has 8 bits.
        limit = max(tolerance, 5e-3) if dtype == torch.bfloat16 and index > 1 else tolerance
        assert error <= limit, ("logprobs", "entropies", "gradient of hidden", "gradient of head")[index]
