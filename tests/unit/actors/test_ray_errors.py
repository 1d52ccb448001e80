"""Ray's exceptions at the door."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from penstock.actors.ray_errors import ray_boundary
from penstock.dataflow.errors import TrainingError


def step() -> AbstractContextManager[None]:
    return ray_boundary(TrainingError, "trainer: step")


def test_a_remote_exception_is_told_by_its_type_and_message() -> None:
    remote = RayTaskError("step", "a long remote traceback", ValueError("odd shape")).as_instanceof_cause()
    with pytest.raises(TrainingError, match=r"^trainer: step failed: ValueError: odd shape$"), step():
        raise remote


def test_a_remote_time_out_is_not_taken_for_ours() -> None:
    remote = RayTaskError("start", "traceback", TimeoutError("peer")).as_instanceof_cause()
    with pytest.raises(TrainingError, match="trainer: step failed: TimeoutError: peer"), step():
        raise remote


def test_a_dead_process_is_told_in_one_line() -> None:
    with pytest.raises(TrainingError, match=r"^trainer: step: a process died: [^\n]+$"), step():
        raise ActorDiedError


async def test_a_local_time_out_passes_through() -> None:
    with pytest.raises(TimeoutError), ray_boundary(TrainingError, "trainer: step"):
        async with asyncio.timeout(0):
            await asyncio.Event().wait()
