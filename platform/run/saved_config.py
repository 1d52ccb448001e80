"""The configuration that a run has written, and another one made of it by `KEY=VALUE` words."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from penstock.dataflow.errors import ConfigError
from penstock.platform.config.compose import Composition, to_yaml
from penstock.platform.config.field_errors import describe_errors
from penstock.platform.config.overrides import sort_overrides
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.atomic_file import write_text_atomically
from penstock.platform.metrics.leaves import leaves
from penstock.platform.metrics.run_files import (
    CONFIG_FILE,
    CONFIG_HISTORY_FILE,
    ENVIRONMENT_FILE,
    START_PARTNER,
    START_POLICY,
)
from penstock.platform.run.run_dir import read_environment

_OF_A_START = ("name", "run_dir", "overwrite", "resume")
"""Keys that say how a run is started, not what it is."""
_INTERPOLATION = re.compile(r"(\\*)\$\{")


def read_saved_config(run_dir: Path) -> dict[str, Any]:
    """The configuration that a run has written.

    Raises:
        ConfigError: If the directory holds no run.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(
            [f"{run_dir}: holds no {CONFIG_FILE}, so it is no run. Give the directory that `penstock train` printed."]
        )
    saved = yaml.safe_load(path.read_text(encoding="utf-8"))  # not OmegaConf: every `${` in it is text
    assert isinstance(saved, dict)
    return {str(key): value for key, value in saved.items()}


def enter_folder_of(run_dir: Path) -> None:
    """Change to the folder in which the run was started: its relative paths and the user's modules are there."""
    folder = read_environment(run_dir).get("folder")
    if folder is not None and Path(folder).is_dir():
        os.chdir(folder)


def changed_config(
    saved: Mapping[str, Any],
    overrides: Sequence[str],
    run_dir: Path,
    other: Path | None = None,
    typed: Sequence[str] | None = None,
) -> RunConfig:
    """The saved configuration with the overrides.

    Args:
        saved: Content of `config.yaml`.
        overrides: `KEY=VALUE` words.
        run_dir: Directory of the run.
        other: Directory of another run that is to have this configuration, and its name.
        typed: Keys of `saved` that the user has set; None: those of the run.

    Raises:
        ConfigError: If an override is no `KEY=VALUE`, or the result is invalid.
    """
    choices = [word for word in overrides if "=" not in word or "/" in word.partition("=")[0]]
    if choices:
        raise ConfigError(
            [
                f"{word}: the configuration of a run takes single keys, KEY=VALUE, and no choices of groups."
                for word in choices
            ]
        )
    given = sort_overrides(overrides, {})  # read as `train` reads them
    if given.problems:
        raise ConfigError(given.problems)
    # Without that file every key counts as typed, so that no default of the run is adapted once more.
    began_with = read_environment(run_dir).get("typed", flat(saved)) if typed is None else typed
    try:
        changed = OmegaConf.create(_escaped(_with_start_policies(saved, run_dir)))
        for one in OverridesParser.create().parse_overrides(given.values):
            OmegaConf.update(changed, one.key_or_group, one.value(), merge=True)
        raw = OmegaConf.to_container(changed, resolve=True)
        assert isinstance(raw, dict)
        raw |= {"run_dir": str(other or run_dir), "overwrite": False}
        raw |= {} if other is None else {"name": other.name, "resume": "never"}
        composition = Composition(
            raw={str(key): value for key, value in raw.items()}, typed=[*began_with, *given.typed]
        )
        composition.validate()
        assert composition.config is not None, "it is valid"
        return composition.config
    except OmegaConfBaseException as error:
        raise ConfigError([str(error).splitlines()[0]]) from error
    except ValidationError as error:
        raise ConfigError(list(describe_errors(error, given.typed).values())) from error


def _with_start_policies(saved: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """The same, with the paths of the policies in a run's own directory, which may have been moved or downloaded."""
    found = dict(saved)
    for folder, owner in ((START_POLICY, found), (START_PARTNER, found.get("partner"))):
        if owner is not None and (path := run_dir.absolute() / folder).is_dir():
            owned = {**owner, "model": {**owner["model"], "path": str(path), "from_scratch": False}}
            found |= owned if owner is found else {"partner": owned}
    return found


def _escaped(tree: Any) -> Any:
    """The same texts, with each `${` as OmegaConf writes it where it is no interpolation."""
    if isinstance(tree, Mapping):
        return {key: _escaped(one) for key, one in tree.items()}
    if isinstance(tree, list):
        return [_escaped(one) for one in tree]
    return _INTERPOLATION.sub(r"\1\1\\${", tree) if isinstance(tree, str) else tree


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> both values, of every leaf that differs between two configurations."""
    old, new = flat(before), flat(now)
    return {
        key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }


def write_changed(
    run_dir: Path, config: RunConfig, version: int, keys: Mapping[str, tuple[Any, Any]], *, by: str
) -> None:
    """Write a configuration that counts from now on, and add its changed keys to the history.

    Args:
        run_dir: Directory of the run.
        config: The configuration.
        version: Last version that was trained without the changes.
        keys: Changed key -> both values.
        by: Command that has changed them.
    """
    rows = [
        {"time_s": round(time.time(), 3), "after_step": version, "key": key, "before": old, "now": new, "by": by}
        for key, (old, new) in keys.items()
        if key not in _OF_A_START
    ]
    # The history first: a change that is in the configuration alone would be lost to `resume=auto`.
    if rows:
        text = "".join(f"{json.dumps(row)}\n" for row in (*read_history(run_dir), *rows))
        write_text_atomically(run_dir / CONFIG_HISTORY_FILE, text)
    write_text_atomically(run_dir / CONFIG_FILE, to_yaml(config))
    environment = read_environment(run_dir) | {"typed": sorted(config.typed)}
    write_text_atomically(run_dir / ENVIRONMENT_FILE, json.dumps(environment, indent=2) + "\n")


def read_history(run_dir: Path) -> list[dict[str, Any]]:
    """The changes that a run has written, the oldest first. A line that was cut off is left out."""
    path = run_dir / CONFIG_HISTORY_FILE
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value; lists are values, and an empty section has none."""
    return {key: value for key, value in leaves(tree) if value != {}}
