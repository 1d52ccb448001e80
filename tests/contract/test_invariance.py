"""The gradient of one batch is the same however it is computed: ranks × ZeRO stage × micro-batches × order."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from penstock.trainer.spec import free_port
from tests.contract.invariance_cases import NUM_TOKENS, WAYS, Result, WeightRoute, compute
from tests.contract.test_trainer_backends import relative_error
from tests.contract.trainer_backend_cases import Case, create_policies
from tests.rank_processes import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("invariance")
    create_policies(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Result:
    """Plain torch, one sequence after the other: nothing is packed."""
    return compute(Case(backend="torch", max_tokens=NUM_TOKENS, adam_epsilon=1.0), folder)


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[WeightRoute, Result]:
    found: dict[WeightRoute, Result] = {}
    for world in (1, 2):
        port = free_port()
        arguments = [(rank, port, folder, world) for rank in range(world)]
        run_ranks("tests.contract.invariance_cases", arguments, timeout_s=900, imports=["deepspeed"])
        ways = pickle.loads((folder / f"ways-{world}").read_bytes())
        found |= {WeightRoute(*way): Result(*result) for way, result in ways.items()}
    return found


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way)))
def test_the_gradient_is_that_of_one_sequence_after_the_other(
    way: WeightRoute, results: dict[WeightRoute, Result], reference: Result
) -> None:
    result = results[way]
    # A prompt that several sequences of a micro-batch share is computed once, so fewer may do.
    assert 0.7 * way.num_micro_batches < result.num_micro_batches <= way.num_micro_batches
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
    assert relative_error(result.change, reference.change) < 1e-5
