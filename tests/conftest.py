"""Fixtures that every suite shares: a tiny policy on disk and ways to publish new versions of its weights."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import hypothesis
import pytest
import torch

from penstock.dataflow.ports import WeightManifest
from penstock.platform.checks import model_probe
from penstock.platform.checks import tasks as checks
from penstock.platform.checks.model_probe import Answer, Question, SettingsQuestion
from penstock.platform.config import compose
from penstock.trainer.models.tiny_policy import create_policy
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.model_config import ModelConfig
from penstock.weights.transport.adapters import adapter_manifest, adapter_tensors
from penstock.weights.transport.device_memory import OpenedVersionBuffers, VersionBufferHandle
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, ShardWriter
from penstock.weights.transport.shared_memory import write_version
from tests.command_line import run_cli
from tests.composed_once import compose_choices_once
from tests.first_calls_once import check_first_calls_once
from tests.tiers import IS_FULL, leave_cases_to_the_full_tier
from tests.tiny_policy import tiny_shape

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("untimed")
pytest.register_assert_rewrite("tests.contract.engine_contract", "tests.contract.engine_harness")

TINY_SHAPE = tiny_shape(vocab_size=32, hidden_size=64, head_dim=32)  # the smallest head of vLLM's CPU attention
TINY_MAX_CONTEXT = 512

Tensors = dict[str, torch.Tensor]
"""HF name -> tensor, each once (a tied lm_head is left out)."""


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_cases_to_the_full_tier(items)


@pytest.fixture(scope="session")
def tiny_policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: Qwen3, hidden 64, 2 layers, vocabulary 32, float32, and its tokenizer.

    The initialiser is wide, so that distributions are peaked and stale weights cannot look like fresh ones.
    """
    from penstock.rollout.tokenization.tokenizers import character_tokenizer

    directory = tmp_path_factory.mktemp("tiny-policy")
    model = ModelConfig(max_context_tokens=TINY_MAX_CONTEXT, shape=TINY_SHAPE)
    create_policy(model, character_tokenizer(), str(directory), seed=0, initializer_range=0.15)
    return directory


def _ask_here(
    question: Question | SettingsQuestion, otherwise: Callable[[Question | SettingsQuestion], Answer]
) -> Answer:
    if isinstance(question, SettingsQuestion) or question.engine_dtype is not None:
        return otherwise(question)
    with torch.random.fork_rng(devices=[]):
        return model_probe.answer_about(question)


@pytest.fixture(scope="session", autouse=True)
def _checked_once() -> Iterator[None]:
    """In `make test`, Hydra composes the same choice, and a check calls the same reward, once per process.

    What a check asks a child about a model is answered here, unless it is for vLLM; runs by command ask a child.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not IS_FULL:
            patch.setattr(compose, "_compose", compose_choices_once)
            patch.setattr(checks, "check_first_calls", check_first_calls_once)
            patch.setattr(model_probe, "_ask_child", partial(_ask_here, otherwise=model_probe._ask_child))
        yield


@pytest.fixture(autouse=True)
def _offline_for_this_test_only() -> Iterator[None]:
    """Reset the offline variables that a dry run sets, which would otherwise last in a test's own process."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def tiny_model_config(tiny_policy_dir: Path) -> ModelConfig:
    """The `model` config of `tiny_policy_dir`, 512 tokens of context."""
    return ModelConfig(path=str(tiny_policy_dir), max_context_tokens=TINY_MAX_CONTEXT, shape=TINY_SHAPE)


def tiny_adapters(seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """HF name -> A and B, of rank 3, of every linear layer but gate_proj in the first layer, large enough to matter."""
    generator = torch.Generator().manual_seed(-seed)
    return {
        f"{name}.weight": (
            torch.randn(3, columns, generator=generator) * 0.2,
            torch.randn(rows, 3, generator=generator) * 0.2,
        )
        for name, (rows, columns) in TINY_SHAPE.linear_layers.items()
        if name != "model.layers.0.mlp.gate_proj"
    }


@pytest.fixture(scope="session")
def tiny_tensors(tiny_policy_dir: Path) -> Callable[[int], Tensors]:
    """`tiny_tensors(seed)`: weights of the tiny policy; 0 gives those on disk, others give other random weights.

    Below 0: those on disk with `tiny_adapters(seed)`.
    """
    from safetensors.torch import load_file

    def tensors(seed: int) -> Tensors:
        loaded = load_file(tiny_policy_dir / "model.safetensors")
        if seed == 0:
            return loaded
        if seed < 0:
            return loaded | {name: loaded[name] + up @ down for name, (down, up) in tiny_adapters(seed).items()}
        generator = torch.Generator().manual_seed(seed)
        return {
            name: tensor
            + torch.randn(tensor.shape, generator=generator) * 0.3 * tensor.std(correction=0).clamp(min=0.1)
            for name, tensor in loaded.items()
        }

    return tensors


class TinyPublisher:
    """`publish(version, seed=None)`: write `tiny_tensors(seed or version)` as `version`, for engines of one kind.

    A seed below 0 writes the adapters only.

    Attributes:
        version_buffers: Hold the versions.
    """

    def __init__(
        self,
        engine: EngineLayout,
        tensors: Callable[[int], Tensors],
        directory: Path,
        handles: Sequence[Sequence[VersionBufferHandle]] | None,
    ) -> None:
        specs = tuple(TensorSpec(name, tuple(tensor.shape)) for name, tensor in tensors(0).items())
        folder = str(directory) if handles is None else None
        self._layout, self._tp_size = engine.layout, engine.tp_size
        self._tensors = tensors
        self._directory = directory
        self._transfer = ShardTransfer.between(TrainingSharding(specs), engine, "float32", folder)
        self.version_buffers: ShardFiles | OpenedVersionBuffers = (
            ShardFiles(self._transfer)
            if handles is None
            else OpenedVersionBuffers([mine for (mine,) in handles], self._transfer.buffers, range(engine.tp_size))
        )
        self._writer = ShardWriter(self._transfer, 0, self.version_buffers)
        base = self._writer.sums({name: tensor.flatten() for name, tensor in tensors(0).items()})
        self._base = self._transfer.manifest(0, base).entries

    def __call__(self, version: int, seed: int | None = None) -> WeightManifest:
        if seed is not None and seed < 0:
            parts = [adapter_tensors(name, *adapter) for name, adapter in tiny_adapters(seed).items()]
            sent = write_version([one for part in parts for one in part], version, "float32", self._directory)
            return adapter_manifest(sent, self._base, self._layout, self._tp_size)
        whole = self._tensors(version if seed is None else seed)
        flat = {name: tensor.flatten() for name, tensor in whole.items()}
        self._writer.write(version, flat)
        return self._transfer.manifest(version, self._writer.sums(flat))


@pytest.fixture(scope="session")
def publisher_of_tiny(
    tmp_path_factory: pytest.TempPathFactory, tiny_tensors: Callable[[int], Tensors]
) -> Callable[..., TinyPublisher]:
    """`publisher_of_tiny(engine_layout, handles=None)`: into files, or into the version buffers of these handles."""

    def publisher(
        engine: EngineLayout, handles: Sequence[Sequence[VersionBufferHandle]] | None = None
    ) -> TinyPublisher:
        return TinyPublisher(engine, tiny_tensors, tmp_path_factory.mktemp("versions"), handles)

    return publisher


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the repository, as a user would have."""
    return tmp_path_factory.mktemp("workspace")


SUMS = [
    "env.args.digits=2",
    "model.shape.num_layers=3",
    "model.shape.hidden_size=96",
    "model.shape.intermediate_size=256",
]
"""Shorter sums than the demo's, and a third of its parameters: it is learned in a quarter of the time."""


@pytest.fixture(scope="session")
def warm_policy(workspace: Path) -> Path:
    """Two-digit sums, stopped below a greedy accuracy of a half, so that it can still rise by 0.2."""
    done = run_cli(
        "sft",
        "experiment=arithmetic_sft",
        *SUMS,
        "sft.batch_size=32",
        "sft.stop_at_accuracy=0.2",
        "sft.max_greedy_accuracy=0.5",
        "sft.eval_every_steps=10",
        "sft.eval_tasks=256",
        "name=warm",
        cwd=workspace,
        timeout_s=280,
    )
    assert done.returncode == 0, done.stderr
    return workspace / "runs" / "warm" / "policy"


@pytest.fixture(scope="session")
def train_overrides(warm_policy: Path) -> list[str]:
    """Overrides that make the demo small; tests add theirs behind."""
    return [
        "experiment=arithmetic",
        *SUMS,
        f"model.path={warm_policy}",
        "dataflow.max_staleness=2",
        "evaluation.num_tasks=256",
        "evaluation.every_steps=0",
    ]
