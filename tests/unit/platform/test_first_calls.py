"""Before anything starts, the reward and the environment are called with scripted answers; each failure is one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.dataflow.errors import TrajectoryError
from penstock.envs.loading import load_reward, load_task_source
from penstock.envs.streams import MAIN, named_tasks
from penstock.platform.checks import first_calls
from penstock.platform.checks.first_calls import TEXT, check_first_calls
from penstock.platform.checks.load import compose_config
from penstock.platform.config.findings import Finding

USER_CODE = """
import os, time
from penstock.envs.environment import Done, Environment, Observation
from penstock.envs.tasks.generated_tasks import GeneratedTasks

def parts(trajectory, answer): return {"right": float(trajectory.response == answer), "short": 0.5}
def returns_none(trajectory, **_): return None
def text(trajectory, **_): return "good"
def an_object(trajectory, **_): return object()
def generator(trajectory, **_): yield 1.0
def nan(trajectory, **_): return float("nan")
def raises(trajectory, **_): return 1 / int("answer:\\n42")
def hangs(trajectory, **_): time.sleep(60)
def exits(trajectory, **_): os._exit(3)
async def hangs_async(trajectory, **_):
    import asyncio
    await asyncio.sleep(60)

class Tasks(GeneratedTasks):
    def draw(self, rng): return {"prompt": str(rng.random()), "answer": "right"}
class Answered(Tasks):
    def gold_response(self, task): return task.fields["answer"]
class Played(Tasks):
    def environment(self): return self.kind()
    def gold_actions(self, task): return ["look", "right"]

class Episode(Environment):
    def step(self, action):
        if action.text == "look":
            return Observation("you see it", reward=0.25)
        return Done(float(action.text == "right"))
class Good(Played): kind = Episode
class NoReset(Played):
    class kind(Episode):
        def reset(self, task): raise OSError("no such board")
class HangingReset(Played):
    class kind(Episode):
        def reset(self, task): time.sleep(60)
class NoGold(Played):
    class kind(Episode):
        def step(self, action): raise OSError("no such move")
class Strict(Played):
    class kind(Episode):
        def step(self, action): return super().step(action) if action.text in ("look", "right") else 1 / 0
def of_episode(trajectory, **_): return float(trajectory.episode.turns[0].observation == "you see it")
"""

Call = Callable[..., list[Finding]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    (tmp_path / "called_first.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(tmp_path)

    def call(factory: str, *overrides: str) -> list[Finding]:
        typed = [f"env.factory=called_first:{factory}", "env.args={}", *overrides]
        config = compose_config(["experiment=arithmetic", "model.path=policy", *typed])
        source = load_task_source(config.env, 0)
        tasks = [task for task, _ in zip(named_tasks(source, MAIN, source.train()), range(3), strict=False)]
        return list(check_first_calls(config, source, load_reward(config.reward), tasks))

    return call


def test_the_result_of_both_answers_is_shown(call: Call) -> None:
    gold, text = call("Answered", "reward.fn=called_first:parts")
    assert (gold.severity, text.severity) == ("note", "note")
    assert "/train/0 answered with 'right': reward 1.5, right 1, short 0.5" in gold.message
    assert f"/train/2 answered with {TEXT!r}: reward 0.5, right 0, short 0.5" in text.message


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("text", "returned 'good' of type str"),
        ("an_object", "of type object"),
        ("generator", "of type generator"),
        ("nan", "returned nan; expected a finite number"),
        (
            "raises",
            r"ValueError: invalid literal for int() with base 10: 'answer:\n42' (called_first.py, line",
        ),
        ("exits", "its process ended with exit code 3"),
        ("hangs", "timed out after 0.3 s"),
        ("hangs_async", "timed out after 0.3 s"),
    ],
)
def test_what_is_no_reward_refuses_the_run_with_function_task_and_what_is_expected(
    call: Call, name: str, found: str
) -> None:
    limits = ("reward.timeout_s=0.3",) if name.startswith("hangs") else ()
    (finding,) = call("Answered", f"reward.fn=called_first:{name}", *limits)
    assert finding.severity == "error"
    assert f"reward.fn=called_first:{name}, called before the start on task " in finding.message
    assert "/train/0 with the answer 'right': " in finding.message
    assert found in finding.message
    assert "returns a finite number, or a dict of named numbers" in finding.message


def test_a_reward_that_has_no_opinion_on_any_answer_is_a_warning(call: Call) -> None:
    first, second, warned = call("Answered", "reward.fn=called_first:returns_none")
    assert [first.severity, second.severity, warned.severity] == ["note", "note", "warning"]
    assert "answered with 'right': no opinion (None)" in first.message
    assert "no opinion (None) on any of the 2 answers" in warned.message
    assert "a function without `return` gives None" in warned.message


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (
            "[1] * 5 + [None] + [1] * 5",
            r"task rows/5 \(rows_first:rows\(\), row 5\) with .*the field 'answer' of the task is None",
        ),
        ('[1.0] * 5 + [float("nan")] + [1.0] * 5', r"the field 'answer' of the task is nan \(type float\)"),
        ('["1"] * 5 + [{"a": 1}] + ["1"] * 5', r"the field 'answer' of the task is \{'a': 1\} \(type dict\)"),
        ('["1"] * 5 + ["nan"] + ["1"] * 5', r"the field 'answer' of the task is 'nan' \(type str\)"),
        ("[[1]] * 5 + [[{}]] + [[1]] * 5", r"the field 'answer' of the task is {} \(type dict\)"),
        (
            '[[1.0, 2]] * 5 + [[1.0, float("nan")]] + [[1.0, 2]] * 5',
            r"the field 'answer' of the task is nan \(type float\)",
        ),
        ('["1"] * 60 + [""] + ["1"] * 5', r"the field 'answer' of the task is '' \(type str\)"),
        ('["1"] * 5 + [2, 3.0, [4]] + ["1"] * 5', ""),
    ],
)
def test_the_reward_is_called_on_a_task_of_every_kind_of_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, found: str
) -> None:
    # The last rows have columns of their own, in all combinations.
    others = '{f"of_{bit}": bit for bit in range(6) if n > 20 and n >> bit & 1}'
    row = f'{{"prompt": f"{{n}}+", "answer": one, **{others}}}'
    code = f"def rows():\n    return [{row} for n, one in enumerate({rows})]\n"
    (tmp_path / "rows_first.py").write_text(f"{code}\ndef own():\n    return [{{'prompt': 'own', 'answer': '1'}}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rows_first", raising=False)
    typed = ["env=dataset", "env.args={rows: rows_first:rows, held_out: {rows: rows_first:own}}", "reward=exact_match"]
    config = compose_config(["experiment=arithmetic", "model.path=policy", *typed])
    source = load_task_source(config.env, 0)
    tasks = list(source.stored()["train"])  # type: ignore[attr-defined]
    findings = list(check_first_calls(config, source, load_reward(config.reward), tasks, source.held_out(1)))
    problems = [finding.message for finding in findings if finding.severity == "error"]
    assert len(problems) == bool(found)
    assert not found or re.search(found, problems[0])


def test_a_reward_that_is_allowed_more_time_than_the_check_has_is_only_warned_about(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_calls, "LIMIT_S", 0.3)
    (finding,) = call("Answered", "reward.fn=called_first:hangs", "reward.timeout_s=50")
    assert finding.severity == "warning"
    assert "reward.timeout_s=50 allows more" in finding.message


def test_a_reward_that_needs_a_service_is_not_called_and_the_parts_beside_it_are(call: Call) -> None:
    http = "penstock.envs.rewards.http_reward:HttpReward"
    url = "reward.args={url: 'http://127.0.0.1:9/', request_timeout_s: 1}"
    assert call("Answered", f"reward.fn={http}", url) == []
    service = f"service: {{fn: {http}, args: {{url: 'http://127.0.0.1:9/', request_timeout_s: 1}}}}"
    parts = f"reward.parts={{{service}, mine: {{fn: called_first:parts}}}}"
    first, _ = call("Answered", "reward.fn=null", parts)
    assert "reward.parts (mine): " in first.message
    assert "reward 1.5, mine 1.5, mine/right 1, mine/short 0.5" in first.message


def test_an_environment_is_played_and_its_episodes_are_scored(call: Call) -> None:
    played, garbage, scored, _ = call("Good", "reward.fn=called_first:of_episode")
    assert "/train/0 played with its gold actions: 2 turns, reward 1.25" in played.message
    assert f"played with {TEXT!r}: 1 turns, reward 0" in garbage.message
    assert "answered with 'lookright': reward 1" in scored.message
    assert {one.severity for one in call("Good", "reward=episode")} == {"note"}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("factory", "severity", "found"),
    [
        ("NoReset", "error", "/train/0: it raised OSError: no such board (called_first.py, line "),
        ("HangingReset", "error", "/train/0: timed out after 0.3 s"),
        ("NoGold", "error", "it raised OSError: no such move (called_first.py, line "),
        ("Strict", "warning", f"), at the action {TEXT!r}. The attempt would fail"),
    ],
)
def test_an_environment_that_fails_is_named_with_its_task(call: Call, factory: str, severity: str, found: str) -> None:
    limits = ("env.episode.timeout_s=0.3",) if factory == "HangingReset" else ()
    failed = [one for one in call(factory, "reward=episode", *limits) if one.severity != "note"]
    assert [one.severity for one in failed] == [severity]
    assert f"env.factory=called_first:{factory}, called before the start on task " in failed[0].message
    assert found in failed[0].message


def test_a_failure_without_a_traceback_is_its_last_line() -> None:
    assert TrajectoryError("reward", "fn on 0/0 (t/0): timed out after 1 s.").cause == "timed out after 1 s"
    assert TrajectoryError("env", "it is gone").cause == "it is gone"
