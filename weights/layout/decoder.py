"""The tensors of a decoder, from its shape alone: what a plan needs when there is no checkpoint to look at."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.weights.layout.algebra import Shape, TensorSpec
from penstock.weights.model_config import ModelShape


def decoder_tensors(model: ModelShape) -> list[TensorSpec]:
    """Names and shapes in Hugging Face form, in the order of the checkpoint; a tied lm_head is left out."""
    hidden = model.hidden_size
    tensors = [TensorSpec("model.embed_tokens.weight", (model.vocab_size, hidden))]
    for layer in range(model.num_layers):
        tensors += [TensorSpec(f"model.layers.{layer}.{name}", shape) for name, shape in _layer(model)]
    tensors.append(TensorSpec("model.norm.weight", (hidden,)))
    if not model.tie_word_embeddings:
        tensors.append(TensorSpec("lm_head.weight", (model.vocab_size, hidden)))
    return tensors


def _layer(model: ModelShape) -> Iterator[tuple[str, Shape]]:
    hidden, rows = model.hidden_size, model.intermediate_size
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    for part, width in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        yield f"self_attn.{part}.weight", (width, hidden)
        if model.attention_bias:
            yield f"self_attn.{part}.bias", (width,)
    yield "self_attn.o_proj.weight", (hidden, heads)
    if model.qk_norm:
        yield "self_attn.q_norm.weight", (model.head_dim,)
        yield "self_attn.k_norm.weight", (model.head_dim,)
    yield from _gated("mlp", rows, hidden) if not model.num_experts else _mixture(model)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def _mixture(model: ModelShape) -> Iterator[tuple[str, Shape]]:
    """Experts stacked as transformers 5 stacks them: gate over up."""
    hidden, rows, experts = model.hidden_size, model.expert_size, model.num_experts
    yield "mlp.gate.weight", (experts, hidden)
    yield "mlp.experts.gate_up_proj", (experts, 2 * rows, hidden)
    yield "mlp.experts.down_proj", (experts, hidden, rows)
    if model.shared_expert_size:
        yield from _gated("mlp.shared_expert", model.shared_expert_size, hidden)
        yield "mlp.shared_expert_gate.weight", (1, hidden)


def _gated(owner: str, rows: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{owner}.gate_proj.weight", (rows, hidden)
    yield f"{owner}.up_proj.weight", (rows, hidden)
    yield f"{owner}.down_proj.weight", (hidden, rows)
