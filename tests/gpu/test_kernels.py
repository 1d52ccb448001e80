"""The Triton kernels on a GPU against float64 on the CPU: what tests/unit/kernels/ shows of them interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.changed_elements import find_changes
from penstock.kernels.gpu.dispatch import runs_on_triton
from penstock.kernels.linear_logprob import linear_logprobs
from penstock.trainer.algorithms.algorithm import Algorithm
from penstock.trainer.algorithms.metrics import TokenMetrics
from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batches.collate import MicroBatch
from penstock.trainer.config import AlgorithmConfig
from penstock.trainer.optimizer_steps import OpenOptimizerStep
from tests.algorithms import algorithm_config
from tests.unit.kernels.interpreted_policy_loss import in_float64, micro_batch, policy
from tests.unit.kernels.problems import HeadProblem, expected_scores, head_problem
from tests.unit.kernels.test_changed_elements import changed_pair

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


@pytest.mark.parametrize("num_elements", [0, 1, 1000, 100_003])
@pytest.mark.parametrize("density", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_changed_weights_are_found(num_elements: int, density: float, dtype: torch.dtype) -> None:
    pair = [torch.from_numpy(one) for one in changed_pair(num_elements, density, dtype, seed=1)]
    mine, theirs = find_changes(*(one.to(GPU) for one in pair)), find_changes(*pair)
    assert mine.num_changed == theirs.num_changed
    for name in ("positions", "values", "bitmap"):
        assert torch.equal(getattr(mine, name)().cpu(), getattr(theirs, name)()), name


def on(batch: MicroBatch, device: torch.device) -> MicroBatch:
    columns = {name: getattr(batch, name) for name in MicroBatch.__slots__}
    return replace(batch, **{name: one.to(device) for name, one in columns.items() if isinstance(one, Tensor)})


def loss_and_gradient(
    config: AlgorithmConfig, batch: MicroBatch, target: Tensor, entropies: Tensor
) -> tuple[Tensor, Tensor]:
    leaf = target.clone().requires_grad_()
    loss = Objective(Algorithm(config))(leaf, entropies, batch, OpenOptimizerStep(TokenMetrics(target.device)))
    loss.backward()
    assert leaf.grad is not None
    return loss.detach().double().cpu(), leaf.grad.double().cpu()


@pytest.mark.parametrize("num_tokens", [1, 1000, 70_001])
@pytest.mark.parametrize("correction", ["none", "decoupled", "tis_token"])
def test_the_policy_loss_is_the_composed_one(num_tokens: int, correction: str) -> None:
    config = algorithm_config(correction=correction, proximal="recompute", clip_low=0.2, clip_high=0.28)
    batch = micro_batch(num_tokens, seed=2)
    target, entropies = policy(batch, seed=2)
    found = loss_and_gradient(config, on(batch, GPU), target.to(GPU), entropies.to(GPU))
    wanted = loss_and_gradient(config, in_float64(batch), target.double(), entropies.double())
    size = max(float(wanted[1].norm()), abs(float(wanted[0])), 1e-3)
    assert abs(float(found[0] - wanted[0])) <= 1e-5 * size
    assert float((found[1] - wanted[1]).norm()) <= 1e-5 * size
