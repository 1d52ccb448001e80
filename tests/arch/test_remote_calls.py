"""Every call of another process has a time limit that a stalled event loop does not use up (actors/ray_errors.py)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HELPERS = {"answer_of", "gather_answers", "late_calls", "silence_limit", "wait_started"}
PLAIN_LIMITS = {"timeout", "timeout_at", "wait_for"}
WITHOUT_A_LIMIT_HERE = {
    "actors/cluster.py:engine_actor": "starts a process",
    "actors/cluster.py:trainer_ranks": "starts processes",
    "actors/cluster.py:start_rewards": "starts processes",
    "actors/devices.py:_gpus_of": "returns the call to `reserve_devices`, which limits it",
    "actors/engine/client.py:_update_weights": "`attempt` limits it (weights.timeout_s)",
    "actors/engine/client.py:make_version_buffers": "`DeviceMemoryTransport._connect` limits it (weights.timeout_s)",
    "actors/engine/client.py:forget_versions": "`_answered_or_ended` limits it",
    "actors/engine/client.py:sleep": "the same",
    "actors/engine/client.py:wake": "the same",
    "actors/engine/client.py:join_transfer_group": "returns the call to `gather_answers`",
    "actors/engine/client.py:receive": "returns the call to `gather_answers`",
    "actors/engine/client.py:close": "the process is killed after it",
    "actors/episodes.py:open": "`RemoteEpisodes.answer` limits it",
    "actors/episodes.py:_call": "`RemoteEpisodes.answer` limits it",
    "actors/episodes.py:_on_node": "starts a process",
    "actors/node_probe.py:start": "starts a process",
    "actors/frozen_policies.py:start_frozen_policies": "starts processes",
    "actors/reward/client.py:_submit": "is not awaited; `_watch_process` limits the wait for results",
    "actors/reward/client.py:close": "the processes are killed after it",
    "actors/trainer/client.py:training_sharding": "`_answers` limits it",
    "actors/trainer/client.py:save": "`_answers` limits the call of rank 0, which waits for those of the others",
    "actors/trainer/client.py:read_back": "returns a handle, which the engine's update resolves",
    "actors/trainer/client.py:_call": "returns the calls to `_answers` and `call_ranks`",
    "actors/weights/process_group.py:__init__": "makes a type",
    "actors/weights/process_group.py:join": "returns the call to `gather_answers`",
    "actors/weights/process_group.py:receive": "returns the call to `gather_answers`",
}


def functions_with(tree: ast.Module, names: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Each outermost function in which an attribute of these names is called, with all names that it uses."""
    bodies = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for function in (node for body in bodies for node in body.body):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        called = {
            node.func.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        if called & names:
            yield function.name, {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


def unlimited(source: str, name: str) -> list[str]:
    """Functions that call another process without one of the helpers."""
    found = functions_with(ast.parse(source), {"remote"})
    return [f"{name}:{function}" for function, used in found if not used & HELPERS]


def clients() -> list[Path]:
    return sorted(path for path in (ROOT / "actors").rglob("*.py") if path.name != "ray_errors.py")


def test_calls_of_other_processes_go_through_the_helpers() -> None:
    found = [one for path in clients() for one in unlimited(path.read_text(), str(path.relative_to(ROOT)))]
    assert sorted(set(found)) == sorted(WITHOUT_A_LIMIT_HERE)


def test_no_plain_time_limit_is_put_on_another_process() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{function}"
        for path in clients()
        for function, _ in functions_with(ast.parse(path.read_text()), PLAIN_LIMITS)
    }
    assert found == {
        "actors/batched_calls.py:collect",  # in the actor's own process
        "actors/engine/client.py:close",
        "actors/reward/client.py:close",
        "actors/weights/publisher.py:update",  # for requests in the driver's own pool
    }


@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("await self._actor.load.remote()", True),
        ("await asyncio.gather(*(one.ready.remote() for one in self._workers))", True),
        ("await answer_of(self._actor.load.remote(), 1.0, EngineLostError, 'e: load')", False),
        ("async with silence_limit(1.0):\n            await self._actor.load.remote()", False),
    ],
)
def test_a_planted_call_without_a_limit_is_found(call: str, *, is_found: bool) -> None:
    source = f"class Client:\n    async def load(self):\n        {call}\n"
    assert unlimited(source, "a.py") == (["a.py:load"] if is_found else [])
