"""Model FLOPs against torch's own counter, device peaks by name, and what a step says of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from penstock.trainer.backends.rank_consistency import fingerprint
from penstock.trainer.config import LoraConfig
from penstock.trainer.flops import FlopCounter, forward_flops, peak_flops
from penstock.trainer.models.tiny_policy import create_policy
from tests.tiny_policy import SPECIAL_TOKENS

from .torch_trainer import MODEL, trainer_of


@pytest.mark.parametrize("experts", [{}, {"num_experts": 8, "expert_size": 32}], ids=["dense", "of 8 experts two"])
def test_model_flops_are_those_that_torch_counts_with_half_of_the_attention(experts, tmp_path) -> None:
    shape, num_tokens = MODEL.shape.model_copy(update=experts), 24
    create_policy(MODEL.model_copy(update={"shape": shape}), SPECIAL_TOKENS, str(tmp_path), seed=0)
    settings = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if experts else {})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **settings)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, num_tokens, dtype=torch.int64), use_cache=False)
    never_seen = 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2
    router = 2 * shape.num_layers * shape.hidden_size * shape.num_experts * num_tokens
    assert forward_flops(shape, num_tokens, num_tokens) == counter.get_total_flops() - never_seen - router


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 NVL", "bfloat16", 835e12),
        ("NVIDIA H200 NVL", "bfloat16", 835e12),
        ("NVIDIA GB200", "bfloat16", 2500e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A10G", "bfloat16", 70e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA GH200 480GB", "bfloat16", None),
        ("NVIDIA H200", "float32", None),
        (None, "bfloat16", None),
    ],
)
def test_the_peak_is_that_of_the_name_or_unknown(name, dtype, peak) -> None:
    assert peak_flops(name, dtype) == peak


def test_a_step_reports_its_rates_and_no_utilisation_where_the_peak_is_unknown(policy, batch) -> None:
    trainer = trainer_of(policy, epochs=2, proximal="recompute")
    metrics = trainer.step(batch, 0).metrics
    inputs = [int(one.loss_mask.nonzero()[0][-1]) for group in batch for one in group.trajectories]
    targets = [one.num_sampled_tokens for group in batch for one in group.trajectories]
    forward = sum(forward_flops(MODEL.shape, n, m) for n, m in zip(inputs, targets, strict=True))
    seconds = metrics["trainer/step_s"]
    assert metrics["trainer/tokens_per_s_per_device"] == pytest.approx(2 * sum(inputs) / seconds)
    assert metrics["trainer/tflops_per_device"] == pytest.approx(7 * forward / seconds / 1e12), "2 epochs and a forward"
    assert "trainer/mfu" not in metrics
    assert not any(name.startswith("rank/") for name in metrics), "there is one rank"


def test_frozen_weights_under_adapters_cost_no_gradient_of_their_own(policy, batch) -> None:
    flops = []
    for lora in (None, LoraConfig(rank=4)):
        metrics = trainer_of(policy, lora=lora).step(batch, 0).metrics
        flops.append(metrics["trainer/tflops_per_device"] * 1e12 * metrics["trainer/step_s"])
    shape = MODEL.shape
    inputs = sum(int(one.loss_mask.nonzero()[0][-1]) for group in batch for one in group.trajectories)
    targets = sum(one.num_sampled_tokens for group in batch for one in group.trajectories)
    head = shape.vocab_size * shape.hidden_size
    of_weights = 2 * ((shape.active_parameters - head) * inputs + head * targets)
    assert flops[0] - flops[1] == pytest.approx(of_weights, rel=1e-6)


def test_utilisation_is_that_of_all_devices_since_the_last_step() -> None:
    counter = FlopCounter(MODEL.shape, num_devices=4, peak_flops=1e12, num_tokens=800, flops=2e12)
    assert counter.take(2.0) == {
        "trainer/tokens_per_s_per_device": 100.0,
        "trainer/tflops_per_device": 0.25,
        "trainer/mfu": 0.25,
    }
    assert counter.take(2.0)["trainer/mfu"] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_is_of_the_bits_whatever_the_order(dtype) -> None:
    weights = [torch.randn(5, 3).to(dtype), torch.randn(7).to(dtype)]
    before = fingerprint(weights)
    assert fingerprint([weights[1], weights[0].T.contiguous()]) == before
    weights[1][3] = torch.nextafter(weights[1][3], torch.tensor(9.0, dtype=dtype))
    assert fingerprint(weights) != before
