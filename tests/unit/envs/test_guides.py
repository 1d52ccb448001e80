"""The code of the guides is written to a folder, and their commands are given there, as a user would."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from penstock.dataflow.ids import TaskId
from penstock.dataflow.task import Task
from penstock.envs.config import EnvConfig, RewardConfig
from penstock.envs.endpoint.scripted import play_program
from penstock.envs.environment import Action
from penstock.envs.loading import load_task_source
from penstock.envs.workers.episode_host import EpisodeHost
from penstock.envs.workers.scoring import RewardRunner
from penstock.platform.checks.model_probe import Answer
from penstock.rollout.tokenization.tokenizers import byte_tokenizer, character_tokenizer
from tests.answers import answered
from tests.model_folder import write_model

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
TRAINING = {"train", "sft", "rm", "dpo", "eval", "sample"}
OF_A_STARTED_RUN = {"checkpoints", "export", "resume"}
RUN_ELSEWHERE = {("sandbox", "check"), ("sandbox", "serve"), ("scale", "runs/long"), ("compare", "runs/first")}
RUN_ELSEWHERE |= {("report", "runs/first"), ("doctor", "--cluster"), ("compare", "runs/evaluations/first-step_60")}
"""By test_cli_sandbox, test_comparison, test_evaluation_results and test_report in tests/unit/platform; test_fleet and
test_joined_cluster in tests/integration.
"""
SHELL = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"`(my_\w+\.py)`.*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = set(sys.modules)
    written = 0
    for guide in GUIDES.glob("*.md"):
        for name, code in PYTHON.findall(guide.read_text()):
            (tmp_path / name).write_text(code)
            monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)  # another test's, of that name
            written += 1
    assert written == 18
    character_tokenizer().save_pretrained(write_model(tmp_path / "judge"))
    monkeypatch.setattr("penstock.platform.checks.model_files.ask", lambda _question: Answer([]))
    rows = [{"question": f"{n}+{n}=", "answer": f"{2 * n}"} for n in range(100)]
    pairs = [{"prompt": f"{n}+{n}=", "chosen": f";{2 * n}", "rejected": f";{n}"} for n in range(4096)]
    for name, lines in (("rows", rows), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    write_own_rows(tmp_path)
    monkeypatch.syspath_prepend(GUIDES.parents[1] / "examples")  # where some commands go first
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # of programs called `python`
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def write_own_rows(folder: Path) -> None:
    """The files of the guide on datasets."""
    sums = [(f"{n}+{n + 1}=", f"{2 * n + 1}") for n in range(200)]
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in sums]
    table = ["prompt,answer", *(f"{prompt},{answer}" for prompt, answer in sums)]
    for name in ("more", "data"):
        (folder / name).mkdir()
    for name, part in {"train": lines[:100], "more/one": lines[100:150], "hard": lines[150:]}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(part))
    for name, part in {"data/train": lines[:100], "data/test": lines[100:]}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(part))
    for name, part in {"validation": table[:1] + table[151:], "easy": table[:1] + table[101:151]}.items():
        (folder / f"{name}.csv").write_text("\n".join(part))
    (folder / "train.csv").write_text("\n".join(["question,Final Answer", *table[1:]]))


def commands() -> dict[str, list[str]]:
    """Every line of the guides that calls penstock, as words, but of day-two.md (tests/integration/test_day_two.py)."""
    guides = [guide for guide in sorted(GUIDES.glob("*.md")) if guide.name != "day-two.md"]
    blocks = [block for guide in guides for block in SHELL.findall(guide.read_text())]
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("penstock ")]
    return {line: shlex.split(line.partition(" > ")[0], comments=True)[1:] for line in lines}


def test_the_commands_of_the_guides_are_found_and_few_are_run_elsewhere() -> None:
    found = [tuple(words[:2]) for words in commands().values()]
    assert found.count(("env", "check")) >= 9
    assert set(found) >= RUN_ELSEWHERE | {("env", "show"), ("env", "play"), ("train", "experiment=arithmetic")}


HERE = {
    line: words
    for line, words in commands().items()
    if tuple(words[:2]) not in RUN_ELSEWHERE and words[0] not in OF_A_STARTED_RUN and "runs/first" not in words
    if words[0] != "eval" or not words[1].startswith("runs/")  # of a run: tests/unit/platform/test_eval_policies.py
    if ".venv-verifiers" not in line  # by tests/integration/test_verifiers_taskset.py
}


STARTS_PROGRAMS = (
    "env check agent",
    "env check repository",
    "env check my_mcp",
    "verifiers",
    "python_code",
    "penstock sweep",
)
"""Ten to thirty seconds each."""


def tiered(number: int, line: str) -> Any:
    """Each line takes some seconds, so everyday it is every other one, and none that starts programs."""
    is_full = number % 2 or any(few in line for few in STARTS_PROGRAMS)
    return pytest.param(line, marks=pytest.mark.full if is_full else ())


@pytest.mark.some(3)
@pytest.mark.parametrize("line", [tiered(number, line) for number, line in enumerate(HERE)])
def test_the_commands_of_the_guides_do_what_they_say(folder: Path, line: str) -> None:
    from penstock.platform.cli.main import app

    character_tokenizer().save_pretrained(write_model(folder / "exported"))
    chat = {"vocab_size": 259, "max_position_embeddings": 1024}
    byte_tokenizer().save_pretrained(write_model(folder / "my-model", **chat))
    words = HERE[line]
    if words[0] in TRAINING | {"sweep"} and "--dry-run" not in words:
        words = [*words, "--dry-run"]  # training itself has its own tests
    result = CliRunner().invoke(app, words, input="1\n" * 100, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    said = {"check": "no check failed", "show": "the first two:", "play": "turns are over"}
    said |= {"slurm": "#SBATCH", "kuberay": "kind: RayJob", "ray": "ray start"}
    of_runs = {"sweep": ": to run", "plan": "fastest plans"} | dict.fromkeys(TRAINING, "dry run: nothing was started.")
    assert (of_runs[words[0]] if words[0] in of_runs else said[words[1]]) in result.output


@pytest.mark.some(2)
@pytest.mark.parametrize("line", [line for line, words in commands().items() if words[0] in OF_A_STARTED_RUN])
def test_the_commands_that_continue_a_run_find_its_checkpoints(
    folder: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the training and the export, which tests/integration/test_resume.py runs."""
    from penstock.platform.checks.load import compose_config
    from penstock.platform.cli import export
    from penstock.platform.cli.main import app
    from penstock.platform.run import training
    from penstock.platform.run.checkpoint import CheckpointFolder
    from penstock.platform.run.flow import FlowSnapshot
    from penstock.platform.run.run_dir import prepare_run_dir
    from penstock.trainer.models.tiny_policy import create_policy

    config = compose_config(["experiment=arithmetic", "name=long", "run_dir=runs/long", "model.path=policy"])
    create_policy(config.model, character_tokenizer(), "policy", 0)
    run_dir = prepare_run_dir(config)
    (run_dir / "metrics.jsonl").touch()
    (run_dir / "best.json").write_text('{"step": 40, "accuracy": 0.5, "reward_mean": 0.5}')
    saved = CheckpointFolder(run_dir)
    saved.prepare()
    of_run = {"evaluations": [], "config": config.model_dump(mode="json")}
    for version in (40, 60):
        manifest = {
            "version": version,
            "incarnation": 0,
            "trainer_files": [],
            "spooled": {},
            "files": [],
            "run": of_run,
        }
        saved.commit(saved.unfinished(version), FlowSnapshot({}, (), ()), manifest)
    taken: list[str] = []
    monkeypatch.setattr(training, "train_in", lambda _config, _run_dir, found: taken.append(found.path.name) or 0)
    monkeypatch.setattr(
        export,
        "export_policy",
        lambda _config, found, target: taken.append(found.name) or character_tokenizer().save_pretrained(target),
    )
    monkeypatch.setattr(export, "upload", lambda _folder, name, _version: name)
    words = commands()[line]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    is_list = words[0] == "checkpoints"
    assert taken == ([] if is_list else ["step_40" if {"40", "--best"} & set(words) else "step_60"])
    assert not is_list or result.output.count("complete") == 2


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


@pytest.mark.full
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
