"""A small policy with random weights, in the shape that the config gives."""

from __future__ import annotations

from typing import Any

import torch

from penstock.weights.model_config import ModelConfig


def create_policy(model: ModelConfig, tokenizer: Any, path: str, seed: int, *, initializer_range: float = 0.02) -> None:
    """Save a randomly initialised Qwen3 policy, dense or with experts, and its tokenizer in Hugging Face form.

    The same seed gives the same weights.

    Args:
        model: Its `shape` and `max_context_tokens` are used.
        tokenizer: A Hugging Face tokenizer; gives the ids of the special tokens.
        path: Directory to write; created.
        seed: Of the weights.
        initializer_range: Standard deviation of the weights; 0.02 is Qwen3's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = model.shape
    experts: dict[str, Any] = {}
    if shape.num_experts:
        experts = {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.intermediate_size // shape.expert_size,
            "moe_intermediate_size": shape.expert_size,
            "norm_topk_prob": True,
        }
    config = AutoConfig.for_model(
        "qwen3_moe" if experts else "qwen3",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=model.max_context_tokens,
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=initializer_range,
        dtype="float32",
        **experts,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = AutoModelForCausalLM.from_config(config)
    policy.float().save_pretrained(path)
    tokenizer.save_pretrained(path)
