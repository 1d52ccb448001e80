"""Installed packages offer environments by name, through entry points of the group `penstock.envs`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import EnvConfig
from penstock.envs.loading import load_task_source
from penstock.envs.registry import BUILT_IN, known_factories
from penstock.envs.streams import MAIN, named_tasks

MAZE = """
from penstock.envs.tasks.generated_tasks import GeneratedTasks

class Maze(GeneratedTasks):
    def draw(self, rng):
        return {"prompt": f"maze {rng.random()}", "answer": "out"}
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package that offers environments on the path, as pip leaves it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "penstock_test_maze.py").write_text(MAZE)

    def install(package: str, **offered: str) -> None:
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {path}" for name, path in offered.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[penstock.envs]", *lines, "[other]", "x = y:z", ""]))

    return install


def test_an_environment_of_a_package_is_known_and_loaded_by_name(install: Install) -> None:
    assert "maze" not in known_factories()
    install("mazes", maze="penstock_test_maze:Maze")
    assert known_factories() == {**BUILT_IN, "maze": "penstock_test_maze:Maze"}
    source = load_task_source(EnvConfig(factory="maze"), seed=0)
    task = next(named_tasks(source, MAIN, source.train()))
    assert (str(task.prompt)[:5], task.fields["answer"]) == ("maze ", "out")


def test_a_name_that_is_nearly_right_is_answered_with_that_of_the_package(install: Install) -> None:
    install("mazes", maze="penstock_test_maze:Maze")
    with pytest.raises(ConfigError, match=r"env.factory='maz' is no environment.*math.*Did you mean 'maze'"):
        load_task_source(EnvConfig(factory="maz"), seed=0)


def test_two_packages_of_one_name_are_refused_unless_they_mean_the_same(install: Install) -> None:
    install("mazes", maze="penstock_test_maze:Maze")
    install("same-mazes", maze="penstock_test_maze:Maze")
    assert known_factories()["maze"] == "penstock_test_maze:Maze"
    install("other-mazes", maze="others:Maze")
    with pytest.raises(ConfigError, match=r"2 installed packages offer.*'maze'.*others:Maze, penstock_test_maze:Maze"):
        load_task_source(EnvConfig(factory="maze"), seed=0)
    assert load_task_source(EnvConfig(factory="penstock_test_maze:Maze"), seed=0)


def test_what_is_built_in_is_never_replaced(install: Install) -> None:
    install("mazes", math="penstock_test_maze:Maze")
    assert known_factories() == BUILT_IN


def test_an_entry_point_that_does_not_resolve_is_an_error_when_it_is_used(install: Install) -> None:
    install("mazes", maze="penstock_test_maze:Labyrinth")
    with pytest.raises(ConfigError, match=r"penstock_test_maze.*Labyrinth"):
        load_task_source(EnvConfig(factory="maze"), seed=0)
