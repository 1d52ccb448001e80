"""Parses command-line overrides into group choices and values, and reports the invalid ones.

Hydra stops at the first invalid override. A value override `key=value` is therefore passed to Hydra as `++key=value`,
so that Hydra accepts every key and the schema reports all unknown keys at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from penstock.platform.config.field_errors import SECTION_GROUPS, accepted_choice, nearest_choice

Groups = Mapping[str, Sequence[str]]
"""Config group -> its choices."""

_REPLACED = {"env.args"}
"""Keys whose value replaces the old one completely. Hydra would merge them and keep arguments of another factory."""

_ESCAPE = re.compile(r"\\(?:\\|n|[tr](?![a-z]))")
"""In double quotes. Not `\\text` and `\\right`: prompts hold LaTeX."""
_MAY_BE_ESCAPE = re.compile(r"\\[\\ntr]")
_ESCAPED = {r"\\": "\\", r"\n": "\n", r"\t": "\t", r"\r": "\r"}
_VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", "\r": "␍"})

CONF_DIR = Path(__file__).resolve().parents[2] / "conf"


@dataclass(slots=True)
class Overrides:
    """The parsed overrides of the user."""

    choices: list[str] = field(default_factory=list)
    """Overrides that choose group members, ready for Hydra."""
    values: list[str] = field(default_factory=list)
    """Overrides that set or delete values, ready for Hydra."""
    typed: dict[str, str] = field(default_factory=dict)
    """Dotted key -> the value override as typed."""
    types: list[str] = field(default_factory=list)
    """Keys `GROUP.type` of the groups that are chosen."""
    problems: list[str] = field(default_factory=list)
    """One sentence per invalid override."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Dotted key -> a sentence that says how its value was read, where Hydra alone would read it otherwise."""


def find_groups(folders: Sequence[Path]) -> dict[str, list[str]]:
    """List the config groups under `folders` and their choices, sorted."""
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for path in folder.rglob("*.yaml"):
            group = path.parent.relative_to(folder).as_posix()
            if group != ".":
                groups.setdefault(group, set()).add(path.stem)
    return {group: sorted(choices) for group, choices in sorted(groups.items())}


def shadowed_files(config_dir: Path) -> list[str]:
    """Files of `config_dir` that Hydra would ignore, because Penstock has a file of the same group and name."""
    theirs = (path.relative_to(config_dir) for path in sorted(config_dir.rglob("*.yaml")))
    return [
        f"{config_dir / path}: Penstock's own {path} would take precedence. Give your file another name."
        for path in theirs
        if (CONF_DIR / path).exists()
    ]


def unreadable_files(config_dir: Path) -> list[str]:
    """Files of `config_dir` that are no YAML of keys and values, which Hydra would report without their name."""
    found = []
    for path in sorted(config_dir.rglob("*.yaml")):
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            found.append(f"{path} cannot be read: {error}. Write a text file in UTF-8, or remove it.")
        except yaml.YAMLError as error:
            found.append(f"{path} is no YAML: {' '.join(str(error).split())}. Mend it, or remove it.")
        else:
            if values is not None and not isinstance(values, dict):
                found.append(f"{path} holds a {type(values).__name__}, but a file of a config group has `key: value`.")
    return found


def quoted(word: str) -> str:
    """`key='value'` of `key=value`: a path may have characters that Hydra's grammar does not read, such as `é`.

    A value that begins as a list, a section or a quoted text stays: something is wrong with it.
    """
    key, mark, value = word.partition("=")
    if not mark or not value or value[0] in "[{'\"$":
        return word
    return f"{key}={QuotedString(text=value, quote=Quote.single).with_quotes()}"


def parse_override(word: str) -> tuple[Override, str]:
    """The override, and its text as Hydra reads it: `quoted` if it cannot be parsed as it is.

    Raises:
        HydraException: If neither can be parsed.
    """
    parser = OverridesParser.create()
    try:
        return parser.parse_override(word), word
    except HydraException:
        if (text := quoted(word)) == word:
            raise
        return parser.parse_override(text), text


def sort_overrides(typed: Sequence[str], groups: Groups) -> Overrides:
    """Parse overrides into choices and values, without composing."""
    result = Overrides()
    for word in typed:
        try:
            override, text = parse_override(word)
        except HydraException as error:
            detail = " ".join(str(error).split())
            hint = "Write key=value; quote text with spaces or brackets: key='\"a b\"'."
            result.problems.append(f"{word!r} is not an override: {detail}. {hint}")
            continue
        _sort_one(override, text, groups, result)
    experiments = list(dict.fromkeys(choice for choice in result.choices if choice.startswith("experiment=")))
    if len(experiments) > 1:
        result.problems.append(
            f"{' '.join(experiments)}: {len(experiments)} experiments are chosen, and a run has one, since the later "
            "one would replace only some keys of the earlier one. Leave all but one out."
        )
        result.choices = [choice for choice in result.choices if choice not in experiments[:-1]]
    return result


def _sort_one(override: Override, text: str, groups: Groups, result: Overrides) -> None:
    key = override.key_or_group
    as_group = key.replace(".", "/")
    if override.is_sweep_override():
        result.problems.append(f"{text}: a run takes one value of {key}. Start one run per value, or `penstock sweep`.")
    elif key.partition(".")[0] == "hydra":
        result.problems.append(f"{text}: Hydra only composes here, so its own settings have no effect. Leave it out.")
    elif key in groups:
        _sort_choice(override, text, groups, result)
    elif "/" in key:
        hint = nearest_choice(key, list(groups))
        result.problems.append(f"{text}: {key} is no config group.{hint} Groups: {', '.join(groups)}.")
    elif as_group in groups and not override.is_delete():
        result.problems.append(f"{text}: {key} is a config group. {_choose(as_group, override.value(), groups)}")
    elif as_group.removesuffix("/type") in groups and as_group.endswith("/type") and not override.is_delete():
        group = as_group.removesuffix("/type")
        why = f"{key} alone would keep the settings of the previous variant"
        result.problems.append(f"{text}: {why}. {_choose(group, override.value(), groups)}")
    else:
        value = text if override.is_delete() else f"++{_with_escapes(override, text, result).lstrip('+')}"
        if key in _REPLACED:
            # Hydra refuses to delete what no file has set, so deleting is setting nothing.
            value = f"++{key}={{}}" if override.is_delete() else value
            result.values.append(f"++{key}=null")
        result.values.append(value)
        result.typed[key] = text


def _with_escapes(override: Override, text: str, result: Overrides) -> str:
    """The override with the escapes of its double-quoted texts replaced, which Hydra would leave as they are.

    `'rollout.sampling.stop=["\\n\\n"]'` is two line breaks, as in YAML, JSON and Python. In single quotes, as in YAML,
    a backslash is a backslash.
    """
    understood: list[str] = []

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(one) for one in value]
        if isinstance(value, dict):
            return {key: replaced(one) for key, one in value.items()}
        if not isinstance(value, QuotedString) or value.quote is not Quote.double:
            return value
        if not _MAY_BE_ESCAPE.search(value.text):
            return value
        plain = _ESCAPE.sub(lambda found: _ESCAPED[found.group()], value.text)
        understood.append(plain.translate(_VISIBLE))
        return QuotedString(plain, Quote.double)

    value = replaced(override._value)  # noqa: SLF001 - its public value has lost the quotes
    if not understood:
        return text
    shown = ", ".join(one if len(one) <= 80 else f"{one[:79]}…" for one in understood)
    result.remarks[override.key_or_group] = (
        f"{override.key_or_group} was read as {shown}"
        r": in double quotes \n is a line break ⏎, \t a tab ⇥, \r a carriage return ␍ (\t and \r not before a small "
        r"letter, as in \text) and \\ a backslash. In single quotes a backslash stays a backslash."
    )
    override._value = value  # noqa: SLF001
    return f"{override.get_key_element()}={override.get_value_element_as_str()}"


def _choose(group: str, value: object, groups: Groups) -> str:
    """The override that chooses `value` of a group."""
    if value in groups[group]:
        return f"Write {accepted_choice(group, str(value))}."
    if isinstance(value, list) and value and all(one in groups[group] for one in value):
        return f"Write {group}=[{','.join(value)}]."
    if "custom" in groups[group] and isinstance(value, str) and ("." in value or ":" in value):
        return f"Write {group}=custom {group.replace('/', '.')}.function={value}."
    hint = nearest_choice(str(value), groups[group])
    return f"Write {group}=CHOICE, one of {', '.join(groups[group])}.{hint}"


def _sort_choice(override: Override, text: str, groups: Groups, result: Overrides) -> None:
    group, value = override.key_or_group, override.value()
    chosen = value if isinstance(value, list) else [value]
    if isinstance(value, list) and group.replace("/", ".") not in SECTION_GROUPS:
        result.problems.append(f"{text}: a run has one choice of {group}, not {len(value)}. Write {group}=CHOICE.")
        return
    for choice in chosen:
        name = str(choice).removesuffix(".yaml") if isinstance(choice, str) else json.dumps(choice, default=str)
        if not override.is_delete() and name not in groups[group]:
            hint = nearest_choice(name, groups[group])
            own = f"Put your own files into DIR/{group}/ and use --config-dir DIR."
            if group == "tracker":
                own = f"For one of your own set tracker.{name}.factory=package.module:function (docs/extending.md)."
            elif group.replace("/", ".") in SECTION_GROUPS:
                own = f"Own files, in DIR/{group}/ with --config-dir DIR, can only set keys of these."
            result.problems.append(
                f"{group}={name} is not a valid choice. Choices: {', '.join(groups[group])}.{hint} {own}"
            )
            return
    result.choices.append(text.lstrip("+"))
    result.types.append(f"{group.replace('/', '.')}.type")
