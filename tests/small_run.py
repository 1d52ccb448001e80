"""The smallest training run: a policy that knows nothing, on the CPU, some seconds a run.

`make test` trains it in the process of the test, `make test-full` by `penstock train` too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.trainer.models.tiny_policy import create_policy
from penstock.weights.model_config import ModelConfig
from tests.command_line import read_summary, run_cli
from tests.in_process import train_in_process
from tests.tiny_policy import tiny_shape

MAX_CONTEXT_TOKENS = 1024


def small_run_overrides(
    folder: Path, name: str, tokenizer: Any, *overrides: str, num_experts: int = 0, head_dim: int = 16
) -> list[str]:
    """Of a run with one group of two attempts a step; its policy, which knows nothing, is written in `folder`.

    vLLM's CPU build needs `head_dim` 32.
    """
    experts = {"num_experts": num_experts, "expert_size": 16, "intermediate_size": 32} if num_experts else {}
    shape = tiny_shape(vocab_size=len(tokenizer), hidden_size=32, head_dim=head_dim).model_copy(update=experts)
    model = ModelConfig(max_context_tokens=MAX_CONTEXT_TOKENS, shape=shape)
    create_policy(model, tokenizer, str(folder / "policy"), seed=0)
    return [
        "experiment=arithmetic",
        "rollout/engine=torch",
        "rollout.sampling.max_new_tokens=12",
        "trainer.backend=torch",
        "dataflow.batch_groups=1",
        "dataflow.group_size=2",
        "evaluation.num_tasks=1",
        "evaluation.every_steps=0",
        f"name={name}",
        "model.path=policy",
        f"model.max_context_tokens={MAX_CONTEXT_TOKENS}",
        *overrides,
    ]


def train_by_command(folder: Path, overrides: Sequence[str]) -> None:
    """`penstock train` with these overrides in `folder`."""
    done = run_cli("train", *overrides, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


Train = Callable[[Path, Sequence[str]], None]
"""Trains with these overrides in this folder until the end."""
TWO_ROUTES = pytest.mark.parametrize(
    "train",
    [
        pytest.param(train_in_process, id="in_process"),
        pytest.param(train_by_command, id="by_command", marks=[pytest.mark.integration, pytest.mark.full]),
    ],
)


def small_run(train: Train, folder: Path, name: str, tokenizer: Any, *overrides: str) -> Path:
    """Train in `folder` until the end; the folder of the run."""
    train(folder, small_run_overrides(folder, name, tokenizer, *overrides))
    run_dir = folder / "runs" / name
    assert read_summary(run_dir)["ledger"]["failed"] == 0
    return run_dir
