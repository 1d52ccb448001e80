"""The tensors of a policy as transformers defines them: without memory, and under the names of a checkpoint.

transformers names tensors by its modules, and some modules stack tensors that a checkpoint holds one by one (experts).
Its own conversion turns them back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.model_config import ModelShape

logger = logging.getLogger(__name__)


def config_of_shape(shape: ModelShape) -> Any:
    """A transformers configuration for a model of which only the shape is known: of the family that has this shape."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    experts = {
        "num_experts": shape.num_experts,
        "moe_intermediate_size": shape.expert_size,
        "shared_expert_intermediate_size": shape.shared_expert_size,
        "num_experts_per_tok": min(8, shape.num_experts),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if shape.num_experts:
        model_type = "qwen2_moe" if shape.shared_expert_size else "qwen3_moe"
    else:
        model_type = "qwen2" if shape.attention_bias else "qwen3" if shape.qk_norm else "llama"
    return AutoConfig.for_model(
        model_type,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tie_word_embeddings,
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        **(experts if shape.num_experts else {}),
    )


def model_without_memory(hf_config: Any) -> Any:
    """transformers' model on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config)


def module_tensors(hf_config: Any) -> list[TensorSpec]:
    """The tensors that a trainer of this model holds: transformers' module names and full shapes, tied ones once."""
    parameters = model_without_memory(hf_config).named_parameters()
    return [TensorSpec(name, tuple(parameter.shape)) for name, parameter in parameters]


def checkpoint_tensors(hf_config: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the names of a checkpoint, split and joined as a checkpoint holds them.

    The tensors of a model that transformers does not know are returned unchanged.
    """
    from transformers.core_model_loading import revert_weight_conversion

    try:
        model = model_without_memory(hf_config)
    except ValueError as error:
        logger.info("transformers has no model for %s: %s", type(hf_config).__name__, error)
        return dict(tensors)
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted
