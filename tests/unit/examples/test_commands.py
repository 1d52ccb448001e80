"""Every example has one command, in its docstring and in examples/README.md; it is checked, and trains."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.platform.checks.load import load_config
from penstock.platform.cli.main import app
from penstock.rollout.tokenization.tokenizers import byte_tokenizer
from tests.command_line import read_summary
from tests.in_process import train_in_process
from tests.model_folder import write_model
from tests.small_run import small_run_overrides

FOLDER = Path(__file__).parents[3] / "examples"
STEPS = 2
ROW = re.compile(r"^\| (\[`.*?) \| `(penstock train .*?)` \|", re.MULTILINE)
COMMANDS = {
    re.findall(r"\[`(\w+)\.py`\]", files)[0]: shlex.split(line)[2:]
    for files, line in ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
}
CHECKS = {
    "word_problems": "math dataset=word_problems subset=null --reward word_problems:score",
    "calculator": "calculator:CalculatorTasks",
    "lights_out": "gymnasium id=lights_out:LightsOut-v0 kwargs.render_mode=ansi",
    "nim": "nim:NimGame",
    "guessing": "guessing:GuessingGame high=100",
    "countdown": "countdown:CountdownTasks --reward countdown:countdown_reward",
    "drafts": "drafts:Drafts",
    "own_task": "own_task:MyTasks --reward own_task:my_fn",
    "own_environment": "own_environment:HotOrCold",
    "own_agent": "agent tasks=own_agent:Codes agent=[python,own_agent.py]",
    "repairs": "repository tasks=repairs:Repairs 'agent=[python,small_agent.py,\"{prompt}\"]' read=[small_agent.py]",
}
"""Name of an example -> arguments of `penstock env check`; the slow examples are sums, which have their own tests."""
LONG = ("own_agent", "repairs", "slow_environment", "slow_tool")
"""They start programs or wait."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the examples, as the working directory, with the data that one of them writes."""
    known = set(sys.modules)
    for source in FOLDER.glob("*.py"):
        shutil.copy(source, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # of programs called `python`
    runpy.run_path("word_problems.py", run_name="__main__")
    yield tmp_path
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def tiered(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.full if name in LONG else ())


def test_every_example_is_in_the_table() -> None:
    told = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in FOLDER.glob("*.py") if f"[`{path.name}`]({path.name})" not in told] == []
    assert COMMANDS.keys() == CHECKS.keys() | {"slow_tool", "slow_environment"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_docstring_of_an_example_has_the_command_of_the_table(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    text = (ast.get_docstring(tree, clean=False) or "").replace("\\\n", " ")
    found = [shlex.split(line)[2:] for line in text.splitlines() if line.startswith("    penstock train ")]
    assert found == [COMMANDS[name]]


@pytest.mark.some(1)
@pytest.mark.parametrize("name", map(tiered, COMMANDS))
def test_the_command_of_an_example_passes_the_dry_run(name: str, folder: Path) -> None:
    overrides = [word for word in COMMANDS[name] if not word.startswith("model.path=")]
    config = load_config("train", overrides, dry_run=True).config
    assert f"{name}:" in f"{config.reward.fn} {config.env.factory} {config.env.args}"


@pytest.mark.some(1)
@pytest.mark.parametrize("name", map(tiered, CHECKS))
def test_an_example_passes_the_check_of_environments(name: str, folder: Path) -> None:
    byte_tokenizer().save_pretrained(write_model(folder / "policy"))
    result = CliRunner().invoke(app, ["env", "check", *shlex.split(CHECKS[name])], env={"COLUMNS": "250"})
    assert result.exit_code == 0, result.output


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_trains(name: str, folder: Path) -> None:
    small = small_run_overrides(folder, "small", byte_tokenizer(), f"total_steps={STEPS}", "dataflow.max_staleness=0")
    train_in_process(folder, [*COMMANDS[name], *(word for word in small if not word.startswith("experiment="))])
    ledger = read_summary(folder / "runs" / "small")["ledger"]
    assert (ledger["trained"], ledger["failed"]) == (STEPS, 0)
