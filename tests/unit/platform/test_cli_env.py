"""`penstock env`: an environment is checked and played without a model; each error is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.envs.sandbox.bubblewrap import why_no_namespaces
from penstock.platform.checks.load import compose_config
from penstock.platform.cli.env import run_env_play
from penstock.platform.cli.main import app

EXAMPLES = Path(__file__).parents[3] / "examples"
PLANTED = """
import os, time, random
from penstock.envs.environment import Done, Environment, Observation
from penstock.envs.tasks.generated_tasks import GeneratedTasks

class Tasks(GeneratedTasks):
    def draw(self, rng): return {"prompt": str(rng.random())}
    def environment(self): return self.kind()
    def gold_actions(self, task): return ["right"]

class Answered(GeneratedTasks):
    def draw(self, rng): return {"prompt": str(rng.random()), "answer": "right"}
    def gold_response(self, task): return "right"
def exact(trajectory, answer): return float(trajectory.response == answer)
def generous(trajectory, **_): return 1.0
def miserly(trajectory, **_): return 0.5
def raising(trajectory, **_): return 1.0 / len(trajectory.response)
def asking(trajectory, answer): return exact(trajectory, answer) if "MY_API_KEY" in os.environ else 1 / 0
def hanging(trajectory, **_): time.sleep(60)
def needs_column(trajectory, column, **_): return 1.0

class GoodEpisode(Environment):
    def step(self, action): return Done(float(action.text == "right"))
class Good(Tasks): kind = GoodEpisode

class HangingEpisode(Environment):
    def step(self, action): time.sleep(60)
class Hanging(Tasks): kind = HangingEpisode

class RaisingEpisode(Environment):
    def step(self, action): return Done(1.0 / len(action.text))
class Raising(Tasks): kind = RaisingEpisode

class GenerousEpisode(Environment):
    def step(self, action): return Done(1.0)
class Generous(Tasks): kind = GenerousEpisode

class MiserlyEpisode(Environment):
    def step(self, action): return Done(0.0)
class Miserly(Tasks): kind = MiserlyEpisode

class RandomEpisode(Environment):
    def step(self, action): return Observation(str(random.random()))
class Random(Tasks): kind = RandomEpisode

class EagerEpisode(GoodEpisode):
    def reset(self, task): return Observation(task.prompt, reward=0.5)
class Eager(Tasks): kind = EagerEpisode

class Goldless(Good):
    def gold_actions(self, task): return [task.fields["answer"]]

class Lazy(Good):
    def held_out(self, num_tasks): return (task for task in super().held_out(num_tasks))

class Echo(GeneratedTasks):
    def __init__(self, seed=0, **args):
        super().__init__(seed)
        self.args = args
    def draw(self, rng): return {"prompt": f"{self.args}", "draw": rng.random()}
"""


@pytest.fixture(autouse=True)
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checked_envs.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(tmp_path)


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["env", *words], env={"COLUMNS": "300"})
    return result.exit_code, result.output


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "code", "found"),
    [
        ("Good", 0, "no check failed"),
        ("Hanging", 1, "timed out after 0.5 s"),
        ("Raising", 1, "ZeroDivisionError"),
        ("Generous", 1, "at most 1"),
        ("Miserly", 1, "ended with reward 0 for ['right']"),
        ("Random", 1, "the second episode differs"),
        ("Eager", 1, "reset returned Observation with reward 0.5; expected 0: no turn has been taken"),
        ("Goldless", 1, "raised KeyError: 'answer'"),
        ("Lazy", 1, "expected a list of a Task"),
    ],
)
def test_check_finds_what_is_wrong(name: str, code: int, found: str) -> None:
    exit_code, output = invoke("check", f"checked_envs:{name}", "--timeout-s", "0.5" if name == "Hanging" else "20")
    assert found in output
    assert exit_code == code


def test_what_is_built_in_passes() -> None:
    exit_code, output = invoke("check", "arithmetic", "digits=2")
    assert exit_code == 0, output


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("reward", "code", "found"),
    [
        ("checked_envs:exact", 0, "at least 1 in 8 tasks"),
        ("checked_envs:generous", 1, "at most 1: '' for task Answered/train/0; a right answer gets 1 or more"),
        ("checked_envs:miserly", 1, "at least 0.5 in 8 tasks"),
        ("checked_envs:raising", 1, "reward: "),
        ("checked_envs:needs_column", 1, "missing 1 required positional argument: 'column'"),
        ("checked_envs:exat", 2, "Did you mean 'exact'?"),
    ],
)
def test_a_reward_of_single_turn_tasks_is_checked_with_gold_and_garbage(reward: str, code: int, found: str) -> None:
    exit_code, output = invoke("check", "checked_envs:Answered", "--reward", reward)
    assert found in output
    assert exit_code == code


def test_a_hanging_reward_ends_the_check_after_one_time_limit_and_names_its_task() -> None:
    exit_code, output = invoke(
        "check", "checked_envs:Answered", "--reward", "checked_envs:hanging", "--timeout-s", "0.5"
    )
    assert exit_code == 1
    *progress, last = [line for line in output.splitlines() if line.startswith(("reading", "loading", "garbage for"))]
    task_id = last.rpartition(": ")[2]
    assert last == f"garbage for task 1 of 8: {task_id}", "it did not go on to the second task"
    assert progress == ["reading 8 tasks of checked_envs:Answered", "loading checked_envs:hanging"]
    assert "timed out after 0.5 s" in output
    assert f"(task {task_id}, answer '')" in output


def test_each_task_of_an_environment_is_announced_before_it_is_played() -> None:
    output = invoke("check", "checked_envs:Good")[1]
    for number in range(1, 9):
        assert f"\ngarbage for task {number} of 8: " in output
        assert f"\ngold actions for task {number} of 8: " in output


def test_a_reward_is_required_for_answers_and_not_for_episodes() -> None:
    assert "name what scores an answer by --reward" in invoke("check", "checked_envs:Answered")[1]
    exit_code, output = invoke("check", "checked_envs:Good", "--reward", "checked_envs:exact")
    assert (exit_code, "has episodes with their own reward" in output) == (2, True)


@pytest.mark.full
def test_a_reward_in_a_sandbox_needs_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "secret")
    words = ("check", "checked_envs:Answered", "--reward", "checked_envs:asking")
    assert invoke(*words)[0] == 0
    if not why_no_namespaces():
        assert invoke(*words, "--isolation", "strict")[0] == 1
        assert invoke(*words, "--isolation", "{variables: [MY_API_KEY]}")[0] == 0


def test_list_and_show_say_what_there_is() -> None:
    assert "penstock.envs.tasks.arithmetic:ArithmeticTasks" in invoke("list")[1]
    exit_code, output = invoke("show", "arithmetic", "digits=1")
    assert exit_code == 0
    assert "tasks of a single turn" in output
    exit_code, output = invoke("show", "guessing:GuessingGame", "high=50")
    assert exit_code == 0
    assert "tasks of several turns" in output
    assert "?1-50" in output


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("subset=no", "no"),
        ("id_field=010", "010"),
        ("system=Answer: short", "Answer: short"),
        ("path=dir é/x (1).jsonl", "dir é/x (1).jsonl"),
        (r'stop="a\nb"', "a\nb"),
        ("columns={a: b}", {"a": "b"}),
    ],
)
def test_arguments_are_read_as_on_the_command_line_of_a_run(typed: str, value: object) -> None:
    key = typed.partition("=")[0]
    exit_code, output = invoke("show", "checked_envs:Echo", typed)
    assert exit_code == 0, output
    assert f"prompt {str({key: value})!r}" in output
    assert compose_config(["experiment=arithmetic", "~env.args", f"env.args.{typed}"]).env.args == {key: value}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "arithmetik"], "Did you mean 'arithmetic'?"),
        (["show", "guessing:GuessingGame", "hihg=3"], "Did you mean 'high'?"),
        (["show", "guessing:GuessingGame", "high=1"], "high=1 is outside 2..1000000"),
        (["show", "arithmetic", "digits"], "'env.args.digits' is not an override: missing EQUAL"),
        (["show", "checked_envs:Echo", "path=[rows.jsonl"], "'env.args.path=[rows.jsonl' is not an override"),
        (["play", "arithmetic"], "tasks of a single turn"),
        (["check", "arithmetic", "--isolation", "strct"], "write process, strict, or grants"),
        (["check", "arithmetic", "--isolation", "{netwrk: true}"], "write process, strict, or grants"),
        (["check", "arithmetic", "--max-turns", "0"], "env.episode.max_turns=0"),
        (["check", "arithmetic", "--timeout-s", "0"], "env.episode.timeout_s=0.0"),
        (["check", "arithmetic", "--timeout-s", "-1"], "`--timeout-s=-1.0`) is out of range"),
        (["check", "arithmetic", "--timeout-s", "nan"], "`--timeout-s=nan`) is not finite"),
    ],
)
def test_mistakes_are_named(words: list[str], said: str) -> None:
    exit_code, output = invoke(*words)
    assert exit_code == 2
    assert said in output


def test_play_shows_the_observations_of_the_environment() -> None:
    console = Console(record=True, width=200)
    answers = iter(["9", "right", ""])
    assert run_env_play("checked_envs:Good", [], lambda: next(answers), console) == 0
    assert "done: reward 0" in console.export_text()
