"""A policy is written as the checkpoint that it came from; what else that holds stays, and is not trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from penstock.dataflow.errors import CheckpointError
from penstock.trainer.models.policy_model import hf_parameters, load_policy
from penstock.weights.hf_folder import CONFIG_FILE, transformers_config
from penstock.weights.layout.checkpoint_names import (
    checkpoint_tensors,
    loading_arguments,
    model_without_memory,
    module_tensors,
)
from penstock.weights.policy_folder import policy_tensors, write_policy
from tests.contract.test_model_families import FAMILIES, make_model, model_config

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


def exported(source: Path, target: Path) -> dict[str, torch.Tensor]:
    """Write a policy whose every tensor is one more than in its source; the trained tensors by their modules' names."""
    policy = load_policy(str(source), model_config(source), gradient_checkpointing=False)
    trained = {name: parameter.detach() + 1 for name, parameter in hf_parameters(policy)}
    write_policy(policy.hf_model, trained, target)
    shutil.copy2(source / "preprocessor_config.json", target)
    return trained


def stack_experts(folder: Path) -> None:
    """Give a checkpoint its experts stacked, as the hub's Qwen3.5 has them; transformers writes them one by one."""
    file = folder / "model.safetensors"
    written = load_file(file)
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    stacked = {name: one.detach() for name, one in whole.named_parameters() if ".mlp.experts." in name}
    assert len(stacked) == 8, "two of each of four layers"
    kept = {name: one for name, one in written.items() if ".mlp.experts." not in name}
    save_file(kept | stacked, file, {"format": "pt"})


@pytest.mark.parametrize("is_stacked", [True, False])
def test_experts_are_written_as_the_source_holds_them(
    is_stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = dict(FAMILIES["qwen3_5"]["text_config"])  # type: ignore[call-overload]
    experts = {"text_config": text | FAMILIES["qwen3_5_moe_text"]}
    monkeypatch.setitem(FAMILIES, "qwen3_5_moe", FAMILIES["qwen3_5"] | experts)  # type: ignore[arg-type]
    source, target = make_model("qwen3_5_moe", tmp_path / "source", 0), tmp_path / "policy"
    if is_stacked:
        stack_experts(source)
    trained = exported(source, target)
    before, after = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    assert after.keys() == before.keys()
    assert any(name.endswith("experts.gate_up_proj") for name in after) == is_stacked
    again = load_policy(str(target), model_config(target), gradient_checkpointing=False)
    for name, parameter in hf_parameters(again):
        torch.testing.assert_close(parameter.detach(), trained[name], rtol=0, atol=0)


HEADS = [("gemma3", "language_model.lm_head.weight"), ("gemma3", "lm_head.weight"), ("qwen3_5", "lm_head.weight")]


@pytest.mark.some(2)
@pytest.mark.parametrize("is_alone", [False, True], ids=["both", "head-only"])
@pytest.mark.parametrize(("model_type", "head"), HEADS)
def test_a_tied_head_in_the_files_is_written_as_the_trained_embedding(
    model_type: str, head: str, is_alone: bool, tmp_path: Path
) -> None:
    source = make_model(model_type, tmp_path / "source", 0, tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[head] = tensors[embedding].clone()
    if is_alone:
        del tensors[embedding]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    trained = exported(source, tmp_path / "policy")
    after = load_file(tmp_path / "policy" / "model.safetensors")
    assert after.keys() == tensors.keys()
    torch.testing.assert_close(after[head], trained["model.embed_tokens.weight"], rtol=0, atol=0)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "policy")
    assert whole.lm_head.weight is whole.get_input_embeddings().weight
    torch.testing.assert_close(whole.lm_head.weight.detach(), after[head], rtol=0, atol=0)


SERVED = [
    ("gemma3", {}), ("gemma3", {"tie_word_embeddings": True}), ("qwen3_5", {"tie_word_embeddings": True}),
    ("qwen3", {"tie_word_embeddings": True}), ("qwen3_moe", {}), ("mixtral", {}), ("nemotron_h", {}),
]  # fmt: skip


@pytest.mark.some(3)
@pytest.mark.parametrize(("model_type", "fields"), SERVED)
def test_what_is_served_without_a_trainer_is_what_a_trainer_would_publish(
    model_type: str, fields: dict[str, object], tmp_path: Path
) -> None:
    """Under the same names, without what else the files hold, and from the files that the index names alone."""
    source = make_model(model_type, tmp_path, 0, **fields)
    tensors = load_file(source / "model.safetensors") | {EXTRA: torch.ones(2), "rotary_emb.inv_freq": torch.ones(2)}
    (source / "model.safetensors").unlink()
    save_file(tensors, source / "model-00001-of-00001.safetensors", {"format": "pt"})
    save_file({name: one + 1 for name, one in tensors.items()}, source / "consolidated.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    model = model_config(source)
    trained = dict(hf_parameters(load_policy(str(source), model, gradient_checkpointing=False)))
    served = policy_tensors(source, model.dtype)
    assert (
        served.keys()
        == trained.keys()
        == {one.name for one in module_tensors(transformers_config(source / CONFIG_FILE))}
    )
    for name, tensor in served.items():
        torch.testing.assert_close(tensor, trained[name].detach(), rtol=0, atol=0)


def test_weights_that_are_missing_or_contradict_the_configuration_are_not_served(tmp_path: Path) -> None:
    source = make_model("qwen3", tmp_path / "tied", 0, tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    head = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors | {"lm_head.weight": head}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight is not equal to the embedding, but config\.json has tie"
    ):
        policy_tensors(source, "float32")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"1 tensors of Qwen3ForCausalLM are not in it, e\.g\. model\.norm\.weight"
    ):
        policy_tensors(source, "float32")
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"there are no weights in it"):
        policy_tensors(source, "float32")


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


def test_a_language_model_that_its_checkpoint_holds_with_its_head_is_found_there() -> None:
    """Llama 4, whose `base_model` is the language model itself."""
    from transformers import AutoConfig

    text = {
        "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32, "head_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2,
        "pad_token_id": 0,
    }  # fmt: skip
    tower = {
        "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64,
    }  # fmt: skip
    hf_config = AutoConfig.for_model("llama4", text_config=text, vision_config=tower)
    hf_config.architectures = ["Llama4ForConditionalGeneration"]
    assert loading_arguments(hf_config)["key_mapping"] == {r"^language_model\.": ""}
    given = {name: one.detach() for name, one in model_without_memory(hf_config).named_parameters()}
    assert checkpoint_tensors(hf_config, given).keys() == {f"language_model.{name}" for name in given}
