"""The code of the guides is written to a folder and checked as a user would check it."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from penstock.dataflow.ids import TaskId
from penstock.dataflow.trajectory import Task
from penstock.envs.config import EnvConfig, RewardConfig
from penstock.envs.endpoint.scripted import play_program
from penstock.envs.environment import Action
from penstock.envs.episode_host import EpisodeHost
from penstock.envs.loading import load_task_source
from penstock.envs.scoring import RewardRunner
from tests.answers import answered

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
PYTHON = re.compile(r"`(my_\w+\.py)`.*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    written = 0
    for guide in GUIDES.glob("*.md"):
        for name, code in PYTHON.findall(guide.read_text()):
            (tmp_path / name).write_text(code)
            written += 1
    assert written == 12
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


AGENT = ["agent", "tasks=my_agent_function:Sums", "agent=my_agent_function:solve"]


ROWS = ["dataset", "rows=my_rows:rows"]
VERIFIERS = ["verifiers", "id=my_verifiers", "kwargs.high=9"]


@pytest.mark.parametrize(
    "words", [["my_env:Echo"], ["my_pennies:Pennies"], ["my_tools:Products"], ROWS, AGENT, VERIFIERS]
)
def test_the_environments_of_the_guides_pass_their_check(folder: Path, words: list[str]) -> None:
    from penstock.platform.cli import app

    result = CliRunner().invoke(app, ["env", "check", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "no check failed" in result.output


async def test_the_agent_program_of_the_guide_prints_its_reward(folder: Path) -> None:
    command = [sys.executable, str(folder / "my_agent.py")]
    config = EnvConfig(factory="agent", args={"tasks": "my_agent_function:Sums", "agent": command})
    host, answers = EpisodeHost(config, 0), iter(["4", "3"])

    async def say(part: object) -> str:
        return next(answers)

    try:
        async with host.open(Task(TaskId("t"), "1+2", {"answer": "3"}, "")) as played:
            await played.reset()
            assert (await play_program(config, played, "t", say))["reward"] == 1.0
    finally:
        await host.close()


async def test_the_tools_of_the_guide_s_server_lead_to_full_reward(folder: Path) -> None:
    config = EnvConfig(factory="my_mcp:Shop")
    source: Any = load_task_source(config, 0)
    task, host = replace(next(source.train()), environment=""), EpisodeHost(config, 0)
    call, answer = source.gold_actions(task)
    try:
        async with host.open(task) as played:
            await played.reset()
            assert (await played.step(Action(call)))["content"][0]["content"] in {"2", "15"}
            assert (await played.step(Action(answer)))["reward"] == 1.0
    finally:
        await host.close()


async def test_the_reward_of_the_guide_scores(folder: Path) -> None:
    runner = RewardRunner(RewardConfig(fn="my_reward:correct"))
    try:
        score = await runner.score(Task(TaskId("t"), "1+1=", {"answer": "2"}), answered("1+1+0=2;2"))
    finally:
        await runner.shutdown()
    assert (score.reward, score.parts) == (1.1, {"right": 1.0, "short": 0.1})


async def test_the_service_of_the_guide_scores(folder: Path) -> None:
    app = importlib.import_module("my_service").app
    async with TestServer(app) as server:
        args = {"url": str(server.make_url("/reward")), "request_timeout_s": 5}
        runner = RewardRunner(RewardConfig(fn="penstock.envs.rewards.http_reward:HttpReward", args=args))
        try:
            score = await runner.score(Task(TaskId("t"), "1+1=", {"answer": "2"}), answered("1+1+0=2;2"))
        finally:
            await runner.shutdown()
    assert (score.reward, score.parts) == (1.0, {"right": 1.0})
