"""The schema as a tree of dotted keys: which keys exist, what each accepts, and which one a typo meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.platform.config.schema import RunConfig

_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an error location of pydantic points.

    Attributes:
        path: Dotted key as a user writes it.
        siblings: Keys that are valid beside the last one.
        field: What the schema says of the last key; None if it is unknown or inside a free-form value.
    """

    path: str
    siblings: tuple[str, ...]
    field: FieldInfo | None


def locate(loc: Sequence[str | int]) -> Place:
    """Follow `loc` from the root; tags of tagged unions, which pydantic puts into it, are left out of the path."""
    annotation: Any = RunConfig
    parts: list[str] = []
    siblings: tuple[str, ...] = ()
    field: FieldInfo | None = None
    for key in map(str, loc):
        sections = _sections(annotation)
        if len(sections) > 1:
            annotation = next((section for section in sections if key in _tags(section)), Any)
            continue
        if sections:
            fields = sections[0].model_fields
            siblings = tuple(fields)
            field = fields.get(key)
            annotation = field.annotation if field else Any
        elif get_origin(annotation) is dict:
            field = None
            annotation = get_args(annotation)[1]
        else:
            break  # inside a list: the error is the list's
        parts.append(key)
    return Place(".".join(parts), siblings, field)


def all_paths(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every key of the schema, dotted; `*` stands for a name the user chooses."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        annotation: Any = field.annotation
        if get_origin(annotation) is dict:
            annotation, path = get_args(annotation)[1], f"{path}.*"
        for inner in _sections(annotation):
            yield from all_paths(inner, f"{path}.")


def nearest_key(path: str, siblings: Sequence[str]) -> str | None:
    """The key a misspelt `path` probably meant: a sibling, or the same name in another section."""
    prefix, _, name = path.rpartition(".")
    close = get_close_matches(name, siblings, n=1, cutoff=0.7)
    if close:
        return f"{prefix}.{close[0]}" if prefix else close[0]
    section = path.partition(".")[0] + "."
    candidates = sorted(all_paths(), key=lambda candidate: candidate.startswith(section))  # the last of a name is kept
    by_name = {candidate.rpartition(".")[2]: candidate for candidate in candidates if candidate != path}
    elsewhere = get_close_matches(name, list(by_name), n=1, cutoff=0.8)
    return by_name[elsewhere[0]] if elsewhere else None


def expectation(field: FieldInfo) -> str:
    """What a key accepts, in words: `an integer >= 1`, `a number in (0, 1]`, `one of: a, b`."""
    kinds = _alternatives(field.annotation)
    words = [_kind_words(kind) for kind in kinds if kind is not NoneType]
    nullable = " or null" if NoneType in kinds else ""
    return " or ".join(words) + range_words(field) + nullable


def range_words(field: FieldInfo) -> str:
    """The range of a number: ` >= 1`, ` in (0, 1]`; empty if it has none."""
    low = high = ""
    for bound in field.metadata:
        match bound:
            case Ge(ge=value):
                low = f"[{value}"
            case Gt(gt=value):
                low = f"({value}"
            case Le(le=value):
                high = f"{value}]"
            case Lt(lt=value):
                high = f"{value})"
    if low and high:
        return f" in {low}, {high}"
    if low:
        return f" {'>=' if low[0] == '[' else '>'} {low[1:]}"
    return f" {'<=' if high[-1] == ']' else '<'} {high[:-1]}" if high else ""


def _kind_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of: " + ", ".join(map(str, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of: " + ", ".join(str(member.value) for member in kind)
    if get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis:
        return "a list of names"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    if get_origin(kind) is dict or _sections(kind):
        return "a section with keys of its own"
    return _NOUNS.get(kind, str(kind))


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, or the type itself."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in _alternatives(member)]
    return [annotation]


def _sections(annotation: Any) -> list[type[BaseModel]]:
    return [kind for kind in _alternatives(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _tags(section: type[BaseModel]) -> tuple[str, ...]:
    """Values of `type` that choose this member of a tagged union."""
    tag = section.model_fields.get("type")
    return get_args(tag.annotation) if tag else ()
