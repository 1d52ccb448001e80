"""Reward functions written for TRL or verl are called as there if `reward.style` says so; without it they are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.ports import Score
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Episode, Trajectory, Turn
from penstock.envs.config import RewardConfig, RewardPartConfig
from penstock.envs.loading import load_reward
from penstock.envs.scripted_check import scripted_answer, scripted_trajectory
from penstock.envs.workers.scoring import RewardRunner
from penstock.platform.checks.tasks import TaskSample, check_reward

PEERS = '''
def accuracy(completions, answer, **kwargs):
    """As in TRL's documentation: a plain prompt, a column."""
    return [1.0 if text == truth else 0.0 for text, truth in zip(completions, answer)]

def formatted(prompts, completions, **kwargs):
    """Chat messages."""
    assert prompts == [[{"role": "user", "content": "1+1?"}]]
    return [float(completion[0]["content"].startswith("<think>")) for completion in completions]

def begun(prompts, completions, **kwargs):
    """TRL moves the beginning of the answer from the prompt to the completion."""
    assert prompts == [[{"role": "user", "content": "1+1?"}]]
    return [float(completions == [[{"role": "assistant", "content": "It is 2"}]])]

def turns(completions, **_): return [float("".join(one["role"][0] for one in completions[0]) == "aua")]
def only_math(completions, kind, **kwargs): return [1.0 if one == "math" else None for one in kind]
async def slow(completions, **kwargs): return [0.25] * len(completions)
def scaled(completions, scale, completion_ids, log_metric, **kwargs):
    log_metric("seen", 1.0)
    return [scale * len(ids) for ids in completion_ids]
def number(completions, **kwargs): return 1.0
def two(completions, **kwargs): return [1.0, 2.0]
def no_more(prompts, completions): return [0.5]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info == {"index": 3}
    return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str}
def plain_score(solution_str, ground_truth, penalty=0.0, **_): return (solution_str == ground_truth) - penalty
def scoreless(data_source, solution_str, ground_truth, extra_info): return {"acc": 1.0}

def own(trajectory, completions, **_): return float(completions)
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "penstock_test_peers.py").write_text(PEERS)
    monkeypatch.syspath_prepend(tmp_path)


def config(name: str, style: str | None, **args: Any) -> RewardConfig:
    return RewardConfig.model_validate({"fn": f"penstock_test_peers:{name}", "style": style, "args": args})


def task(prompt: Any = "1+1?", **fields: Any) -> Task:
    return Task(TaskId("t/0"), prompt, fields)


async def score(config: RewardConfig, task: Task, answer: str | Trajectory) -> Score:
    runner = RewardRunner(config)
    try:
        return await runner.score(task, scripted_answer(task, answer) if isinstance(answer, str) else answer)
    finally:
        await runner.shutdown()


@pytest.mark.parametrize(
    ("name", "args", "fields", "reward"),
    [
        ("accuracy", {}, {"answer": "2"}, 1.0),
        ("accuracy", {}, {"answer": "3"}, 0.0),
        ("slow", {}, {}, 0.25),
        ("scaled", {"scale": 10}, {}, 20.0),
        ("no_more", {}, {"answer": "a column that it does not take"}, 0.5),
    ],
)
async def test_a_reward_of_trl_gets_lists_of_one(name: str, args: Any, fields: Any, reward: float) -> None:
    assert await score(config(name, "trl", **args), task(**fields), "2") == Score(reward, {})


async def test_chat_prompts_give_chat_completions_with_the_reasoning_and_the_observations() -> None:
    chat = task([{"role": "user", "content": "1+1?"}])
    thought = replace(scripted_answer(chat, "2"), reasoning="<think>easy</think>")
    assert (await score(config("formatted", "trl"), chat, thought)).reward == 1.0
    answer = task([{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "It is "}])
    assert (await score(config("begun", "trl"), answer, "2")).reward == 1.0
    played = (Turn("look", "stop", 2, "a 2"), Turn("2", "stop", 2))
    episode = scripted_trajectory(chat, played, Episode(played, "done"))
    assert (await score(config("turns", "trl"), chat, episode)).reward == 1.0


async def test_none_leaves_a_part_out_and_is_no_opinion_of_a_reward_that_is_alone() -> None:
    def part(name: str, weight: float) -> RewardPartConfig:
        return RewardPartConfig(fn=f"penstock_test_peers:{name}", style="trl", weight=weight)

    parts = RewardConfig(parts={"math": part("only_math", 2.0), "slow": part("slow", 4.0)})
    assert await score(parts, task(kind="math"), "2") == Score(3.0, {"math": 1.0, "slow": 0.25})
    assert await score(parts, task(kind="code"), "2") == Score(1.0, {"slow": 0.25})
    assert await score(config("only_math", "trl"), task(kind="code"), "2") == Score(None, {})
    alone = RewardConfig(parts={"math": part("only_math", 2.0), "slow": part("slow", 0.0)})
    assert await score(alone, task(kind="code"), "2") == Score(None, {}), "a part of weight 0 is only recorded"


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("fields", "reward"),
    [
        ({"reward_model": {"style": "rule", "ground_truth": "2"}}, 1.0),
        ({"ground_truth": "2", "answer": "3"}, 1.0),
        ({"answer": "2"}, 1.0),
        ({"answer": "3"}, 0.0),
    ],
)
async def test_a_score_of_verl_gets_the_ground_truth_of_its_rows(fields: Any, reward: float) -> None:
    row = task(data_source="openai/gsm8k", extra_info={"index": 3}, **fields)
    assert await score(config("compute_score", "verl"), row, "2") == Score(reward, {"acc": 1.0}, answer="2")
    assert (await score(config("plain_score", "verl", penalty=0.5), row, "2")).reward == reward - 0.5


@pytest.mark.parametrize(
    ("name", "style", "fields", "words"),
    [
        ("number", "trl", {}, "it returned 1.0 of type float; with reward.style=trl it returns a list"),
        ("two", "trl", {}, r"it returned \[1.0, 2.0\] of type list"),
        ("scoreless", "verl", {"answer": "2"}, "a dict without score, which reward.style=verl needs"),
        ("plain_score", "verl", {"solution": "2"}, r"no field ground_truth, .* Its fields are \['solution'\]"),
    ],
)
async def test_what_the_library_would_not_take_either_fails_with_what_it_takes(
    name: str, style: str, fields: Any, words: str
) -> None:
    with pytest.raises(TrajectoryError, match=words):
        await score(config(name, style), task(**fields), "2")


@pytest.mark.parametrize(
    ("name", "style", "words"),
    [
        ("accuracy", None, ["penstock_test_peers:accuracy", "(completions, answer, **kwargs)", "Add reward.style=trl"]),
        ("compute_score", None, ["of a reward of verl", "Add reward.style=verl"]),
        ("accuracy", "verl", ["reward.style=verl", "no reward function of verl"]),
    ],
)
def test_the_missing_or_wrong_style_is_named(name: str, style: str | None, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_reward(config(name, style))
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_column_of_an_own_reward_may_be_called_completions() -> None:
    load_reward(config("own", None))


def test_the_style_of_parts_is_set_for_each_part() -> None:
    parts = {"one": RewardPartConfig(fn="penstock_test_peers:accuracy")}
    with pytest.raises(ConfigError, match=r"Add reward.parts.one.style=trl"):
        load_reward(RewardConfig(parts=parts))
    with pytest.raises(ConfigError, match=r"reward.style=trl with 1 reward.parts: it would act on none of them"):
        load_reward(RewardConfig(parts=parts, style="trl"))


def test_a_column_that_the_tasks_lack_is_named_before_a_run() -> None:
    tasks = TaskSample([task(solution="2")], [])
    (finding,) = check_reward(load_reward(config("accuracy", "trl")), tasks)
    assert finding.message.startswith("reward.fn=penstock_test_peers:accuracy takes (trajectory, /, *, answer, **_)")
    assert not list(check_reward(load_reward(config("only_math", "trl", kind=["math"])), tasks))
    assert not list(check_reward(load_reward(config("compute_score", "verl")), tasks))
