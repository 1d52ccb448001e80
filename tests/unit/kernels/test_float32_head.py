from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.kernels.float32_head import use_float32_head
from penstock.trainer.models.policy_model import load_policy
from penstock.weights.model_config import ModelConfig


@pytest.fixture
def bfloat16_config(tiny_model_config: ModelConfig) -> ModelConfig:
    return tiny_model_config.model_copy(update={"dtype": "bfloat16", "head_dtype": "float32"})


def logits_of(path: Path, config: ModelConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a bfloat16 policy, and the same in float64 from its own last hidden states."""
    model = load_policy(str(path), config, gradient_checkpointing=False).causal_lm.bfloat16()
    if config.head_dtype == "float32":
        use_float32_head(model)
    ids = torch.arange(12)[None] % config.shape.vocab_size
    hidden = model.base_model(input_ids=ids).last_hidden_state
    head = model.get_output_embeddings()
    return head(hidden), hidden.double() @ head.weight.double().T


def test_a_float32_head_rounds_no_logit_to_the_precision_of_the_model(
    tiny_policy_dir: Path, bfloat16_config: ModelConfig
) -> None:
    logits, exact = logits_of(tiny_policy_dir, bfloat16_config)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-6 * exact.abs().max()


def test_a_head_of_the_model_s_precision_rounds_them(tiny_policy_dir: Path, bfloat16_config: ModelConfig) -> None:
    logits, exact = logits_of(tiny_policy_dir, bfloat16_config.model_copy(update={"head_dtype": "model"}))
    assert logits.dtype == torch.bfloat16
    assert (logits - exact).abs().max() > 1e-3 * exact.abs().max()


def test_the_weight_of_a_tied_head_stays_the_embedding(tiny_policy_dir: Path, bfloat16_config: ModelConfig) -> None:
    model = load_policy(str(tiny_policy_dir), bfloat16_config, gradient_checkpointing=False).causal_lm
    use_float32_head(model)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_gradients_reach_a_bfloat16_weight_and_its_input() -> None:
    head = torch.nn.Linear(8, 5, bias=False)
    holder = torch.nn.Module()
    holder.get_output_embeddings = lambda: head
    use_float32_head(holder)
    head.bfloat16()
    hidden = torch.randn(3, 8).bfloat16().requires_grad_()
    head(hidden).sum().backward()
    assert head.weight.grad.dtype == hidden.grad.dtype == torch.bfloat16
    assert torch.allclose(hidden.grad.float(), head.weight.float().sum(0).expand(3, 8), atol=0.02)
