"""Optimizers beside those of torch, and what a model says of its matrices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from penstock.dataflow.errors import CheckpointError, ConfigError
from penstock.dataflow.trajectory import GroupPayload
from penstock.trainer.checkpoint import CheckpointReader, write_snapshot
from penstock.trainer.config import LoraConfig, MuonConfig, OptimizerConfig
from penstock.trainer.models.policy_model import PolicyModel
from penstock.trainer.models.value_model import ValueModel
from penstock.trainer.optimizers import adamw
from penstock.trainer.optimizers.adamw import AdamW, rounded_up_or_down
from penstock.trainer.optimizers.factory import build_optimizer
from penstock.trainer.optimizers.muon import Muon, hidden_matrices

from .torch_trainer import trainer_of

SMALL = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
QWEN3 = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {**QWEN3, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MUON = OptimizerConfig(lr=1e-3, weight_decay=0.1, muon=MuonConfig())


def policy_of(kind: str) -> PolicyModel | ValueModel:
    torch.manual_seed(0)
    if kind == "critic":
        return ValueModel(AutoModelForSequenceClassification.from_config(Qwen3Config(**QWEN3, num_labels=1)))
    configs = {
        "tied": Qwen3Config(**QWEN3, tie_word_embeddings=True),
        "untied": Qwen3Config(**QWEN3, tie_word_embeddings=False),
        "experts": Qwen3MoeConfig(**EXPERTS),
        "gpt2": GPT2Config(vocab_size=40, n_embd=32, n_head=4, n_layer=2, n_positions=16),
    }
    return PolicyModel(AutoModelForCausalLM.from_config(configs[kind]))


def gradients(model: nn.Module, num_steps: int) -> Iterator[None]:
    """Before each step a gradient for every parameter, the same for a seed, of another size for each step."""
    generator = torch.Generator().manual_seed(1)
    for step in range(num_steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0**-step
        yield


OF_LAYER = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPECTED = {
    "tied": {*OF_LAYER, "gate_proj", "up_proj", "down_proj"},
    "untied": {*OF_LAYER, "gate_proj", "up_proj", "down_proj"},
    "critic": {*OF_LAYER, "gate_proj", "up_proj", "down_proj"},
    "experts": {*OF_LAYER, "gate", "experts.gate_up_proj", "experts.down_proj"},
    "gpt2": {"c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"},
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_model_says_which_of_its_weights_are_hidden_matrices(kind: str) -> None:
    found = hidden_matrices(policy_of(kind).hf_model)
    assert len(found) == 2 * len(EXPECTED[kind])
    for end in EXPECTED[kind]:
        of_this = [name for name in found if name.removesuffix(".weight").endswith(f".{end}")]
        assert len(of_this) == 2, end


def reference_step(model: nn.Module, hidden: set[str], config: OptimizerConfig) -> Callable[[], None]:
    """torch's Muon over each matrix, those of experts one by one, and torch's AdamW over all others."""
    assert config.muon is not None
    named = {name.partition(".")[2]: one for name, one in model.named_parameters()}
    plain = [one for name, one in named.items() if name in hidden and one.dim() == 2]
    stacked = [one for name, one in named.items() if name in hidden and one.dim() == 3]
    experts = [nn.Parameter(one.detach()[index]) for one in stacked for index in range(len(one))]  # views of the stack
    muon = torch.optim.Muon(
        [*plain, *experts],
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.muon.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    others = [one for name, one in named.items() if name not in hidden]
    rest = torch.optim.AdamW(others, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)

    def step() -> None:
        slices = [one.grad[index] for one in stacked if one.grad is not None for index in range(len(one))]
        for expert, gradient in zip(experts, slices, strict=True):
            expert.grad = gradient
        muon.step()
        rest.step()

    return step


@pytest.mark.parametrize("kind", EXPECTED)
def test_muon_is_that_of_torch_on_every_matrix_and_expert_and_adamw_elsewhere(kind: str) -> None:
    model = policy_of(kind)
    other = copy.deepcopy(model)
    optimizer = build_optimizer(model, MUON)
    assert isinstance(optimizer, Muon)
    theirs = reference_step(other, hidden_matrices(other.hf_model), MUON)
    for _ in zip(gradients(model, 4), gradients(other, 4), strict=True):
        optimizer.step()
        theirs()
    mine, expected = dict(model.named_parameters()), dict(other.named_parameters())
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_adamw_is_that_of_torch_bit_for_bit() -> None:
    config = OptimizerConfig(lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95))
    model = policy_of("tied")
    other = copy.deepcopy(model)
    optimizer = build_optimizer(model, config)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.8, 0.95))
    for _ in zip(gradients(model, 4), gradients(other, 4), strict=True):
        optimizer.step()
        theirs.step()
    mine, expected = dict(model.named_parameters()), dict(other.named_parameters())
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_a_value_is_rounded_to_its_neighbours_and_is_their_mean() -> None:
    values = torch.tensor([1.001, -3.3333, 1.5, 0.0, 7e-30, 1e-41])
    random = torch.arange(1 << 16, dtype=torch.int32)
    for value in values:
        rounded = rounded_up_or_down(value.repeat(1 << 16), random)
        kept = rounded.bfloat16()
        assert torch.equal(kept.float(), rounded), "nothing is left to be rounded"
        neighbours = sorted(set(kept.float().tolist()))
        assert neighbours[0] <= float(value) <= neighbours[-1]
        assert len(neighbours) == (1 if float(value.bfloat16()) == float(value) else 2)
        assert float(rounded.double().mean()) == pytest.approx(float(value), rel=1e-6)


def weights(count: int = 1) -> list[tuple[str, nn.Parameter]]:
    return [(str(index), nn.Parameter(torch.zeros(1000))) for index in range(count)]


def compact(**settings: Any) -> OptimizerConfig:
    return OptimizerConfig(lr=1e-3, moments_dtype="bfloat16", **settings)


def test_moments_are_kept_in_bfloat16_and_the_first_step_is_that_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "MOMENTS_PIECE_ELEMENTS", 300)
    mine, theirs = policy_of("tied"), policy_of("tied")
    one = build_optimizer(mine, compact(weight_decay=0.1))
    other = torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in zip(gradients(mine, 1), gradients(theirs, 1), strict=True):
        one.step()
        other.step()
    for parameter, expected in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-9)
        state = one.state_of(parameter)
        assert {name: kept.dtype for name, kept in state.items()} == {
            "step": torch.float32,
            "exp_avg": torch.bfloat16,
            "exp_avg_sq": torch.bfloat16,
        }
        assert state["exp_avg"].shape == parameter.shape


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_a_second_moment_falls_as_in_float32_which_rounding_to_nearest_does_not_let_it(beta2: float) -> None:
    ((_, parameter),) = named = weights()
    optimizer = AdamW(named, compact(betas=(0.9, beta2)))
    parameter.grad = torch.ones(1000)
    optimizer.step()
    start = float(optimizer.state_of(parameter)["exp_avg_sq"].float().mean())
    nearest = optimizer.state_of(parameter)["exp_avg_sq"].clone()
    parameter.grad = torch.zeros(1000)
    num_steps = 500
    for _ in range(num_steps):
        optimizer.step()
        nearest.copy_(nearest.float() * beta2)
    expected = start * beta2**num_steps
    assert float(optimizer.state_of(parameter)["exp_avg_sq"].float().mean()) == pytest.approx(expected, rel=0.05)
    if beta2 == 0.999:
        assert float(nearest.float().mean()) == pytest.approx(start, rel=0.01), "a thousandth is less than half a step"


def regression(config: OptimizerConfig, seed: int, num_steps: int = 2000) -> float:
    """Excess of the loss of a linear regression after minibatch steps, relative to that at the start.

    Gradients fall by orders of magnitude, so the second moment has to follow them.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -1.5, 64)
    inputs = torch.randn(4096, 64, generator=generator) * scales
    solution = torch.randn(64, generator=generator)
    targets = inputs @ solution
    weight = nn.Parameter(torch.zeros(64))
    optimizer = AdamW([("w", weight)], config)
    for step in range(num_steps):
        rows = torch.randint(0, 4096, (64,), generator=generator)
        loss = (inputs[rows] @ weight - targets[rows]).square().mean()
        (weight.grad,) = torch.autograd.grad(loss, weight)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * (1 - step / num_steps)
        optimizer.step()
    return float((inputs @ weight.detach() - targets).square().mean() / targets.square().mean())


@pytest.mark.full
def test_2000_steps_of_a_regression_end_where_those_in_float32_end(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"lr": 1e-2, "betas": (0.9, 0.999)}
    exact = regression(OptimizerConfig(**settings), seed=0)
    kept = regression(OptimizerConfig(**settings, moments_dtype="bfloat16"), seed=0)
    assert kept < 1.25 * exact, (kept, exact)
    monkeypatch.setattr(adamw, "rounded_up_or_down", lambda values, random: values)  # to nearest, by the copy
    nearest = regression(OptimizerConfig(**settings, moments_dtype="bfloat16"), seed=0)
    assert nearest > 2 * exact, (nearest, exact)


def test_random_bits_follow_from_step_and_tensor() -> None:
    first, second = (AdamW(weights(2), compact()) for _ in range(2))
    for optimizer, seed in ((first, 1), (second, 2)):
        torch.manual_seed(seed)
        for step in range(3):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.full((1000,), 0.3 + step)
            optimizer.step()
    moments = [
        [optimizer.state_of(one)["exp_avg"] for one in optimizer.param_groups[0]["params"]]
        for optimizer in (first, second)
    ]
    assert torch.equal(moments[0][0], moments[1][0])
    assert torch.equal(moments[0][1], moments[1][1])
    assert not torch.equal(moments[0][0], moments[0][1]), "two tensors are rounded by other bits"


OPTIMIZERS = {"adamw": OptimizerConfig(lr=1e-3), "muon": MUON, "bfloat16 moments": compact()}


def saved(policy: str, batch: list[GroupPayload], optimizer: str, folder: Path) -> None:
    trainer = trainer_of(policy, optimizer=OPTIMIZERS[optimizer])
    for version in range(3):
        trainer.step(batch, version)
    write_snapshot(trainer.snapshot(3), folder, 0)


@pytest.mark.parametrize(("theirs", "mine"), [("adamw", "muon"), ("muon", "adamw"), ("muon", "bfloat16 moments")])
def test_a_checkpoint_of_another_optimizer_is_refused_with_what_to_do(
    theirs: str, mine: str, policy: str, batch: list[GroupPayload], tmp_path: Path
) -> None:
    saved(policy, batch, theirs, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"exp_avg, exp_avg_sq.*trainer\.optimizer\.muon.*--restore weights"
    ) as told:
        trainer_of(policy, optimizer=OPTIMIZERS[mine]).restore(str(tmp_path))
    assert "momentum_buffer" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(("theirs", "mine"), [("adamw", "bfloat16 moments"), ("bfloat16 moments", "adamw")])
def test_moments_go_on_in_another_dtype(
    theirs: str, mine: str, policy: str, batch: list[GroupPayload], tmp_path: Path
) -> None:
    saved(policy, batch, theirs, tmp_path / "saved")
    trainer = trainer_of(policy, optimizer=OPTIMIZERS[mine])
    trainer.restore(str(tmp_path / "saved"))
    write_snapshot(trainer.snapshot(3), tmp_path / "again", 0)
    before, after = CheckpointReader(tmp_path / "saved"), CheckpointReader(tmp_path / "again")
    for name in before._shapes:
        assert torch.equal(before.full(name, "value"), after.full(name, "value"))
        assert before.kinds(name) == after.kinds(name) == {"value", "exp_avg", "exp_avg_sq"}
        for kind in ("exp_avg", "exp_avg_sq"):
            expected: Tensor = before.full(name, kind)
            assert torch.equal(after.full(name, kind), expected.bfloat16().float() if theirs == "adamw" else expected)


def test_a_checkpoint_with_bfloat16_moments_is_smaller(policy: str, batch: list[GroupPayload], tmp_path: Path) -> None:
    sizes = []
    for optimizer in ("adamw", "bfloat16 moments"):
        saved(policy, batch, optimizer, tmp_path / optimizer)
        sizes.append((tmp_path / optimizer / "trainer_00000.safetensors").stat().st_size)
    num_elements = sum(one.numel() for _, one in trainer_of(policy).export_weights())
    assert sizes[0] - sizes[1] == pytest.approx(4 * num_elements, rel=0.05)


def test_muon_with_adapters_is_refused(policy: str) -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.optimizer\.muon with trainer\.lora.*trainer\.optimizer\.muon=null"
    ):
        trainer_of(policy, optimizer=MUON, lora=LoraConfig())
