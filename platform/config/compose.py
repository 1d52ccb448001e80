"""From a command line to a validated `RunConfig`: Hydra composes, pydantic validates, and all problems are reported.

Field errors do not hide cross-field errors. An invalid key falls back to its value without the override, the checks run
on the result, and findings that depend on a replaced key are omitted.

A value that the user has not set is never refused: where a default does not fit, the checks say which value does
(`Finding.fits`). It is used instead, with one line that says so (`Composition.settle`). Set is a key that is on the
command line or in a file of the user's (`--config-dir`). Values of Penstock's own files are defaults, also of a file
that the user chose, but for the type of what a choice names: `rollout/engine=torch` sets rollout.engine.type.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from penstock.dataflow.errors import ConfigError
from penstock.platform.config.checkpoint_shapes import fill_shapes
from penstock.platform.config.field_errors import describe_errors, locate, nearest_choice, nearest_key
from penstock.platform.config.findings import Finding
from penstock.platform.config.overrides import (
    CONF_DIR,
    Overrides,
    find_groups,
    shadowed_files,
    sort_overrides,
    unreadable_files,
)
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.leaves import leaves, scalars, value_at

Raw = dict[str, Any]
_COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, TypeError, AssertionError)
"""What Hydra and OmegaConf raise for files and overrides that they cannot use."""
_LARGEST = 2**53
"""Larger integers are not exact in metrics, and from 2^63 torch and vLLM refuse them."""
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095
_TEXTS = ("rollout.sampling.stop", "env.reasoning.", "warm_start")
"""Keys, or beginnings of keys, of text that a model or a parser reads. Other strings name things."""
_LITERAL_ESCAPE = re.compile(r"(?<!\\)\\(?:n|[tr](?![a-z]))")
_MAX_FITS = 8
"""How often a default is replaced before the finding counts: two checks may each want what the other one refuses."""


@dataclass(slots=True)
class Composition:
    """Result of composing."""

    config: RunConfig | None = None
    """The configuration, with invalid keys replaced where possible; None if it could not be repaired."""
    problems: list[str] = field(default_factory=list)
    """One sentence per invalid override or key."""
    remarks: list[str] = field(default_factory=list)
    """One sentence per value that could be misunderstood: how it was read."""
    wrong_paths: list[str] = field(default_factory=list)
    """The dotted keys that `problems` are about."""
    typed: list[str] = field(default_factory=list)
    """Dotted keys that the user has set, on the command line or in a file of theirs."""
    has_experiment: bool = True
    """Whether an experiment was chosen. Without one, most values are not those that the user wants."""
    raw: Raw = field(default_factory=dict)
    """What `config` was validated from."""
    derived: dict[str, str] = field(default_factory=dict)
    """Key that the user has not set -> a sentence about its value, which is not the default."""
    _defaults: Raw = field(default_factory=dict)
    _num_fits: Counter[str] = field(default_factory=Counter)

    def settle(self, check: Callable[[RunConfig], Iterable[Finding]]) -> list[Finding]:
        """Repeat a check while it refuses a default and knows a value that fits.

        Args:
            check: Yields findings about a configuration; after a replaced default it is not asked for the rest of them.

        Returns:
            The relevant findings about the final `config`.
        """
        while True:
            assert self.config is not None, "it could be validated"
            findings: list[Finding] = []
            for finding in check(self.config):
                if self._replaces_a_default(finding):
                    break
                findings.append(finding)
            else:
                return self.relevant(findings)

    def _replaces_a_default(self, finding: Finding) -> bool:
        """Set the first value that fits of a key that the user has not set; whether there is one."""
        assert self.config is not None, "the finding is about it"
        for key, value, why in finding.fits if self.relevant([finding]) else ():
            if self.config.is_typed(key) or self._num_fits[key] == _MAX_FITS:
                continue
            old = value_at(self.config.model_dump(mode="json"), key.split("."))
            default = self._defaults.setdefault(key, old)
            self._num_fits[key] += 1
            _set_at(self.raw, key, value)
            self.validate()
            self.derived[key] = f"{key}={_shown(value)}, not the default {_shown(default)}: {why}."
            if value == default:
                del self.derived[key]
            return True
        return False

    def validate(self) -> None:
        """Validate `raw` as `config`.

        Raises:
            ValidationError: If a value is invalid.
        """
        # JSON mode with strict types: lists become tuples, but "32" is not an integer and true is not 1.
        # What is no UTF-8 is reported by `_unusable_values`.
        text = json.dumps(self.raw, default=str, ensure_ascii=False).encode(errors="replace")
        self.config = RunConfig.model_validate_json(text, strict=True)
        self.config._typed = tuple(self.typed)  # noqa: SLF001 - nothing else sets it

    def relevant(self, findings: Iterable[Finding]) -> list[Finding]:
        """Findings that do not depend on a replaced key."""
        return [finding for finding in findings if self.has_experiment and not finding.touches(self.wrong_paths)]


def compose_all(typed: Sequence[str], config_dir: Path | None = None) -> Composition:
    """Compose and validate the fields. Problems are collected instead of raised.

    Raises:
        ConfigError: If Hydra cannot compose at all.
    """
    result = Composition()
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError([f"--config-dir {config_dir}: no such folder. Give the folder of your config groups."])
    if config_dir is not None:
        if unreadable := unreadable_files(config_dir):
            raise ConfigError(unreadable)
        result.problems += shadowed_files(config_dir)
    groups = find_groups([CONF_DIR, *([config_dir] if config_dir else [])])
    overrides = sort_overrides(typed, groups)
    parts = ("experiment=", "task=", "scale=")
    result.has_experiment = any(choice.startswith(parts) for choice in overrides.choices)
    if not result.has_experiment and not overrides.problems:
        choices = ", ".join(groups["experiment"])
        overrides.problems.append(
            f"experiment: none chosen. Add experiment=CHOICE, one of: {choices}; or "
            f"task=, model= and scale= (docs/guides/recipes.md)."
        )
    result.problems += overrides.problems
    result.typed = [*overrides.typed, *overrides.types]
    result.raw = _compose_values(overrides, config_dir, result)
    result.remarks += overrides.remarks.values()
    result.remarks += [
        said
        for path, said in _literal_escapes(result.raw)
        if not any(f"{path}.".startswith(f"{key}.") for key in overrides.remarks)
    ]
    if config_dir is not None:
        result.typed += _keys_of_files(overrides.choices, config_dir)
    _validate(overrides, config_dir, result)
    return result


def compose_args(pairs: Sequence[str]) -> Raw:
    """Arguments of an environment, of `KEY=VALUE` words as `train` reads them after `env.args.`.

    Raises:
        ConfigError: Listing all words that cannot be used.
    """
    result = Composition()
    overrides = sort_overrides(["env.args={}", *(f"env.args.{pair}" for pair in pairs)], {})
    raw = _compose_values(overrides, None, result)
    if problems := overrides.problems + result.problems:
        raise ConfigError(problems)
    args = raw["env"]["args"]
    assert isinstance(args, dict)
    return args


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML, with keys in schema order."""
    text: str = yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes texts with line breaks and other control characters in double quotes, where each is seen and kept."""


def _text_in_yaml(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if "Cc" in map(unicodedata.category, text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text_in_yaml)


def _compose_values(overrides: Overrides, config_dir: Path | None, result: Composition) -> Raw:
    """Compose with all values. Values that Hydra refuses are reported and left out."""
    try:
        return _compose(overrides.choices, overrides.values, config_dir)
    except _COMPOSE_ERRORS as error:
        first = error
    base = _compose_base(overrides.choices, config_dir)
    accepted: list[str] = []
    raw = base
    for value in overrides.values:
        try:
            raw = _compose(overrides.choices, [*accepted, value], config_dir)
        except _COMPOSE_ERRORS as error:
            said = (typed for typed in overrides.typed.values() if typed.lstrip("+") == value.lstrip("+"))
            result.problems.append(f"{next(said, value)}: {_one_line(error)}{_nearest_deleted(value)}")
        else:
            accepted.append(value)
    assert len(accepted) < len(overrides.values), first
    return raw


def _compose_base(choices: Sequence[str], config_dir: Path | None) -> Raw:
    """Compose without value overrides.

    Raises:
        ConfigError: If the YAML is invalid.
    """
    try:
        return _compose(choices, [], config_dir)
    except _COMPOSE_ERRORS as error:
        raise ConfigError([_one_line(error)]) from error


def _compose(choices: Sequence[str], values: Sequence[str], config_dir: Path | None) -> Raw:
    search_path = [_search_path(config_dir)] if config_dir else []
    GlobalHydra.instance().clear()
    with initialize_config_module("penstock.conf", version_base=None):
        composed = compose("config", [*search_path, *choices, *values])
    raw = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(raw, dict)
    return {str(key): value for key, value in raw.items()}


def _keys_of_files(choices: Sequence[str], config_dir: Path) -> Iterator[str]:
    """Dotted keys of the files of `config_dir` that these choices use, directly or by their defaults lists."""
    GlobalHydra.instance().clear()
    with initialize_config_module("penstock.conf", version_base=None):
        loader = GlobalHydra.instance().config_loader()
        used = loader.compute_defaults_list("config", [_search_path(config_dir), *choices], RunMode.RUN).defaults
    for one in used:
        file = config_dir / f"{one.config_path}.yaml"
        if file.is_file():
            values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
            values.pop("defaults", None)
            yield from dict(leaves(values, prefix=f"{one.package}." if one.package else ""))


def _search_path(config_dir: Path) -> str:
    element = QuotedString(text=f"file://{config_dir.resolve()}", quote=Quote.single)
    return f"hydra.searchpath=[{element.with_quotes()}]"


def _set_at(raw: Raw, path: str, value: Any) -> None:
    *sections, last = path.split(".")
    for key in sections:
        if not isinstance(raw.get(key), dict):
            raw[key] = {}
        raw = raw[key]
    raw[last] = value


def _shown(value: Any) -> str:
    """As in YAML."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(str, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def _validate(overrides: Overrides, config_dir: Path | None, result: Composition) -> None:
    """Fill `result.config`. On field errors, describe them, replace the invalid values and retry a few times."""
    base: Raw | None = None
    raw = result.raw
    misread = fill_shapes(raw, overrides.typed, result.remarks)
    result.problems += misread.values()
    result.wrong_paths += misread
    for _ in range(3):
        wrong = dict(_unusable_values(raw))
        try:
            result.validate()
        except ValidationError as error:
            wrong |= describe_errors(error, overrides.typed)
        if not wrong:
            return
        # A section may lack a key that has been taken out of it because it was wrong.
        fresh = [path for path in wrong if not any(f"{one}.".startswith(f"{path}.") for one in result.wrong_paths)]
        result.problems += [wrong[path] for path in fresh]
        result.wrong_paths += fresh
        if base is None:
            base = _compose_base(overrides.choices, config_dir)
        for path in wrong:
            _replace(raw, base, path.split("."))


def _unusable_values(raw: Raw) -> Iterator[tuple[str, str]]:
    """Key, and a sentence about its value, for values that no key takes, whatever its type. Arguments are not read."""
    for path, value in scalars(raw, without="args"):
        if isinstance(value, int) and abs(value) > _LARGEST:
            yield (
                path,
                f"{path}={value} is out of range: integers go up to 2^53 = {_LARGEST}, since larger ones are not exact "
                "in metrics. Use a smaller one.",
            )
        elif isinstance(value, str):
            is_name = not path.startswith(_TEXTS)
            kinds = set(map(unicodedata.category, value))
            longest = max(len(part.encode(errors="replace")) for part in value.split("/"))
            if "Cs" in kinds:
                yield path, f"{path}={json.dumps(value):.80} has bytes that are no UTF-8. Write it as UTF-8."
            elif is_name and "Cc" in kinds:
                yield path, f"{path}={json.dumps(value):.80} has a control character, such as a line break. Remove it."
            elif is_name and (longest > _MAX_NAME_BYTES or len(value.encode()) > _MAX_PATH_BYTES):
                yield (
                    path,
                    f"{path}={json.dumps(value):.60}... has {len(value)} characters, {longest} bytes between two "
                    f"slashes: file systems allow {_MAX_PATH_BYTES}, and {_MAX_NAME_BYTES} for one name. Shorten it.",
                )


def _literal_escapes(raw: Raw) -> Iterator[tuple[str, str]]:
    """Key, and a sentence about each text with a backslash and `n`, where a line break may be meant."""
    for path, value in scalars(raw, without="warm_start"):  # it holds overrides, which are read when they are used
        if isinstance(value, str) and (found := _LITERAL_ESCAPE.search(value)):
            around = " ".join(value[max(0, found.start() - 20) : found.end() + 20].split())
            name = {"n": "line break", "t": "tab", "r": "carriage return"}[found.group()[-1]]
            yield (
                path,
                f"{path}: {around} has a backslash and the letter {found.group()[-1]}, which is no {name}. For a "
                f"{name} write {found.group()} in double quotes; for LaTeX and the like, all is well.",
            )


def _replace(raw: Raw, base: Raw, keys: Sequence[str]) -> None:
    """Restore the values of `base` at `keys`. Delete keys that `base` lacks or has with the same value."""
    *sections, last = keys
    owner, origin = value_at(raw, sections), value_at(base, sections)
    if not isinstance(owner, dict):
        return
    known = isinstance(origin, dict) and last in origin and origin[last] != owner.get(last)
    if known:
        owner[last] = origin[last]
    else:
        owner.pop(last, None)


def _nearest_deleted(value: str) -> str:
    """A hint ` Did you mean …?` for `~key` with a misspelt `key`."""
    if not value.startswith("~"):
        return ""
    path = value[1:].partition("=")[0]
    nearest = nearest_key(path, locate(path.split(".")).siblings)
    return f" Did you mean ~{nearest}?" if nearest else ""


def _one_line(error: Exception) -> str:
    """Hydra's message without its internals."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        choices = [option for option in error.options if option]
        hint = nearest_choice(choice, choices)
        return f"{group}={choice} is not a valid choice. Choices: {', '.join(choices)}.{hint}"
    said = " ".join(str(error).partition("full_key")[0].partition("Config search path")[0].split())
    causes = (error, error.__cause__, error.__context__)
    if any(isinstance(one, GrammarParseError | InterpolationResolutionError) for one in causes):
        return rf"{said.rstrip('.')}. `${{` begins an interpolation: write \${{ where these two characters are meant."
    return said
