"""Builds the streams of training tasks from the configuration section `env`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from penstock.dataflow.stages import Stage
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import TaskStream
from penstock.envs.config import EnvConfig, SourceConfig
from penstock.envs.contract import TaskSource
from penstock.envs.environment import EnvironmentSource
from penstock.envs.loading import load_task_source

MAIN = ""
"""Name of the stream of `env.factory`."""
MAX_HELD_OUT_TASKS = 1024
"""Held-out tasks that an evaluation has if no number is given and there are more."""


def load_task_streams(config: EnvConfig, seed: int) -> list[TaskStream]:
    """Every stream of training tasks; a single unnamed one if none is configured.

    Raises:
        ConfigError: If a factory does not resolve, refuses its arguments or returns no task source.
    """
    if not config.streams:
        source = load_task_source(config, seed)
        return [TaskStream(MAIN, named_tasks(source, MAIN, source.train()))]
    streams: list[TaskStream] = []
    for name, stream in config.streams.items():
        source = load_task_source(stream_env(config, stream), seed)
        weight = stream.weight if not config.has_stages else float(not streams)  # the first stage is open
        streams.append(TaskStream(name, named_tasks(source, name, source.train()), weight, stream.quota))
    return streams


def stages_of(config: EnvConfig) -> list[Stage]:
    """The streams as stages, in order; empty if none has a gate."""
    if not config.has_stages:
        return []
    return [Stage(name, stream.gate, stream.gate_groups) for name, stream in config.streams.items()]


def load_held_out(config: EnvConfig, seed: int, num_tasks: int | None) -> list[Task]:
    """The factory's held-out tasks, as `held_out_tasks`.

    Raises:
        ConfigError: As `load_task_source`.
        ValueError: If there are fewer.
    """
    return held_out_tasks(load_task_source(config, seed), num_tasks)


def held_out_tasks(source: TaskSource, num_tasks: int | None, name: str = MAIN) -> list[Task]:
    """The first `num_tasks` held-out tasks of a source; None is all of them, at most `MAX_HELD_OUT_TASKS`.

    Args:
        source: The source.
        num_tasks: Their number.
        name: Stream whose environment answers, if they have one.

    Raises:
        ValueError: If a number is given and there are fewer, with both numbers.
    """
    asked = MAX_HELD_OUT_TASKS if num_tasks is None else num_tasks
    tasks = list(named_tasks(source, name, source.held_out(asked))) if asked else []
    if num_tasks is not None and len(tasks) < num_tasks:
        raise ValueError(f"there are only {len(tasks)} held-out tasks. Use at most {len(tasks)}, or hold out more.")
    return tasks


def named_tasks(source: TaskSource, name: str, tasks: Iterable[Task]) -> Iterator[Task]:
    """Set the name of the stream on tasks of an `EnvironmentSource`, so that the episode host finds its environment."""
    if not isinstance(source, EnvironmentSource):
        return iter(tasks)
    return (replace(task, environment=name) for task in tasks)


def place_of(config: EnvConfig, source: TaskSource, task: Task) -> str:
    """The id of a task, for messages, with the place of its row if the source has `where(task)`."""
    where = None if config.streams else getattr(source, "where", None)
    return task.task_id if where is None else f"{task.task_id} ({where(task)})"


def stream_factories(config: EnvConfig) -> dict[str, EnvConfig]:
    """Name -> configuration of its tasks and environments, for `env.factory` and every stream."""
    return {MAIN: config} | {name: stream_env(config, stream) for name, stream in config.streams.items()}


def stream_env(config: EnvConfig, stream: SourceConfig) -> EnvConfig:
    """The environment of one stream or evaluation set. It inherits `env.args` only if it has the same factory."""
    factory, args = stream.factory or config.factory, stream.args
    if factory == config.factory:
        args = {**config.args, **args}
    episode = config.episode
    if stream.max_open is not None:
        fewer = {"max_open": stream.max_open, "warm": min(episode.warm, stream.max_open)}
        episode = episode.model_copy(update=fewer)
    return EnvConfig(factory=factory, args=args, python=config.python, episode=episode)
