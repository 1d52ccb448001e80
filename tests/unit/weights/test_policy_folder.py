"""A policy is written as the checkpoint that it came from; what else that holds stays, and is not trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from penstock.dataflow.errors import CheckpointError
from penstock.trainer.models.policy_model import hf_parameters, load_policy
from penstock.weights.hf_folder import transformers_config
from penstock.weights.layout.checkpoint_names import loading_arguments
from penstock.weights.policy_folder import policy_tensors, write_policy
from tests.contract.test_model_families import make_model, model_config

EXTRA = "mtp.layers.0.weight"
"""A layer that predicts the token after the next one, which neither transformers nor an engine loads."""


@pytest.mark.some(1)
@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5"])
def test_the_tower_stays_and_the_language_model_is_replaced(model_type: str, tmp_path: Path) -> None:
    source, target = make_model(model_type, tmp_path / "source", 0), tmp_path / "policy"
    before = load_file(source / "model.safetensors") | {EXTRA: torch.ones(2)}
    save_file(before, source / "model.safetensors", {"format": "pt"})
    policy = load_policy(str(source), model_config(source), gradient_checkpointing=False)
    trained = {name: parameter.detach() + 1 for name, parameter in hf_parameters(policy)}
    assert not any("vis" in name for name in trained)
    write_policy(policy.hf_model, trained, target)
    after = load_file(target / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(changed) == len(trained)
    assert {name for name in before if "vis" in name or "multi_modal" in name or name == EXTRA}.isdisjoint(changed)
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()
    again = load_policy(str(target), model_config(target), gradient_checkpointing=False)
    for name, parameter in hf_parameters(again):
        torch.testing.assert_close(parameter.detach(), trained[name], rtol=0, atol=0)


@pytest.mark.some(1)
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5"])
def test_what_is_served_without_a_trainer_is_the_language_model(model_type: str, is_tied: bool, tmp_path: Path) -> None:
    source = make_model(model_type, tmp_path, 0, tie_word_embeddings=is_tied)
    policy = load_policy(str(source), model_config(source), gradient_checkpointing=False)
    found = dict(policy_tensors(source))
    for name, parameter in hf_parameters(policy):
        torch.testing.assert_close(found.pop(name), parameter.detach(), rtol=0, atol=0)
    assert set(found) <= {"lm_head.weight"}


def test_a_language_model_alone_is_written_by_transformers(tmp_path: Path) -> None:
    source = make_model("llama", tmp_path / "source", 0)
    assert loading_arguments(transformers_config(source / "config.json")) == {}
    policy = load_policy(str(source), model_config(source), gradient_checkpointing=False)
    write_policy(policy.hf_model, {name: one.detach() for name, one in hf_parameters(policy)}, tmp_path / "policy")
    with safe_open(tmp_path / "policy" / "model.safetensors", "pt") as held:
        assert "model.norm.weight" in held.keys()  # noqa: SIM118 - safe_open is no mapping


def test_what_the_checkpoint_does_not_hold_is_not_written_beside_it(tmp_path: Path) -> None:
    source = make_model("gemma3", tmp_path / "source", 0)
    policy = load_policy(str(source), model_config(source), gradient_checkpointing=False)
    trained = {name: one.detach() for name, one in hf_parameters(policy)} | {"model.layers.9.weight": torch.ones(1)}
    with pytest.raises(CheckpointError, match=r"1 tensors that were trained are not in it, e.g. language_model"):
        write_policy(policy.hf_model, trained, tmp_path / "policy")
