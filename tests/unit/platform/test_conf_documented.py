"""Every file of conf/ says what it is for and repeats no default; every key of the schema is described."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from penstock.envs.config import EpisodeConfig, RewardConfig
from penstock.platform.config.field_errors import tags_of
from penstock.platform.config.overrides import CONF_DIR
from penstock.platform.config.schema import RunConfig
from tests.config_page import config_page, inner_sections, undocumented

ROOT = Path(__file__).parents[3]
FILES = sorted(CONF_DIR.rglob("*.yaml"))
PRESETS = [path for path in FILES if path.parent.name != "experiment"]
"""Experiments may repeat a default: what stands below it may come from another preset than the schema's."""


def package(path: Path) -> list[str]:
    """Keys that the file is composed below."""
    header = re.match(r"# @package (\S+)", path.read_text())
    group = path.parent.relative_to(CONF_DIR).as_posix().replace("/", ".")
    name = header[1] if header else group
    return [] if name in ("_global_", ".", "") else name.split(".")


def repeated(values: dict[str, Any], section: type[BaseModel], path: str = "") -> Iterator[str]:
    """Keys that are set to the default that the schema has."""
    for key, value in values.items():
        field = section.model_fields.get(key)
        if field is None or key == "type":
            continue
        default = field.get_default(call_default_factory=True)
        inner = [one for one in inner_sections(field) if not tags_of(one) or _tag(value) in tags_of(one)]
        if isinstance(value, dict) and inner and not isinstance(default, dict):
            yield from repeated(value, inner[0], f"{path}{key}.")
        elif value == getattr(default, "value", default) and type(value) is type(default):
            yield f"{path}{key}={value}"


def _tag(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else None


def whole(path: Path) -> dict[str, Any]:
    """Values of a file, below the keys of its package."""
    values = {key: value for key, value in (yaml.safe_load(path.read_text()) or {}).items() if key != "defaults"}
    for key in reversed(package(path)):
        values = {key: values}
    return values


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(CONF_DIR).as_posix())
def test_every_file_begins_with_what_it_is_for(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    assert re.match(r"# \S", lines[0])


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.relative_to(CONF_DIR).as_posix())
def test_no_preset_repeats_a_default(path: Path) -> None:
    assert list(repeated(whole(path), RunConfig)) == []


def test_a_repeated_default_is_found() -> None:
    planted = {"trainer": {"zero_stage": 0, "optimizer": {"eps": 1e-8, "lr": 1.0}}, "rollout": {"max_resumes": 4}}
    assert list(repeated(planted, RunConfig)) == ["trainer.zero_stage=0", "trainer.optimizer.eps=1e-08"]
    variant = {"rollout": {"engine": {"type": "vllm", "max_num_seqs": 256, "kv_cache_gib": 4}}}
    assert list(repeated(variant, RunConfig)) == ["rollout.engine.max_num_seqs=256"]


def test_every_key_is_described() -> None:
    assert list(undocumented()) == []


def test_the_reference_page_is_that_of_the_schema() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert page == config_page(), "print it with: python -m tests.config_page > docs/reference/configuration.md"


def test_only_a_reward_model_may_take_all_memory_by_default() -> None:
    """A memory bomb costs its process, not the machine."""
    presets = [path for folder in ("env", "reward") for path in (CONF_DIR / folder).glob("*.yaml")]
    unbounded = {path.name for path in presets if "max_memory_gib: null" in path.read_text()}
    assert unbounded == {"reward_model.yaml"}
    assert EpisodeConfig().max_memory_gib == 8.0
    assert RewardConfig().max_memory_gib == 4.0
