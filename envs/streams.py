"""From the `env` section to the streams of training tasks."""

from __future__ import annotations

from penstock.dataflow.streams import TaskStream
from penstock.envs.config import EnvConfig, StreamConfig
from penstock.envs.loading import load_task_source


def load_task_streams(config: EnvConfig, seed: int) -> list[TaskStream]:
    """Every stream of training tasks; one without a name where none is configured.

    Raises:
        ConfigError: If a factory does not resolve, refuses its arguments or returns no task source.
    """
    if not config.streams:
        return [TaskStream("", load_task_source(config, seed).train())]
    return [
        TaskStream(name, load_task_source(stream_env(config, stream), seed).train(), stream.weight, stream.quota)
        for name, stream in config.streams.items()
    ]


def stream_env(config: EnvConfig, stream: StreamConfig) -> EnvConfig:
    """The environment of one stream: the factory's own arguments are inherited, another factory's are not."""
    if stream.factory is None or stream.factory == config.factory:
        return EnvConfig(factory=config.factory, args={**config.args, **stream.args})
    return EnvConfig(factory=stream.factory, args=stream.args)
