"""Adapters: what they train, what leaves the trainer, and the reference that they are without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.config import LoraConfig
from penstock.trainer.models.frozen_policy import FrozenPolicy
from penstock.trainer.models.lora import Adapter, merged
from penstock.trainer.policy_trainer import PolicyTrainer

from .torch_trainer import MODEL, TEMPERATURE, logprobs_of, scored, trainer_of

LORA = LoraConfig(rank=4, alpha=12)


@pytest.fixture
def trainer(policy: str) -> PolicyTrainer:
    return trainer_of(policy, lora=LORA, lr=1e-2)


def weights_of(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.export_weights()}


def test_only_adapters_are_trained_and_the_weights_under_them_stay(
    trainer: PolicyTrainer, policy: str, batch: list[GroupPayload]
) -> None:
    backend, on_disk = trainer.backend, load_file(f"{policy}/model.safetensors")
    start = weights_of(trainer)
    assert {name: torch.equal(weight, on_disk[name]) for name, weight in start.items()} == dict.fromkeys(on_disk, True)
    trainer.accumulate(batch[:1], 0)
    trained = {id(parameter) for parameter in backend.adapters.parameters()}
    has_gradient = {id(parameter) for parameter in backend._model.parameters() if parameter.grad is not None}
    assert has_gradient == trained
    assert len(trained) == 2 * 7 * MODEL.shape.num_layers
    trainer.step(batch[1:], 0)
    assert {id(parameter) for parameter in backend._optimizer.state} == trained
    with backend.adapters.off():
        off = weights_of(trainer)
    assert all(torch.equal(weight, off[name]) for name, weight in on_disk.items())
    changed = {name for name, weight in weights_of(trainer).items() if not torch.equal(weight, on_disk[name])}
    assert changed == backend.gathered_adapters().keys()


def test_what_is_saved_is_the_adapted_policy_merged_and_as_an_adapter(
    trainer: PolicyTrainer, policy: str, batch: list[GroupPayload], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for version in range(3):
        trainer.step(batch, version)
    trainer.backend.save_hf(str(tmp_path), [trainer.backend.held_weights()])
    members = [one for group in batch for one in group.trajectories]
    mine = np.concatenate(trainer._passes.per_sampled_token(batch))
    start = AutoModelForCausalLM.from_pretrained(policy)
    before = np.concatenate([logprobs_of(start, one) for one in members])
    assert np.abs(mine - before).max() > 0.1
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    np.testing.assert_allclose(mine, np.concatenate([logprobs_of(merged, one) for one in members]), atol=2e-6)
    adapted = PeftModel.from_pretrained(start, tmp_path / "adapter")
    np.testing.assert_allclose(mine, np.concatenate([logprobs_of(adapted, one) for one in members]), atol=2e-6)


def test_the_reference_is_the_policy_without_its_adapters(
    trainer: PolicyTrainer, policy: str, batch: list[GroupPayload]
) -> None:
    trainer.step(batch, 0)
    frozen = FrozenPolicy.load(policy, MODEL, "cpu", 60, TEMPERATURE)
    with trainer.backend.adapters.off():
        found = trainer._passes.per_sampled_token(batch)
    for group, scores in zip(batch, found, strict=True):
        np.testing.assert_allclose(scores, frozen.logprobs(group), atol=1e-6)
    assert np.abs(trainer._passes.per_sampled_token(batch)[0] - found[0]).max() > 1e-3, "they are on again"


@pytest.mark.parametrize(("kl_in", "estimator"), [("loss", "k2"), ("reward", "k1")])
def test_a_step_held_to_the_reference_needs_no_second_model(
    policy: str, batch: list[GroupPayload], kl_in: str, estimator: str
) -> None:
    settings = {"lora": LORA, "lr": 1e-2, "kl_coefficient": 0.1, "kl_in": kl_in, "kl_estimator": estimator}
    mine, theirs = trainer_of(policy, **settings), trainer_of(policy, **settings)
    frozen = FrozenPolicy.load(policy, MODEL, "cpu", 60, TEMPERATURE)
    references = [frozen.logprobs(group) for group in batch]
    for version in range(2):
        report = mine.step(batch, version)
        expected = theirs.step(scored(batch, references), version)
        for name in ("loss/grad_norm", "loss/reference_kl"):
            assert report.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-4, abs=1e-7), name
    assert report.metrics["loss/reference_kl"] > 1e-4


@pytest.mark.parametrize("reach", [1e-5, 1e-4, 1e-3])
def test_bfloat16_keeps_as_much_of_a_small_update_in_the_trainer_as_in_the_weights_of_engines(reach: float) -> None:
    """Stochastic rounding of the merged weight would keep all of it, and put engines ahead of their trainer."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    draw = torch.Generator().manual_seed(0)
    plain = torch.nn.Linear(1024, 256, bias=False)
    plain.weight.data = 0.02 * torch.randn(256, 1024, generator=draw)
    settings = PeftConfig(r=16, lora_alpha=32, target_modules=["0"])
    (layer,) = inject_adapter_in_model(settings, torch.nn.Sequential(plain)).to(torch.bfloat16)
    layer.lora_B["default"].weight.data = (reach * torch.randn(256, 16, generator=draw).sign()).bfloat16()
    down, up = (part["default"].weight.detach().float() for part in (layer.lora_A, layer.lora_B))
    x, weight = torch.randn(256, 1024, generator=draw).bfloat16(), layer.base_layer.weight.detach()
    with torch.no_grad():
        exact = x.float() @ (2.0 * up @ down).T
        in_trainer = layer(x).float() - layer.base_layer(x).float()
        in_engine = x.float() @ (merged(weight, Adapter(down, up, 2.0)).float() - weight.float()).T
    kept = [float((one * exact).sum() / exact.square().sum()) for one in (in_trainer, in_engine)]
    assert kept[0] == pytest.approx(kept[1], abs=0.03)
    assert reach == 1e-3 or kept[0] < 0.6


@pytest.mark.parametrize(
    ("target", "words"),
    [("q_porj", "q_proj"), ("layers.2.mlp.up_proj", "up_proj"), ("lm_head", "the head"), ("self_attn", "no linear")],
)
def test_targets_that_match_nothing_are_named_with_the_nearest(policy: str, target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        trainer_of(policy, lora=LoraConfig(targets=("o_proj", target)))
    (violation,) = refused.value.violations
    assert violation.startswith(f"trainer.lora.targets: {target} ")


def test_a_target_may_be_one_layers(policy: str) -> None:
    trainer = trainer_of(policy, lora=LoraConfig(targets=("layers.1.mlp.up_proj", "k_proj")))
    assert sorted(trainer.backend.gathered_adapters()) == [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.self_attn.k_proj.weight",
    ]


def test_a_reward_model_has_no_adapters(policy: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.lora with a reward model"):
        trainer_of(policy, kind="reward", lora=LORA)
