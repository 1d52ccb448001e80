"""The config of a checkpoint made small: the same class with few layers, tokens and experts, to be asked what it is.

Names of settings are those that transformers' configs share; which of them a config has decides. A class in whose code
widths depend on each other in other ways refuses the narrow form; then only depth, vocabulary and experts are cut.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

VOCABULARY = 128
WINDOW = 6
"""Tokens of sliding windows and chunks of attention, fewer than the sequences have."""
_MIN_LAYERS, _MAX_LAYERS = 2, 24
_HEADS, _WIDTH = 4, 64
_MAX_PARAMETERS = 500_000_000
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
_WHOLE = 1024
"""A window that holds every sequence that a tiny instance is given."""
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id")
_AT_MOST = (
    (("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    (("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "num_selected_experts"), 2),
    (("n_group", "topk_group", "num_expert_group"), 1),
    (("num_kv_shared_layers",), 0),  # layers without keys of their own
)


def tiny_config(hf_config: Any, *, is_narrow: bool, context: int | None = None) -> Any:
    """A copy of a text config that transformers builds in a moment.

    Args:
        hf_config: Of a checkpoint.
        is_narrow: Whether widths are cut too.
        context: Windows of at least so many tokens are no windows of the tiny instance either. None: all are.
    """
    small = copy.deepcopy(hf_config.get_text_config(decoder=True))
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    _cut_layers(small)
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        _set(small, name, VOCABULARY)
    for name in _TOKENS:
        if getattr(small, name, None) is not None:
            setattr(small, name, 0 if name == "pad_token_id" else 1)
    for names, most in _AT_MOST:
        for name in names:
            if isinstance(getattr(small, name, None), int):
                _set(small, name, min(getattr(small, name), most))
    for name in _WINDOWS:
        if isinstance(window := getattr(small, name, None), int):
            _set(small, name, _WHOLE if context is not None and context <= window else min(window, WINDOW))
    for name in [name for name in small.to_dict() if "intermediate_size" in name or name in ("ffn_dim", "n_inner")]:
        if isinstance(getattr(small, name, None), int):
            _set(small, name, min(getattr(small, name), 2 * _WIDTH))
    if is_narrow:
        _cut_widths(small)
    return small


def _cut_layers(small: Any) -> None:
    """Keep the first layers, as many as it takes to have one of every kind that a list by layers names."""
    of_model = small.num_hidden_layers
    lists = {
        name: value
        for name, value in vars(small).items()
        if isinstance(value, list | tuple) and len(value) == of_model and of_model > 1
    }
    kept = _MIN_LAYERS
    for value in lists.values():
        if all(isinstance(one, str | int | bool) for one in value):
            firsts = [list(value).index(one) + 1 for one in set(value)]
            is_of_kinds = isinstance(value[0], str) or len(firsts) < of_model  # numbers that all differ are no kinds
            kept = max(kept, *firsts) if is_of_kinds else kept
    dense = getattr(small, "first_k_dense_replace", None)
    for name in ("attn_layer_period", "expert_layer_period", "full_attention_interval"):
        kept = max(kept, getattr(small, name, None) or 0)
    kept = min(max(kept, (dense or 0) + 1), of_model, _MAX_LAYERS)
    for name, value in lists.items():
        setattr(small, name, value[:kept])
    _set(small, "num_hidden_layers", kept)


def _cut_widths(small: Any) -> None:
    """Few heads of the width that they have, and a narrow residual stream, where the config says it beside heads."""
    heads = small.num_attention_heads
    shared = getattr(small, "num_key_value_heads", None) or heads
    width = getattr(small, "head_dim", None) or small.hidden_size // heads
    has_own_width = getattr(small, "head_dim", None) is not None
    few = min(heads, _HEADS)
    _set(small, "num_attention_heads", few)
    if getattr(small, "num_key_value_heads", None) is not None:
        _set(small, "num_key_value_heads", max(1, few * shared // heads))
    _set(small, "hidden_size", 2 * _WIDTH if has_own_width and few * width != small.hidden_size else few * width)


def _set(config: Any, name: str, value: int) -> None:
    if hasattr(config, name):
        setattr(config, name, value)


def tiny_model(config: Any, attention: str, device: str) -> nn.Module:
    """Build it in float32 with weights so large that caps, scales and choices of experts matter, by a fixed seed.

    Raises:
        ValueError: If it is not tiny.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)  # transformers writes the attention into it
    settings = {"attn_implementation": attention, "dtype": torch.float32}
    with torch.device("meta"):
        size = sum(one.numel() for one in AutoModelForCausalLM.from_config(config, **settings).parameters())
    if size > _MAX_PARAMETERS:
        raise ValueError(f"it has {size / 1e6:.0f} million parameters")
    # Draws of its own, so that asking changes nothing that is drawn afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, **settings).eval()
        head = getattr(model.get_output_embeddings(), "weight", None)
        embeddings = {id(one) for one in (model.get_input_embeddings().weight, head) if one is not None}
        with torch.no_grad():
            for one in model.parameters():
                if one.dim() > 1:
                    one.normal_(0, (4.0 if id(one) in embeddings else 1.5) / one.shape[-1] ** 0.5)
                else:
                    one.add_(torch.randn_like(one), alpha=0.1)
    return model.requires_grad_(requires_grad=False).to(device)
