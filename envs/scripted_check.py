"""Plays an environment with scripted actions, without a model, for `penstock env check`.

It plays garbage, then the gold actions. Everything runs in an environment process as in training, so a check that hangs
or dies becomes a row of the table and does not end the command. Each task is announced before it is played, and the
first failure ends its row: after a hang, every further task would most likely take its whole time limit, too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ids import TrajectoryId
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import MAIN_THREAD, Episode, EpisodeEnd, Thread, Trajectory, Turn
from penstock.dataflow.versions import Span
from penstock.envs.config import EnvConfig, RewardConfig
from penstock.envs.contract import TaskSource
from penstock.envs.endpoint.scripted import NewText, play_program
from penstock.envs.environment import Action, EnvironmentSource, Observation
from penstock.envs.loading import load_task_source
from penstock.envs.rewards.answers import NO_ANSWER, kind_of
from penstock.envs.streams import MAIN, named_tasks
from penstock.envs.threads import ThreadNames, take_turns
from penstock.envs.workers.episode_host import EpisodeHost, PlayedEpisode
from penstock.envs.workers.scoring import RewardRunner

NUM_TASKS = 8
NUM_READ_TASKS = 4096
"""Training tasks of which one of each kind is scored."""
MAX_KINDS = 16
GARBAGE = ("", "???", "<tool_call>{not json</tool_call>", "0" * 500, "né ✓ \u202e", "I do not know.")
FULL_REWARD = 1.0
NO_OPINION = "the reward had no opinion (None) on any answer"
Say = Callable[[str], None]
"""Shows a line of progress."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table; `is_good` is None if nothing could be checked."""

    name: str
    is_good: bool | None
    found: str


@dataclass(frozen=True, slots=True)
class PlayedScript:
    """One scripted episode."""

    replies: list[dict[str, Any]]
    step_s: list[float]
    turns: list[Turn]
    """The actions, with the observations that followed; empty for an agent program."""

    @property
    def reward(self) -> float:
        return float(sum(reply.get("reward", 0.0) for reply in self.replies))

    def trajectory(self, task: Task) -> Trajectory:
        """The episode as a reward function gets it."""
        sums: dict[str, dict[str, float]] = {"parts": {}, "counts": {}}
        for kind, named in sums.items():
            for name, value in (pair for reply in self.replies for pair in reply.get(kind, {}).items()):
                named[name] = named.get(name, 0.0) + value
        is_done = bool(self.replies[-1].get("done"))
        end: EpisodeEnd = "done" if is_done else "max_turns"
        answer = self.replies[-1].get("answer")
        episode = Episode(tuple(self.turns), end, self.reward, sums["parts"], sums["counts"], answer)
        return scripted_trajectory(task, self.turns, episode)


def _good(name: str, found: str) -> Finding:
    return Finding(name, is_good=True, found=found)


def _bad(name: str, found: str) -> Finding:
    return Finding(name, is_good=False, found=found)


async def check_environment(
    config: EnvConfig, reward: RewardConfig | None = None, say: Say = lambda _: None
) -> list[Finding]:
    """Run all checks, in the order in which a user would read them.

    Args:
        config: The environment.
        reward: Scores answers to single-turn tasks.
        say: Shows each task before it is played or scored.

    Raises:
        ConfigError: If the factory or the reward does not resolve or refuses its arguments.
    """
    say(f"reading {NUM_TASKS} tasks of {config.factory}")
    source = load_task_source(config, 0)
    findings, tasks = _check_tasks(config, source)
    if not tasks:
        return findings
    if not isinstance(source, EnvironmentSource):
        if reward is None:
            return [*findings, Finding("rewards", None, "single-turn tasks: name what scores an answer by --reward")]
        try:
            kinds = kinds_of_tasks([*islice(source.train(), NUM_READ_TASKS), *source.held_out(NUM_READ_TASKS)])
        except Exception as error:  # noqa: BLE001  user code: anything it raises is a finding
            return [*findings, _bad("more tasks", f"raised {type(error).__name__}: {error}")]
        return [*findings, *await _check_answers(reward, source, tasks, kinds, say)]
    if reward is not None:
        raise ConfigError(f"--reward {reward.fn}: {config.factory} has episodes with their own reward; leave it out.")
    host = EpisodeHost(config, 0)
    try:
        return [*findings, *await _check_episodes(host, source, tasks, config, say)]
    finally:
        await host.close()


def _check_tasks(config: EnvConfig, source: TaskSource) -> tuple[list[Finding], list[Task]]:
    try:
        tasks = list(islice(named_tasks(source, MAIN, source.train()), NUM_TASKS))
        again = load_task_source(config, 0)
        same = list(islice(named_tasks(again, MAIN, again.train()), NUM_TASKS))
    except Exception as error:  # noqa: BLE001  user code: anything it raises is a finding
        return [_bad("train()", f"raised {type(error).__name__}: {error}")], []
    strange = next((task for task in tasks if not isinstance(task, Task)), None)
    if strange is not None or not tasks:
        return [_bad("train()", f"gave {strange!r:.80}; expected Task objects")], []
    ids = [task.task_id for task in tasks]
    findings = [
        _good("train()", f"{len(tasks)} tasks, the first is {ids[0]}"),
        Finding("same seed, same tasks", tasks == same, "equal" if tasks == same else "the second source differs"),
        Finding("ids are unique", len(set(ids)) == len(ids), f"{len(set(ids))} ids for {len(ids)} tasks"),
    ]
    try:
        held_out = source.held_out(1)
    except Exception as error:  # noqa: BLE001  user code
        return [*findings, _bad("held_out(1)", f"raised {type(error).__name__}: {error}")], tasks
    is_good = isinstance(held_out, Sequence) and len(held_out) == 1 and isinstance(held_out[0], Task)
    found = f"gave {len(held_out)} tasks" if is_good else f"gave {held_out!r:.80}; expected a list of a Task"
    return [*findings, Finding("held_out(1)", is_good, found)], tasks


def kinds_of_tasks(tasks: Sequence[Task]) -> list[Task]:
    """The first task of each kind of value of each field, or without it; at most `MAX_KINDS`.

    A reward that takes one value of a kind most likely takes all of them, and one that takes numbers may fail at text.
    The field `answer` comes first, and in it what no response equals, so that no number of other fields hides it.
    """
    names = dict.fromkeys(name for task in tasks for name in task.fields)
    first: dict[tuple[str, str], Task] = {}
    for task in tasks:
        for name in names:
            first.setdefault((name, kind_of(task.fields[name]) if name in task.fields else ""), task)
    order = sorted(first, key=lambda kind: (kind[0] != "answer", NO_ANSWER not in kind[1]))
    return list({id(first[kind]): first[kind] for kind in order}.values())[:MAX_KINDS] if names else list(tasks[:1])


async def _check_answers(
    reward: RewardConfig, source: TaskSource, tasks: Sequence[Task], kinds: Sequence[Task], say: Say
) -> list[Finding]:
    """Score garbage and the gold answer of each task with the reward function, in a reward process, and one answer to
    a task of each kind.
    """
    runner, name = RewardRunner(reward), "gold gets full reward"
    try:
        say(f"loading {reward.label}")
        await runner.start()
        scored = _Scored(runner, say)
        answers = [(task, text) for task in tasks for text in GARBAGE]
        garbage = await scored.rewards("garbage", answers, len(GARBAGE))
        if isinstance(garbage, str):
            return [_bad("garbage gets no full reward", garbage)]
        of_kinds = await scored.rewards("one answer", [(task, GARBAGE[-1]) for task in kinds if task not in tasks], 1)
        if isinstance(of_kinds, str):
            return [_bad("every kind of row is scored", of_kinds)]
        best = max((one for one in garbage if one is not None), default=None)
        if best is None:
            findings = [Finding("garbage gets no full reward", None, NO_OPINION)]
        else:
            is_low, (task, text) = best < FULL_REWARD, answers[garbage.index(best)]
            which = "" if is_low else f": {text!r} for task {task.task_id}; a right answer gets {FULL_REWARD:g} or more"
            findings = [Finding("garbage gets no full reward", is_low, f"at most {best:g}{which}")]
        findings.append(_good("every kind of row is scored", f"{len(kinds)} in {NUM_READ_TASKS} tasks at most"))
        gold_response = getattr(source, "gold_response", None)
        if gold_response is None:
            return [*findings, Finding(name, None, "it has no gold_response(task)")]
        try:
            answers = [(task, gold_response(task)) for task in tasks]
        except Exception as error:  # noqa: BLE001  user code
            return [*findings, _bad(name, f"gold_response raised {type(error).__name__}: {error}")]
        gold = await scored.rewards("gold answer", answers, 1)
        if isinstance(gold, str):
            return [*findings, _bad(name, gold)]
        given = [one for one in gold if one is not None]
        if not given:
            return [*findings, Finding(name, None, NO_OPINION)]
        found = f"at least {min(given):g} in {len(given)} tasks"
        return [*findings, Finding(name, min(given) >= FULL_REWARD, found)]
    finally:
        await runner.shutdown()


@dataclass(frozen=True, slots=True)
class _Scored:
    """Scores answers one after another."""

    runner: RewardRunner
    say: Say

    async def rewards(self, what: str, answers: Sequence[tuple[Task, str]], num_each: int) -> list[float | None] | str:
        """The rewards of all answers, `num_each` per task; or the first failure, with its task and its answer."""
        rewards: list[float | None] = []
        for task, text in answers:
            if len(rewards) % num_each == 0:
                self.say(
                    f"{what} for task {1 + len(rewards) // num_each} of {len(answers) // num_each}: {task.task_id}"
                )
            (score,) = await self.runner.score_many([(task, scripted_answer(task, text))])
            if isinstance(score, TrajectoryError):
                return f"{score.summary} (task {task.task_id}, answer {text!r:.60})"
            rewards.append(score.reward)
        return rewards


def scripted_turns(source: TaskSource, task: Task) -> list[str]:
    """The source's gold answer, or the gold actions of its environment; empty if there are none."""
    gold = getattr(source, "gold_response" if task.environment is None else "gold_actions", None)
    try:
        given = [] if gold is None else gold(task)
        turns = [given] if isinstance(given, str) else list(given)
    except Exception:  # noqa: BLE001  user code; `penstock env check` reports it
        return []
    return turns if all(isinstance(turn, str) for turn in turns) else []


def scripted_answer(task: Task, text: str) -> Trajectory:
    """A finished answer as a reward function gets it; only the number of its tokens is real."""
    return scripted_trajectory(task, [Turn(text, "stop", 1 + len(text))])


def scripted_trajectory(task: Task, turns: Sequence[Turn], episode: Episode | None = None) -> Trajectory:
    """A trajectory of scripted turns, of one prompt token per thread. Token ids and logprobs are 0."""
    names = list(dict.fromkeys(turn.thread for turn in turns)) or [MAIN_THREAD]
    sampled = [sum(turn.num_tokens for turn in turns if turn.thread == name) for name in names]
    loss_mask = np.concatenate([np.arange(1 + num_tokens) > 0 for num_tokens in sampled])
    prompt = task.prompt if isinstance(task.prompt, str) else json.dumps(task.prompt)
    has_main_only = names == [MAIN_THREAD]
    return Trajectory(
        trajectory_id=TrajectoryId(task.task_id),
        task_id=task.task_id,
        token_ids=np.zeros(len(loss_mask), np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=np.zeros(len(loss_mask), np.float32),
        spans=tuple(Span(0, num_tokens) for num_tokens in sampled if num_tokens),
        prompt=prompt,
        response="".join(turn.response for turn in turns),
        finish_reason="stop" if episode is None or episode.end == "done" else "length",
        episode=episode,
        threads=() if has_main_only else tuple(map(Thread, names, [1 + num for num in sampled])),
        messages=() if isinstance(task.prompt, str) else task.prompt,
    )


async def _check_episodes(
    host: EpisodeHost, source: EnvironmentSource, tasks: Sequence[Task], config: EnvConfig, say: Say
) -> list[Finding]:
    max_turns = config.episode.max_turns
    gold_actions = getattr(source, "gold_actions", None)
    script = list(islice(cycle(GARBAGE), max_turns))
    try:
        say(f"garbage, twice, for task {tasks[0].task_id}")
        first, second = [await play_script(host, tasks[0], script, config) for _ in range(2)]
        garbage = []
        for number, task in enumerate(tasks, 1):
            say(f"garbage for task {number} of {len(tasks)}: {task.task_id}")
            garbage.append(await play_script(host, task, script, config))
    except TrajectoryError as failure:
        return [_bad("garbage", failure.detail.strip().splitlines()[-1])]
    times = [seconds for played in garbage for seconds in played.step_s]
    is_same = _without_times(first.replies) == _without_times(second.replies)
    findings = [
        _good("garbage is no failure", f"{len(times)} steps"),
        Finding("same actions, same replies", is_same, "equal" if is_same else "the second episode differs"),
        _good("time per step", f"median {1000 * median(times):.2f} ms, longest {1000 * max(times):.2f} ms"),
    ]
    best = max(played.reward for played in garbage)
    findings.append(Finding("garbage gets no full reward", best < FULL_REWARD, f"at most {best:g}"))
    if gold_actions is None:
        return [*findings, Finding("gold gets full reward", None, "it has no gold_actions(task)")]
    return [*findings, await _check_gold(host, tasks, gold_actions, config, say)]


def _without_times(replies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Replies without those counts that are seconds."""
    counts = [{name: one for name, one in reply.get("counts", {}).items() if name[-2:] != "_s"} for reply in replies]
    return [{**reply, "counts": counted} for reply, counted in zip(replies, counts, strict=True)]


async def _check_gold(
    host: EpisodeHost, tasks: Sequence[Task], gold_actions: Any, config: EnvConfig, say: Say
) -> Finding:
    name, max_turns = "gold gets full reward", config.episode.max_turns
    for number, task in enumerate(tasks, 1):
        say(f"gold actions for task {number} of {len(tasks)}: {task.task_id}")
        try:
            actions = list(gold_actions(task))
        except Exception as error:  # noqa: BLE001  user code
            return _bad(name, f"gold_actions({task.task_id}) raised {type(error).__name__}: {error}")
        if len(actions) > max_turns:
            return _bad(name, f"{task.task_id} takes {len(actions)} turns, env.episode.max_turns={max_turns}")
        try:
            played = await play_script(host, task, actions, config)
        except TrajectoryError as failure:
            return _bad(name, failure.detail.strip().splitlines()[-1])
        if "reward" not in played.replies[-1]:
            return Finding(name, None, "the program gives no reward: the reward function scores its trajectory")
        is_done = bool(played.replies[-1].get("done"))
        if not is_done or played.reward < FULL_REWARD:
            how = "ended" if is_done else "did not end"
            return _bad(name, f"{task.task_id} {how} with reward {played.reward:g} for {actions!r:.80}")
    return _good(name, f"{len(tasks)} of {len(tasks)} tasks")


async def play_script(host: EpisodeHost, task: Task, actions: Sequence[str], config: EnvConfig) -> PlayedScript:
    """Play `actions` in order until the episode ends; it may request several turns concurrently.

    Raises:
        TrajectoryError: kind `env`, if the environment fails.
    """
    names, left = ThreadNames(task.task_id, config.episode.max_threads), list(enumerate(actions))
    async with host.open(task) as played:
        reply = await played.reset()
        if reply.get("runs_itself"):
            return await _run(played, task, actions, config)
        replies: list[dict[str, Any]] = [dict(reply)]
        step_s: list[float] = []
        played_turns: list[Turn] = []
        observations = names.check(reply)
        if len(observations) > config.episode.max_turns:
            requested = f"reset of {task.task_id}: asks for {len(observations)} turns at the same time"
            raise TrajectoryError("env", f"{requested}, env.episode.max_turns={config.episode.max_turns}")
        while observations and len(left) >= len(observations):
            turns = [
                Action(text, turn=turn, thread=one.thread)
                for one, (turn, text) in zip(observations, left, strict=False)
            ]
            left = left[len(observations) :]
            started = time.perf_counter()
            reply = await take_turns(played, reply, turns)
            step_s.append(time.perf_counter() - started)
            replies.append(dict(reply))
            observations = names.check(reply)
            played_turns += [_turn(action, observations) for action in turns]
    return PlayedScript(replies, step_s, played_turns)


def _turn(action: Action, observations: Sequence[Observation]) -> Turn:
    """A scripted turn, with the observation that follows in its thread."""
    following = next((one.text for one in observations if one.thread == action.thread and one.fork_of is None), "")
    return Turn(action.text, "stop", 1 + len(action.text), following, len(following), thread=action.thread)


async def _run(played: PlayedEpisode, task: Task, actions: Sequence[str], config: EnvConfig) -> PlayedScript:
    """Play `actions` as the answers to an agent program, which requests its turns itself."""
    replies: list[dict[str, Any]] = []
    left, step_s, waiting_since = list(actions), [], time.perf_counter()

    async def say(content: NewText) -> str | None:
        nonlocal waiting_since
        replies.append({"content": content})
        step_s.append(time.perf_counter() - waiting_since)
        waiting_since = time.perf_counter()
        return left.pop(0) if left else None

    reply = await play_program(config, played, task.task_id, say)
    if not replies:
        raise TrajectoryError("env", f"{task.task_id}: the program ended without a request")
    return PlayedScript([*replies, dict(reply)], step_s, [])
