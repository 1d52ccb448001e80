"""The import paths in a configuration: which functions and classes of the user a run needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the child of checks/imports.py imports this module, and should import little
    from penstock.envs.config import EnvConfig
    from penstock.platform.config.schema import RunConfig


def import_paths(config: RunConfig) -> dict[str, str]:
    """Return key -> import path for every function or class that the configuration names and processes import."""
    env, flow, algorithm = config.env, config.dataflow, config.algorithm
    named: dict[str, str | None] = {
        **({} if env.python is not None else _of_environment(env)),
        "env.curriculum": env.curriculum,
        "reward.fn": config.reward.fn,
        **{f"reward.parts.{name}.fn": part.fn for name, part in config.reward.parts.items()},
        "dataflow.group_sizing": flow.group_sizing,
        "dataflow.length_limiting": flow.length_limiting,
        "dataflow.filters.user": flow.filters.user,
        "algorithm.advantage.function": algorithm.advantage.name,
        "algorithm.loss.function": algorithm.loss.name,
    }
    return {key: path for key, path in named.items() if path is not None and ("." in path or ":" in path)}


def _of_environment(env: EnvConfig) -> dict[str, str | None]:
    named: dict[str, str | None] = {"env.factory": env.factory}
    named |= {f"env.streams.{name}.factory": stream.factory for name, stream in env.streams.items()}
    # Arguments that environments import by themselves (envs/adapters/rows.py, envs/tasks/agents.py).
    for name in ("rows", "agent"):
        value = env.args.get(name)
        named[f"env.args.{name}"] = value if isinstance(value, str) else None
    return named


def module_of(path: str) -> str:
    """The module of an import path, `package.module:name` or `package.module.name`."""
    return path.partition(":")[0] if ":" in path else path.rpartition(".")[0]
