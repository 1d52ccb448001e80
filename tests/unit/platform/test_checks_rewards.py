"""Every reward function that a run names, also inside args and parts, has to take the fields of the tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.dataflow.task import Task
from penstock.envs.adapters.rows import RowTasks
from penstock.envs.config import RewardConfig, RewardPartConfig
from penstock.envs.loading import load_reward
from penstock.platform.checks import tasks as checks
from penstock.platform.checks.load import compose_config
from penstock.platform.checks.tasks import TaskSample, check_prompts, check_reward
from penstock.rollout.tokenization.tokenizers import TokenCodec, byte_tokenizer

REWARDS = """
def needs_solution(trajectory, solution, scale=1.0): return 1.0
def any_fields(trajectory, **_): return 1.0
def strict(trajectory, answer, scale): return 1.0
class Built:
    @classmethod
    def build(cls, context, **args): return cls()
    async def __call__(self, trajectory, tests, **_): return 1.0
"""
ANSWERS = TaskSample([Task("t/0", "?", {"answer": "1"})], [Task("h/0", "?", {"answer": "1"})])


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "penstock_test_columns.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)


def part(name: str, **args: object) -> RewardPartConfig:
    return RewardPartConfig(fn=f"penstock_test_columns:{name}", args=args)


def findings(config: RewardConfig, tasks: TaskSample = ANSWERS) -> list[str]:
    return [finding.message for finding in check_reward(load_reward(config), tasks)]


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("needs_solution", {}, ["(trajectory, answer=…)", "missing a required argument: 'solution'", "t/0", "**_"]),
        ("needs_solution", {"scale": 2}, ["(trajectory, scale=…, answer=…)", "'solution'"]),
        ("strict", {"scales": 2}, ["(trajectory, scales=…, answer=…)", "'scale'"]),
        ("Built", {}, ["columns:Built takes", "'tests'"]),
    ],
)
def test_a_reward_that_needs_another_column_is_refused_alone_and_as_a_part(
    name: str, args: object, words: list[str]
) -> None:
    wrong = part(name, **args)  # type: ignore[arg-type]
    (alone,) = findings(RewardConfig(fn=wrong.fn, args=wrong.args))
    (among,) = findings(RewardConfig(parts={"fine": part("any_fields"), "wrong": wrong}))
    assert alone.startswith(f"reward.fn={wrong.fn} takes (trajectory, ")
    assert among.startswith(f"reward.parts.wrong.fn={wrong.fn} takes (trajectory, ")
    for word in words:
        assert word in alone
        assert word in among


def test_arguments_and_fields_together_fit() -> None:
    fine = {"strict": part("strict", scale=2), "known": part("needs_solution", solution="1", answer_is="2")}
    assert findings(RewardConfig(parts={"strict": fine["strict"], "any": part("any_fields", other=1)})) == []
    (problem,) = findings(RewardConfig(parts=fine))
    assert "reward.parts.known" in problem
    assert "got an unexpected keyword argument" in problem


def test_all_tasks_that_are_read_count_and_each_part_is_named_once() -> None:
    late = Task("other/7", "?", {"solution": "1"})
    strict = RewardConfig(parts={"strict": part("strict", scale=2)})
    for tasks in (TaskSample([*ANSWERS.train, late, late], []), TaskSample(ANSWERS.train, [late])):
        (problem,) = findings(strict, tasks)
        assert "other/7 with the fields ['solution']" in problem
    assert len(findings(RewardConfig(parts={"a": part("strict"), "b": part("needs_solution")}))) == 2


def test_a_column_that_no_argument_can_be_named_after_is_named_with_the_way_to_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "1+1=", "final solution": "2", "solved by": "me"}\n' * 3)
    reward = load_reward(RewardConfig(fn="penstock_test_columns:needs_solution"))
    found: dict[str, list[str]] = {}
    for name, columns in {"without": {}, "with": {"solution": "final solution"}}.items():
        source = RowTasks(0, "rows.jsonl", columns=columns)
        tasks = TaskSample([next(source.train())], [])
        found[name] = [finding.message for finding in check_reward(reward, tasks, source.left_out)]
    (message,) = found.pop("without")
    assert "['final solution', 'solved by'] cannot be names of arguments" in message
    assert message.endswith("Use env.args.columns={answer: 'final solution'}.")
    assert found == {"with": []}


def test_a_task_that_cannot_be_tokenised_is_named_with_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    user = {"role": "user", "content": "1+1="}
    rows = [{"prompt": [user, *([call] if number == 2 else [])], "answer": "2"} for number in range(4)]
    Path("rows.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    typed = ["env=dataset", "env.args={path: rows.jsonl, held_out: train}", "model.path=policy"]
    config = compose_config(["experiment=arithmetic", *typed])
    source = RowTasks(0, "rows.jsonl", held_out="train")
    tasks = TaskSample(list(source.stored()["train"]), [])
    monkeypatch.setattr(checks, "_load_codec", lambda _: TokenCodec(byte_tokenizer()))
    (finding,) = check_prompts(config, source, tasks)
    assert finding.message.startswith("env: the task rows/2 (rows.jsonl, line 5) cannot be tokenised by ")
