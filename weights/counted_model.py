"""What a model with recurrent or unequal layers holds, counted on its class: built on the meta device, which has no
memory.

A decoder of plain attention follows from its dimensions (`ModelShape`). Layers with recurrent state have weights and
states of other forms, one for each kind; so the class is built, and one pass tells what its cache holds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
_PROMPT = 4
"""Tokens of a pass, as many as the widest convolution reads."""


class Counted(NamedTuple):
    """Numbers of one model; of its cache over all layers."""

    num_weights: int
    """A tied head once."""
    num_active_weights: int
    """With which a token is multiplied: those of the experts it uses, of the embeddings the head."""
    kv_elements: int
    """Of each token."""
    state_elements: int
    """Of each sequence, however long."""
    has_experts: bool
    """Whether a layer has any."""

    @property
    def sizes(self) -> dict[str, int]:
        """Those that a `ModelShape` has."""
        return {name: int(value) for name, value in self._asdict().items() if name != "has_experts"}


_counted: dict[str, Counted | None] = {}


def counted(hf_config: Any, experts_share: float) -> Counted | None:
    """Count a model with layers other than attention, or of several sizes; None for others, and where transformers
    cannot.

    Args:
        hf_config: Of the language model, as transformers builds it.
        experts_share: Share of the experts that a token uses; 1 without experts.
    """
    kinds = getattr(hf_config, "layer_types", None) or getattr(hf_config, "layers_block_type", None) or ()
    if set(kinds) <= _ATTENTION and not _has_unequal_layers(hf_config):
        return None
    settings = {name: value for name, value in hf_config.to_dict().items() if name != "_name_or_path"}
    key = json.dumps([settings, experts_share], sort_keys=True, default=str)
    if key not in _counted:
        _counted[key] = _count(hf_config, experts_share)
    return _counted[key]


def _has_unequal_layers(hf_config: Any) -> bool:
    """Whether a dimension is one of each layer (Gemma 3n, Gemma 4)."""
    dimensions = ("intermediate_size", "head_dim", "num_key_value_heads")
    try:
        return any(isinstance(getattr(hf_config, name, None), list) for name in dimensions)
    except RuntimeError:  # transformers': there is no value of all
        return True


def _count(hf_config: Any, experts_share: float) -> Counted | None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    said = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # or it recommends kernels
    try:
        with torch.device("meta"), torch.no_grad():
            settings = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
            model = AutoModelForCausalLM.from_config(hf_config, **settings).eval()
            sizes = [
                sum(one.numel() for one in _tensors(vars(_pass(model, num_tokens).past_key_values)))
                for num_tokens in (_PROMPT, _PROMPT + 1)
            ]
    except Exception as error:  # noqa: BLE001 - every class refuses in its own way
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        logger.warning(
            "%s: weights and cache are estimated as those of plain attention (%s)", hf_config.model_type, what
        )
        return None
    finally:
        transformers_logging.set_verbosity(said)
    weights = {id(one): one for one in model.parameters()}
    total = sum(one.numel() for one in weights.values())
    routed = sum(one.numel() for one in weights.values() if one.dim() == 3 and one.shape[1] > 1)  # experts, not kernels
    embedding = model.get_input_embeddings().weight
    unused = 0 if embedding is model.get_output_embeddings().weight else embedding.numel()
    kv = sizes[1] - sizes[0]
    active = total - unused - round(routed * (1 - experts_share))
    return Counted(total, active, kv, sizes[0] - _PROMPT * kv, routed > 0)


def _pass(model: Any, num_tokens: int) -> Any:
    return model(input_ids=torch.zeros(1, num_tokens, dtype=torch.int64), use_cache=True)


def _tensors(held: Any) -> Iterator[Tensor]:
    """All tensors with a dimension in what a cache holds."""
    if isinstance(held, Tensor):
        yield from [held] if held.dim() > 1 else []
    elif isinstance(held, dict | list | tuple):
        for one in held.values() if isinstance(held, dict) else held:
            yield from _tensors(one)
    elif type(held).__module__.startswith("transformers"):
        yield from _tensors(vars(held))
