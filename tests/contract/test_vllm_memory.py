"""Whether an engine starts where the dry run says so: vLLM's own check of free memory, on the numbers of our plan.

No device is needed: for this check a device is its size and what is free of it when the engine starts.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster.actor_factory import engine_spec
from penstock.platform.cluster.memory import CUDA_CONTEXT_GIB, GIB, engine_memory, resident_gib
from penstock.platform.cluster.placement import plan_placement
from penstock.platform.config.schema import RunConfig

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)"),
]


def qwen2_5(hidden: int, intermediate: int, layers: int, heads: int) -> list[str]:
    """Overrides for a Qwen2.5 whose config.json is not in this package."""
    sizes = {
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": 2,
        "head_dim": 128,
        "tie_word_embeddings": "true",
    }
    shape = [f"model.shape.{key}={size}" for key, size in sizes.items()]
    return ["model=qwen2_5_0_5b_instruct", "model.path=elsewhere/policy", *shape]


MODELS = {
    "0.5B": ["model=qwen2_5_0_5b_instruct"],
    "1.5B": qwen2_5(1536, 8960, 28, 12),
    "3B": qwen2_5(2048, 11_008, 36, 16),
    "7B": ["model=qwen2_5_7b"],
}
RECIPES = {
    "one GPU": ("gpu", ["experiment=gsm8k_qwen_1gpu"]),
    "one GPU, stated cache": ("gpu", ["experiment=gsm8k_qwen_1gpu", "rollout.engine.kv_cache_gib=4"]),
    "eight GPUs": ("generate", ["experiment=math_qwen_8gpu", "model.max_context_tokens=5120"]),
}
"""Pool of the engines, and overrides."""
SIZES = (24, 40, 48, 80)
"""Memory of a GPU, GiB."""
FIT = {
    *product(["one GPU", "one GPU, stated cache"], ["0.5B"], SIZES),
    *product(["one GPU", "one GPU, stated cache"], ["1.5B", "3B"], [80]),
    *product(["eight GPUs"], ["0.5B", "1.5B"], SIZES),
    *product(["eight GPUs"], ["3B", "7B"], [80]),
}
"""Some that the dry run must not refuse."""


def planned(recipe: str, model: str, size: int) -> RunConfig:
    """Raises `ConfigError` where the dry run refuses it."""
    pool, overrides = RECIPES[recipe]
    pools = [pool] if pool == "gpu" else ["train", "generate"]
    sizes = [f"cluster.pools.{name}.memory_gib={size}" for name in pools]
    head, *others = overrides
    return compose_config([head, *MODELS[model], *others, *sizes])


def check_of_vllm(config: RunConfig, pool: str, free_gib: float, monkeypatch: pytest.MonkeyPatch, path: Path) -> float:
    """What vLLM requests of a device of the pool, GiB. Raises `ValueError` where vLLM would not start."""
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    from penstock.rollout.engines.vllm import arguments

    total = int(config.cluster.pools[pool].memory_gib * GIB)
    monkeypatch.setattr(arguments, "current_platform", SimpleNamespace(get_device_total_memory=lambda: total))
    spec = replace(engine_spec(config, 0), model_path=str(path))
    asked = arguments.engine_args(spec, spec.engine)
    cache = CacheConfig(
        gpu_memory_utilization=asked.gpu_memory_utilization,
        kv_cache_memory_bytes=asked.kv_cache_memory_bytes,
    )
    snapshot = MemorySnapshot(free_memory=int(free_gib * GIB), total_memory=total, device="cuda:0", auto_measure=False)
    return request_memory(snapshot, cache) / GIB


@pytest.mark.some(12)
@pytest.mark.parametrize("case", list(product(RECIPES, MODELS, SIZES)), ids=str)
def test_an_engine_starts_where_the_dry_run_says_so_whoever_starts_first(
    case: tuple[str, str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe, model, size = case
    pool = RECIPES[recipe][0]
    try:
        config = planned(recipe, model, size)
    except ConfigError as refused:
        assert case not in FIT
        told = "\n".join(refused.violations)
        assert re.search(
            rf"memory_gib={size}, but its fullest GPU needs about [\d.]+ GiB|KV cache of an engine, ", told
        )
        return
    before = {"engine first": 0.0}
    if config.cluster.colocated:
        rank = next(one.memory for one in plan_placement(config) if one.role == "trainer")
        before["trainer first"] = resident_gib(config, rank)
    for order, held in before.items():
        free = size - CUDA_CONTEXT_GIB - held
        requested = check_of_vllm(config, pool, free, monkeypatch, tmp_path)
        memory = engine_memory(config, config.cluster.pools[pool]).device
        assert requested > memory["weights"] + memory["kv_cache"] - 0.01, f"{order}: vLLM would pass on a full device"


def test_a_device_that_something_else_has_filled_is_refused_by_vllm_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = planned("one GPU", "0.5B", 24)
    memory = engine_memory(config, config.cluster.pools["gpu"]).device
    needed = memory["weights"] + memory["kv_cache"]
    assert check_of_vllm(config, "gpu", needed + 0.01, monkeypatch, tmp_path) == pytest.approx(needed)
    with pytest.raises(ValueError, match=rf"\(4\.9/24\.0 GiB\) .* is less than .* {needed:.2f} GiB"):
        check_of_vllm(config, "gpu", 4.9, monkeypatch, tmp_path)
