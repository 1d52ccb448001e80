"""Datasets, gymnasium and reasoning-gym as task sources, which the extra `envs` brings."""

from __future__ import annotations

import itertools
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.adapters.gymnasium_env import GymnasiumTasks, checked_words
from penstock.envs.adapters.reasoning_gym_tasks import (
    HELD_OUT_SEED,
    MAX_HELD_OUT,
    ROWS_PER_EPOCH,
    ReasoningGymTasks,
    dataset_names,
    reasoning_gym_reward,
    train_seed,
    verified,
)
from penstock.envs.adapters.rows import RowTasks
from penstock.envs.config import IsolationConfig
from penstock.envs.environment import Action, Done, Observation
from penstock.envs.sandbox.bubblewrap import why_no_namespaces
from penstock.envs.workers.scoring import RewardRunner
from penstock.platform.checks.load import compose_config
from tests.answers import answered

ROWS = [{"key": f"k{index}", "question": f"{index}+1=", "answer": str(index + 1)} for index in range(100)]


def written(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> str:
    path = folder / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_of_a_file_are_tasks_and_the_splits_are_disjoint(tmp_path: Path, suffix: str) -> None:
    source = RowTasks(0, written(tmp_path, suffix, ROWS), prompt_field="question", id_field="key")
    held_out = source.held_out(5)
    trained = list(islice(source.train(), 300))
    assert not {task.prompt for task in held_out} & {task.prompt for task in trained}
    assert {task.task_id for task in trained} < {row["key"] for row in ROWS}
    assert all(task.fields["answer"] == str(int(str(task.prompt).partition("+")[0]) + 1) for task in trained)
    assert [task.task_id for task in RowTasks(0, written(tmp_path, suffix, ROWS), prompt_field="question").held_out(3)]


def test_rows_of_a_function_become_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rows.py").write_text("def rows():\n    return [{'prompt': str(i)} for i in range(50)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = next(RowTasks(0, rows="my_rows:rows", system="Be brief.").train())
    assert [message["role"] for message in task.prompt] == ["system", "user"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (ROWS, {"prompt_field": "questoin"}, "line 1 has no column 'questoin'.*Did you mean 'question'"),
        (
            [*ROWS, {"question": "?"}],
            {"prompt_field": "question", "required_fields": ["answer"]},
            "line 101 has no 'answer'",
        ),
        (
            [*ROWS, ROWS[3]],
            {"prompt_field": "question", "id_field": "key"},
            "line 4 and .*line 101 have the same id, 'k3'",
        ),
        ([], {}, "is empty"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        next(RowTasks(0, written(tmp_path, ".jsonl", rows), **settings).train())


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        next(RowTasks(0, str(tmp_path / "none.jsonl")).train())
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1"}\n{oops\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2 is not JSON"):
        next(RowTasks(0, str(tmp_path / "bad.jsonl")).train())
    (tmp_path / "bad.parquet").write_text("oops")
    with pytest.raises(ConfigError, match=r"bad\.parquet is no Parquet file"):
        next(RowTasks(0, str(tmp_path / "bad.parquet")).train())
    with pytest.raises(ValueError, match="exactly one of the two"):
        RowTasks(0)


WALK = {"kwargs": {"render_mode": "ansi", "is_slippery": False}, "action_names": ["left", "down", "right", "up"]}


def test_a_gymnasium_environment_is_played_by_words() -> None:
    source = GymnasiumTasks(0, "FrozenLake-v1", **WALK)  # type: ignore[arg-type]
    task = next(source.train())
    environment = source.environment()
    opening = environment.reset(task)
    assert isinstance(opening, Observation)
    assert "Actions: left, down, right, up." in opening.messages[0]["content"]
    lost = environment.step(Action("I would rather not"))
    assert isinstance(lost, Observation)
    assert lost.counts == {"no_action": 1.0}
    for word in ["down", "down", "right", "right", "down", "right"]:  # the way over the 4x4 map without holes
        reply = environment.step(Action(f"I go {word}."))
    assert reply == Done(1.0)
    environment.close()


def test_another_game_gets_no_arguments_of_frozen_lake() -> None:
    game = compose_config(["experiment=arithmetic", "env=gymnasium", "env.args.id=Taxi-v4", "reward=episode"])
    assert game.env.args == {"id": "Taxi-v4"}
    lake = compose_config(["experiment=arithmetic", "env=frozen_lake", "reward=episode"])
    assert lake.env.factory == "gymnasium"
    assert lake.env.args["action_names"] == ["left", "down", "right", "up"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "FrozenLaek-v1"}, "gymnasium cannot make it"),
        ({"id": "FrozenLake-v1", "action_names": ["left"]}, "action_names has 1 names, the environment has 4"),
        ({"id": "FrozenLake-v1", "action_names": ["go left", "down", "right", "up"]}, "can never be chosen"),
        ({"id": "Pendulum-v1"}, "a policy writes Discrete or Text only"),
    ],
)
def test_what_gymnasium_cannot_play_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GymnasiumTasks(0, **settings)


def test_action_names_that_can_never_be_chosen_are_refused() -> None:
    assert checked_words(["left", "turn-right", "2"]) == ["left", "turn-right", "2"]
    with pytest.raises(ValueError, match=r"'turn left', which can never be chosen.*e\.g\. 'turn_left'"):
        checked_words(["turn left", "right"])
    with pytest.raises(ValueError, match=r"\['left'\] more than once; case does not tell actions apart"):
        checked_words(["left", "Left"])


def test_reasoning_gym_tasks_are_scored_by_their_own_verifier() -> None:
    source = ReasoningGymTasks(0, "chain_sum", {"min_terms": 2, "max_terms": 3})
    held_out = {str(task.prompt) for task in source.held_out(20)}
    for task in islice(source.train(), 50):
        assert str(task.prompt) not in held_out
        assert reasoning_gym_reward(answered(source.gold_response(task)), **task.fields)["reward"] == 1.0
        assert reasoning_gym_reward(answered("I do not know"), **task.fields)["reward"] == 0.0
    assert len(dataset_names()) > 90
    with pytest.raises(ValueError, match=r"'chian_sum' is none of the \d+ of reasoning-gym. Did you mean 'chain_sum'"):
        ReasoningGymTasks(0, "chian_sum")
    task = next(ReasoningGymTasks(0, "prime_factorization").train())
    wrong = answered("<answer>I do not know</answer>")
    assert reasoning_gym_reward(wrong, **task.fields) == {"reward": 0.0, "verifier_error": 1.0}


def test_an_answer_on_which_a_verifier_raises_is_wrong_and_counted() -> None:
    def score_answer(answer: str, entry: dict[str, Any]) -> float:
        return float(int(answer) == entry["answer"])

    assert verified(score_answer, "7", {"answer": 7}) == {"reward": 1.0, "verifier_error": 0.0}
    assert verified(score_answer, "I do not know", {"answer": 7}) == {"reward": 0.0, "verifier_error": 1.0}


def test_no_two_rows_of_reasoning_gym_are_drawn_from_one_seed_and_none_from_a_held_out_one() -> None:
    """Row i of a dataset is drawn from its seed + i, and some datasets seed numpy, which takes 32 bits."""
    seeds = [train_seed(seed, epoch) for seed in (0, 1, 2, 1022) for epoch in (*range(20), 1023)]
    held_out = range(HELD_OUT_SEED, HELD_OUT_SEED + MAX_HELD_OUT)
    blocks = sorted([(seed, seed + ROWS_PER_EPOCH) for seed in seeds] + [(held_out.start, held_out.stop)])
    assert all(end <= following for (_, end), (following, _) in itertools.pairwise(blocks))
    far = [train_seed(seed, epoch) for seed in (-1, 0, 2**31) for epoch in (0, 10**7)]
    assert all(held_out.stop <= seed <= 2**32 - ROWS_PER_EPOCH for seed in [*seeds, *far])


def test_without_the_extra_the_error_has_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gymnasium", "reasoning_gym"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[envs\]'"):
        GymnasiumTasks(0, "FrozenLake-v1")
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[envs\]'"):
        ReasoningGymTasks(0)


@pytest.mark.parametrize("isolation", ["strict", "process"])
async def test_an_answer_that_is_a_program_reaches_nothing_from_the_sandbox_of_its_verifier(
    tmp_path: Path, isolation: str
) -> None:
    """countdown's verifier evaluates the answer. In a plain process that reaches the user's files, so it is
    isolated.
    """
    if isolation == "strict" and (problem := why_no_namespaces()):
        pytest.skip(f"this host allows no user namespaces: {problem}")
    reward = compose_config(["experiment=arithmetic", "env=reasoning_gym", "reward=reasoning_gym"]).reward
    assert reward.isolation == IsolationConfig(), "strict, unless a user says otherwise"
    if isolation == "process":
        reward = reward.model_copy(update={"isolation": None})
    mark = tmp_path / "touched"
    entry = {"answer": "1 + 2", "metadata": {"numbers": [1, 2], "target": 3}}
    task = Task(TaskId("countdown/0"), "?", {"dataset": "countdown", "entry": entry})
    runner = RewardRunner(reward)
    try:
        hostile = await runner.score(task, answered(f'<answer>__import__("os").system("touch {mark}")</answer>'))
        honest = await runner.score(task, answered("<answer>1 + 2</answer>"))
    finally:
        await runner.shutdown()
    assert hostile.reward < 0.1
    assert honest.reward == 1.0
    assert mark.exists() == (isolation == "process"), "so what is tried here is a hostile answer"
