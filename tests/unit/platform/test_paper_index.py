"""docs/paper_index.md is the catalog, and the catalog is what runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.platform.checks.load import compose_config
from penstock.platform.cli.algorithms import is_arxiv
from penstock.trainer.algorithms.catalog import entries
from tools.paper_table import paper_table, setting

ROOT = Path(__file__).parents[3]
INDEX = (ROOT / "docs" / "paper_index.md").read_text(encoding="utf-8")


def test_the_index_holds_the_table_of_the_catalog_as_it_is_printed():
    assert paper_table() in INDEX, "print it with: python tools/paper_table.py"


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_every_entry_has_a_row_with_equation_file_and_source(entry):
    (row,) = [line for line in INDEX.splitlines() if line.startswith(f"| {entry.kind} | `{setting(entry)}`")]
    assert f"`{entry.formula}`" in row
    assert f"`{entry.file}`" in row
    assert f"arxiv.org/abs/{entry.source}" in row if is_arxiv(entry.source) else entry.source in row


def test_every_file_that_the_index_names_exists():
    files = set(re.findall(r"`((?:trainer|dataflow|conf|rollout|weights)/[\w/.]+)`", INDEX))
    assert len(files) > 15
    assert [name for name in files if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("kind", ["advantage", "loss", "correction", "aggregation", "proximal"])
def test_settings_are_what_a_configuration_takes(kind):
    for entry in (one for one in entries() if one.kind == kind and one.name != "value"):
        separator = "/" if kind in ("advantage", "loss", "correction") else "."
        assert setting(entry) == f"algorithm{separator}{kind}={entry.name}"
    synchronous = ["experiment=arithmetic", "dataflow=synchronous"]
    assert compose_config([*synchronous, "algorithm.overlong.mode=penalty"]).algorithm.overlong.mode == "penalty"


def test_every_setting_of_the_table_is_a_key_or_a_choice_of_one():
    reference = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    for entry in (one for one in entries() if one.name != "value"):
        key = setting(entry).partition("=")[0]
        assert (ROOT / "conf" / key).is_dir() or f"| `{key}` |" in reference, key


def test_every_preset_is_in_the_guide():
    guide = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    for preset in (ROOT / "conf" / "algorithm").glob("*.yaml"):
        assert f"| `{preset.stem}` |" in guide
