"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from penstock.dataflow.ports import WeightManifest
from penstock.rollout.config import EngineConfig
from penstock.rollout.local_engine import LocalEngine
from penstock.weights.layout.engine import EngineSide
from penstock.weights.model_config import ModelConfig

from .engine_harness import Harness, OpenHarness, Reference, make_spec, within


@pytest.fixture(scope="session")
def reference(tiny_policy_dir: Path, tiny_tensors: Callable[[int], dict[str, torch.Tensor]]) -> Reference:
    """The oracle of `EngineContract` over the tiny policy."""
    return Reference(tiny_policy_dir, tiny_tensors)


@pytest.fixture(scope="session")
def open_harness(
    tiny_model_config: ModelConfig,
    reference: Reference,
    publisher_of_tiny: Callable[[EngineSide], Callable[..., WeightManifest]],
) -> OpenHarness:
    """`async with open_harness(engine_type, config, update_mode) as harness`: starts at version 0."""

    @asynccontextmanager
    async def opened(engine_type: type[LocalEngine], config: EngineConfig, update_mode: str) -> AsyncIterator[Harness]:
        spec = make_spec(tiny_model_config, config, update_mode)
        engine = engine_type(spec)
        side = EngineSide(config.type, tiny_model_config.shape, config.tensor_parallel_size)
        try:
            yield await Harness.begin(engine, spec, reference, publisher_of_tiny(side))
        finally:
            await within(engine.shutdown())

    return opened


@pytest_asyncio.fixture(loop_scope="module")
async def idle(harness: Harness) -> AsyncIterator[None]:
    """Leaves the engine without requests, whatever the test did."""
    yield
    await harness.abort_leftovers()
