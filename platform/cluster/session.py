"""Ray for a run: started on this machine, or a cluster joined so that it behaves as this machine does.

On a joined cluster, processes are started by raylets, in folders and with variables that are not the driver's. So the
driver makes paths absolute (`with_absolute_paths`), and sends its variables and the user's modules
(actors/job_environment.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.actors.cluster import JobNeeds, ray_session
from penstock.platform.cluster.preflight import check_nodes
from penstock.platform.config.findings import Command
from penstock.platform.config.import_paths import import_paths, module_of
from penstock.platform.config.schema import RunConfig

_VARIABLE_KEYS = ("key_variable", "token_variable", "variables")
"""Keys that name environment variables which processes of a run read."""


@asynccontextmanager
async def cluster_session(config: RunConfig, command: Command, logs: Path | None = None) -> AsyncIterator[RunConfig]:
    """Start or join Ray for the duration of a run. The nodes of a joined cluster are checked first.

    Args:
        config: Configuration of the run.
        command: What is run.
        logs: Folder for the output of the workers; None: it stays in Ray's logs.

    Yields:
        The configuration for processes on any node.

    Raises:
        PlacementError: If no cluster answers at `cluster.address`, or its nodes cannot take the run.
        ConfigError: If the user's modules are too large to be sent to the nodes.
    """
    if not is_joined(config):
        async with ray_session(config.cluster.address, config.weights.directory, logs):
            yield config
        return
    config = with_absolute_paths(config)
    needs = JobNeeds(modules=user_modules(config), variables=tuple(_named_variables(config)))
    async with ray_session(config.cluster.address, config.weights.directory, logs, needs):
        await check_nodes(config, command)
        yield config


def is_joined(config: RunConfig) -> bool:
    """Whether the run joins a running cluster."""
    return config.cluster.address != "local"


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with absolute paths, since a relative one means another place in the folder of a raylet.

    Besides `run_dir`, every text is a path that has a slash or whose key is `path`, and names something that exists.
    Names on the hub are none, unless there is a folder of that name, which is then what they mean.
    """
    tree = _absolute(config.model_dump(mode="json"))
    tree["run_dir"] = str(Path(config.run_dir).absolute())
    return RunConfig.model_validate_json(json.dumps(tree), strict=True)


def as_trained(config: RunConfig) -> RunConfig:
    """The configuration with which the run of a configuration trains."""
    return with_absolute_paths(config) if is_joined(config) else config


def _absolute(tree: Any, key: str = "") -> Any:
    if isinstance(tree, dict):
        return {name: _absolute(value, name) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_absolute(value, key) for value in tree]
    return absolute_path(tree) if isinstance(tree, str) and ("/" in tree or key == "path") else tree


def absolute_path(path: str) -> str:
    """The absolute form of a path that exists here; any other text, such as a name on the hub, as it is."""
    return os.path.abspath(path) if os.path.exists(path) else path  # noqa: PTH100, PTH110 - any text


def user_modules(config: RunConfig) -> tuple[str, ...]:
    """The modules that the configuration names by import paths."""
    return tuple(dict.fromkeys(module_of(path) for path in import_paths(config).values()))


def _named_variables(config: RunConfig) -> Iterator[str]:
    """The environment variables that the configuration names, such as that of a judge's key."""
    sections: list[Any] = [config.model_dump(mode="json", include={"reward", "sandbox", "env"})]
    while sections:
        section = sections.pop()
        if isinstance(section, dict):
            for key, value in section.items():
                if key in _VARIABLE_KEYS and value:
                    yield from [value] if isinstance(value, str) else value
                else:
                    sections.append(value)
        elif isinstance(section, list):
            sections += section
