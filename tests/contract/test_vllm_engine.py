from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from penstock.rollout.config import VllmEngineConfig
from penstock.rollout.vllm_environment import vllm_environment

from .crossing import CrossingContract
from .engine_contract import EngineContract
from .engine_harness import (
    JOURNAL_INTERVAL,
    MAX_NUM_SEQS,
    Harness,
    OpenHarness,
)
from .multi_turn import MultiTurnContract
from .partial_rollouts import PartialRolloutContract

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)"),
]
CONFIG = VllmEngineConfig(
    type="vllm",
    max_num_seqs=MAX_NUM_SEQS,
    kv_cache_gib=0.25,
    enforce_eager=True,
    journal_interval_tokens=JOURNAL_INTERVAL,
)
ENGINES = [("keep_kv", 1, "host"), ("recompute_kv", 2, "device")]
"""Update mode, tensor-parallel workers, and where versions are written; an engine takes 15 s to start."""


@pytest.fixture(scope="module")
def cpu_profile() -> Iterator[None]:
    """The environment of an engine actor, set before vLLM is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_environment("cpu", threads=1).items():
            patch.setenv(name, value)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES, ids=str)
async def harness(
    request: pytest.FixtureRequest, cpu_profile: None, open_harness: OpenHarness
) -> AsyncIterator[Harness]:
    from penstock.rollout.vllm_engine import VllmEngine

    update_mode, tp_size, memory = request.param
    config = CONFIG.model_copy(update={"tensor_parallel_size": tp_size})
    async with open_harness(VllmEngine, config, update_mode, memory) as harness:
        yield harness


class TestVllmEngine(EngineContract, PartialRolloutContract, MultiTurnContract, CrossingContract):
    """The contract on vLLM's CPU build, in both update modes, over one worker and two, with slots of both kinds."""
