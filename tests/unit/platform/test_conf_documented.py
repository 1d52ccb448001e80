"""Every file of conf/ begins with its purpose and repeats no default; every key of the schema is described."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import pytest
import yaml
from pydantic import BaseModel

from penstock.envs.config import EpisodeConfig, RewardConfig
from penstock.envs.import_path import load_object
from penstock.envs.registry import factory_path
from penstock.platform.config.field_errors import tags_of
from penstock.platform.config.overrides import CONF_DIR
from penstock.platform.config.schema import RunConfig
from tests.composed_once import compose_every_time
from tools.config_page import config_page, inner_sections, undocumented

Values = dict[str, Any]
ROOT = Path(__file__).parents[3]
FILES = sorted(CONF_DIR.rglob("*.yaml"))
PRESETS = [path for path in FILES if path.parent.name != "experiment"]
EXPERIMENTS = [path for path in FILES if path.parent.name == "experiment"]


def package(path: Path) -> list[str]:
    """Keys that the file is composed below."""
    header = re.match(r"# @package (\S+)", path.read_text())
    group = path.parent.relative_to(CONF_DIR).as_posix().replace("/", ".")
    name = header[1] if header else group
    return [] if name in ("_global_", ".", "") else name.split(".")


def repeated(values: Values, section: type[BaseModel], below: Values, path: str = "") -> Iterator[str]:
    """Keys that are set to what they are without it: the value of a file `below`, or else the default of the schema."""
    for key, value in values.items():
        field = section.model_fields.get(key)
        if field is None or key == "type":
            continue
        default = below.get(key, field.get_default(call_default_factory=True))
        under = below[key] if isinstance(below.get(key), dict) else {}
        tags = {value.get("type"), under.get("type")} if isinstance(value, dict) else set()
        inner = [one for one in inner_sections(field) if not tags_of(one) or tags & set(tags_of(one))]
        if isinstance(value, dict) and inner and get_origin(field.annotation) is dict:  # sections by name
            for name, named in value.items():
                yield from repeated(named, inner[0], under.get(name, {}), f"{path}{key}.{name}.")
        elif isinstance(value, dict) and inner:
            yield from repeated(value, inner[0], under, f"{path}{key}.")
        elif is_same(value, getattr(default, "value", default)):
            yield f"{path}{key}={value}"


def is_same(value: Any, default: Any) -> bool:
    """Equal, where `false` is not 0."""
    return value == default and isinstance(value, bool) == isinstance(default, bool)


def repeated_arguments(values: Values, below: Values) -> Iterator[str]:
    """Arguments of a factory or of a reward that are set to the default that the callable has."""
    reward, reward_below = values.get("reward", {}), below.get("reward", {})
    called = {
        "env": (values.get("env", {}), below.get("env", {}), "factory"),
        "reward": (reward, reward_below, "fn"),
        **{
            f"reward.parts.{name}": (part, reward_below.get("parts", {}).get(name, {}), "fn")
            for name, part in reward.get("parts", {}).items()
        },
    }
    for section, (chosen, under, key) in called.items():
        path = chosen.get(key, under.get(key))
        defaults = argument_defaults(path) if path else {}
        for name, value in chosen.get("args", {}).items():
            is_reset = name in under.get("args", {}) and not is_same(value, under["args"][name])
            if name in defaults and is_same(value, defaults[name]) and not is_reset:
                yield f"{section}.args.{name}={value}"


def argument_defaults(path: str) -> Values:
    """Argument -> default of a callable; of a class that is built from a `config`, those of its model."""
    target = load_object(factory_path(path))
    config = get_type_hints(target.__init__).get("config") if isinstance(target, type) else None
    if isinstance(config, type) and issubclass(config, BaseModel):
        return {name: field.default for name, field in config.model_fields.items() if not field.is_required()}
    parameters = inspect.signature(target).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def composed_below(path: Path, folder: Path) -> Values:
    """What an experiment changes: the composition of its defaults list without its own values."""
    defaults = (yaml.safe_load(path.read_text()) or {}).get("defaults", [])
    bare = folder / "experiment" / "bare.yaml"
    bare.parent.mkdir()
    bare.write_text("# @package _global_\n" + yaml.safe_dump({"defaults": defaults or ["_self_"]}))
    return compose_every_time(["experiment=bare"], [], folder)


def whole(path: Path) -> Values:
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
    values = whole(path)
    assert [*repeated(values, RunConfig, {}), *repeated_arguments(values, {})] == []


@pytest.mark.some(9)
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_sets_only_what_it_changes(path: Path, tmp_path: Path) -> None:
    values, below = whole(path), composed_below(path, tmp_path)
    assert [*repeated(values, RunConfig, below), *repeated_arguments(values, below)] == []


def test_a_repeated_default_is_found() -> None:
    planted = {"trainer": {"zero_stage": 0, "optimizer": {"eps": 1e-8, "lr": 1.0}}, "rollout": {"routing": "x"}}
    assert list(repeated(planted, RunConfig, {})) == ["trainer.zero_stage=0", "trainer.optimizer.eps=1e-08"]
    variant = {"rollout": {"engine": {"type": "vllm", "max_num_seqs": 256, "kv_cache_gib": 4}}}
    assert list(repeated(variant, RunConfig, {})) == ["rollout.engine.max_num_seqs=256"]
    part = {"reward": {"parts": {"judge": {"weight": 1.0, "clip": [0, 1]}}}}
    assert list(repeated(part, RunConfig, {})) == ["reward.parts.judge.weight=1.0"]
    assert list(repeated({"seed": 0, "total_steps": 3}, RunConfig, {"seed": 0, "total_steps": 2})) == ["seed=0"]
    reset = {"trainer": {"zero_stage": 0}}
    assert list(repeated(reset, RunConfig, {"trainer": {"zero_stage": 3}})) == []


def test_a_repeated_argument_is_found() -> None:
    judge = {"fn": "penstock.envs.rewards.judge:JudgeReward", "args": {"url": "http://x", "lowest": 0, "highest": 5}}
    planted = {"env": {"factory": "arithmetic", "args": {"digits": 2, "operators": "-"}}, "reward": judge}
    assert list(repeated_arguments(planted, {})) == ["env.args.digits=2", "reward.args.lowest=0"]
    below = {"env": {"factory": "arithmetic", "args": {"digits": 3}}}
    assert list(repeated_arguments({"env": {"args": {"digits": 2}}}, below)) == [], "the child resets it"


def test_every_key_is_described() -> None:
    assert list(undocumented()) == []


def test_the_reference_page_is_that_of_the_schema() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert page == config_page(), "print it with: python tools/config_page.py > docs/reference/configuration.md"


def test_only_a_reward_model_may_take_all_memory_by_default() -> None:
    """A memory bomb costs its process, not the machine."""
    presets = [path for folder in ("env", "reward") for path in (CONF_DIR / folder).glob("*.yaml")]
    unbounded = {path.name for path in presets if "max_memory_gib: null" in path.read_text()}
    assert unbounded == {"reward_model.yaml"}
    assert EpisodeConfig().max_memory_gib == 8.0
    assert RewardConfig().max_memory_gib == 4.0
