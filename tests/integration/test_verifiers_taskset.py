"""Environments of verifiers 0.4, in the interpreter that `make verifiers-env` makes."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.envs.config import EnvConfig, StreamConfig
from penstock.envs.endpoint.scripted import NewText, play_program
from penstock.envs.loading import load_task_source
from penstock.envs.streams import load_task_streams
from penstock.envs.workers.episode_host import EpisodeHost
from penstock.rollout.tokenization.tokenizers import byte_tokenizer
from tests.command_line import read_metric, read_summary, run_cli
from tests.small_run import small_run_overrides, train_by_command

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "datasets.md"
CHAT = {"runtime": {"type": "subprocess"}, "harness": {"id": None}}
"""How YAML reads `harness.id=null`."""
TASKS = """
import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        "Add two numbers."
        return a + b


class SumConfig(vf.TaskConfig):
    has_tools: bool = False
    raises: bool = False
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(config.tools)] if config.has_tools else []

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.config.raises:
            raise KeyError("nothing")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=-0.5)
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()


class Sums(vf.Taskset[SumTask, SumsConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            data = SumData(prompt=f"{number}+1=", system_prompt="Add.", answer=str(number + 1))
            yield SumTask(data, self.config.task)
            number += 1


if __name__ == "__main__":
    Adder.run()

__all__ = ["Adder", "Sums"]
"""
AGAIN = """
import verifiers.v1 as vf
import planted_sums

class Sums(planted_sums.Sums):
    pass

class AgainConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig(), harness=vf.HarnessConfig(id="null"))
    critic: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig(), model="another")

class Again(vf.Env[AgainConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != task.data.answer:
                segment = await interaction.turn("Again.")

__all__ = ["Again", "Sums"]
"""
KINDS: dict[str, dict[str, Any]] = {
    "single": {"kwargs": {"agent": CHAT}},
    "tools": {"kwargs": {"agent": CHAT, "taskset": {"task": {"has_tools": True}}}},
    "raises": {"kwargs": {"agent": CHAT, "taskset": {"task": {"raises": True}}}},
    "turns": {"id": "planted_again", "kwargs": {}},
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """That of the target in this tree, or a new one."""
    made = ROOT / ".venv-verifiers"
    if not made.exists():
        made = tmp_path_factory.mktemp("target") / "venv"
        target = ["make", "-s", "verifiers-env", f"VERIFIERS_ENV={made}"]
        done = subprocess.run(target, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            pytest.skip(f"the package index gives no verifiers 0.4: {done.stderr.strip()[-300:]}")
    return str(made / "bin" / "python")


@pytest.fixture(scope="module", autouse=True)
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted_sums.py").write_text(TASKS)
    (folder / "planted_again.py").write_text(AGAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def play(python: str) -> AsyncIterator[Callable[..., Any]]:
    """`await play(kind, *answers)`: what came of the rollout, and what the policy was shown."""
    streams = {kind: StreamConfig(args=args) for kind, args in KINDS.items()}
    single = {"id": "planted_sums", **KINDS["single"]}
    config = EnvConfig(factory="verifiers", args=single, python=python, streams=streams)
    tasks = {stream.name: next(stream.tasks) for stream in load_task_streams(config, 0)}
    host = EpisodeHost(config, 0)

    async def played(kind: str, *answers: str) -> SimpleNamespace:
        task, shown = tasks[kind], []
        left = [answer.replace("ANSWER", task.fields["data"]["answer"]) for answer in answers]

        async def say(part: NewText) -> str | None:
            shown.append(part)
            return left.pop(0) if left else None

        async with host.open(task) as opened:
            assert (await opened.reset()) == {"runs_itself": True}
            reply = await play_program(config, opened, task.task_id, say)
        return SimpleNamespace(shown=shown, task=task, **reply)

    try:
        yield played
    finally:
        await host.close()


async def test_a_single_turn_is_played_and_its_task_scores_it(play: Callable[..., Any]) -> None:
    right = await play("single", "ANSWER")
    assert right.shown == [right.task.prompt]
    length = float(len(right.task.fields["data"]["answer"]))
    assert (right.reward, right.counts) == (2.0 - 0.5 * length, {"num_turns": 1.0})
    assert right.parts == {"right": 1.0, "length": length, "calls": 0.0}
    assert (await play("single", "no idea")).reward == -3.5


async def test_tools_are_called_by_its_program(play: Callable[..., Any]) -> None:
    played = await play(
        "tools", '<tool_call>{"name": "adder_add", "arguments": {"a": 2, "b": 1}}</tool_call>', "ANSWER"
    )
    assert played.shown[1] == [{"role": "tool", "content": "3"}]
    assert (played.parts["right"], played.parts["calls"]) == (1.0, 1.0)


async def test_an_environment_of_its_own_talks_to_the_policy_until_a_budget_ends_it(play: Callable[..., Any]) -> None:
    played = await play("turns", "?", "!", "ANSWER")
    assert [part[-1]["content"] for part in played.shown] == [played.task.prompt[-1]["content"], "Again.", "Again."]
    assert (played.parts["right"], played.counts) == (1.0, {"num_turns": 3.0})
    ended = await play("turns", "?")
    assert (ended.parts["right"], ended.reward, ended.counts) == (0.0, -0.5, {"num_turns": 1.0})


async def test_what_raises_fails_the_attempt(play: Callable[..., Any]) -> None:
    with pytest.raises(TrajectoryError, match=r"the rollout ended with TaskError: .*KeyError: 'nothing'"):
        await play("raises", "ANSWER")


def refusal(python: str, name: str = "planted_sums", **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load_task_source(EnvConfig(factory="verifiers", args={"id": name, "kwargs": kwargs}, python=python), 0)
    return refused.value.violations[0]


async def test_what_cannot_be_played_is_an_error(python: str) -> None:
    assert "not said where the program of its agent agent runs" in refusal(python)
    assert "agent.harness.nothing: Extra inputs are not permitted" in refusal(
        python, agent={**CHAT, "harness": {"id": None, "nothing": 1}}
    )
    assert "taskset 'planted_summs' not found" in refusal(python, "planted_summs", agent=CHAT)
    critic = {"runtime": {"type": "subprocess"}, "model": None}
    assert "2 of its 2 agents are the policy (player, critic)" in refusal(python, "planted_again", critic=critic)


async def test_the_commands_of_the_guide_check_and_train_it(python: str, tmp_path: Path) -> None:
    text = GUIDE.read_text()
    code = re.search(r"`my_taskset\.py`.*?^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert code is not None
    (tmp_path / "my_taskset.py").write_text(code[1])
    check, train = [
        shlex.split(line.replace(".venv-verifiers/bin/python", python))[1:]
        for line in re.findall(r"^penstock .*\.venv-verifiers.*$", text, re.MULTILINE)
    ]
    checked = run_cli(*check, cwd=tmp_path, timeout_s=900)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    own = [word for word in train if word.startswith(("env", "reward"))]
    train_by_command(tmp_path, small_run_overrides(tmp_path, "taskset", byte_tokenizer(), "total_steps=2", *own))
    run_dir = tmp_path / "runs" / "taskset"
    assert read_summary(run_dir)["ledger"]["trained"] == 2
    assert len(read_metric(run_dir, "reward/part/short")) == 2
