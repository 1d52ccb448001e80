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

logger = logging.getLogger(__name__)


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
