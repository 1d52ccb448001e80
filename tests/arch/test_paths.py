"""A publish makes at most eight calls between files, and a trajectory is sampled and scored by at most twelve files.

A publish is followed from the run to the live parameters. A trajectory is followed from the admission of its task to
the engine that samples it, to the function that scores it, and to the gate at which its group waits to be trained. Each
path below is the longest of its kind, function by function. The syntax trees must show that every function calls
the next one by its name, or names it in a string (a method of vLLM's workers); so a new layer between two of them
breaks the path here, and has to be counted.
"""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 8
MOST_FILES = 12
TO_THE_ENGINE = [
    ("platform/run/run.py", "publish"),
    ("actors/weights/publisher.py", "publish"),
    ("actors/engine/client.py", "update_weights"),
    ("actors/engine/actor.py", "update_weights"),
]
IN_PLACE = [
    ("weights/transport/process_group/endpoints.py", "receive_in_place"),
    ("weights/transport/process_group/transfer.py", "run"),
]
COPIED = [("weights/copies.py", "copy_values")]
TO_VLLM = [*TO_THE_ENGINE, ("rollout/engines/vllm/engine.py", "update_weights")]
TO_TORCH = [
    *TO_THE_ENGINE,
    ("rollout/engines/torch/engine.py", "update_weights"),
    ("rollout/engines/torch/decode_thread.py", "call"),
    ("rollout/engines/torch/engine.py", "_swap"),
]
FROM_THE_TRAINER = [
    ("platform/run/run.py", "publish"),
    ("actors/weights/publisher.py", "publish"),
    ("actors/weights/process_group.py", "send"),
    ("actors/trainer/client.py", "call_transfer"),
    ("actors/trainer/actor.py", "send_weights"),
    ("weights/transport/process_group/endpoints.py", "send"),
    ("weights/transport/process_group/transfer.py", "run"),
]
SAMPLED = [
    ("platform/run/flow.py", "_admit_now"),
    ("platform/run/group_run.py", "start"),
    ("rollout/trajectory/runner.py", "run"),
    ("rollout/engine_pool/pool.py", "lease"),
]
SAMPLED_BY_VLLM = [
    ("rollout/trajectory/runner.py", "run"),
    ("actors/engine/client.py", "generate"),
    ("actors/engine/actor.py", "submit"),
    ("rollout/engines/vllm/engine.py", "generate"),
]
SCORED = [
    ("platform/run/group_run.py", "start"),
    ("actors/reward/client.py", "score"),
    ("actors/reward/actor.py", "score"),
    ("envs/workers/scoring.py", "score"),
]
READY = [
    ("platform/run/group_run.py", "start"),
    ("platform/run/flow.py", "group_finished"),
    ("dataflow/core.py", "ready"),
    ("dataflow/gates.py", "mark_ready"),
]
PATHS = {
    "into vLLM, in messages": [*TO_VLLM, ("rollout/engines/vllm/worker.py", "penstock_receive_in_place"), *IN_PLACE],
    "into vLLM, from a version buffer": [
        *TO_VLLM,
        ("rollout/engines/vllm/worker.py", "receive_weights"),
        ("weights/transport/in_place.py", "apply"),
        *COPIED,
    ],
    "into the torch engine, in messages": [*TO_TORCH, *IN_PLACE],
    "into the torch engine, from a version buffer": [*TO_TORCH, ("weights/transport/in_place.py", "apply"), *COPIED],
    "out of the training ranks": FROM_THE_TRAINER,
}
BETWEEN = {
    (
        "rollout/engines/vllm/engine.py",
        "receive_weights",
    ): "update_weights",  # vLLM's own, which calls its transfer engine's
    ("actors/trainer/client.py", "send_weights"): "getattr",  # methods of the ranks are called by name
    ("rollout/engines/torch/decode_thread.py", "_swap"): "action",  # runs what it was given
}
"""Calls that are not by the next one's name -> the name they are made by."""


def names(path: str) -> tuple[set[str], set[str]]:
    """Functions that a file defines, and all that it calls or has in a string."""
    tree = ast.parse((ROOT / path).read_text())
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return defined, used | {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def follow(path: list[tuple[str, str]]) -> None:
    """Fail where a file of a path does not call the next one."""
    for (caller, _), (callee, function) in pairwise(path):
        assert BETWEEN.get((caller, function), function) in names(caller)[1], f"{caller} calls no {function}"
        assert function in names(callee)[0], f"{callee} has no {function}"


@pytest.mark.parametrize("kind", PATHS)
def test_a_publish_passes_at_most_eight_calls_between_files(kind: str) -> None:
    follow(PATHS[kind])
    assert len(PATHS[kind]) - 1 <= MOST


def test_a_trajectory_is_sampled_and_scored_by_at_most_twelve_files() -> None:
    paths = (SAMPLED, SAMPLED_BY_VLLM, SCORED, READY)
    for path in paths:
        follow(path)
    assert len({file for path in paths for file, _ in path}) <= MOST_FILES


def test_the_live_parameters_are_written_at_the_end_of_each_path() -> None:
    for path in PATHS.values():
        assert "copy_" in names(path[-1][0])[1]
