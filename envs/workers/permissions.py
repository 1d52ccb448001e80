"""The permissions of user code: all those of the user, or, with `isolation: strict`, only those of its section.

In both cases it runs in processes that are killed at a limit (child_process.py), and never sees a tracker's key.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.envs.config import EnvConfig, IsolationConfig, RewardConfig
from penstock.envs.streams import stream_factories

_NOT_FOR_USER_CODE = frozenset({
    "WANDB_API_KEY", "MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "TRACKIO_SERVER_URL",
    "TRACKIO_WRITE_TOKEN", "SWANLAB_API_KEY",
})  # fmt: skip
"""Secrets of the run that no reward and no environment needs."""
_NAMES = frozenset({
    "PATH", "LANG", "LANGUAGE", "TZ", "TERM", "HOME", "USER", "LOGNAME", "VIRTUAL_ENV", "LD_LIBRARY_PATH",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TORCH_HOME",
    "TOKENIZERS_PARALLELISM",
})  # fmt: skip
_BEGINNINGS = (
    "LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "PENSTOCK_",
)  # fmt: skip
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def grants_of_reward(reward: RewardConfig) -> IsolationConfig | None:
    """The permissions of a reward, including paths in its arguments, all absolute; None: it is not isolated."""
    return _grants(reward.isolation, [reward.args, *(part.args for part in reward.parts.values())])


def grants_of_episodes(env: EnvConfig) -> IsolationConfig | None:
    """The permissions of an environment and all its streams, which share processes.

    Raises:
        ConfigError: If a factory is an unregistered name.
    """
    return _grants(env.episode.isolation, [one.args for one in stream_factories(env).values()])


def _grants(isolation: IsolationConfig | None, args: Iterable[Mapping[str, Any]]) -> IsolationConfig | None:
    if isolation is None:
        return None
    named = [os.path.expanduser(path) for path in isolation.read]  # noqa: PTH111
    named += [path for one in args for path in _paths_in(one)]
    return isolation.model_copy(update={"read": tuple(dict.fromkeys(map(os.path.abspath, named)))})


def _paths_in(value: object) -> Iterator[str]:
    """Every text that is an existing path: the user has passed it to the code."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _paths_in(one)
    elif isinstance(value, str) and value.strip("./~") and "\0" not in value and os.path.exists(value):  # noqa: PTH110
        yield value


def environment_for(grants: IsolationConfig | None) -> dict[str, str]:
    """The environment of a process with user code."""
    if grants is None:
        return {name: value for name, value in os.environ.items() if name not in _NOT_FOR_USER_CODE}
    return {name: value for name, value in os.environ.items() if name in grants.variables or _is_harmless(name)}


def _is_harmless(name: str) -> bool:
    return name in _NAMES or (name.startswith(_BEGINNINGS) and not any(word in name for word in _SECRETS))
