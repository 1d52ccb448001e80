"""vLLM's own decisions for our engines on a GPU, without one: what changes with another version of vLLM is found here.

Every model that we ship a configuration of, with the engine that its experiment starts, goes through vLLM's own
validation under its CUDA platform (tests/contract/vllm_on_a_gpu.py). What a kernel does, only a GPU can show.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.platform.checks.load import compose_config
from penstock.platform.cluster.actor_factory import engine_spec
from penstock.platform.cluster.memory import ENGINE_BATCH_TOKENS, GIB, staged_gib
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.trainer.models.tiny_policy import create_policy
from penstock.weights.hf_folder import transformers_config
from penstock.weights.layout.checkpoint_names import module_tensors
from tests.contract.vllm_on_a_gpu import Answer, Case
from tests.tiny_policy import SPECIAL_TOKENS

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf" / "model"
pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,  # two imports of vLLM
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)"),
]
LARGE = "experiment=math_qwen_8gpu"
ENGINES: dict[str, list[str]] = {
    "arithmetic": ["experiment=arithmetic"],
    "arithmetic_small": ["experiment=arithmetic", "model=arithmetic_small"],
    "arithmetic_experts": ["experiment=arithmetic", "model=arithmetic_experts"],
    "bytes": ["experiment=text"],
    "qwen2_5_0_5b_instruct": ["experiment=gsm8k_qwen_1gpu"],
    "qwen2_5_7b": [LARGE],
    "qwen2_5_7b on two": [LARGE, "rollout.engine.tensor_parallel_size=2", "rollout.num_engines=2"],
    "qwen2_5_7b eager": [LARGE, "rollout.engine.enforce_eager=true", "weights.staging=bucket"],
    "qwen3_0_6b": [LARGE, "model=qwen3_0_6b"],
    "llama3_2_1b": [LARGE, "model=llama3_2_1b"],
    "gemma3_1b": [LARGE, "model=gemma3_1b"],
    "gpt_oss_20b": [
        LARGE,
        "model=gpt_oss_20b",
        "rollout.engine.tensor_parallel_size=4",
        "rollout.num_engines=1",
        "cluster.pools.train.memory_gib=1000",
    ],
    "qwen3_30b_a3b": [
        LARGE,
        "model=qwen3_30b_a3b",
        "rollout.engine.tensor_parallel_size=4",
        "rollout.num_engines=1",
        "cluster.pools.train.memory_gib=1000",
    ],
}
"""Model -> overrides of a configuration with the engine."""
MIXTURES = {"arithmetic_experts", "gpt_oss_20b", "qwen3_30b_a3b"}
"""Their layouts take a minute each: test_vllm_layout.py has them."""
NEEDS_A_DEVICE = {"qwen3_5", "qwen3_5_moe"}
"""vLLM's module of gated delta layers asks Triton and torch for their device when it is imported."""


def engine_of(overrides: list[str], folder: Path) -> EngineSpec:
    """The first engine, as a driver starts it, on a GPU; the folder gets what vLLM reads of a checkpoint."""
    config = compose_config(overrides)
    model = config.model
    public = CONF / "public" / f"{model.path}.json"
    if public.exists():
        folder.mkdir()
        shutil.copy(public, folder / "config.json")
    else:
        create_policy(model, SPECIAL_TOKENS, str(folder), seed=0)
    at_folder = config.model_copy(update={"model": model.model_copy(update={"path": str(folder)})})
    return replace(engine_spec(at_folder, 0), device="cuda")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    made = {}
    for name, overrides in ENGINES.items():
        folder = tmp_path_factory.mktemp("models") / name.replace(" ", "_")
        spec = engine_of(overrides, folder)
        tensors = module_tensors(transformers_config(folder / "config.json"))
        is_traced = not spec.model.shape.num_experts  # which takes a minute: in test_vllm_layout.py
        made[name] = Case(spec, [(one.name, tuple(one.shape)) for one in tensors] if is_traced else [])
    return made


def asked(device: str, cases: dict[str, Case], folder: Path) -> dict[str, Answer]:
    (folder / "cases").write_bytes(pickle.dumps(list(cases.values())))
    program = [sys.executable, "-m", "tests.contract.vllm_on_a_gpu", device]
    done = subprocess.run(
        [*program, str(folder / "cases"), str(folder / "answers")],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(cases, pickle.loads((folder / "answers").read_bytes()), strict=True))


@pytest.fixture(scope="module")
def on_gpu(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    return asked("cuda", cases, tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def on_cpu(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Of the models whose layout is traced."""
    of_cpu = {
        name: Case(replace(case.spec, device="cpu"), case.tensors) for name, case in cases.items() if case.tensors
    }
    return asked("cpu", of_cpu, tmp_path_factory.mktemp("cpu"))


def test_every_shipped_architecture_has_an_engine_here() -> None:
    shipped = {name_of_architecture(path.stem) for path in CONF.glob("*.yaml")} - NEEDS_A_DEVICE
    assert shipped == {name_of_architecture(name.partition(" ")[0]) for name in ENGINES}


def name_of_architecture(model: str) -> str:
    """Of a file of conf/model: `model_type` of its public config, or its own name if it is made from scratch."""
    (path,) = re.findall(r"^path: (\S+)", (CONF / f"{model}.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    public = CONF / "public" / f"{path}.json"
    return str(json.loads(public.read_text(encoding="utf-8"))["model_type"]) if public.exists() else model


@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_is_the_one_that_our_updates_are_written_for(
    name: str, on_gpu: dict[str, Answer], cases: dict[str, Case]
) -> None:
    decided, spec = SimpleNamespace(**on_gpu[name].decisions), cases[name].spec
    is_eager = spec.engine.enforce_eager  # type: ignore[union-attr]
    assert decided.v2_runner, "the V1 runner is what the CPU build has; its order of pause and step differs"
    assert decided.async_scheduling
    assert decided.scheduler == "holding_scheduler", "ours, made from AsyncScheduler"
    assert decided.worker == "vllm.v1.worker.gpu_worker.Worker"
    assert decided.executor == ("UniProcExecutor" if spec.engine.tensor_parallel_size == 1 else "MultiprocExecutor")
    assert decided.graphs == ("NONE" if is_eager else "FULL_AND_PIECEWISE")
    assert decided.compilation == ("NONE" if is_eager else "VLLM_COMPILE")
    assert decided.sleep_mode
    assert decided.dtype == f"torch.{spec.model.dtype}"
    assert decided.head_dtype == "torch.float32"
    assert decided.logprobs_mode == "processed_logprobs"
    assert decided.max_model_len == spec.model.max_context_tokens
    assert decided.prefix_caching
    assert decided.cache_dtype == "auto"
    assert decided.weight_transfer == "penstock_shared_memory"


def test_the_version_that_waits_is_left_out_of_vllms_share_of_the_device(on_gpu: dict[str, Answer]) -> None:
    config = compose_config([LARGE])
    found = on_gpu["qwen2_5_7b"].decisions["gpu_memory_utilization"]
    assert found == pytest.approx(0.85 - staged_gib(config) / 80, abs=1e-6)
    colocated = on_gpu["qwen2_5_0_5b_instruct"].decisions
    assert colocated["kv_cache_memory_bytes"] == 4 * GIB


def test_a_step_prefills_as_many_tokens_as_that_of_a_server_and_as_the_plan_counts(on_gpu: dict[str, Answer]) -> None:
    assert on_gpu["qwen2_5_7b"].decisions["batch_tokens"] == ENGINE_BATCH_TOKENS[70] == 8192


@pytest.mark.parametrize("name", [name for name in ENGINES if name not in MIXTURES])
def test_the_layout_on_a_gpu_is_that_of_the_cpu_build(
    name: str, on_gpu: dict[str, Answer], on_cpu: dict[str, Answer]
) -> None:
    """The layouts that the CPU build is compared with bit for bit (test_vllm_layout.py) are those of GPUs too."""
    ours, theirs = on_gpu[name].layout, on_cpu[name].layout
    assert list(map(dict, ours.buffers)) == list(map(dict, theirs.buffers))
    assert dict(ours.shards) == dict(theirs.shards)
