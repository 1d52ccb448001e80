"""A model folder of which only the files matter: a config.json of the demo's policy, and weights that nobody loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
}


def write_model(folder: Path, **fields: object) -> Path:
    """Write config.json, with `fields` instead of the demo's, and one tensor; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    save_file({"model.norm.weight": np.zeros(2, np.float32)}, folder / "model.safetensors")
    return folder
