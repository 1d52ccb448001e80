"""docs/reference/configuration.md, rendered from the schema: python tools/config_page.py"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from penstock.platform.config.field_errors import descriptions, expectation, extras_of, sections_of, tags_of
from penstock.platform.config.overrides import CONF_DIR, find_groups
from penstock.platform.config.schema import RunConfig

_GROUPS = find_groups([CONF_DIR])


def summary(section: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(section) or "").partition("\n\n")[0].split())


def inner_sections(field: FieldInfo) -> list[type[BaseModel]]:
    """Sections that a key holds: one, its variants, or that of each name of a mapping."""
    is_mapping = get_origin(field.annotation) is dict
    return sections_of(get_args(field.annotation)[1] if is_mapping else field.annotation)


def undocumented(section: type[BaseModel] = RunConfig) -> Iterator[str]:
    """Keys without a description; a key that holds a section is described by that section."""
    known = descriptions(section)
    for name, field in section.model_fields.items():
        inner = inner_sections(field)
        if not inner and not known.get(name):
            yield f"{section.__name__}.{name}"
        for one in inner:
            yield from undocumented(one)
    for one in sections_of(extras_of(section)):
        yield from undocumented(one)


def default_of(field: FieldInfo) -> str:
    """As it is written in YAML; `required` if there is none."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    return f"`{json.dumps(getattr(value, 'value', value), default=list)}`"


def rows(section: type[BaseModel], path: str) -> Iterator[str]:
    """Table rows of the plain keys of a section."""
    known = descriptions(section)
    for name, field in section.model_fields.items():
        if not inner_sections(field) and not (name == "type" and len(tags_of(section)) == 1):
            accepts = expectation(field).replace("|", "\\|")
            text = known.get(name, "").replace("|", "\\|")
            yield f"| `{f'{path}.{name}'.lstrip('.')}` | {default_of(field)} | {accepts} | {text} |"


def section_page(section: type[BaseModel], path: str, level: int) -> Iterator[str]:
    """A heading, what the section is, its keys, and the sections in it."""
    found = list(rows(section, path))
    if found:
        yield from ["| key | default | accepts | meaning |", "|---|---|---|---|", *found, ""]
    for name, field in section.model_fields.items():
        inner = f"{path}.{name}".lstrip(".")
        inner = f"{inner}.NAME" if get_origin(field.annotation) is dict else inner
        variants = inner_sections(field)
        if not variants or path == "partner":  # whose sections are those of the policy
            continue
        yield from [f"{'#' * level} {inner}", ""]
        if choices := _GROUPS.get(inner.replace(".", "/")):
            yield from [f"Chosen with `{inner.replace('.', '/')}=`: {', '.join(f'`{one}`' for one in choices)}.", ""]
        for variant in variants:
            title = " or ".join(f"`{one}`" for one in tags_of(variant))
            yield from [f"{f'**type: {title}.** ' if len(variants) > 1 else ''}{summary(variant)}", ""]
            yield from section_page(variant, inner, min(level + 1, 4))
    for named in sections_of(extras_of(section)):
        yield from [f"{'#' * level} {path}.NAME", "", summary(named), ""]
        yield from section_page(named, f"{path}.NAME", min(level + 1, 4))


def config_page() -> str:
    """The whole page."""
    groups = ", ".join(f"`{one}`" for one in _GROUPS if "/" not in one and one != "experiment")
    lines = [
        "# Configuration",
        "",
        "<!-- Rendered: python tools/config_page.py > docs/reference/configuration.md -->",
        "Every key with its default, what it accepts and what it means. Set a key with `key=value` on a command line,",
        "or in a YAML file of your own; choose a file of a config group (a folder of `conf/`) with `group=choice`.",
        "`penstock train --dry-run experiment=NAME` prints the whole configuration of a run without starting it.",
        f"Groups: {groups}.",
        "",
        "**What you did not set is never an error.** Values of the files of `conf/` are defaults, too. Where a default",
        "does not fit the model, the data, the machine or what you have set, a value that fits replaces it. One line",
        "(`KEY=VALUE, not the default OLD: why`) says so at the start and in a dry run; `config.yaml` has the value. A",
        "key on the command line or in a file of your `--config-dir` is never changed: if it does not fit, the run is",
        "refused with both numbers. A machine that is too small for the model, and a model that cannot be trained,",
        "are refused with the reason. A resumed run remembers what was set when it began (`typed` in",
        "`environment.json`).",
        "",
    ]
    lines += section_page(RunConfig, "", 2)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(config_page(), end="")
