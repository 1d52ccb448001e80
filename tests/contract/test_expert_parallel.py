"""Experts that stay on their ranks: every family that has a plan gives what it gives on one rank.

Backends, copies, sequences and critics with it: test_trainer_backends.py; checkpoints: test_checkpoints.py.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.dataflow.errors import ConfigError
from penstock.trainer.backends.expert_parallel import modules_of_experts
from penstock.trainer.spec import free_port
from penstock.weights.hf_folder import transformers_config
from penstock.weights.layout.checkpoint_names import model_without_memory
from tests.contract.expert_parallel_families import FAMILIES, settings, train
from tests.contract.test_model_families import make_model, model_config
from tests.contract.trainer_backend_cases import make_batch
from tests.rank_processes import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtures")
    for family in FAMILIES:
        make_model(family, folder / family, 0)
    return folder


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.timeout(1800)  # its ranks have 900 s
@pytest.mark.parametrize("world", [2, 4])
def test_every_family_gives_what_it_gives_on_one_rank(folder: Path, world: int) -> None:
    port = free_port()
    arguments = [(rank, port, folder, world) for rank in range(world)]
    run_ranks("tests.contract.expert_parallel_families", arguments, timeout_s=900, imports=["deepspeed"])
    results = pickle.loads((folder / f"experts{world}").read_bytes())
    assert list(results) == list(FAMILIES)
    for family, (logprobs, weights, num_sent) in results.items():
        expected_logprobs, expected, _ = train(folder / family, settings(1))
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5, err_msg=family)
        assert weights.keys() == expected.keys()
        for name, (before, after) in expected.items():
            assert torch.equal(weights[name][0], before)
            rounding = torch.finfo(torch.float32).eps * before.norm()
            difference = (weights[name][1] - after).norm()
            assert difference <= 1e-5 * (after - before).norm() + rounding, f"{family}: {name}"
        # Of k experts of each token in each layer some are elsewhere: there and back, forward and backward.
        shape = model_config(folder / family).shape
        num_tokens = sum(len(one.token_ids) for seed in (1, 2) for p in make_batch(seed) for one in p.trajectories)
        most = 4 * num_tokens * shape.experts_per_token * shape.num_layers * shape.hidden_size * 4
        assert 0.3 * most < num_sent < most, family


@pytest.mark.parametrize("family", ["granitemoe", "qwen3"])
def test_a_model_without_a_plan_is_named(tmp_path: Path, family: str) -> None:
    config = transformers_config(make_model(family, tmp_path, 0) / "config.json")
    with pytest.raises(ConfigError, match=r"no plan for (GraniteMoe|Qwen3)ForCausalLM .*what it has: none\. Use"):
        modules_of_experts(model_without_memory(config))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_names_the_experts_of_every_layer(tmp_path: Path, family: str) -> None:
    config = transformers_config(make_model(family, tmp_path, 0) / "config.json")
    names = [name for name, _ in modules_of_experts(model_without_memory(config))]
    assert names == [f"model.layers.{layer}.mlp.experts" for layer in range(config.num_hidden_layers)]
