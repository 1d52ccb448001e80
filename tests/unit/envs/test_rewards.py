"""Built-in rewards, weighted sums of rewards, and the memory of pure ones."""

from __future__ import annotations

import gc
import importlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ids import TaskId
from penstock.dataflow.ports import Score
from penstock.dataflow.task import Task
from penstock.envs.config import RewardConfig, RewardPartConfig
from penstock.envs.contract import RewardContext, RewardFunction
from penstock.envs.loading import load_reward
from penstock.envs.rewards import formats
from penstock.envs.rewards.composition import is_pure_function
from penstock.envs.rewards.python_code import PythonCodeReward, last_code_block
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Limits, Program, Sandbox, SandboxResult
from penstock.envs.sandbox.local import LocalSandbox
from penstock.envs.workers.scoring import RewardRunner
from tests.answers import answered

SANDBOX = SandboxConfig(allow_unisolated=True, limits=Limits(wall_s=3.0))
ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(1, 1) == 3"]


@pytest.fixture
async def code() -> AsyncIterator[PythonCodeReward]:
    reward = PythonCodeReward.build(RewardContext(SANDBOX))
    yield reward
    await reward._sandbox.close()


@pytest.mark.some(5)
@pytest.mark.parametrize(
    ("response", "passed"),
    [
        (ADD, 2),
        ("```\ndef add(a, b): return 3\n```", 2),
        ("```python\ndef add(a, b): return 3\n```\n```sh\nrm -rf /\n```", 2),
        ("```python\ndef add(a, b): return 3\n```\n```python\ndef add(a, b): return 0\n```", 1),
        ("```python\ndef add(a, b): return", 0),
        ("```python\ndef add(a, b) return\n```", 0),
        ("no code", 0),
        ("```python\nwhile True: pass\n```", 0),
        ("```python\nimport os; os._exit(0)\n```", 0),
        ("```python\nraise SystemExit(0)\n```", 0),
        ("```python\nprint('0 passed 0\\n1 passed 1')\n```", 0),
        ("```python\nimport sys\ndef add(a, b):\n    sys.exit(0)\n```", 0),
        ("```python\ndef add(a, b):\n    if a == 1: return 3\n    while True: pass\n```", 1),
        ("```python\nprint('x' * 10**6)\ndef add(a, b): return 3\n```", 0),
    ],
)
async def test_code_scores_the_share_of_tests_it_passes(code: PythonCodeReward, response: str, passed: int) -> None:
    got = await code(answered(response), tests=TESTS)
    assert got == {"reward": pytest.approx(passed / 3), "passed": passed}


async def test_dataclasses_and_annotations_mean_in_a_solution_what_they_mean_in_a_file(code: PythonCodeReward) -> None:
    response = """```python
from dataclasses import dataclass
from typing import ClassVar, Optional
@dataclass
class Node:
    count: ClassVar[int] = 0
    value: int = 0
    left: "Optional[Node]" = None
```"""
    tests = [
        "assert Node(1, Node(2)).left.value == 2",
        "import typing; assert typing.get_type_hints(Node)['left'] == typing.Optional[Node]",
        "assert Node.__annotations__['value'] is int",
    ]
    assert (await code(answered(response), tests=tests))["passed"] == 3
    response = "```python\ndef double(x: int): return 2 * x\nprint(double.__annotations__)\n```"
    assert (await code(answered(response), cases=[["", "{'x': <class 'int'>}"]]))["passed"] == 1


async def test_cases_are_judged_from_outside_by_standard_input_and_output(code: PythonCodeReward) -> None:
    response = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    cases = [["1 2", "3"], ["4 5\n", "9 \n"], ["1 1", "3"], ["x", "0"]]
    assert await code(answered(response), cases=cases) == {"reward": 0.5, "passed": 2}


async def test_blanks_count_in_front_and_not_at_the_end(code: PythonCodeReward) -> None:
    response = "```python\nprint(input().replace('/', chr(10)))\n```"
    right = [["  a/b", "  a\nb"], ["a  /b//", "a\nb"], ["/a", "\na\n\n"]]
    wrong = [["a/b", "  a\nb"], ["  a/b", "a\nb"], ["/a", "a"], ["a", "\na"], ["a//b", "a\nb"]]
    assert (await code(answered(response), cases=right))["passed"] == 3
    assert (await code(answered(response), cases=wrong))["passed"] == 0


async def test_after_a_case_that_hits_a_limit_no_other_is_run() -> None:
    sandbox = Recorder(LocalSandbox(SANDBOX))
    reward = PythonCodeReward(sandbox, Limits(wall_s=0.5), "share")
    response = "```python\nn = int(input())\nwhile n == 2: pass\nprint(n)\n```"
    got = await reward(answered(response), cases=[["1", "1"], ["0", "1"], ["2", "2"], ["3", "3"], ["4", "4"]])
    assert got == {"reward": 0.2, "passed": 1}
    assert sandbox.outcomes == ["exited", "exited", "wall_clock"]
    await sandbox.close()


class Recorder:
    """Passes programs on to a sandbox and notes how they ended."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.outcomes: list[str] = []

    async def run(self, program: Program, limits: Limits) -> SandboxResult:
        return (await self.run_in_turn([program], limits))[0]

    async def run_in_turn(self, programs: Sequence[Program], limits: Limits) -> list[SandboxResult]:
        results = await self._sandbox.run_in_turn(programs, limits)
        self.outcomes += [result.outcome for result in results]
        return results

    async def close(self) -> None:
        await self._sandbox.close()


async def test_what_programs_in_the_sandbox_use_is_not_the_worker_s() -> None:
    busy = """```python
import os, time
hoard = b"x" * (300 << 20)
for _ in range(8):
    if os.fork() == 0:
        time.sleep(0.6)
        os._exit(0)
time.sleep(0.6)
```"""
    fn = "penstock.envs.rewards.python_code:PythonCodeReward"
    sandbox = SANDBOX.model_copy(update={"limits": Limits(wall_s=20.0)})
    config = RewardConfig(fn=fn, max_processes=6, max_memory_gib=0.25, timeout_s=60)
    runner = RewardRunner(config, sandbox)
    try:
        score = await runner.score(Task(TaskId("t/0"), "?", {"tests": ["assert len(hoard)"]}), answered(busy))
    finally:
        await runner.shutdown()
    assert score.reward == 1.0


async def test_all_or_nothing() -> None:
    reward = PythonCodeReward.build(RewardContext(SANDBOX), mode="all")
    assert (await reward(answered(ADD), tests=TESTS[:2]))["reward"] == 1.0
    assert (await reward(answered(ADD), tests=TESTS))["reward"] == 0.0
    await reward._sandbox.close()


async def test_a_task_without_tests_is_an_error_and_no_zero(code: PythonCodeReward) -> None:
    with pytest.raises(ValueError, match="no tests and no cases"):
        await code(answered(ADD))


async def test_tests_and_cases_have_the_usual_forms(code: PythonCodeReward) -> None:
    assert await code(answered(ADD), tests="assert add(1, 2) == 3\nassert add(1, 1) == 2") == {"reward": 1, "passed": 1}
    response = "```python\nprint(input() * 2)\n```"
    cases = [{"input": "1\n", "output": "11\n"}, {"output": "1", "input": "1"}]
    assert await code(answered(response), cases=cases) == {"reward": 0.5, "passed": 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tests": [{"input": "1", "output": "2"}]}, r"tests=\[{'input': '1'.*as cases"),
        ({"tests": {"input": ["1"], "output": ["2"]}}, r"tests={'input'"),
        ({"tests": '["assert add(1, 2) == 3"]'}, r"tests='\["),
        ({"tests": 3}, "tests=3"),
        ({"cases": {"input": "1", "output": "2"}}, "cases={'input'"),
        ({"cases": "12"}, "cases='12'"),
        ({"cases": ["12"]}, r"cases\[0\]='12'"),
        ({"cases": [["1", "2"], ["1", 2]]}, r"cases\[1\]=\['1', 2\]"),
        ({"cases": [{"input": "1", "output": "2", "testtype": "functional"}]}, r"cases\[0\]=.*functional"),
        ({"cases": [["1", "é" * 35_000]]}, r"cases\[0\] of the task has 70000 bytes.*65536 .*max_output_kib=64"),
    ],
)
async def test_tests_and_cases_that_could_not_be_judged_are_errors(
    code: PythonCodeReward, fields: dict[str, Any], message: str
) -> None:
    for response in (ADD, "no code"):
        with pytest.raises(ValueError, match=message):
            await code(answered(response), **fields)


def test_wrong_arguments_are_refused_before_the_run() -> None:
    for args in ({"mode": "most"}, {"modes": "all"}):
        with pytest.raises(ConfigError, match=r"reward.args=.*mode=share or mode=all"):
            load_reward(RewardConfig(fn="penstock.envs.rewards.python_code:PythonCodeReward", args=args))


def test_the_last_python_block_counts() -> None:
    assert last_code_block("```py\na\n```\n```\nb\n```\n```json\n{}\n```") == "a\n", "not its output"
    assert last_code_block("```\na\n```\n```\nb\n```\n```json\n{}\n```") == "b\n"
    assert last_code_block("```python\nx = '```'\n```") == "x = '```'\n"
    assert last_code_block("`a` ``` b ```") is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("1. So:\n   ```python\n   if a:\n       b\n   ```\n2. Done", "if a:\n    b\n"),
        ("- So:\n\t```python\n\ta\n\n\tb\n\t```", "a\n\nb\n"),
        ("```python title='a.py'\na\n```", "a\n"),
        ("``` python:a.py\na\n```", "a\n"),
        ("```python\na\nb(1)```\nIt prints\n```\n1\n```", "a\nb(1)"),
        ("```python\r\na\r\n```\r\nDone\r\n", "a\r\n"),
        (
            '```python\n"""So:\n    ```\n    a()\n    ```\nor `b`: ```b()```\n"""\n```',
            '"""So:\n    ```\n    a()\n    ```\nor `b`: ```b()```\n"""\n',
        ),
    ],
)
def test_a_fence_may_be_indented_say_more_and_end_a_line(text: str, code: str) -> None:
    assert last_code_block(text) == code


def test_many_fences_that_close_nothing_take_no_time_to_speak_of() -> None:
    assert last_code_block("```a\n" * 4000 + " " * 20_000 + "a " * 20_000) is None


def test_formats() -> None:
    assert formats.contains(answered("a b"), text="a") == 1.0
    assert formats.contains(answered("a b"), text="c") == 0.0
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert formats.matches(answered("<think>a\nb</think>\n<answer>1</answer>"), pattern=pattern) == 1.0
    assert formats.matches(answered("so <think>a</think><answer>1</answer>"), pattern=pattern) == 0.0
    assert formats.one_code_block(answered(ADD)) == 1.0
    assert formats.one_code_block(answered(ADD + "\n" + ADD)) == 0.0
    assert formats.finished(answered("a")) == 1.0
    assert formats.finished(answered("a", finish_reason="length")) == 0.0


def test_json_is_judged_by_its_schema() -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "minimum": 1}}}
    wanted = {
        '{"n": 1}': 1,
        '{"n": 0}': 0,
        "{}": 0,
        "n": 0,
        '{"n": NaN}': 0,
        "[" * 10**5: 0,
        '```json\n{"n": 2}\n```': 1,
    }
    for response, value in wanted.items():
        assert formats.json_valid(answered(response), schema=schema) == value, response[:50]
    assert formats.json_valid(answered("[1]")) == 1
    with pytest.raises(Exception, match="is not valid under any of the given schemas"):
        formats.json_valid(answered("1"), schema={"type": "no such type"})


def test_the_overlong_penalty_follows_its_formula() -> None:
    """max 10, buffer 4: DAPO's eq. 13 by hand."""
    wanted = {6: 0.0, 7: -0.25, 8: -0.5, 9: -0.75, 10: -1.0, 12: -1.0, 1: 0.0}
    for num_sampled, penalty in wanted.items():
        got = formats.overlong_penalty(answered("a", num_sampled), max_tokens=10, buffer_tokens=4)
        assert got == pytest.approx(penalty)
    with pytest.raises(ValueError, match=r"buffer_tokens=11 must be in 1..max_tokens=10"):
        formats.overlong_penalty(answered("a"), max_tokens=10, buffer_tokens=11)


PARTS = """
import asyncio
from penstock.envs.contract import pure
calls = 0

def length(trajectory, scale=1.0, **_): return scale * len(trajectory.response)
async def judge(trajectory, **_):
    await asyncio.sleep(0)
    return {"tone": 0.5, "truth": 0.25}
cancelled = []
async def patient(trajectory, **_):
    try: await asyncio.sleep(60)
    except asyncio.CancelledError: cancelled.append("patient"); raise
async def hasty(trajectory, **_):
    await asyncio.sleep(0)
    raise RuntimeError("the judge broke")
def sudden(trajectory, **_): raise RuntimeError("broke at once")
def broken(trajectory, **_): return float("nan")
@pure
def counted(trajectory, **_):
    global calls
    calls += 1
    if trajectory.response == "raise": raise RuntimeError(f"call {calls}")
    return calls
def counted_impure(trajectory, **_): return counted(trajectory)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "penstock_test_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "penstock_test_parts"


async def scores(config: RewardConfig, *responses: str, **fields: object) -> list[Score | TrajectoryError]:
    runner = RewardRunner(config)
    await runner.start()
    try:
        out = []
        for response in responses:
            out += await runner.score_many([(Task(TaskId("t/0"), "?", fields), answered(response))])
        return out
    finally:
        await runner.shutdown()


async def test_a_weighted_sum_clips_adds_and_records(module: str) -> None:
    length = RewardPartConfig(fn=f"{module}:length", args={"scale": 2.0}, weight=-0.5, clip=(0.0, 10.0))
    plain = RewardConfig(parts={"length": length, "seen": RewardPartConfig(fn=f"{module}:length", weight=0.0)})
    (score,) = await scores(plain, "x" * 7)  # min(14, 10) * -0.5
    assert score == Score(-5.0, {"length": 14.0, "seen": 7.0})
    judged = {"length": length, "judge": RewardPartConfig(fn=f"{module}:judge", weight=2.0)}
    (score,) = await scores(RewardConfig(parts=judged), "xx")  # -2 + 1.5
    assert isinstance(score, Score)
    assert score.reward == pytest.approx(-0.5)
    assert score.parts == {"length": 4.0, "judge": 0.75, "judge/tone": 0.5, "judge/truth": 0.25}


async def test_a_part_that_fails_fails_the_sum_by_name(module: str) -> None:
    parts = {name: RewardPartConfig(fn=f"{module}:{name}") for name in ("length", "broken")}
    (failure,) = await scores(RewardConfig(parts=parts), "x")
    assert isinstance(failure, TrajectoryError)
    assert "reward.parts.broken: the reward function returned nan" in failure.detail


async def test_a_part_that_fails_ends_the_others_and_synchronous_parts_come_first(
    module: str, recwarn: pytest.WarningsRecorder
) -> None:
    def sum_of(*names: str) -> RewardFunction:
        return load_reward(RewardConfig(parts={name: RewardPartConfig(fn=f"{module}:{name}") for name in names}))

    with pytest.raises(RuntimeError, match="the judge broke"):
        await sum_of("patient", "hasty")(answered("x"))  # type: ignore[misc]
    assert importlib.import_module(module).cancelled == ["patient"]
    with pytest.raises(RuntimeError, match="broke at once"):
        await sum_of("patient", "sudden")(answered("x"))  # type: ignore[misc]
    gc.collect()
    assert [str(warning.message) for warning in recwarn if "never awaited" in str(warning.message)] == []


def test_sums_that_make_no_sense_are_refused(module: str) -> None:
    fn = f"{module}:length"
    wrong = {
        "one reward function, or named parts": RewardConfig(fn=fn, parts={"a": RewardPartConfig(fn=fn)}),
        "reward.fn=None with 0 reward.parts": RewardConfig(),
        "would reach none of them": RewardConfig(parts={"a": RewardPartConfig(fn=fn)}, args={"scale": 2.0}),
        "named 'reward'": RewardConfig(parts={"reward": RewardPartConfig(fn=fn)}),
        "the lowest value is above": RewardConfig(parts={"a": RewardPartConfig(fn=fn, clip=(1, 0))}),
        "reward.parts.a.fn=": RewardConfig(parts={"a": RewardPartConfig(fn=f"{module}:lenght")}),
    }
    for message, config in wrong.items():
        with pytest.raises(ConfigError, match=message):
            load_reward(config)


async def test_a_pure_reward_is_remembered_by_its_input_and_its_failures_are_not(module: str) -> None:
    pure = RewardConfig(fn=f"{module}:counted", cache_entries=2)

    def values(got: list[Score | TrajectoryError]) -> list[float | None]:
        return [score.reward if isinstance(score, Score) else None for score in got]

    assert values(await scores(pure, "a", "b", "a", "raise", "raise", "b", "c", "a")) == [1, 2, 1, None, None, 2, 5, 6]
    assert values(await scores(pure.model_copy(update={"cache_entries": 0}), "a", "a")) == [1, 2]
    assert values(await scores(pure.model_copy(update={"fn": f"{module}:counted_impure"}), "a", "a")) == [1, 2]


@pytest.mark.parametrize(
    ("fn", "is_pure"),
    [
        ("penstock.envs.tasks.arithmetic:exact_match", True),
        ("penstock.envs.tasks.math_tasks:math_verify_reward", True),
        ("penstock.envs.adapters.reasoning_gym_tasks:reasoning_gym_reward", True),
        ("penstock.envs.rewards.episode:episode_reward", False),
    ],
)
def test_verifiers_of_a_text_are_pure(fn: str, is_pure: bool) -> None:
    assert is_pure_function(load_reward(RewardConfig(fn=fn))) is is_pure


async def test_code_is_scored_through_the_whole_path() -> None:
    config = RewardConfig(
        parts={
            "code": RewardPartConfig(fn="penstock.envs.rewards.python_code:PythonCodeReward"),
            "format": RewardPartConfig(fn="penstock.envs.rewards.formats:one_code_block", weight=0.1),
        },
        timeout_s=30,
    )
    runner = RewardRunner(config, SANDBOX)
    task = Task(TaskId("t/0"), "?", {"tests": TESTS})
    try:
        results = await runner.score_many([(task, answered(text)) for text in (ADD, "no code", ADD)])
    finally:
        await runner.shutdown()
    right = Score(pytest.approx(2 / 3 + 0.1), {"code": pytest.approx(2 / 3), "code/passed": 2.0, "format": 1.0})
    assert results == [right, Score(0.0, {"code": 0.0, "code/passed": 0.0, "format": 0.0}), right]


@pytest.mark.some(1)
@pytest.mark.parametrize("other", ["length", "judge"])
async def test_a_pure_part_is_called_once_for_equal_texts_next_to_one_that_is_not_pure(module: str, other: str) -> None:
    parts = {name: RewardPartConfig(fn=f"{module}:{name}") for name in ("counted", other)}
    found = await scores(RewardConfig(parts=parts), "x", "x", "y", "x")
    assert [score.parts["counted"] for score in found if isinstance(score, Score)] == [1.0, 1.0, 2.0, 1.0]
    again = await scores(RewardConfig(parts=parts, cache_entries=1), "x", "y", "x")
    assert [score.parts["counted"] for score in again if isinstance(score, Score)] == [1.0, 2.0, 3.0]
    off = await scores(RewardConfig(parts=parts, cache_entries=0), "x", "x")
    assert [score.parts["counted"] for score in off if isinstance(score, Score)] == [1.0, 2.0]
    parts = {"counted_impure": RewardPartConfig(fn=f"{module}:counted_impure"), other: parts[other]}
    impure = await scores(RewardConfig(parts=parts), "x", "x")
    assert [score.parts["counted_impure"] for score in impure if isinstance(score, Score)] == [1.0, 2.0]


async def test_a_pure_part_that_raised_is_tried_again(module: str) -> None:
    parts = {name: RewardPartConfig(fn=f"{module}:{name}") for name in ("counted", "length")}
    failures = await scores(RewardConfig(parts=parts), "raise", "raise")
    assert ["call 1" in str(failures[0]), "call 2" in str(failures[1])] == [True, True]
