"""Calls the user's reward and environment on two tasks with scripted answers, before anything starts.

A reward that returns text, hangs or ends its process is found here in seconds, and not by a run that has loaded its
engines. It is also called on a task of every other kind of row (other types of fields, missing ones). The calls are
made in the processes of a run (envs/workers), each within `LIMIT_S`.

A reward that needs a service or a model is not called (`is_called_before_start = False`), because neither has to be up
yet. Agent programs are not run: they may need longer than this check may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.config import EnvConfig, RewardConfig
from penstock.envs.contract import RewardFunction, TaskSource
from penstock.envs.rewards.composition import calls_of
from penstock.envs.scripted_check import kinds_of_tasks, play_script, scripted_answer, scripted_turns
from penstock.envs.streams import place_of
from penstock.envs.workers.episode_host import EpisodeHost
from penstock.envs.workers.scoring import RewardRunner
from penstock.platform.config.findings import Finding, absent, error, note, warning
from penstock.platform.config.schema import RunConfig

LIMIT_S = 10.0
"""Longest time for one call here. A call that its own key allows more time is only warned about."""
TEXT = "I do not know."
"""The answer where the task source has none."""
MAX_TURNS = 3
_SHOWN_CHARACTERS = 60


def check_first_calls(
    config: RunConfig,
    source: TaskSource,
    reward: RewardFunction,
    tasks: Sequence[Task],
    held_out: Sequence[Task] = (),
) -> Iterator[Finding]:
    """Play or answer the first and the last of `tasks`, and score both; yields a note about each result.

    The first gets its gold answer if the source has one, the last one the text of a policy that knows nothing; so does
    one task of each further kind, training or held out, of which only a failure is told.
    """
    chosen = [tasks[0], tasks[-1]] if len(tasks) > 1 else [tasks[0]]
    single_turn = [task for task in (*chosen, *tasks, *held_out) if task.environment is None]
    others = [task for task in kinds_of_tasks(single_turn) if not any(task is one for one in chosen)]
    yield from asyncio.run(_call(config, source, reward, chosen, others))


async def _call(
    config: RunConfig, source: TaskSource, reward: RewardFunction, chosen: Sequence[Task], others: Sequence[Task]
) -> list[Finding]:
    episode = config.env.episode
    limits = episode.model_copy(update={"timeout_s": min(LIMIT_S, episode.timeout_s), "num_workers": 1, "warm": 0})
    env = config.env.model_copy(update={"episode": limits})
    host, findings = EpisodeHost(env, config.seed), []
    answered: list[tuple[Task, Trajectory]] = []
    try:
        for index, task in enumerate(chosen):
            gold = scripted_turns(source, task) if index == 0 and not config.env.streams else []  # of another factory
            if task.environment is None:
                answered.append((task, scripted_answer(task, gold[0] if gold else TEXT)))
                continue
            finding, trajectory = await _play(config, env, host, task, gold)
            findings.append(finding)
            if trajectory is None:
                break  # the next task would most likely end in the same way
            answered.append((task, trajectory))
    finally:
        await host.close()
    called = _called_before_start(config.reward, reward)
    if answered and called is not None:
        scored = [*answered, *((task, scripted_answer(task, TEXT)) for task in others)]
        findings += [finding async for finding in _score(config, source, called, scored, len(answered))]
    return findings


async def _play(
    config: RunConfig, env: EnvConfig, host: EpisodeHost, task: Task, gold: list[str]
) -> tuple[Finding, Trajectory | None]:
    """Play one episode; the trajectory is None if there is none to score."""
    where, calls = f"env.factory={env.factory}", "reset"
    actions = gold or [TEXT] * min(MAX_TURNS, env.episode.max_turns)
    try:
        async with host.open(task) as opened:
            if (await opened.reset()).get("runs_itself"):
                told = "is an agent program, which is not run before the start. `penstock env check` runs it."
                return note(f"{where}: {task.task_id} {told}", "env"), None
        calls = "gold actions" if gold else f"action {TEXT!r}"
        played = await play_script(host, task, actions, env)
    except ConfigError as problem:
        return absent(" ".join(problem.violations), "env"), None
    except TrajectoryError as failure:
        what = f"{where}, called before the start on task {task.task_id}: {failure.cause}"
        if "timed out after" in failure.detail and config.env.episode.timeout_s > LIMIT_S:
            allowed = f"env.episode.timeout_s={config.env.episode.timeout_s:g} allows more, so the run starts"
            return warning(f"{what}. {allowed}, but it will wait at least that long.", "env"), None
        if calls.startswith("action"):
            advice = "A policy says such things, too: answer them with an Observation or a reward"
            return warning(f"{what}, at the {calls}. The attempt would fail. {advice}.", "env"), None
        return error(f"{what}, at its {calls}. No episode could be played. Fix it, or see `penstock env check`."), None
    trajectory = played.trajectory(task)
    how = "its gold actions" if gold else repr(TEXT)
    return note(
        f"{where}: {task.task_id} played with {how}: {len(played.turns)} turns, reward {played.reward:g}", "env"
    ), trajectory


def _called_before_start(config: RewardConfig, reward: RewardFunction) -> RewardConfig | None:
    """The reward with the parts that are called here; None if there are none."""
    if config.pool is not None:  # its device is not on this machine, or another process will need it
        return None
    is_called = {key: getattr(one, "is_called_before_start", True) for key, one, _ in calls_of(reward, {})}
    limits = {"timeout_s": min(LIMIT_S, config.timeout_s), "max_attempts": 1}
    if not config.parts:
        return config.model_copy(update=limits) if all(is_called.values()) else None
    parts = {name: part for name, part in config.parts.items() if is_called[f"reward.parts.{name}"]}
    return config.model_copy(update={**limits, "parts": parts}) if parts else None


async def _score(
    config: RunConfig,
    source: TaskSource,
    called: RewardConfig,
    answered: Sequence[tuple[Task, Trajectory]],
    num_shown: int,
) -> AsyncIterator[Finding]:
    """Score the answers, up to the first failure; the results of the first `num_shown` are told."""
    has_opinion = False
    where = f"reward.fn={called.fn}" if called.fn else f"reward.parts ({called.label})"
    runner = RewardRunner(called, config.sandbox)
    try:
        for number, (task, trajectory) in enumerate(answered):
            shown = repr(trajectory.response[:_SHOWN_CHARACTERS])
            try:
                score = await runner.score(task, trajectory)
            except ConfigError as problem:
                yield absent(" ".join(problem.violations), "reward")
                return
            except TrajectoryError as failure:
                place = place_of(config.env, source, task)
                what = f"{where}, called before the start on task {place} with the answer {shown}"
                if "timed out after" in failure.detail and not config.is_typed("reward"):
                    yield warning(
                        f"{what}: {failure.cause}. This machine may be busy; scores may take as long.", "reward"
                    )
                    return
                yield _failed_call(f"{what}: {failure.cause}", failure, config.reward.timeout_s)
                return
            has_opinion |= score.reward is not None
            parts = "".join(f", {name} {value:g}" for name, value in score.parts.items())
            found = "no opinion (None)" if score.reward is None else f"reward {score.reward:g}{parts}"
            if number < num_shown:
                yield note(f"{where}: {task.task_id} answered with {shown}: {found}", "reward")
        if not has_opinion:
            yield warning(
                f"{where}: it had no opinion (None) on any of the {len(answered)} answers that it was called with "
                "before the start. Such answers are never trained. If that is not meant, return a number: a function "
                "without `return` gives None.",
                "reward",
            )
    finally:
        await runner.shutdown()


def _failed_call(what: str, failure: TrajectoryError, timeout_s: float) -> Finding:
    if "timed out after" in failure.detail and timeout_s > LIMIT_S:
        return warning(
            f"{what}. reward.timeout_s={timeout_s:g} allows more, so the run starts, but every score may take as long.",
            "reward",
        )
    return error(
        f"{what}. Such an attempt fails. A reward returns a finite number, or a dict of named numbers, "
        f"within reward.timeout_s={timeout_s:g}, or None for no opinion; a wrong answer is 0, not an exception "
        "(docs/guides/first-reward.md).",
        "reward",
        "env",
    )
