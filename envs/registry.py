"""Environments by name: the built-in ones, and those of installed packages.

A package registers one as an entry point of the group `penstock.envs`, in its pyproject.toml:

    [project.entry-points."penstock.envs"]
    maze = "my_package.maze:Maze"
"""

from __future__ import annotations

from collections import Counter
from importlib.metadata import entry_points

from penstock.dataflow.errors import ConfigError
from penstock.envs.import_path import nearest_hint

GROUP = "penstock.envs"
BUILT_IN = {
    "agent": "penstock.envs.tasks.agents:AgentTasks",
    "arithmetic": "penstock.envs.tasks.arithmetic:ArithmeticTasks",
    "dataset": "penstock.envs.adapters.rows:RowTasks",
    "gymnasium": "penstock.envs.adapters.gymnasium_env:GymnasiumTasks",
    "math": "penstock.envs.tasks.math_tasks:MathTasks",
    "python_code": "penstock.envs.tasks.python_tasks:PythonTasks",
    "reasoning_gym": "penstock.envs.adapters.reasoning_gym_tasks:ReasoningGymTasks",
    "repository": "penstock.envs.tasks.repositories:RepositoryTasks",
    "verifiers": "penstock.envs.adapters.verifiers_env:VerifiersTasks",
}
"""Name -> import path of the factory."""


def known_factories() -> dict[str, str]:
    """Name -> import path; a package cannot replace a built-in environment.

    Raises:
        ConfigError: If two packages register the same name.
    """
    offered = {(point.name, point.value) for point in entry_points(group=GROUP)}
    twice = [name for name, count in Counter(name for name, _ in offered).items() if count > 1]
    if twice:
        paths = [value for name, value in sorted(offered) if name == twice[0]]
        raise ConfigError(
            f"env.factory: {len(paths)} installed packages offer an environment {twice[0]!r} (entry points of "
            f"{GROUP}): {', '.join(paths)}. Write the import path of the one you mean."
        )
    return {**dict(offered), **BUILT_IN}


def factory_path(name_or_path: str) -> str:
    """The import path of a name; an import path is returned as it is.

    Raises:
        ConfigError: If the name is not registered.
    """
    if "." in name_or_path or ":" in name_or_path:
        return name_or_path
    known = known_factories()
    if name_or_path not in known:
        raise ConfigError(
            f"env.factory={name_or_path!r} is no environment that is built in or installed: "
            f"{', '.join(sorted(known))}.{nearest_hint(name_or_path, known)} Your own is named by import path, "
            "`package.module:name`."
        )
    return known[name_or_path]
