"""Policies that tests train and serve: small enough that every test can afford one."""

from __future__ import annotations

import types

from penstock.weights.model_config import ModelShape

SPECIAL_TOKENS = types.SimpleNamespace(
    bos_token_id=None, eos_token_id=1, pad_token_id=0, save_pretrained=lambda path: None
)
"""Replaces the tokenizer where no text is read."""


def tiny_shape(vocab_size: int, hidden_size: int = 32, head_dim: int = 8) -> ModelShape:
    """Two layers, four heads that share two key/value heads, a tied head."""
    return ModelShape(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        tie_word_embeddings=True,
    )
