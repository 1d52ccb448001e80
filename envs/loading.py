"""From the `env` and `reward` sections of the configuration to the user's objects, checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import EnvConfig, RewardConfig
from penstock.envs.contract import RewardFunction, TaskSource
from penstock.envs.import_path import load_object, nearest_hint


def load_task_source(config: EnvConfig, seed: int) -> TaskSource:
    """Build the task source that `env.factory` names.

    Raises:
        ConfigError: If the path does not resolve, the arguments do not fit, or the result is no task source.
    """
    factory = load_object(config.factory, "env.factory")
    if not callable(factory):
        raise ConfigError([_not_callable("env.factory", config.factory, factory)])
    try:
        source = factory(seed=seed, **config.args)
    except (TypeError, ValueError) as error:
        refusal = f"env.args={config.args}: {config.factory} refuses them: {error}."
        raise ConfigError([refusal + _misspelt(factory, config)]) from error
    missing = [name for name in ("train", "held_out") if not callable(getattr(source, name, None))]
    if missing:
        raise ConfigError(
            [
                f"env.factory={config.factory!r} returned a {type(source).__name__} without {' and '.join(missing)}. "
                "A task source has train() and held_out(num_tasks); see penstock/envs/contract.py."
            ]
        )
    return cast("TaskSource", source)


def load_reward(config: RewardConfig) -> RewardFunction:
    """Import the function that `reward.fn` names.

    Raises:
        ConfigError: If the path does not resolve, or what it names cannot be called with a trajectory.
    """
    function = load_object(config.fn, "reward.fn")
    if not callable(function):
        raise ConfigError([_not_callable("reward.fn", config.fn, function)])
    return cast("RewardFunction", function)


def _not_callable(key: str, path: str, value: object) -> str:
    return f"{key}={path!r} is not callable: it is {value!r:.40}, of type {type(value).__name__}. Name a function."


def _misspelt(factory: Callable[..., object], config: EnvConfig) -> str:
    """The nearest parameter to each argument that the factory does not have."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return ""
    return "".join(nearest_hint(name, parameters) for name in config.args if name not in parameters)
