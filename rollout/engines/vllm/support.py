"""Whether this vLLM serves a checkpoint on this device, asked of its own registry, validators and loader.

Nothing is loaded: the model is built on the meta device. It must run in a process of its own, in the environment of an
engine (environment.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import vllm
import vllm._custom_ops as ops
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform

from penstock.dataflow.errors import WeightSyncError
from penstock.rollout.engines.vllm.layout import joined, plain_config, stand_in_groups, trace_rank
from penstock.weights.hf_folder import CONFIG_FILE, transformers_config
from penstock.weights.layout.checkpoint_names import module_tensors
from penstock.weights.model_config import DType


def unsupported(
    folder: Path, dtype: DType, tp_size: int, context: int, *, is_traced: bool, device_is_here: bool
) -> list[str]:
    """Why vLLM cannot serve this model; empty if it can.

    Args:
        folder: Hugging Face directory.
        dtype: Dtype of the engine.
        tp_size: Tensor-parallel ranks.
        context: `model.max_context_tokens`.
        is_traced: Whether weights are published by a plan, for which the layout must be known.
        device_is_here: Whether engines run on the kind of device that this machine has.
    """
    hf_config = transformers_config(folder / CONFIG_FILE)
    where = f"vLLM {vllm.__version__} on {torch.device(vllm.platforms.current_platform.device_type).type}"
    try:
        config = plain_config(hf_config, dtype, tp_size, context, folder)
    except WeightSyncError as error:
        return [f"{where}: {_line(error)}"]
    except Exception as error:  # noqa: BLE001 - validators raise what they like
        return [f"{where} refuses it: {_line(error)}"]
    try:
        with stand_in_groups(0, tp_size), set_current_vllm_config(config), torch.device("meta"):
            initialize_model(config)
    except Exception as error:  # noqa: BLE001
        return [f"{where} cannot build it: {_line(error)}"]
    if device_is_here and (problem := _of_attention(config) or _of_gated_delta(config, dtype)):
        return [f"{where}: {problem}"]
    if not is_traced:
        return []
    tensors = module_tensors(hf_config)
    try:
        ranks = []
        for rank in range(tp_size):
            with stand_in_groups(rank, tp_size):
                ranks.append(trace_rank(plain_config(hf_config, dtype, tp_size, context, folder), tensors, dtype, rank))
        joined(ranks)
    except WeightSyncError as error:
        return [f"{where}: {_line(error)}"]
    return []


def _of_attention(config: Any) -> str:
    """Whether the attention backend of each layer supports its heads and dtype."""
    for name, layer in config.compilation_config.static_forward_context.items():
        head_size, backend = getattr(layer, "head_size", None), getattr(layer, "attn_backend", None)
        if head_size is None or backend is None:
            continue
        if not backend.supports_head_size(head_size):
            sizes = ", ".join(map(str, backend.get_supported_head_sizes()))
            return (
                f"head_dim={head_size} of {name} is not supported by its attention backend {backend.get_name()}, which "
                f"has {sizes}. Use rollout/engine=torch, another device, or a model with such heads"
            )
    return ""


def only_dtype(folder: Path, dtype: DType, tp_size: int, context: int) -> DType | None:
    """The only dtype in which all layers of a model are computed on this device; None: any, or it is not known."""
    try:
        config = plain_config(transformers_config(folder / CONFIG_FILE), dtype, tp_size, context, folder)
        with stand_in_groups(0, tp_size), set_current_vllm_config(config), torch.device("meta"):
            initialize_model(config)
    except Exception:  # noqa: BLE001 - `unsupported` says why
        return None
    return "bfloat16" if current_platform.is_cpu() and _gated_delta(config)[0] else None


def _of_gated_delta(config: Any, dtype: DType) -> str:
    """Whether vLLM's kernel for CPUs computes gated delta layers of such heads (it is given one token) and dtype."""
    name, layer = _gated_delta(config)
    if layer is None or not current_platform.is_cpu():
        return ""
    if not hasattr(layer, "forward_cpu"):
        return f"{name} is a {type(layer).__name__}, which has no form for CPUs. Use a GPU"
    num_heads, value_size, key_size = layer.get_state_shape()[1]
    query, value = (torch.zeros(1, 1, num_heads, size, dtype=torch.bfloat16) for size in (key_size, value_size))
    decay, beta = torch.zeros(1, 1, num_heads), torch.zeros(1, 1, num_heads, dtype=torch.bfloat16)
    state, slots = torch.zeros(1, num_heads, key_size, value_size), torch.zeros(1, dtype=torch.int32)
    ends = torch.tensor([0, 1], dtype=torch.int32)
    try:
        ops.chunk_gated_delta_rule_cpu(
            *(query, query, value, decay, beta, state),
            output_final_state=True,
            cu_seqlens=ends,
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            initial_state_indices=slots,
        )
    except RuntimeError as error:
        sizes = f"linear heads of {key_size} (keys) and {value_size} (values)"
        return (
            f"{name} has {sizes}, which its kernel for CPUs refuses: {_line(error)} Use a GPU, or a model with others"
        )
    if dtype == "bfloat16":
        return ""
    return (
        f"it computes gated delta layers ({name}) in bfloat16 only, and model.dtype={dtype}. Use model.dtype=bfloat16"
    )


def _gated_delta(config: Any) -> tuple[str, Any]:
    """The first such layer and its name."""
    layers = config.compilation_config.static_forward_context.items()
    return next(((name, layer) for name, layer in layers if isinstance(layer, GatedDeltaNetAttention)), ("", None))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:600]
