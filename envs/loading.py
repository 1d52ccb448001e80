"""Loads and checks the user's objects that the configuration sections `env` and `reward` name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from pydantic import ValidationError

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import EnvConfig, PeerStyle, RewardConfig
from penstock.envs.contract import RewardContext, RewardFactory, RewardFunction, TaskSource
from penstock.envs.import_path import load_object, nearest_hint
from penstock.envs.registry import factory_path
from penstock.envs.rewards.composition import WeightedPart, WeightedSum
from penstock.envs.rewards.peer_styles import PEERS, recognise

_IN_ANOTHER_INTERPRETER = "penstock.envs.workers.task_host:HostedTasks"


def load_task_source(config: EnvConfig, seed: int) -> TaskSource:
    """Build the task source that `env.factory` names.

    Raises:
        ConfigError: If the path does not resolve, the arguments do not fit, or the result is not a task source.
    """
    if config.python is not None:
        return cast("TaskSource", load_object(_IN_ANOTHER_INTERPRETER)(config, seed))
    factory = load_object(factory_path(config.factory), "env.factory")
    if not callable(factory):
        raise ConfigError(_not_callable("env.factory", config.factory, factory))
    try:
        source = factory(seed=seed, **config.args)
    except (TypeError, ValueError) as error:
        refusal = f"env.args={config.args}: {config.factory} refuses them: {error}."
        raise ConfigError(refusal + _misspelt(factory, config)) from error
    missing = [name for name in ("train", "held_out") if not callable(getattr(source, name, None))]
    if missing:
        raise ConfigError(
            f"env.factory={config.factory!r} returned a {type(source).__name__} without {' and '.join(missing)}. "
            "A task source has train() and held_out(num_tasks); see penstock/envs/contract.py."
        )
    if hasattr(source, "environment") and not callable(source.environment):
        raise ConfigError(_not_callable("env.factory", f"{config.factory}.environment", source.environment))
    return cast("TaskSource", source)


def load_reward(config: RewardConfig, context: RewardContext | None = None) -> RewardFunction:
    """Import and build the reward of `reward.fn` or `reward.parts`.

    Raises:
        ConfigError: If a path does not resolve, its object is not callable or raises when it is built, or its arguments
            do not fit.
    """
    if (config.fn is None) == (not config.parts):
        raise ConfigError(
            f"reward.fn={config.fn!r} with {len(config.parts)} reward.parts: a run has one reward function, or "
            "named parts that are added up. Set one of the two, the other to null or {}."
        )
    if config.parts and config.args:
        raise ConfigError(
            f"reward.args={config.args} with {len(config.parts)} reward.parts: it would reach none of them. Move "
            "it to the part that takes it, reward.parts.<name>.args, and set reward.args={}."
        )
    if config.parts and config.style:
        raise ConfigError(
            f"reward.style={config.style} with {len(config.parts)} reward.parts: it would act on none of them. Set "
            "reward.parts.<name>.style for each part that needs it, and reward.style=null."
        )
    context = replace(context or RewardContext(), timeout_s=config.timeout_s, max_concurrency=config.max_concurrency)
    if config.fn is not None:
        return _load_one(config.fn, config.args, config.style, "reward", context)
    for name, part in config.parts.items():
        if part.clip is not None and part.clip[0] > part.clip[1]:
            raise ConfigError(f"reward.parts.{name}.clip={list(part.clip)}: the lowest value is above the highest.")
    parts = {
        name: WeightedPart(
            _load_one(part.fn, part.args, part.style, f"reward.parts.{name}", context), part.weight, part.clip
        )
        for name, part in config.parts.items()
    }
    try:
        return WeightedSum(parts, cache_entries=config.cache_entries)
    except ValueError as error:
        raise ConfigError(f"reward.parts: {error}") from error


def _load_one(
    path: str, args: Mapping[str, Any], style: PeerStyle | None, section: str, context: RewardContext
) -> RewardFunction:
    function = load_object(path, f"{section}.fn")
    if not callable(function):
        raise ConfigError(_not_callable(f"{section}.fn", path, function))
    if style is not None:
        try:
            return next(peer for peer in PEERS if peer.style == style)(function, args)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{section}.style={style} with {section}.fn={path!r}: it is no reward function of {style}: {error}. "
                "Leave the style out for a function of a trajectory (docs/guides/first-reward.md)."
            ) from error
    if (seen := recognise(function)) is not None:
        raise ConfigError(
            f"{section}.fn={path!r} takes {inspect.signature(function)}, the parameters of a reward of {seen}. "
            f"Add {section}.style={seen}, so that it is called as {seen} calls it (docs/guides/first-reward.md)."
        )
    if isinstance(function, type) and isinstance(function, RewardFactory):
        try:
            return cast("RewardFunction", function.build(context, **args))
        except (TypeError, ValueError) as error:
            wrong = str(error)
            if isinstance(error, ValidationError):
                wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ConfigError(f"{section}.args={dict(args)}: {path} refuses them: {wrong}.") from error
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # user code: anything it raises is reported
            raise ConfigError(f"{section}.fn={path!r}: its build raised {type(error).__name__}: {error}") from error
    return partial(function, **args) if args else cast("RewardFunction", function)


def _not_callable(key: str, path: str, value: object) -> str:
    return f"{key}={path!r} is not callable: it is {value!r:.40}, of type {type(value).__name__}. Name a function."


def _misspelt(factory: Callable[..., object], config: EnvConfig) -> str:
    """Hints with the nearest parameter, for each argument that the factory does not have."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return ""
    return "".join(nearest_hint(name, parameters) for name in config.args if name not in parameters)
