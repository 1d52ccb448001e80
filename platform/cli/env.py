"""`penstock env list | show | check | play`: inspect an environment without a model, an engine or Ray."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import get_args

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text
from yaml import YAMLError, safe_load

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import MAIN_THREAD
from penstock.envs.config import EnvConfig, EpisodeConfig, IsolationConfig, PeerStyle, RewardConfig
from penstock.envs.endpoint.scripted import NewText, play_program
from penstock.envs.environment import Action, EnvironmentSource
from penstock.envs.import_path import load_object
from penstock.envs.loading import load_reward, load_task_source
from penstock.envs.registry import factory_path, known_factories
from penstock.envs.scripted_check import Finding, check_environment
from penstock.envs.streams import MAIN, named_tasks
from penstock.envs.threads import ThreadNames, take_turns
from penstock.envs.tools.functions import with_tools
from penstock.envs.workers.episode_host import EpisodeHost, PlayedEpisode
from penstock.platform.checks.tasks import check_reward, check_sample, read_sample
from penstock.platform.config.compose import compose_args
from penstock.platform.config.field_errors import describe_errors

_MARK = {True: Text("ok", "green"), False: Text("FAILED", "bold red"), None: Text("not checked")}


def _isolation(text: str | None) -> IsolationConfig | None:
    """Parse `--isolation` as YAML, as on the command line of `train`.

    Raises:
        ConfigError: If it is neither the name of an isolation nor a set of grants.
    """
    if text is None:
        return None
    try:
        return EpisodeConfig(isolation=safe_load(text)).isolation
    except (ValueError, YAMLError) as error:
        wanted = "process, strict, or grants, e.g. '{network: true, variables: [MY_KEY]}'"
        raise ConfigError([f"--isolation={text!r}: write {wanted}."]) from error


def run_env_list(console: Console) -> int:
    """Print one line per built-in or installed environment."""
    table = Table("name", "import path")
    for name, path in sorted(known_factories().items()):
        table.add_row(name, path)
    console.print(table)
    return 0


def run_env_show(factory: str, pairs: list[str], console: Console, python: str | None = None) -> int:
    """Print the arguments of a factory of ours, its first tasks, and whether they have several turns."""
    source = load_task_source(EnvConfig(factory=factory, args=compose_args(pairs), python=python), 0)
    if python is None:
        path = factory_path(factory)
        made_by = load_object(path, "env.factory")
        console.print(f"{path}{inspect.signature(made_by)}", markup=False)
        if documentation := inspect.getdoc(made_by):
            console.print(documentation, markup=False)
    kind = "several turns, with an environment" if isinstance(source, EnvironmentSource) else "a single turn"
    console.print(f"\ntasks of {kind}; the first two:")
    for task in islice(source.train(), 2):
        console.print(f"- {task.task_id}: prompt {task.prompt!r}\n  fields {dict(task.fields)!r}", markup=False)
    return 0


def run_env_check(
    factory: str,
    pairs: list[str],
    max_turns: int,
    timeout_s: float,
    reward: str | None,
    style: str | None,
    isolation: str | None,
    console: Console,
    python: str | None = None,
) -> int:
    """Play an environment with a scripted agent, or score scripted answers; returns 1 if a check failed, else 0."""
    if style not in (None, *get_args(PeerStyle)):
        raise ConfigError([f"--style={style}: it is one of {', '.join(get_args(PeerStyle))}, or left out."])
    wanted = _isolation(isolation)
    try:
        limits = EpisodeConfig(max_turns=max_turns, timeout_s=timeout_s, isolation=wanted)
    except ValidationError as error:
        typed = {
            "env.episode.max_turns": f"--max-turns={max_turns}",
            "env.episode.timeout_s": f"--timeout-s={timeout_s}",
        }
        wrong = describe_errors(error, typed, EpisodeConfig, ("env", "episode"))
        raise ConfigError(list(wrong.values())) from error
    config = EnvConfig(factory=factory, args=compose_args(pairs), episode=limits, python=python)
    scored_by = (
        None
        if reward is None
        else RewardConfig.model_validate({"fn": reward, "style": style, "timeout_s": timeout_s, "isolation": wanted})
    )
    findings: list[Finding] = asyncio.run(check_environment(config, scored_by, partial(console.print, markup=False)))
    findings += _check_as_a_run(config, scored_by)
    table = Table("check", "verdict", "what was found")
    for finding in findings:
        table.add_row(finding.name, _MARK[finding.is_good], finding.found)
    console.print(table)
    bad = [finding.name for finding in findings if finding.is_good is False]
    console.print(f"{len(bad)} of {len(findings)} checks failed" if bad else "no check failed")
    return int(bool(bad))


def _check_as_a_run(config: EnvConfig, scored_by: RewardConfig | None) -> Iterator[Finding]:
    """What a dry run of `penstock train` checks of the tasks, and of the reward with them."""
    try:
        source = load_task_source(config, 0)
        tasks = read_sample(source)
    except Exception as problem:  # noqa: BLE001 - user code: anything it raises is a finding
        yield Finding("tasks can be read", is_good=False, found=f"{type(problem).__name__}: {problem}")
        return
    checked = {"ids and splits": list(check_sample(config, tasks))}
    if scored_by is not None:
        checked["the reward takes every task"] = list(
            check_reward(load_reward(scored_by), tasks, getattr(source, "left_out", None))
        )
    size = f"{len(tasks.train)} training and {len(tasks.held_out)} held-out tasks"
    for name, problems in checked.items():
        yield Finding(name, not problems, "; ".join(problem.message for problem in problems) or size)


def run_env_play(
    factory: str,
    pairs: list[str],
    ask: Callable[[], str],
    console: Console,
    isolation: str | None = None,
    python: str | None = None,
) -> int:
    """Play one episode by hand until an empty line or the end of the input."""
    episode = EpisodeConfig(isolation=_isolation(isolation))
    config = EnvConfig(factory=factory, args=compose_args(pairs), episode=episode, python=python)
    source = load_task_source(config, 0)
    if not isinstance(source, EnvironmentSource):
        raise ConfigError(
            [f"env.factory={factory!r} has tasks of a single turn: there is nothing to play. See `penstock env show`."]
        )
    task = next(named_tasks(source, MAIN, source.train()))
    return asyncio.run(_play(config, task, ask, console))


async def _play(config: EnvConfig, task: Task, ask: Callable[[], str], console: Console) -> int:
    host = EpisodeHost(config, 0)
    try:
        async with host.open(task) as played:
            began = await played.reset()
            if began.get("runs_itself"):
                return await _answer_program(config, played, task, ask, console)
            names = ThreadNames(task.task_id, config.episode.max_threads)
            reply, num_turns = began, 0
            while said := names.check(reply):
                if num_turns + len(said) > config.episode.max_turns:
                    console.print(f"env.episode.max_turns={config.episode.max_turns} turns are over")
                    return 0
                actions = []
                for turn, one in enumerate(said, num_turns):
                    name = "" if one.thread == MAIN_THREAD else f"{one.thread}: "
                    shown = with_tools(one.messages, one.tools) if one.tools else one.content
                    console.print(f"{name}{shown}", markup=False)
                    actions.append(Action(await asyncio.to_thread(_line, ask), turn=turn, thread=one.thread))
                if not all(action.text for action in actions):
                    return 0
                num_turns += len(actions)
                reply = await take_turns(played, reply, actions)
            console.print(f"done: reward {reply['reward']:g} {reply['parts']}", markup=False)
            return 0
    except TrajectoryError as failure:
        console.print(f"the environment failed: {failure.detail}", markup=False)
        return 1
    finally:
        await host.close()


async def _answer_program(
    config: EnvConfig, played: PlayedEpisode, task: Task, ask: Callable[[], str], console: Console
) -> int:
    async def say(part: NewText) -> str | None:
        console.print(part, markup=False)
        return await asyncio.to_thread(_line, ask) or None

    reply = await play_program(config, played, task.task_id, say)
    reward = f"{reply['reward']:g} {reply.get('parts', {})}" if "reward" in reply else "not given by the program"
    console.print(f"done: reward {reward}", markup=False)
    return 0


def _line(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except EOFError:
        return ""
