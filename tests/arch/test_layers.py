"""Layers and import boundaries, checked over the syntax trees, including imports inside functions and TYPE_CHECKING."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BELOW = {
    "dataflow": set(),
    "kernels": {"dataflow"},
    "weights": {"dataflow", "kernels"},
    "envs": {"dataflow", "kernels"},
    "rollout": {"dataflow", "kernels", "weights", "envs"},
    "trainer": {"dataflow", "kernels", "weights", "envs"},
    "actors": {"dataflow", "kernels", "weights", "envs", "rollout", "trainer"},
    "platform": {"dataflow", "kernels", "weights", "envs", "rollout", "trainer", "actors", "conf"},
    "conf": set(),
}
"""Folder -> the folders it may import from, besides itself."""

INSIDE_PLATFORM = ("metrics", "config", "cluster", "checks", "run", "simulator", "cli")
"""Folders of platform/; each imports only from those before it."""

REGISTRY = "trainer/algorithms/catalog.py"
"""Imports, at the first lookup, the modules that register themselves in it."""

IMPORT_BOUNDARIES: dict[str, Callable[[str], bool]] = {
    "ray": lambda path: path.startswith(("actors/", "platform/")),
    "torch": lambda path: not path.startswith(("dataflow/", "envs/")) or path == "envs/rewards/reward_model.py",
    "vllm": lambda path: path.startswith("rollout/engines/vllm/"),
    "deepspeed": lambda path: path.startswith("trainer/backends/deepspeed"),
    "numba": lambda path: path == "weights/checksum.py",
    "peft": lambda path: path == "trainer/models/lora.py",
    "wandb": lambda path: path.startswith("platform/metrics/trackers/"),
    "mlflow": lambda path: path == "platform/metrics/trackers/mlflow.py",
    "trackio": lambda path: path == "platform/metrics/trackers/trackio.py",
    "triton": lambda path: path.startswith("kernels/"),
    "hydra": lambda path: path.startswith("platform/"),
    "omegaconf": lambda path: path.startswith("platform/"),
}
"""Foreign library -> may the file at this path import it?"""


@dataclass(frozen=True)
class Reading:
    """Result of one pass over the source tree."""

    num_files: int
    violations: list[str]


def read_project(root: Path) -> Reading:
    """Parse every Python file of the source tree under `root` and collect its forbidden imports."""
    violations = []
    num_files = 0
    for folder in BELOW:
        for path in sorted((root / folder).rglob("*.py")):
            num_files += 1
            relative = path.relative_to(root).as_posix()
            for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8")), relative):
                if wrong := what_is_wrong(relative, name):
                    violations.append(f"{relative}:{line}: {wrong}")
    return Reading(num_files, violations)


def imported_names(tree: ast.AST, relative: str) -> Iterator[tuple[int, str]]:
    """`(line, absolute dotted name)` of everything imported anywhere in `tree`, also by `import_module("...")`."""
    package = ["penstock", *Path(relative).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def what_is_wrong(relative: str, name: str) -> str | None:
    """Why the file may not import `name`; None if it may."""
    folder = relative.partition("/")[0]
    top, _, rest = name.partition(".")
    if top == "penstock":
        target = rest.partition(".")[0]
        if target in BELOW and target != folder and target not in BELOW[folder]:
            return f"{folder}/ may not import from {target}/ ({name})"
        if folder == target == "platform":
            mine, theirs = relative.split("/")[1], rest.split(".")[1]
            if mine not in INSIDE_PLATFORM or theirs not in INSIDE_PLATFORM[: INSIDE_PLATFORM.index(mine) + 1]:
                return f"platform/{mine}/ may not import from platform/{theirs}/ ({name})"
    elif top in BELOW and top != "platform":
        return f"{name} is imported by its folder; write penstock.{name}"
    elif top in IMPORT_BOUNDARIES and not IMPORT_BOUNDARIES[top](relative):
        return f"{top} is imported only behind its boundary; this file may not import it ({name})"
    return None


def test_every_file_imports_only_from_layers_below_and_foreign_libraries_only_behind_their_boundary() -> None:
    assert read_project(ROOT).violations == []


def import_circle(root: Path) -> list[str]:
    """A circle of modules of which each is imported by the next one; empty if there is none.

    Imports for types only do not count: a loss is annotated with the configuration that has its settings.
    """
    files = {path.relative_to(root).as_posix(): path for folder in BELOW for path in (root / folder).rglob("*.py")}
    names = {f"penstock.{relative.removesuffix('.py').replace('/', '.')}": relative for relative in files}
    graph: dict[str, set[str]] = {}
    for relative, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
        tree.body = [node for node in tree.body if node not in for_types]
        imported = {name for _, name in imported_names(tree, relative)}
        modules = imported | {name.rpartition(".")[0] for name in imported}
        graph[relative] = {names[name] for name in modules & names.keys()} - {relative}
    graph.pop(REGISTRY, None)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other() -> None:
    assert import_circle(ROOT) == []


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "kernels" / "gpu").mkdir(parents=True)
    (tmp_path / "kernels" / "logprob.py").write_text("def late():\n    from penstock.kernels.gpu import tile")
    (tmp_path / "kernels" / "gpu" / "tile.py").write_text("from penstock.kernels.logprob import LOWEST")
    assert set(import_circle(tmp_path)) == {"kernels/logprob.py", "kernels/gpu/tile.py"}


def test_every_file_that_penstock_ships_was_read() -> None:
    shipped = sum(
        name.endswith(".py")
        for folder, _, names in os.walk(ROOT / "src" / "penstock", followlinks=True)
        for name in names
        if folder != str(ROOT / "src" / "penstock")
    )
    assert read_project(ROOT).num_files == shipped
    assert shipped >= 60


PLANTED = {
    "dataflow/core.py": ("from penstock.envs.config import EnvConfig", "dataflow/ may not import from envs/"),
    "dataflow/torchy.py": ("def late():\n    import torch.nn", "torch is imported only behind its boundary"),
    "envs/rayish.py": ("import ray", "ray is imported only behind its boundary"),
    "envs/workers/scoring.py": ("from torch import nn", "torch is imported only behind its boundary"),
    "kernels/loss.py": ("from penstock import trainer", "kernels/ may not import from trainer/"),
    "weights/typed.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from penstock.rollout import engine_pool as pool",
        "weights/ may not import from rollout/",
    ),
    "rollout/engine_pool/pool.py": (
        "from penstock.trainer.config import TrainerConfig",
        "rollout/ may not import from trainer/",
    ),
    "rollout/vllm_helper.py": ("from vllm import LLM", "vllm is imported only behind its boundary"),
    "rollout/deep/relative.py": ("from ...trainer import config", "rollout/ may not import from trainer/"),
    "trainer/step.py": ("import penstock.rollout.engine_pool.pool", "trainer/ may not import from rollout/"),
    "trainer/other_backend.py": ("import deepspeed", "deepspeed is imported only behind its boundary"),
    "trainer/loss.py": ("import triton.language as tl", "triton is imported only behind its boundary"),
    "actors/engine/actor.py": ("import_module('penstock.platform.run.run')", "actors/ may not import from platform/"),
    "actors/config.py": ("from omegaconf import DictConfig", "omegaconf is imported only behind its boundary"),
    "platform/run/run.py": ("import wandb", "wandb is imported only behind its boundary"),
    "platform/config/schema.py": (
        "from penstock.platform.run.flow import Flow",
        "platform/config/ may not import from platform/run/",
    ),
    "platform/somewhere.py": ("import penstock.platform.run.flow", "platform/somewhere.py/ may not import"),
    "platform/short.py": ("from dataflow.core import Dataflow", "write penstock.dataflow.core.Dataflow"),
}


@pytest.mark.parametrize("path", PLANTED)
def test_a_planted_violation_is_found(tmp_path: Path, path: str) -> None:
    source, message = PLANTED[path]
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(source)
    reading = read_project(tmp_path)
    assert reading.num_files == 1
    assert len(reading.violations) == 1
    assert reading.violations[0].startswith(path)
    assert message in reading.violations[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("rollout/engines/vllm/engine.py", "import vllm"),
        ("trainer/backends/deepspeed.py", "import deepspeed"),
        ("platform/metrics/trackers/wandb.py", "import wandb"),
        ("platform/cluster/hardware.py", "import platform\nimport ray"),
        ("kernels/logprob.py", "import triton, torch"),
        (
            "actors/engine/actor.py",
            "from penstock.rollout.engine_pool.pool import Pool\nfrom penstock.trainer import config",
        ),
    ],
)
def test_what_is_allowed_is_not_reported(tmp_path: Path, path: str, source: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(source)
    assert read_project(tmp_path) == Reading(1, [])
