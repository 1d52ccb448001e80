"""Presets of `algorithm`: the source beside each value, what the command prints, and settings that a paper forbids."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from penstock.platform.checks.configuration import check_config
from penstock.platform.checks.load import compose_config
from penstock.platform.cli.algorithms import parts_of
from penstock.platform.cli.main import app
from penstock.platform.config import presets
from penstock.platform.config.overrides import CONF_DIR
from penstock.platform.config.presets import preset_of, read_preset
from penstock.trainer.algorithms.catalog import entries

FOLDER = CONF_DIR / "algorithm"
FILES = sorted(FOLDER.rglob("*.yaml"))
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
SOURCE = re.compile(r"\[(ours|(arXiv \d{4}\.\d{5}, )?(section|appendix|algorithm|listing) [\dA-Z.]+)\]$")


def without_source(path: Path) -> list[str]:
    """Settings of a file that have no source beside them."""
    return [key for key, (_, text) in read_preset(path).settings.items() if not SOURCE.search(text)]


def shown(*arguments: str) -> str:
    """What `penstock algorithms` prints, in one line without the borders of tables."""
    result = CliRunner().invoke(app, ["algorithms", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_every_value_has_its_source_beside_it(path: Path) -> None:
    assert without_source(path) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_every_value_of_the_file_is_read_with_its_comment(path: Path) -> None:
    """Against the YAML parser: no value is missed because its line has another form."""
    raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    prefix = "algorithm" if path.parent == FOLDER else f"algorithm.{path.parent.name}"
    values = {}
    for key, value in raw.items():
        if key == "defaults":
            chosen = [one for one in value if isinstance(one, dict)]
            values |= {f"{prefix}/{group.split()[-1]}": name for one in chosen for group, name in one.items()}
        elif isinstance(value, dict):
            values |= {f"{prefix}.{key}.{inner}": one for inner, one in value.items()}
        elif key != "type":
            values[f"{prefix}.{key}"] = value
    assert {key: yaml.safe_load(value) for key, (value, _) in read_preset(path).settings.items()} == values


def test_a_planted_value_without_a_source_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "algorithm"
    folder.mkdir()
    text = (
        "# A preset.\ndefaults:\n  - grpo\n  - override loss: sapo\n\nepochs: 3 # passes\nkl:\n  target: 0.1 # [ours]\n"
    )
    (folder / "planted.yaml").write_text(text)
    monkeypatch.setattr(presets, "CONF_DIR", tmp_path)
    assert without_source(folder / "planted.yaml") == ["algorithm/loss", "algorithm.epochs"]


@pytest.mark.some(4)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_printed_with_formulas_settings_sources_and_differences(name: str) -> None:
    printed, preset = shown(name), preset_of(name)
    algorithm = compose_config(["experiment=arithmetic", f"algorithm={name}", *needed(name)]).algorithm
    assert re.match(r"arXiv \d{4}\.\d{5}, \w+", preset.paper)
    assert preset.differences
    for expected in (preset.summary, f"Paper: {preset.paper}", *(f"Differs: {one}" for one in preset.differences)):
        assert " ".join(expected.split()) in printed
    for part in parts_of(algorithm):
        assert " ".join(part.formula.split()) in printed
    for key, (value, text) in preset.settings.items():
        assert " ".join(f"{key} {value} {text}".split()) in printed
        if "/" not in key:
            assert attrgetter(key.removeprefix("algorithm."))(algorithm) == yaml.safe_load(value)
        else:
            section = getattr(algorithm, key.partition("/")[2])
            assert value in (str(section), getattr(section, "type", None), "ppo_clip_higher")
    assert not re.search(r"\[section[^]]*\]", " ".join(text for key, (_, text) in inherited(name).items())), (
        "a section of another paper is named with that paper"
    )


@pytest.mark.parametrize(("name", "steps"), [("rloo", "two"), ("dapo", "16"), ("cispo", "16"), ("sapo", "4")])
def test_a_preset_of_one_step_per_batch_says_how_many_its_paper_takes(name: str, steps: str) -> None:
    assert compose_config(["experiment=arithmetic", f"algorithm={name}"]).algorithm.updates_per_batch == 1
    (text,) = [one for one in preset_of(name).differences if one.startswith("one optimizer step per batch; the paper")]
    assert steps in text
    assert "mini_batches" in text


def needed(name: str) -> list[str]:
    return ["teacher.path=somewhere"] if name == "distill" else []


def inherited(name: str) -> dict[str, tuple[str, str]]:
    """What a preset has from the files below it."""
    own = read_preset(FOLDER / f"{name}.yaml").settings
    return {key: one for key, one in preset_of(name).settings.items() if key not in own}


def test_a_name_of_the_catalog_is_printed_with_its_formula_and_settings() -> None:
    printed = shown("mis_token")
    assert "weight w; masked outside lo ≤ w ≤ hi arXiv 2510.18855" in printed
    assert "settings, with algorithm/correction=mis_token" in printed
    assert "algorithm.correction.mis_token.min_weight 0.5 Tokens of a smaller weight are masked." in printed
    assert "algorithm.loss.beta 0.1" in shown("ipo")
    assert "settings" not in shown("value"), "no configuration chooses the loss of a critic"


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    result = CliRunner().invoke(app, ["algorithms", "dapoo"])
    assert result.exit_code == 2
    assert "dapoo: there is no algorithm of this name. Did you mean 'dapo'?" in result.stderr


def test_a_preset_is_of_no_kind_so_it_is_not_suggested_for_one() -> None:
    result = CliRunner().invoke(app, ["algorithms", "dapo", "--kind", "loss"])
    assert result.exit_code == 2
    said = "dapo: there is no algorithm of this name of kind loss. It is a preset, which has parts of several kinds: "
    assert f"{said}`penstock algorithms dapo` shows them." in result.stderr
    result = CliRunner().invoke(app, ["algorithms", "dapoo", "--kind", "loss"])
    assert result.stderr.endswith("dapoo: there is no algorithm of this name of kind loss.\n")


FORBIDDEN = [
    (["algorithm=dapo", "algorithm.kl.coefficient=0.1"], "algorithm.kl.coefficient=0.1 with algorithm.loss.clip_high"),
    (["algorithm=dapo", "algorithm.aggregation=seq_mean_token_mean"], "DAPO weighs all tokens of the batch equally"),
    (["algorithm=reinforce_pp", "algorithm.advantage.whiten=none"], "what REINFORCE++ adds"),
    (["algorithm=gspo", "algorithm.loss.clip_high=0.2"], "algorithm.loss.clip_high=0.2 with algorithm.loss=gspo: "),
    (["algorithm=gspo", "algorithm.loss.clip_low=0.2"], "Use loss.clip_low=0.0003."),
    (["algorithm=sapo", "algorithm.loss.tau_negative=0.5"], "tau_negative=0.5 with algorithm.loss.tau_positive=1.0"),
    (["algorithm=sapo", "algorithm.aggregation=token_mean"], "averages its gate within each answer"),
]


@pytest.mark.parametrize(("overrides", "because"), FORBIDDEN, ids=lambda value: str(value)[:60])
def test_a_preset_with_a_setting_that_its_paper_forbids_is_a_warning_with_advice(overrides, because) -> None:
    def warnings(typed: list[str]) -> list[str]:
        quiet = ["dataflow.filters.zero_variance=true"]
        config = compose_config(["experiment=arithmetic", *quiet, *typed])
        return [one.message for one in check_config(config, "train") if one.severity == "warning"]

    assert warnings(overrides[:1]) == []
    (message,) = warnings(overrides)
    assert because in message
    assert re.search(r"arXiv \d{4}\.\d{5}, section", message)
    assert "Use " in message


def test_every_forbidden_setting_is_tried() -> None:
    assert len(FORBIDDEN) == len({one for entry in entries() for one in entry.deviations})
