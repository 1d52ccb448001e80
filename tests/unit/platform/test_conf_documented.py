"""Every key of the YAML has a comment, and every key of the schema stands in the YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from penstock.envs.config import EpisodeConfig, RewardConfig
from penstock.platform.config.field_errors import all_paths
from penstock.platform.config.overrides import CONF_DIR

FILES = sorted(CONF_DIR.rglob("*.yaml"))
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[a-z_0-9]+):(?P<rest>.*)$")
_KEY_IN_COMMENT = re.compile(r"(\w+): ")
_PARTNER = re.compile(r"^partner\.(model|optimizer)\.")
"""Sections that the partner has too, with the same keys."""
_USER_NAMES = re.compile(r"^(cluster\.pools|env\.streams|reward\.parts)\.[a-z]+")


def keys(path: Path) -> Iterator[tuple[str, bool]]:
    """Dotted key below the file's own package, and whether its line has a comment. `defaults` lists are Hydra's."""
    parents: list[tuple[int, str]] = []
    for line in path.read_text().splitlines():
        match = _KEY.match(line)
        if not match or match["key"] == "defaults":
            continue
        indent = len(match["indent"])
        parents = [parent for parent in parents if parent[0] < indent] + [(indent, match["key"])]
        has_own_value = bool(match["rest"].partition("#")[0].strip())
        dotted = ".".join(key for _, key in parents)
        yield dotted, " # " in line or not has_own_value
        if match["key"] == "isolation":  # a word by default: its comment says what may stand there
            yield from ((f"{dotted}.{inner}", True) for inner in _KEY_IN_COMMENT.findall(line.partition("#")[2]))


def package(path: Path) -> str:
    header = re.match(r"# @package (\S+)", path.read_text())
    if header:
        return "" if header[1] == "_global_" else header[1]
    group = path.parent.relative_to(CONF_DIR).as_posix()
    return "" if group == "." else group.replace("/", ".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(CONF_DIR).as_posix())
def test_every_yaml_key_has_a_comment(path):
    assert [key for key, is_commented in keys(path) if not is_commented] == []
    assert "# " in path.read_text().splitlines()[0]


def test_every_config_key_stands_in_the_yaml():
    documented = set()
    for path in FILES:
        prefix = package(path)
        documented.add(prefix)
        documented |= {f"{prefix}.{key}".lstrip(".") for key, _ in keys(path)}
    documented = {_USER_NAMES.sub(r"\1.*", key) for key in documented}
    sections = {path.rpartition(".")[0] for path in all_paths()}
    missing = [path for path in all_paths() if _PARTNER.sub(_its_section, path) not in documented | sections]
    assert missing == []


def _its_section(of_partner: re.Match[str]) -> str:
    return {"model": "model.", "optimizer": "trainer.optimizer."}[of_partner[1]]


def test_the_comment_check_reads_every_key():
    path = CONF_DIR / "cluster" / "local_cpu.yaml"
    read = {key for key, _ in keys(path)}
    assert set(yaml.safe_load(path.read_text())) <= read
    assert "pools.cpu.count" in read


def test_only_a_reward_model_may_take_all_memory_by_default() -> None:
    """A memory bomb costs its process, not the machine."""
    presets = [path for folder in ("env", "reward") for path in (CONF_DIR / folder).glob("*.yaml")]
    unbounded = {path.name for path in presets if "max_memory_gib: null" in path.read_text()}
    assert unbounded == {"reward_model.yaml"}
    assert EpisodeConfig().max_memory_gib == 8.0
    assert RewardConfig().max_memory_gib == 4.0
