"""Fixtures of the contract suites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .engine_contract import Reference


@pytest.fixture(scope="session")
def reference(tiny_policy_dir: Path, tiny_tensors: Callable[[int], dict[str, torch.Tensor]]) -> Reference:
    """The oracle of `EngineContract` over the tiny policy."""
    return Reference(tiny_policy_dir, tiny_tensors)
