"""Environment variables of engine processes: who gets them, and that vLLM and Triton know them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.actors import cluster
from penstock.dataflow.ids import EngineId
from penstock.rollout.config import VllmEngineConfig
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.weights.model_config import DType, ModelConfig
from tests.tiny_policy import tiny_shape

PRECISION = "TRITON_F32_DEFAULT"


def environment_of_actor(device: Any, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What Ray is told to set in the process of an engine."""
    told: dict[str, Any] = {}

    class Remote:
        def options(self, **options: Any) -> Remote:
            told.update(options)
            return self

        def remote(self, *_: object) -> None:
            pass

    monkeypatch.setattr(cluster.ray, "remote", lambda _: Remote())
    model = ModelConfig(max_context_tokens=32, shape=tiny_shape(20), dtype=dtype)
    engine = VllmEngineConfig(type="vllm")
    cluster.engine_actor(
        EngineSpec(EngineId("engine-0"), "policy", model, engine, device, "keep_kv", seed=0, threads=1),
        cluster.Resources(),
    )
    variables: dict[str, str] = told["runtime_env"]["env_vars"]
    return variables


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bfloat16"), ("cpu", "float32")])
def test_only_an_engine_in_float32_on_a_gpu_computes_float32_products_exactly(
    device: str, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PRECISION not in environment_of_actor(device, dtype, monkeypatch)
    assert environment_of_actor("cuda", "float32", monkeypatch)[PRECISION] == "ieee"


def test_triton_rounds_float32_products_unless_the_variable_is_set() -> None:
    def is_rounded(variables: dict[str, str]) -> bool:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
        program = [sys.executable, str(Path(__file__).with_name("float32_product.py"))]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True, timeout=300)
        assert "fma" in done.stdout or "mma" in done.stdout
        return "tf32" in done.stdout

    assert is_rounded(vllm_environment("cuda", 1, "bfloat16"))
    assert not is_rounded(vllm_environment("cuda", 1, "float32"))


def test_an_engine_core_on_a_gpu_is_spawned_not_forked() -> None:
    """A forked one fails if its parent has asked whether there is a GPU. In a Ray actor vLLM spawns anyway."""
    assert vllm_environment("cuda", threads=1)["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_reads_each_variable_of_its_own_name() -> None:
    """In its source, since importing it takes seconds; a name that it does not know changes nothing."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    declared = (Path(found.origin).parent / "envs.py").read_text()
    names = {*vllm_environment("cpu", 1), *vllm_environment("cuda", 1, "float32")}
    assert [name for name in sorted(names) if name.startswith("VLLM_") and f'"{name}":' not in declared] == []
