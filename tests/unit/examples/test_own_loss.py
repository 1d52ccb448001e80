"""A loss of a user's own is one Python file and one YAML file: documented and checked by the commands, and trained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from penstock.dataflow.errors import ConfigError
from penstock.platform.checks.load import load_config
from penstock.platform.cli.main import app
from penstock.platform.config.schema import RunConfig
from penstock.trainer.algorithms.algorithm import Algorithm
from tests.unit.trainer.algorithms.micro_batches import LENGTHS, data, tokens_of

FOLDER = Path(__file__).parents[3] / "examples" / "losses"
COMMAND = ["experiment=arithmetic", "algorithm/loss=asymmetric", "algorithm/correction=none"]


@pytest.fixture(autouse=True)
def in_the_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(FOLDER)
    monkeypatch.syspath_prepend(FOLDER)
    yield
    sys.modules.pop("asymmetric", None)


def checked(*overrides: str) -> RunConfig:
    return load_config("train", [*COMMAND, *overrides], config_dir=Path("conf"), dry_run=True).config


def refusals(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        checked(*overrides)
    return raised.value.violations


def test_it_is_one_file_and_one_yaml_and_the_command_is_in_its_docstring_and_in_the_table() -> None:
    files = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.suffix in (".py", ".yaml")}
    assert files == {"asymmetric.py", "conf/algorithm/loss/asymmetric.yaml"}
    command = f"penstock train --config-dir conf {' '.join(COMMAND)}"
    assert command in (FOLDER / "asymmetric.py").read_text(encoding="utf-8")
    assert command in (FOLDER.parent / "README.md").read_text(encoding="utf-8")


def test_the_command_prints_its_formula_source_settings_and_metrics() -> None:
    result = CliRunner().invoke(app, ["algorithms", "asymmetric:asymmetric_reinforce"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    printed = " ".join(result.output.split())
    assert "asymmetric:asymmetric_reinforce −(A − δ) c arXiv 2506.20520" in printed
    assert "algorithm.loss.args.delta -0.1 δ: below 0, good answers" in printed
    assert "(a number in [-1, 0])" in printed
    assert "loss/measured/raised_share share of tokens whose probability it raises" in printed


def test_what_has_no_entry_is_said() -> None:
    result = CliRunner().invoke(app, ["algorithms", "asymmetric:Settings"])
    assert result.exit_code == 2
    assert "asymmetric:Settings has no @Entry" in result.stderr


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.loss.args.delta=0.5", "algorithm.loss.args.delta=0.5 is out of range"),
        (
            "algorithm.loss.args.delt=-0.5",
            "unknown key. Did you mean algorithm.loss.args.delta?",
        ),
        (
            "algorithm/correction=tis_token",
            "weighs algorithm.loss=asymmetric:asymmetric_reinforce, but",
        ),
    ],
)
def test_its_settings_and_what_it_says_of_itself_are_checked(override: str, words: str) -> None:
    (problem,) = refusals(override)
    assert words in problem


def test_its_terms_have_the_gradient_of_the_shifted_advantage() -> None:
    algorithm = Algorithm(checked("algorithm.loss.args.delta=-0.5").algorithm)
    tokens = tokens_of(data(LENGTHS["ragged"], 3))
    found = algorithm.loss(tokens, algorithm.loss_settings)
    found.terms.sum().backward()
    assert algorithm.metrics == ("raised_share",)
    assert torch.equal(found.measured["raised_share"], tokens.advantages > -0.5)
    torch.testing.assert_close(tokens.target.grad, -(tokens.advantages + 0.5))
