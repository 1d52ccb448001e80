"""Layers through torch.compile give what they give without, and row lengths need no graph of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock.dataflow.errors import ConfigError
from penstock.trainer.backends.torch import build_torch_backend
from penstock.trainer.config import OptimizerConfig, TrainerConfig
from penstock.trainer.models import varlen_attention
from penstock.trainer.models.policy_model import PolicyModel, compile_layers, load_policy
from penstock.trainer.models.varlen_attention import SequenceBoundaries

from .torch_trainer import MODEL

VARLEN = MODEL.model_copy(update={"attention": "varlen"})


@pytest.fixture
def compiler() -> Iterator[CompileCounterWithBackend]:
    """Counts the graphs of this test; they and their derivatives are run operator by operator."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.set_default_backend(counter)
    yield counter
    torch.compiler.set_default_backend(None)


def logprobs_and_gradient(policy: PolicyModel, lengths: list[int], attention: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of sequences in one row; `rows`: of the same row twice."""
    total = sum(lengths)
    ids = torch.randint(2, 20, (1, total), generator=torch.manual_seed(total))
    positions = torch.cat([torch.arange(one) for one in lengths])[None]
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask, boundaries = None, None
    if attention == "varlen":
        boundaries = SequenceBoundaries.of(lengths, ids.device)
    else:
        mask = ((sequence[:, None] == sequence) & torch.ones(total, total, dtype=torch.bool).tril())[None, None]
    if attention == "rows":
        ids, positions, mask = ids.tile(2, 1), positions.tile(2, 1), mask.tile(2, 1, 1, 1)
    policy.zero_grad()
    logprobs, _ = policy(ids, positions, mask, torch.arange(total - 1), ids[0, 1:], 0.8, boundaries)
    logprobs.sum().backward()
    return logprobs.detach(), torch.cat([one.grad.flatten() for one in policy.parameters()])


def check_equal(plain: PolicyModel, compiled: PolicyModel, lengths: list[int], attention: str) -> None:
    expected, found = (logprobs_and_gradient(one, lengths, attention) for one in (plain, compiled))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert (found[1] - expected[1]).norm() <= 1e-5 * expected[1].norm()


@pytest.mark.full
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("attention", ["sdpa", "rows", "varlen"])
def test_compiled_layers_are_equal_and_compile_once_for_all_layers_and_lengths(
    policy: str, compiler: CompileCounterWithBackend, attention: str, recomputes: bool
) -> None:
    model = VARLEN if attention == "varlen" else MODEL
    plain, compiled = (load_policy(policy, model, gradient_checkpointing=recomputes) for _ in range(2))
    compile_layers(compiled)
    counts = []
    for lengths in ([9, 15], [4, 8, 3, 16], [31], [2] * 6):
        check_equal(plain, compiled, lengths, attention)
        counts.append(compiler.frame_count)
    assert 1 <= counts[0] <= 5
    assert counts[1:] == counts[:1] * 3, "a graph for some layer or length"
    assert list(compiled.state_dict()) == list(plain.state_dict())


@pytest.mark.full
def test_attention_by_lengths_stays_outside_of_the_graphs(
    policy: str, compiler: CompileCounterWithBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the kernel takes the longest length as a number, so a graph with it would be for one length."""

    def kernel(q: torch.Tensor, _k: object, v: torch.Tensor, boundaries: SequenceBoundaries, *_others: object) -> Any:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1) / max(boundaries.lengths)

    monkeypatch.setattr(varlen_attention, "_by_sequence", kernel)
    compiled = load_policy(policy, VARLEN, gradient_checkpointing=False)
    compile_layers(compiled)
    counts = []
    for lengths in ([9, 15], [4, 8, 3, 16], [31]):
        logprobs_and_gradient(compiled, lengths, "varlen")
        counts.append(compiler.frame_count)
    assert counts[1:] == counts[:1] * 2


@pytest.mark.full
@pytest.mark.timeout(900)  # of machine code, by the C++ compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile calls a C++ compiler, and there is no g++")
def test_layers_in_machine_code_are_equal(policy: str) -> None:
    torch._dynamo.reset()
    plain, compiled = (load_policy(policy, VARLEN, gradient_checkpointing=True) for _ in range(2))
    compile_layers(compiled)
    for lengths in ([9, 15], [4, 8, 3, 16]):
        check_equal(plain, compiled, lengths, "varlen")


def test_the_torch_backend_compiles_every_layer_if_configured(policy: str) -> None:
    for is_compiled in (False, True):
        trainer = TrainerConfig(
            backend="torch", max_tokens_per_micro_batch=100, compile=is_compiled, optimizer=OptimizerConfig(lr=1e-3)
        )
        model = build_torch_backend(load_policy, policy, MODEL, trainer, "cpu")._model
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        assert [layer._compiled_call_impl is not None for layer in layers] == [is_compiled] * MODEL.shape.num_layers


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linear has no layers of transformers' kind. Use compile=false"):
        compile_layers(torch.nn.Linear(2, 2))
