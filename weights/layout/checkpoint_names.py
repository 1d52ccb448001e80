"""The tensors of a policy as transformers defines them: without memory, and under the names of a checkpoint.

transformers names tensors by its modules, and some modules stack tensors that a checkpoint holds one by one (experts).
Its own conversion turns them back. A checkpoint may hold more than a language model (a vision tower, layers that
predict further tokens). The language model alone is a policy, and its tensors have other names in such a checkpoint.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from penstock.weights.layout.algebra import TensorSpec

logger = logging.getLogger(__name__)


def model_without_memory(hf_config: Any) -> Any:
    """transformers' language model on the meta device.

    Raises:
        ValueError: If transformers has none for this config.
    """
    from transformers import AutoModelForCausalLM

    with _on_meta():
        return AutoModelForCausalLM.from_config(text_config(hf_config))


@contextmanager
def _on_meta() -> Iterator[None]:
    """Build models of transformers without memory, and whole while DeepSpeed partitions those that are built."""
    from transformers.integrations import deepspeed

    config = deepspeed._hf_deepspeed_config_weak_ref  # noqa: SLF001 - it can be set by a function, and not be read
    deepspeed.unset_hf_deepspeed_config()
    try:
        with torch.device("meta"):
            yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config  # noqa: SLF001


def text_config(hf_config: Any) -> Any:
    """The config of the language model; another object than `hf_config` if that has other parts, too."""
    return hf_config.get_text_config(decoder=True)


def body_of(causal_lm: Any) -> tuple[str, Any]:
    """The name and module of the layers of a language model, without its head.

    transformers names it by `base_model_prefix`. Where a class has no such attribute (Llama 4), `base_model` is the
    language model itself, and its body the model in it.
    """
    from transformers import PreTrainedModel

    if (body := causal_lm.base_model) is not causal_lm:
        return causal_lm.base_model_prefix, body
    inside = [(name, one) for name, one in causal_lm.named_children() if isinstance(one, PreTrainedModel)]
    return inside[0] if len(inside) == 1 else ("", causal_lm)


def linear_layers(model: Any) -> list[str]:
    """Names of the linear layers of a language model, without its head, whose weight is read directly."""
    head = model.get_output_embeddings()
    return [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and one is not head]


def expert_weights(model: Any) -> list[str]:
    """Names of the weights that hold a matrix of every expert, `[experts, rows, columns]`."""
    found = []
    for name, module in model.named_modules():
        for own, weight in module.named_parameters(recurse=False):
            shape = getattr(weight, "ds_shape", weight.shape)
            if len(shape) == 3 and shape[0] == getattr(module, "num_experts", None):
                found.append(f"{name}.{own}")
    return found


def module_tensors(hf_config: Any) -> list[TensorSpec]:
    """The tensors that a trainer of this model holds: transformers' module names and full shapes, tied ones once."""
    parameters = model_without_memory(hf_config).named_parameters()
    return [TensorSpec(name, tuple(parameter.shape)) for name, parameter in parameters]


def checkpoint_tensors(hf_config: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the language model under the names of a checkpoint, split and joined as a checkpoint holds them.

    The tensors of a model that transformers does not know are returned unchanged.
    """
    from transformers.core_model_loading import revert_weight_conversion

    try:
        model = model_without_memory(hf_config)
    except ValueError as error:
        logger.info("transformers has no model for %s: %s", type(hf_config).__name__, error)
        return dict(tensors)
    if text_config(hf_config) is not hf_config:
        alone, inside, model = _places(hf_config, model)
        tensors = {inside + name[len(alone) :] if name.startswith(alone) else name: tensors[name] for name in tensors}
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


def tensors_as_held(
    hf_config: Any, tensors: Mapping[str, torch.Tensor], held: Container[str]
) -> dict[str, torch.Tensor]:
    """Tensors of the language model under the names that the files of a checkpoint with other parts have.

    Files may hold experts stacked, as transformers' modules do, or one by one; and a tied tensor under one of its names
    or under both. A tensor that the files do not hold is under the name that transformers would give it.

    Args:
        hf_config: Of the checkpoint, which has other parts, too.
        tensors: By the names of transformers' modules, tied ones once.
        held: Names of the tensors in the files.
    """
    model = model_without_memory(hf_config)
    alone, inside, whole = _places(hf_config, model)
    written_at = {place: written for written, place in _names_in_checkpoint(hf_config, model, alone).items()}

    def named(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        as_modules, others = {}, {}
        for name, tensor in given.items():
            written = written_at.get(alone, "") + name.removeprefix(alone)
            if name.startswith(alone) and written in held:
                as_modules[written] = tensor
            else:
                others[inside + name.removeprefix(alone) if name.startswith(alone) else name] = tensor
        return as_modules | revert_weight_conversion(whole, others)

    found = named(tensors)
    for other, name in model.all_tied_weights_keys.items():
        if name in tensors:
            (first,), (second,) = named({name: tensors[name]}), named({other: tensors[name]})
            twins = [twin for twin in dict.fromkeys((second, other)) if twin in held]  # transformers loads either
            found |= {twin: tensors[name].clone() for twin in twins}  # safetensors writes no shared memory
            if twins and first not in held:
                del found[first]
    return found


def loading_arguments(hf_config: Any) -> dict[str, Any]:
    """Arguments with which `AutoModelForCausalLM.from_pretrained` loads the language model of a checkpoint alone.

    `key_mapping` has all its names: pattern of a name in the checkpoint -> what takes its place in the language model.
    """
    if text_config(hf_config) is hf_config:
        return {}
    model = model_without_memory(hf_config)
    alone, _, _ = _places(hf_config, model)
    places = _names_in_checkpoint(hf_config, model, alone)
    mapping = {f"^{re.escape(written)}{'' if place == alone else '$'}": place for written, place in places.items()}
    return {"config": text_config(hf_config), "key_mapping": mapping}


def _names_in_checkpoint(hf_config: Any, model: Any, alone: str) -> dict[str, str]:
    """Name in a checkpoint with other parts -> name in the language model; of its layers, the prefixes."""
    places: dict[str, str] = {}
    for name, _ in model.named_parameters():
        of_layers = name.startswith(alone)
        if of_layers and alone in places.values():
            continue
        (written,) = checkpoint_tensors(hf_config, {name: torch.empty(0, device="meta")})
        places[written.removesuffix(name[len(alone) :]) if of_layers else written] = alone if of_layers else name
    return places


def _places(hf_config: Any, model: Any) -> tuple[str, str, Any]:
    """Prefix of the layers in the language model alone and in the whole model of its checkpoint, and that model.

    Raises:
        ValueError: If transformers' class of the checkpoint has no such language model.
    """
    import transformers

    name = (hf_config.architectures or ["an unknown class"])[0]
    kind = getattr(transformers, name, None)
    if kind is None:
        raise ValueError(f"transformers {transformers.__version__} has no {name}")
    with _on_meta():
        whole = kind(copy.deepcopy(hf_config))  # transformers writes the attention into it
    found = {type(module): f"{place}." for place, module in reversed(list(whole.named_modules())) if place}
    if inside := found.get(type(model)):  # with its head
        return "", inside, whole
    prefix, body = body_of(model)
    if (inside := found.get(type(body))) is None:
        layers = type(body).__name__
        raise ValueError(f"transformers' {name} has no {layers}, which is the language model of its config")
    return f"{prefix}.", inside, whole
