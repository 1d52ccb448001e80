"""LoRA on the weights of experts: gradients, merging and publishing are those of W + s·B·A of every expert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.trainer.config import LoraConfig
from penstock.trainer.models.lora import Adapter, Adapters, load_adapted_policy, merged
from penstock.trainer.models.policy_model import hf_parameters, load_policy
from penstock.trainer.models.varlen_attention import SequenceBoundaries
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.transport.adapters import adapter_manifest, adapter_tensors
from tests.layouts import training_layout

from .test_model_families import make_model, model_config

LORA = LoraConfig(rank=3, alpha=6, targets=("q_proj", "experts.gate_up_proj", "experts.down_proj"))


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_the_adapted_model_is_that_of_the_merged_weights(
    tmp_path: Path, model_type: str, gradient_checkpointing: bool
) -> None:
    folder = make_model(model_type, tmp_path, 3)
    model = model_config(folder)
    policy = load_adapted_policy(LORA, 0, str(folder), model, gradient_checkpointing=gradient_checkpointing)
    adapters = Adapters(policy)
    assert len(adapters) == 2 * 3
    assert {name.partition(":")[0] for name, _ in adapters.named_parameters()} <= {
        name for name, _ in hf_parameters(policy)
    }
    trained = [name for name, one in policy.named_parameters() if one.requires_grad]
    assert len(trained) == 2 * 3 * 2
    with torch.no_grad():
        for one in adapters.parameters():
            one.normal_(0, 0.2)
    ids, index = torch.randint(5, 200, (1, 20), generator=torch.Generator().manual_seed(0)), torch.arange(19)
    boundaries = SequenceBoundaries.of((20,), ids.device) if model.attention == "varlen" else None
    call = (ids, torch.arange(20)[None], None, index, ids[0, 1:], 1.0, boundaries)
    whole = load_policy(str(folder), model, gradient_checkpointing=False)
    additions = adapters.copies()
    with torch.no_grad():
        before = whole(*call)[0]
        for name, weight in hf_parameters(whole):
            weight.copy_(merged(weight, additions.get(name)))
    logprobs, merged_logprobs = policy(*call)[0], whole(*call)[0]
    torch.testing.assert_close(logprobs, merged_logprobs, atol=1e-5, rtol=1e-5)
    assert (merged_logprobs - before).abs().max() > 0.01
    with adapters.off():
        torch.testing.assert_close(policy(*call)[0], before, atol=1e-5, rtol=1e-5)
    for found in (policy(*call)[0], merged_logprobs):
        found.sum().backward()
    gradients = {name: one.grad for name, one in hf_parameters(whole)}
    parts = {name: one.grad for name, one in adapters.named_parameters()}
    for name, (down, up, scale) in additions.items():
        torch.testing.assert_close(parts[f"{name}:lora_A"], scale * up.mT @ gradients[name], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(parts[f"{name}:lora_B"], scale * gradients[name] @ down.mT, atol=1e-4, rtol=1e-3)


def test_a_stretch_of_a_weight_is_merged_as_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, down, up = (torch.randn(size, generator=generator) for size in ((4, 5, 6), (4, 2, 6), (4, 5, 2)))
    adapter = Adapter(down, up, 0.5)
    whole = merged(weight, adapter)
    torch.testing.assert_close(whole, weight + 0.5 * up @ down)
    for start in range(0, 120, 7):
        for stop in range(start, 121, 11):
            part = merged(weight.view(-1)[start:stop], adapter, start)
            torch.testing.assert_close(part, whole.view(-1)[start:stop])


def test_each_matrix_of_an_expert_is_published_with_its_place() -> None:
    down, up = torch.randn(3, 2, 6), torch.randn(3, 5, 2)
    sent = dict(adapter_tensors("w", down, up))
    assert sorted(sent) == [f"w[{index}].lora_{part}" for index in range(3) for part in "AB"]
    torch.testing.assert_close(sent["w[1].lora_A"], down[1])
    entries = tuple(TensorEntry(name, "float32", tuple(one.shape), 0) for name, one in sent.items())
    layout = training_layout([TensorSpec("w", (3, 5, 6))])
    adapters = adapter_manifest(WeightManifest(1, "", entries, 0, 0), (), layout, 1).adapters
    assert adapters is not None
    assert [(box.tensor, box.rows, box.columns, box.offset, box.strides) for box in adapters.boxes] == [
        (f"w[{index}]", (0, 5), (0, 6), 30 * index, (6, 1)) for index in range(3)
    ]


def test_experts_are_adapted_only_by_a_target_that_names_them(tmp_path: Path) -> None:
    """`down_proj` of a shared expert is a linear layer; that of the routed ones is another weight."""
    weight = "model.layers.0.mlp.experts.down_proj"
    assert LORA.adapts_experts(weight)
    assert not LoraConfig(targets=("down_proj",)).adapts_experts(weight)
    folder = make_model("qwen3_moe", tmp_path, 3)
    linear = LoraConfig(targets=("q_proj", "down_proj"))
    with pytest.raises(ConfigError, match="down_proj names no linear layer"):
        load_adapted_policy(linear, 0, str(folder), model_config(folder), gradient_checkpointing=False)
