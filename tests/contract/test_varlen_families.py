"""Attention without a mask on one rank, on two data-parallel ones, and split over ranks by Ulysses or by context: every
family gives what it gives with a mask on one."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.trainer.config import TrainerConfig
from penstock.trainer.spec import free_port
from tests.contract.replica_families import OPTIMIZER, STAGES, train
from tests.contract.sequence_parallel_families import FAMILIES, LENGTHS, load, packed_row, scores_and_gradient
from tests.contract.test_model_families import CONTEXT, PLAIN, make_model
from tests.rank_processes import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_model(family, folder / family, 0)
    return folder


def check_gradients(family: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), f"{family}: {name}"


@pytest.mark.some(3)
@pytest.mark.parametrize("family", PLAIN)
def test_logprobs_and_gradients_are_those_of_sdpa_with_a_mask(family: str, folder: Path) -> None:
    from penstock.trainer.model_support import form_of

    assert form_of(folder / family, "varlen")[:3] == ("packed", "fused", "varlen")
    expected, found = (scores_and_gradient(load(folder / family, one), packed_row(one)) for one in ("sdpa", "varlen"))
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    check_gradients(family, found[1], expected[1])


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.timeout(1800)  # its ranks have 900 s
@pytest.mark.parametrize(("way", "world"), [("ulysses", 2), ("context", 2), ("context", 4)])
def test_ranks_that_split_a_row_give_the_same(folder: Path, way: str, world: int) -> None:
    port = free_port()
    arguments = [(rank, port, folder, world, way) for rank in range(world)]
    run_ranks("tests.contract.sequence_parallel_families", arguments, timeout_s=900, imports=["deepspeed"])
    results = pickle.loads((folder / f"{way}{world}").read_bytes())
    assert tuple(results) == FAMILIES
    for family, (logprobs, gradients) in results.items():
        # transformers' sdpa has no sinks; tests/unit/trainer/test_model_forms.py compares varlen with its eager.
        alone = "varlen" if family == "gpt_oss" else "sdpa"
        row = packed_row(alone)
        expected, gradient = scores_and_gradient(load(folder / family, alone), row)
        table = torch.zeros(len(LENGTHS), max(LENGTHS))
        table[row.sequence_index, row.token_index] = expected
        np.testing.assert_allclose(logprobs, table, atol=1e-5, err_msg=family)
        check_gradients(family, gradients, gradient)


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.timeout(1800)  # its ranks have 900 s
def test_two_data_parallel_ranks_take_the_step_that_one_takes_with_a_mask(folder: Path) -> None:
    port = free_port()
    arguments = [(rank, port, folder) for rank in range(2)]
    run_ranks("tests.contract.replica_families", arguments, timeout_s=900, imports=["deepspeed"])
    results = pickle.loads((folder / "replicas").read_bytes())
    alone = TrainerConfig(
        backend="torch", num_ranks=1, zero_stage=0, max_tokens_per_micro_batch=CONTEXT, optimizer=OPTIMIZER
    )
    assert list(results) == [(stage, family) for stage in STAGES for family in PLAIN]
    for family in PLAIN:
        expected, change = train(folder / family, "sdpa", alone)
        for stage in STAGES:
            logprobs, found = results[stage, family]
            np.testing.assert_allclose(logprobs, expected, atol=1e-5, err_msg=f"{family}, ZeRO-{stage}")
            check_gradients(f"{family}, ZeRO-{stage}", found, change)
