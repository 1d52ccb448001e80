"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from .engine_harness import Harness, Reference


@pytest.fixture(scope="session")
def reference(tiny_policy_dir: Path, tiny_tensors: Callable[[int], dict[str, torch.Tensor]]) -> Reference:
    """The oracle of `EngineContract` over the tiny policy."""
    return Reference(tiny_policy_dir, tiny_tensors)


@pytest_asyncio.fixture(loop_scope="module")
async def idle(harness: Harness) -> AsyncIterator[None]:
    """Leaves the engine without requests, whatever the test did."""
    yield
    await harness.abort_leftovers()
