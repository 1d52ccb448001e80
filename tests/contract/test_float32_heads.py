"""`model.head_dtype=float32` everywhere: a bfloat16 engine's logprobs are the trainer's, not rounded logits."""

from __future__ import annotations

import importlib.util
from typing import Literal

import pytest
import torch

from penstock.kernels.linear_logprob import linear_logprobs
from penstock.rollout.config import TorchEngineConfig, VllmEngineConfig
from penstock.rollout.engines.torch.engine import load_batch
from penstock.weights.model_config import ModelConfig

from .engine_harness import make_spec, prompt_of

HeadDType = Literal["model", "float32"]


def in_bfloat16(tiny: ModelConfig, head_dtype: HeadDType) -> ModelConfig:
    return tiny.model_copy(update={"dtype": "bfloat16", "head_dtype": head_dtype})


@pytest.mark.parametrize(("head_dtype", "logits_dtype"), [("float32", torch.float32), ("model", torch.bfloat16)])
def test_the_head_of_the_torch_engine_is_the_trainers(
    tiny_model_config: ModelConfig, head_dtype: HeadDType, logits_dtype: torch.dtype
) -> None:
    config = TorchEngineConfig(type="torch", max_num_seqs=2)
    spec = make_spec(in_bfloat16(tiny_model_config, head_dtype), config, "keep_kv")
    model = load_batch(spec, config).model
    ids = torch.tensor([prompt_of(40)])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0, :-1]
        hidden = hidden * 8.0  # logits of a trained policy are large, and rounded the more
        logits = model.get_output_embeddings()(hidden)
        sampled_with = torch.log_softmax(logits.float(), -1).gather(1, ids[0, 1:, None])[:, 0]
        trained_with = linear_logprobs(hidden, model.get_output_embeddings().weight, ids[0, 1:]).logprobs
    assert logits.dtype == logits_dtype
    difference = float((sampled_with - trained_with).abs().max())
    assert difference < 1e-5 if head_dtype == "float32" else difference > 1e-3


@pytest.mark.integration
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)")
@pytest.mark.parametrize(("head_dtype", "computed_in"), [("float32", torch.float32), ("model", torch.bfloat16)])
def test_vllm_computes_its_head_in_the_configured_dtype(
    tiny_model_config: ModelConfig, head_dtype: HeadDType, computed_in: torch.dtype
) -> None:
    """vLLM's own configuration of the engine, read back: it may ignore an override that it does not know."""
    from penstock.rollout.engines.vllm.arguments import engine_args

    config = VllmEngineConfig(type="vllm", kv_cache_gib=0.1)
    spec = make_spec(in_bfloat16(tiny_model_config, head_dtype), config, "keep_kv")
    settled = engine_args(spec, config).create_model_config()
    assert settled.dtype == torch.bfloat16
    assert settled.head_dtype == computed_in
