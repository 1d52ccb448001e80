"""The torch engine is asked, by a tiny instance, whether its cache and masks compute a class of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.dataflow.ids import EngineId
from penstock.platform.checks.model_probe import Question, answer_about
from penstock.rollout.config import TorchEngineConfig
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.torch.decoding import DecodeBatch
from penstock.rollout.engines.torch.engine import load_batch
from penstock.weights.hf_folder import CONFIG_FILE, shape_of, transformers_config
from penstock.weights.model_config import ModelConfig

SIZES: Mapping[str, object] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
LINEAR = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
WINDOW = 64
GEMMA = GROUPED | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
NO_STATE = "cannot decode over its cache"
WHOLE_CONTEXT = "attention to the whole context, a logprob of a tiny instance differs by"


def folder_of(tmp_path: Path, family: str, fields: Mapping[str, object]) -> Path:
    from transformers import AutoConfig

    parts = (
        {"text_config": SIZES | {k: v for k, v in fields.items() if k != "vision_config"}}
        if "vision_config" in fields
        else SIZES | fields
    )
    AutoConfig.for_model(family, **parts).save_pretrained(tmp_path)
    return tmp_path


def refusal(folder: Path, context: int) -> str:
    """What the check says of the torch engine; empty if it serves the model."""
    question = Question(str(folder), None, None, 1, context, False, "cpu", True, has_torch_engine=True)
    return "; ".join(answer_about(question).problems)


@pytest.mark.parametrize(
    ("family", "fields"),
    [("qwen3", GROUPED), ("gpt2", {}), ("gemma3_text", GEMMA), ("mistral", GROUPED | {"sliding_window": WINDOW})],
)
def test_a_class_whose_layers_attend_to_the_whole_context_is_served(family, fields, tmp_path):
    assert refusal(folder_of(tmp_path, family, fields), WINDOW) == ""


@pytest.mark.parametrize(
    ("family", "fields", "context", "said"),
    [
        ("gemma3_text", GEMMA, WINDOW + 1, WHOLE_CONTEXT),
        ("mistral", GROUPED | {"sliding_window": WINDOW}, WINDOW + 1, WHOLE_CONTEXT),
        ("gemma2", GEMMA | {"query_pre_attn_scalar": 16}, WINDOW, WHOLE_CONTEXT),  # sdpa has no soft caps
        ("qwen3_5", GROUPED | LINEAR | {"vision_config": {}}, WINDOW, NO_STATE),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}, WINDOW, NO_STATE),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, WINDOW, NO_STATE),
        ("bloom", {}, WINDOW, "it refuses sdpa attention"),
    ],
)
def test_a_class_that_the_engine_would_compute_otherwise_is_refused(family, fields, context, said, tmp_path):
    found = refusal(folder_of(tmp_path, family, fields), context)
    assert found.startswith("rollout.engine.type=torch does not compute this model: ")
    assert said in found
    assert found.endswith("Use rollout/engine=vllm")


def test_the_engine_loads_a_model_with_windows_that_hold_the_context(tmp_path):
    from transformers import AutoModelForCausalLM

    file = folder_of(tmp_path, "gemma3_text", GEMMA) / CONFIG_FILE
    AutoModelForCausalLM.from_config(transformers_config(file)).save_pretrained(tmp_path)
    model = ModelConfig(max_context_tokens=WINDOW, shape=shape_of(transformers_config(file), file))
    config = TorchEngineConfig(type="torch")
    spec = EngineSpec(EngineId("e"), str(tmp_path), model, config, "cpu", "keep_kv", 7, 1)
    assert isinstance(load_batch(spec, config), DecodeBatch)
