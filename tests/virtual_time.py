"""Coroutines in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock.platform.simulator.virtual_loop import VirtualTimeLoop

T = TypeVar("T")


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` in a new virtual-time loop and return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
