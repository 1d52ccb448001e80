"""What vLLM's CPU build computes otherwise than new weights and every model need, replaced before it loads a model.

- It packs the weights of linear layers and of experts after loading. A later update would not reach the packed copy,
  and would leave a tied lm_head with old weights without a word. Here both stay live parameters, as on a GPU.
- Its rotary operator takes queries and keys as `[tokens, heads x head size]`. Models that give it `[tokens, heads, head
  size]` (LFM2) get wrongly rotated ones without a word.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import vllm.model_executor.layers.utils as linear_dispatch
from vllm.model_executor.layers.activation import SwigluOAIAndMul
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

_rotate_flat = RotaryEmbedding.forward_cpu


def keep_parameters_live() -> None:
    """Let this process compute with the parameters themselves, and rotate queries and keys of any shape."""
    linear_dispatch.dispatch_cpu_unquantized_gemm = _live_linear
    CPUUnquantizedExperts.process_weights_after_loading = _leave_as_loaded
    CPUUnquantizedExperts.apply = _live_experts
    RotaryEmbedding.forward_cpu = _rotate


def _live_linear(layer: torch.nn.Module, **_unused: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]  # what vLLM's own dispatch does


def _leave_as_loaded(_experts: CPUUnquantizedExperts, _layer: torch.nn.Module) -> None:
    pass


def _live_experts(
    experts: CPUUnquantizedExperts,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: MoEActivation,
    apply_router_weight_on_input: bool,
    **_unused: Any,
) -> None:
    """Write `[tokens, hidden]`: for each expert, its tokens through its three projections, times their gate weights."""
    output.zero_()
    for expert in topk_ids.unique().tolist():
        tokens, place = (topk_ids == expert).nonzero(as_tuple=True)
        bias1, bias2 = (None if one is None else one[expert] for one in (experts.w1_bias, experts.w2_bias))
        gate_up = torch.nn.functional.linear(hidden_states[tokens], w1[expert], bias1)
        answers = torch.nn.functional.linear(_activated(activation, gate_up), w2[expert], bias2)
        if not apply_router_weight_on_input:
            answers = answers * topk_weights[tokens, place, None]
        output.index_add_(0, tokens, answers.to(output.dtype))


def _activated(activation: MoEActivation, gate_up: torch.Tensor) -> torch.Tensor:
    if activation is MoEActivation.SWIGLUOAI:  # of which the CPU build has no operator
        return SwigluOAIAndMul.forward_native(_swiglu_oai, gate_up)
    size = gate_up.shape[-1] // 2 if activation.is_gated else gate_up.shape[-1]
    return apply_moe_activation(activation, gate_up.new_empty(len(gate_up), size), gate_up)


_swiglu_oai: Any = type("SwigluOAI", (), {"alpha": 1.702, "limit": 7.0})
"""The constants of vLLM's layer, which can be built only while an engine's configuration is set."""


def _rotate(
    rotary: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if query.ndim == 2:
        rotary._forward_method = MethodType(_rotate_flat, rotary)  # noqa: SLF001 - from now on as vLLM does, at no cost
        return _rotate_flat(rotary, positions, query, key)
    rows = positions.numel()
    flat_key = None if key is None else key.reshape(rows, -1)
    turned, turned_key = _rotate_flat(rotary, positions, query.reshape(rows, -1), flat_key)
    return turned.view(query.shape), None if key is None or turned_key is None else turned_key.view(key.shape)
