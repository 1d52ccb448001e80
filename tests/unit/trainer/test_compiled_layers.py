"""Layers through torch.compile give what they give without, and row lengths need no graph of their own."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from penstock.trainer.backends.torch import build_torch_backend
from penstock.trainer.config import OptimizerConfig, TrainerConfig
from penstock.trainer.models.policy_model import compile_body, load_policy

from .torch_trainer import MODEL


@pytest.mark.full
def test_compiled_layers_are_equal_and_compile_once_for_all_lengths(policy) -> None:
    plain, compiled = (load_policy(policy, MODEL, gradient_checkpointing=False) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compile_body(compiled, counter)
    counts = []
    for length in (24, 31, 9):
        index = torch.arange(length - 1)
        ids = torch.randint(2, 20, (2, length), generator=torch.manual_seed(length))
        positions = torch.arange(length).tile(2, 1)
        mask = torch.ones(length, length, dtype=torch.bool).tril().tile(2, 1, 1, 1)
        results = []
        for model in (plain, compiled):
            model.zero_grad()
            logprobs, _ = model(ids, positions, mask, index, ids[0, 1:], 0.8)
            logprobs.sum().backward()
            results.append((logprobs.detach(), torch.cat([one.grad.flatten() for one in model.parameters()])))
        counts.append(counter.frame_count)
        torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
        assert (results[1][1] - results[0][1]).norm() <= 1e-5 * results[0][1].norm()
    assert counts[0] >= 1
    assert counts[1:] == counts[:1] * 2, "a graph for every length"
    assert list(compiled.state_dict()) == list(plain.state_dict())


def test_the_torch_backend_compiles_if_configured(policy) -> None:
    for is_compiled in (False, True):
        trainer = TrainerConfig(
            backend="torch", max_tokens_per_micro_batch=100, compile=is_compiled, optimizer=OptimizerConfig(lr=1e-3)
        )
        body = build_torch_backend(load_policy, policy, MODEL, trainer, "cpu")._model.causal_lm.base_model
        assert (body._compiled_call_impl is not None) == is_compiled
