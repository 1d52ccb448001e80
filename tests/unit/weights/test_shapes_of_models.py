"""The dimensions that are read from a configuration of transformers, where its layers are not all alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, NemotronHConfig

from penstock.weights.hf_folder import shape_of

FILE = Path("config.json")


def test_layers_with_heads_of_their_own_are_counted_and_the_widest_is_the_head():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 50}
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=6, **sizes)
    widths = [config.per_layer_config[index].head_dim for index in range(6)]
    assert len(set(widths)) == 2
    shape = shape_of(config, FILE)
    assert shape.head_dim == max(widths)
    assert shape.num_parameters == sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
    assert shape.kv_elements == sum(2 * shape.num_kv_heads * width for width in widths)


def test_the_largest_of_a_size_by_layer_is_taken():
    config = AutoConfig.for_model("gemma3n_text", num_hidden_layers=5, intermediate_size=[64, 64, 128, 64, 64])
    assert shape_of(config, FILE).intermediate_size == 128


@pytest.mark.parametrize(("kind", "num_experts"), [("mlp", 0), ("moe", 4)])
def test_a_hybrid_has_experts_if_a_layer_has_and_not_if_its_configuration_could(kind: str, num_experts: int):
    """NemotronHConfig has experts and their size by default, whatever its layers are."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 50, "num_hidden_layers": 3}
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 4, "n_groups": 1}
    config = NemotronHConfig(
        layers_block_type=["mamba", "attention", kind], mamba_head_dim=32, **sizes, **experts, **heads
    )
    shape = shape_of(config, FILE)
    assert shape.num_experts == num_experts
    assert bool(shape.expert_size) == bool(num_experts)
    assert shape.num_parameters == sum(one.numel() for one in AutoModelForCausalLM.from_config(config).parameters())
