"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from penstock.rollout.config import EngineConfig
from penstock.rollout.engines.local_engine import LocalEngine
from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.sides import EngineLayout
from penstock.weights.model_config import ModelConfig
from tests.conftest import TinyPublisher

from .engine_harness import Harness, OpenHarness, Reference, make_spec, within


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import vLLM, seconds, where its tests are left out anyway."""
    leaves_out = "not integration" in config.option.markexpr
    return True if leaves_out and collection_path.name == "test_vllm_scheduler.py" else None


@pytest.fixture(scope="module")
def cpu_profile() -> Iterator[None]:
    """The environment of an engine actor, set before vLLM is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_environment("cpu", threads=1).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def reference(tiny_policy_dir: Path, tiny_tensors: Callable[[int], dict[str, torch.Tensor]]) -> Reference:
    """The oracle of `EngineContract` over the tiny policy."""
    return Reference(tiny_policy_dir, tiny_tensors)


@pytest.fixture(scope="session")
def open_harness(
    tiny_model_config: ModelConfig,
    reference: Reference,
    publisher_of_tiny: Callable[..., TinyPublisher],
    tiny_tensors: Callable[[int], dict[str, torch.Tensor]],
) -> OpenHarness:
    """`async with open_harness(engine_type, config, update_mode, memory, bucket_bytes)`: a harness, at version 0.

    `memory` is where versions are written: `host` or `device`; they stream through a bucket if there is one.
    """

    @asynccontextmanager
    async def opened(
        engine_type: type[LocalEngine],
        config: EngineConfig,
        update_mode: str,
        memory: str = "host",
        bucket_bytes: int | None = None,
    ) -> AsyncIterator[Harness]:
        spec = make_spec(tiny_model_config, config, update_mode, bucket_bytes)
        engine = engine_type(spec)
        tensors = [TensorSpec(name, tuple(tensor.shape)) for name, tensor in tiny_tensors(0).items()]

        async def connect() -> TinyPublisher:
            side = EngineLayout(config.type, await engine.layout(tensors))
            if memory == "host":
                return publisher_of_tiny(side)
            return publisher_of_tiny(side, await engine.make_version_buffers(side.layout.buffers, "float32", 1))

        try:
            yield await Harness.begin(engine, spec, reference, connect)
        finally:
            await within(engine.shutdown())

    return opened


@pytest_asyncio.fixture(loop_scope="module")
async def idle(harness: Harness) -> AsyncIterator[None]:
    """Leaves the engine without requests, whatever the test did."""
    yield
    await harness.abort_leftovers()
