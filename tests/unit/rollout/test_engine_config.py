from __future__ import annotations

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.rollout.config import VllmEngineConfig

GIB = 2**30


def test_the_memory_of_a_staged_version_is_subtracted_from_the_engine() -> None:
    config = VllmEngineConfig(type="vllm", gpu_memory_utilization=0.85)
    assert config.vllm_utilization(15 * GIB, 20 * GIB, 80 * GIB) == pytest.approx(0.6)
    assert config.vllm_utilization(15 * GIB, 0, 80 * GIB) == 0.85


def test_an_engine_with_a_stated_cache_asks_for_no_more_than_its_weights_and_that_cache() -> None:
    config = VllmEngineConfig(type="vllm", gpu_memory_utilization=0.85, kv_cache_gib=5)
    assert config.vllm_utilization(15 * GIB, 20 * GIB, 80 * GIB) == pytest.approx(20 / 80)
    with pytest.raises(ConfigError, match=r"kv_cache_gib=5 and 20\.0 GiB of weights exceed the 24\.0 GiB"):
        config.vllm_utilization(20 * GIB, 0, 24 * GIB)


def test_an_engine_without_memory_for_the_next_version_is_refused_with_both_numbers() -> None:
    config = VllmEngineConfig(type="vllm", gpu_memory_utilization=0.2)
    with pytest.raises(ConfigError, match=r"=0.2 of 80.0 GiB is less than the 20.0 GiB.*staging=bucket"):
        config.vllm_utilization(15 * GIB, 20 * GIB, 80 * GIB)
