"""The memory estimate of the planner against the bytes of a backend's tensors (tests/contract/memory_of_a_rank.py)."""

from __future__ import annotations

import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch

from penstock.kernels.linear_logprob import linear_logprobs
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster import memory
from penstock.platform.cluster.memory import GIB, trainer_memory
from penstock.platform.config.pools import PoolConfig
from penstock.trainer.algorithms.advantages import GaeConfig
from penstock.weights.model_config import DType
from tests.contract.memory_of_a_rank import BUCKET_ELEMENTS, Case, Measured, activation_bytes
from tests.live_bytes import LiveBytes
from tests.rank_processes import run_ranks

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,  # a process for each case
    pytest.mark.timeout(900),
]
TOLERANCE = 0.10
CASES = [
    *(Case("bfloat16", stage) for stage in range(4)),
    *(Case("float32", stage) for stage in range(4)),
    *(Case("bfloat16", stage, tokens=64) for stage in range(4)),
    Case("bfloat16", 2, tokens=2048, gradient_checkpointing=True),
    Case("bfloat16", 1, lora=8),
    Case("bfloat16", 3, lora=8),
    Case("bfloat16", 2, has_critic=True),
    Case("bfloat16", 3, has_critic=True),
    Case("bfloat16", 3, offload_parameters=True),
    *(Case("bfloat16", stage, tokens=64, optimizer="bfloat16 moments") for stage in range(4)),
    Case("bfloat16", 0, tokens=64, optimizer="muon"),
    Case("float32", 0, tokens=64, optimizer="muon"),
    Case("float32", 0, tokens=64, optimizer="muon", num_ranks=1, on_gpu=False),
    Case("float32", 0, num_ranks=1, on_gpu=False),
    Case("float32", 2, on_gpu=False, tokens=64),
    Case("bfloat16", 0, backend="fsdp2"),
    Case("float32", 0, backend="fsdp2"),
    Case("bfloat16", 0, backend="fsdp2", tokens=64),
    Case("bfloat16", 0, backend="fsdp2", tokens=2048, gradient_checkpointing=True),
    Case("bfloat16", 0, backend="fsdp2", lora=8),
    Case("bfloat16", 0, backend="fsdp2", has_critic=True),
    Case("float32", 0, backend="fsdp2", tokens=64, on_gpu=False),
]

MICRO_BATCHES = [
    ("Qwen/Qwen2.5-0.5B-Instruct", 8192, True),
    ("Qwen/Qwen2.5-0.5B-Instruct", 8192, False),
    ("Qwen/Qwen2.5-7B", 16384, True),
    ("Qwen/Qwen2.5-7B", 4096, False),
]
"""Public model, tokens, and whether activations are computed again."""


def estimated_bytes(case: Case) -> float:
    """Of one rank in a step, without what the process itself takes."""
    base = compose_config(["experiment=math_qwen_8gpu", "checkpoint.every_minutes=0"])
    changed = {"model": case.model, "trainer": case.trainer}
    if case.has_critic:
        changed["algorithm"] = base.algorithm.model_copy(update={"advantage": GaeConfig()})
    pool = PoolConfig(device="gpu" if case.on_gpu else "cpu", count=8, memory_gib=80)
    with mock.patch.object(memory, "ZERO_BUCKET_ELEMENTS", BUCKET_ELEMENTS):
        planned = trainer_memory(base.model_copy(update=changed), pool)
    parts = dict(planned.device if case.on_gpu else planned.host)
    if case.offload_optimizer:  # one memory here
        parts["optimizer"] = planned.host["optimizer"]
    if case.offload_parameters:
        parts["weights"] = planned.host["weights"]
    return sum(gib for part, gib in parts.items() if part not in ("base", "published", "checkpoint")) * GIB


def estimated_activation_bytes(name: str, tokens: int, *, gradient_checkpointing: bool) -> float:
    """Of a micro-batch of a public model in bfloat16 on a GPU."""
    config = compose_config(["experiment=math_qwen_8gpu", f"model.path={name}"])
    changed = {"max_tokens_per_micro_batch": tokens, "gradient_checkpointing": gradient_checkpointing}
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update=changed)})
    return memory._activation_bytes(config, on_gpu=True, trains_head=True)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Measured]:
    folder = tmp_path_factory.mktemp("memory")
    (folder / "cases").write_bytes(pickle.dumps(CASES))
    run_ranks("tests.contract.memory_of_a_rank", [(folder / "cases", folder / "answers")], timeout_s=800)
    return dict(zip(CASES, pickle.loads((folder / "answers").read_bytes()), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_ranks_peak_is_within_a_tenth_of_its_estimate(case: Case, measured: dict[Case, Measured]) -> None:
    assert measured[case].peak == pytest.approx(estimated_bytes(case), rel=TOLERANCE), measured[case]


@pytest.mark.parametrize(("name", "tokens", "checkpoints"), MICRO_BATCHES)
def test_activations_of_shipped_models_are_within_a_tenth_of_their_estimate(
    name: str, tokens: int, checkpoints: bool
) -> None:
    file = ROOT / "conf" / "model" / "public" / f"{name}.json"
    found = activation_bytes(file, tokens, gradient_checkpointing=checkpoints)
    planned = estimated_activation_bytes(name, tokens, gradient_checkpointing=checkpoints)
    assert found == pytest.approx(planned, rel=TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("tokens", "top_k"), [(64, 4), (512, 20), (2048, 64)])
def test_the_head_over_a_truncated_support_is_within_a_tenth_of_its_estimate(
    dtype: DType, tokens: int, top_k: int
) -> None:
    case = Case(dtype, 0, tokens=tokens)
    config = compose_config(["experiment=math_qwen_8gpu", f"rollout.sampling.top_k={top_k}"])
    planned = memory._head_bytes(
        config.model_copy(update={"model": case.model, "trainer": case.trainer}), on_gpu=False, is_trained=True
    )
    shape, generator = case.model.shape, torch.Generator().manual_seed(0)
    support = torch.rand(tokens, shape.vocab_size, generator=generator).topk(top_k).indices
    kind = getattr(torch, dtype)
    hidden, weight = (
        torch.randn(count, shape.hidden_size, generator=generator).to(kind).requires_grad_()
        for count in (tokens, shape.vocab_size)
    )
    with LiveBytes() as live:
        scored = linear_logprobs(hidden, weight, support[:, 0], alternatives=support[:, 1:])
        (scored.logprobs.sum() + scored.entropies.sum()).backward()  # type: ignore[no-untyped-call]
    assert live.peak == pytest.approx(planned, rel=TOLERANCE)
