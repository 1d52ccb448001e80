"""Small models with odd sizes, full tensors for them, and vLLM's slicing of those written out by hand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.weights.layout.algebra import Layout, Shape, TensorSpec, View
from penstock.weights.model_config import ModelShape
from tests.layouts import read

Tensors = dict[str, NDArray[np.int32]]
PADDING = -1


def small(**changes: object) -> ModelShape:
    sizes = {
        "vocab_size": 515,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 3,
    }
    return ModelShape.model_validate(sizes | changes)


QWEN2 = small(attention_bias=True, vocab_size=131)
QWEN3 = small(qk_norm=True, num_heads=16, num_kv_heads=8, head_dim=5, hidden_size=28)
LLAMA = small(num_heads=24, num_kv_heads=4, vocab_size=1001)
GEMMA = small(qk_norm=True, tie_word_embeddings=True, num_kv_heads=1, vocab_size=777)
SEVEN_HEADS = small(num_heads=7, num_kv_heads=1, intermediate_size=56, vocab_size=445)
"""Padded to 448 rows, so that seven ranks can hold it."""
FOURTEEN_HEADS = small(attention_bias=True, num_heads=14, num_kv_heads=2, intermediate_size=56, vocab_size=443)
MOE = small(qk_norm=True, num_kv_heads=4, vocab_size=64)


def tensors_of(name: str) -> tuple[ModelShape, list[TensorSpec]]:
    """A model's shape and tensors."""
    model = {
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "llama": LLAMA,
        "gemma": GEMMA,
        "moe": MOE,
        "seven_heads": SEVEN_HEADS,
        "fourteen_heads": FOURTEEN_HEADS,
    }[name]
    return model, read(name).tensors


def engine_layout(name: str, tp: int) -> Layout:
    """Layout of a vLLM engine over `tp` ranks."""
    return read(name).layouts[tp]


def numbered(tensors: list[TensorSpec]) -> Tensors:
    """Full tensors in which no two elements are equal."""
    full, start = {}, 0
    for tensor in tensors:
        count = int(np.prod(tensor.shape))
        full[tensor.name] = np.arange(start, start + count, dtype=np.int32).reshape(tensor.shape)
        start += count
    return full


def strided(buffer: NDArray[np.int32], shape: Shape, view: View) -> NDArray[np.int32]:
    """A view of a flat buffer."""
    strides = tuple(stride * buffer.itemsize for stride in view.strides)
    return np.lib.stride_tricks.as_strided(buffer[view.offset :], shape, strides)


def buffers_of(layout: Layout, full: Tensors | None = None) -> list[Tensors]:
    """Every rank's buffers, filled from its shards; padding everywhere else."""
    ranks = [{name: np.full(size, PADDING, np.int32) for name, size in sizes.items()} for sizes in layout.buffers]
    for name, shards in layout.shards.items() if full is not None else ():
        for shard in shards:
            part = full[name][tuple(slice(*range_) for range_ in shard.box)]
            strided(ranks[shard.rank][shard.view.buffer], part.shape, shard.view)[...] = part
    return ranks


def vllm_rank(full: Tensors, model: ModelShape, tp: int, rank: int) -> Tensors:
    """Parameters of rank `rank` of `tp` of a vLLM engine: its weight loaders, written as plain slices."""
    held: Tensors = {}
    stacked: dict[str, dict[str, NDArray[np.int32]]] = {}
    for name, tensor in full.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            padded = -(-len(tensor) // 64) * 64
            filled = np.full((padded, tensor.shape[1]), PADDING, tensor.dtype)
            filled[: len(tensor)] = tensor
            held[name] = filled[rank * padded // tp : (rank + 1) * padded // tp]
        elif name.endswith(("o_proj.weight", "mlp.down_proj.weight")):
            width = tensor.shape[1] // tp
            held[name] = tensor[:, rank * width : (rank + 1) * width]
        elif name.endswith("experts.down_proj"):
            width = tensor.shape[2] // tp
            held[name.replace("down_proj", "routed_experts.w2_weight")] = tensor[
                :, :, rank * width : (rank + 1) * width
            ]
        elif name.endswith("experts.gate_up_proj"):
            gate, up = np.split(tensor, 2, axis=1)
            width = gate.shape[1] // tp
            rows = slice(rank * width, (rank + 1) * width)
            held[name.replace("gate_up_proj", "routed_experts.w13_weight")] = np.concatenate(
                [gate[:, rows], up[:, rows]], axis=1
            )
        elif any(part in name for part in ("q_proj", "k_proj", "v_proj", "mlp.gate_proj", "up_proj")):
            owner, part, leaf = name.rsplit(".", 2)
            heads = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads, "v_proj": model.num_kv_heads}
            units = heads.get(part, len(tensor))
            width = len(tensor) // units
            first = rank * units // tp
            count = max(units // tp, 1)
            fused = "qkv_proj" if part in heads else "gate_up_proj"
            stacked.setdefault(f"{owner}.{fused}.{leaf}", {})[part] = tensor[first * width : (first + count) * width]
        else:
            held[name] = tensor
    for name, parts in stacked.items():
        order = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        held[name] = np.concatenate([parts[part] for part in order if part in parts])
    return held


def staging_buffers(
    sizes: Mapping[str, int], dtype: torch.dtype, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """Memory to receive a version: one flat tensor per buffer of a rank's layout, padding zero as in the engines."""
    return {name: torch.zeros(size, dtype=dtype, device=device) for name, size in sizes.items()}
