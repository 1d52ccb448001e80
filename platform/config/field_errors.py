"""Converts pydantic's errors into actionable sentences, using the schema as a tree of dotted keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from itertools import chain, takewhile
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.trackers.config import NO_FACTORY

_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_RANGE_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_PRESETS = ("cispo", "dppo", "gspo", "online_dpo", "sapo", "topr")
_ACCEPTED_WITH = {
    **{f"algorithm/loss={name}": f"algorithm={name}" for name in _PRESETS},
    "algorithm/loss=distill": "algorithm=distill teacher.path=PATH",
    "algorithm/loss=gspo_token": "algorithm=gspo algorithm/loss=gspo_token",
    "algorithm/loss=gmpo": "algorithm=gspo algorithm/loss=gmpo",
    "algorithm/loss=clip_cov": "algorithm/loss=clip_cov algorithm.proximal=recompute",
    "algorithm/loss=kl_cov": "algorithm/loss=kl_cov algorithm.proximal=recompute algorithm.mini_batches=4",
    "algorithm/loss=ipo": "algorithm=online_dpo algorithm/loss=ipo",
    "algorithm/loss=sft": "algorithm/loss=sft algorithm/correction=none",
    "algorithm/correction=tis_seq": "algorithm/correction=tis_seq algorithm.aggregation=seq_mean_token_mean",
    "algorithm/correction=m2po": "algorithm/correction=m2po algorithm.proximal=recompute",
}
"""Choices that are refused or have no effect in algorithm=grpo -> overrides that choose them with what they need."""
SECTION_GROUPS = ("algorithm.correction", "tracker")
"""Config groups of which several choices can be on; each is a section of its own name."""


def accepted_choice(group: str, name: str) -> str:
    """Overrides that choose `name` of a config group and are accepted as they are."""
    return _ACCEPTED_WITH.get(f"{group}={name}", f"{group}={name}")


PEER_NAMES = {
    "learning_rate": "trainer.optimizer.lr=VALUE",
    "lr": "trainer.optimizer.lr=VALUE",
    "weight_decay": "trainer.optimizer.weight_decay=VALUE",
    "warmup_steps": "trainer.optimizer.warmup_steps=VALUE",
    "max_grad_norm": "trainer.optimizer.gradient_clip_norm=VALUE",
    "per_device_train_batch_size": "trainer.max_tokens_per_micro_batch=TOKENS (the whole batch: dataflow.batch_groups)",
    "gradient_accumulation_steps": "trainer.max_tokens_per_micro_batch=TOKENS (the whole batch: dataflow.batch_groups)",
    "train_batch_size": "dataflow.batch_groups=VALUE (prompts per batch)",
    "num_generations": "dataflow.group_size=VALUE",
    "rollout.n": "dataflow.group_size=VALUE",
    "num_iterations": "algorithm.epochs=VALUE algorithm.proximal=recompute",
    "max_steps": "total_steps=VALUE",
    "trainer.total_training_steps": "total_steps=VALUE",
    "max_completion_length": "rollout.sampling.max_new_tokens=VALUE",
    "max_response_length": "rollout.sampling.max_new_tokens=VALUE",
    "max_prompt_length": "model.max_context_tokens=TOKENS (prompt plus answer)",
    "temperature": "rollout.sampling.temperature=VALUE",
    "top_k": "rollout.sampling.top_k=VALUE",
    "top_p": "rollout.sampling.top_p=VALUE rollout.sampling.top_k=20 (any up to 64)",
    "min_p": "rollout.sampling.min_p=VALUE rollout.sampling.top_k=20 (any up to 64)",
    "stop": "rollout.sampling.stop=VALUE",
    "stop_strings": "rollout.sampling.stop=VALUE",
    "stop_token_ids": "rollout.sampling.stop_token_ids=VALUE",
    "beta": "algorithm.kl.coefficient=VALUE",
    "epsilon": "algorithm.loss.clip_low=VALUE algorithm.loss.clip_high=VALUE",
    "epsilon_high": "algorithm.loss.clip_high=VALUE",
    "output_dir": "run_dir=VALUE",
    "model_name_or_path": "model.path=VALUE",
}
"""Names of TRL and verl -> our overrides; text in brackets is a remark.

VALUE is the value of their key, TOKENS a number that differs from theirs.
"""
_CHOICE_ERRORS = {"literal_error", "enum", "union_tag_invalid"}


def describe_errors(
    error: ValidationError,
    overrides: Mapping[str, str],
    section: type[BaseModel] = RunConfig,
    path: Sequence[str] = (),
) -> dict[str, str]:
    """Describe each invalid key in one sentence.

    Args:
        error: The error of pydantic.
        overrides: Dotted key -> the override that set it, as typed.
        section: What was validated.
        path: Where it is.

    Returns:
        Dotted key -> sentence, in schema order.
    """
    sentences: dict[str, str] = {}
    for details in error.errors(include_url=False):
        if details["type"] == "default_factory_not_called":
            continue  # a default that follows another key of its section, which has its own error
        place = locate(details["loc"], section, path)
        typed = overrides.get(place.path, "").partition("=")[2]
        sentences.setdefault(place.path, _sentence(place, details, _origin(place.path, overrides), typed))
    return sentences


def _sentence(place: Place, details: ErrorDetails, origin: str, typed: str) -> str:
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        if new := PEER_NAMES.get(place.path):
            is_word = isinstance(value, str) and value.replace("_", "").isalnum()
            return f"{place.path}{origin}: unknown key. Use {new.replace('VALUE', value if is_word else _show(value))}."
        return _unknown_key(place, origin)
    if kind == NO_FACTORY:
        return _unknown_tracker(place, origin)
    if kind == "union_tag_not_found" or (kind == "missing" and isinstance(value, dict)):
        what = f": {expectation(place.field)}" if place.field else ""
        return f"{place.path} is required and not set{what}."
    where = f"{place.path}={_show(value)}{origin}"
    is_plain = kind not in _CHOICE_ERRORS and not isinstance(value, dict)
    if is_plain and (new := _as_group(place.path, value)):
        return f"{where}: this key is a section. Use {new}."
    if kind == "value_error":  # raised by a validator of ours
        return f"{where}: {details['ctx']['error']}"
    if kind in _RANGE_ERRORS and place.field:
        return f"{where} is out of range: {place.path} must be{range_words(place.field)}."
    if kind in _CHOICE_ERRORS:
        return _unknown_choice(where, details)
    if kind == "finite_number":
        return f"{where} is not finite: {place.path} must be a number{range_words(place.field) if place.field else ''}."
    if kind == "string_too_long":
        length, longest = len(details["input"]), details["ctx"]["max_length"]
        return f"{where} has {length} characters: {place.path} may have {longest}, since it names folders and files."
    if kind == "string_pattern_mismatch" and details["ctx"]["pattern"].startswith("^https"):
        return f"{where} is not a URL: {place.path} must begin with http:// or https://."
    if kind == "string_pattern_mismatch":
        return f"{where} has a character that is not allowed: {place.path} allows only letters, digits and . _ -."
    if place.field is None:
        return f"{where}: {details['msg']}."
    wanted = expectation(place.field)
    if kind in ("string_type", "tuple_type") and isinstance(value, str | int | float) and "text" in wanted:
        quoted = json.dumps(value if isinstance(value, str) else _as_typed(value, typed), ensure_ascii=False)
        written = f"[{quoted}]" if wanted.startswith("a list") else quoted
        return f"{where} is not {wanted}. Quote it: '{place.path}={written}'."
    return f"{where} has the wrong type: {place.path} must be {wanted}."


def _as_typed(value: float, typed: str) -> str:
    """A number, or true or false, as it was typed, alone or in a list: 1e-6 and 1_000, not 1e-06 and 1000."""
    for text in map(str.strip, typed.strip("[] ").split(",")):
        with suppress(ValueError):
            if text.lower() == _show(value).lower() or float(text) == value:
                return text
    return _show(value)


def _as_group(path: str, value: Any) -> str:
    """How to choose a variant of an algorithm that was given as a plain value; empty for other keys."""
    if path not in ("algorithm.loss", "algorithm.advantage", "algorithm.correction"):
        return ""
    name = f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)
    choice = accepted_choice(path.replace(".", "/"), name)
    groups = [word.partition("=") for word in choice.split() if "." not in word]
    return f"{choice}; in a file {' and '.join(f'`override /{group}: {name}`' for group, _, name in groups)}"


def _unknown_key(place: Place, origin: str) -> str:
    where, (parent, _, name) = f"{place.path}{origin}", place.path.rpartition(".")
    if place.owners and parent in SECTION_GROUPS:
        return f"{where}: unknown key. Write {parent}.NAME.{name}; it is a key of {_listed(place.owners)}."
    if place.owners:
        section = parent.rpartition(".")[0]
        group = (section if section in SECTION_GROUPS else parent).replace(".", "/")
        how = f"it with {accepted_choice(group, place.owners[0])}" if len(place.owners) == 1 else "one of them"
        owners = f"{group}={_listed(place.owners)}"
        return f"{where}: key of {owners}; the chosen one is {place.chosen}. Choose {how}, or leave the key out."
    if nearest := nearest_key(place.path, place.siblings):
        return f"{where}: unknown key. Did you mean {nearest}?"
    return f"{where}: unknown key. Keys of {parent or 'the root'}: {', '.join(place.siblings)}."


def _unknown_tracker(place: Place, origin: str) -> str:
    if place.owners:
        return _unknown_key(place, origin)
    parent, _, name = place.path.rpartition(".")
    close = get_close_matches(name, place.siblings, n=1, cutoff=0.7)
    hint = f" Did you mean {parent}.{close[0]}?" if close else ""
    return (
        f"{place.path}{origin}: {name} is none of our trackers ({', '.join(place.siblings)}) and has no factory.{hint} "
        f"One of your own needs {place.path}.factory=package.module:function."
    )


def _listed(names: Sequence[str]) -> str:
    """`a`, or `a, b or c`."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _unknown_choice(where: str, details: ErrorDetails) -> str:
    value, context = details["input"], details.get("ctx", {})
    if details["type"] == "union_tag_invalid":
        value = context["tag"]
        where = f"{where.partition('=')[0]}.type={_show(value)}"
    listed = str(context.get("expected_tags") or context["expected"]).replace("'", "").replace(" or ", ", ")
    choices = [choice.strip() for choice in listed.split(",")]
    return f"{where} is not a valid choice. Choices: {', '.join(choices)}.{nearest_choice(str(value), choices)}"


def _origin(path: str, overrides: Mapping[str, str]) -> str:
    """Name the override that caused an error, if there is one."""
    for key, typed in overrides.items():
        if key == path or path.startswith(f"{key}.") or key.startswith(f"{path}."):
            return "" if typed.lstrip("+").startswith(f"{path}=") and typed[0] != "+" else f" (override `{typed}`)"
    return ""


def _show(value: Any, limit: int = 60) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def nearest_choice(value: str, choices: Sequence[str]) -> str:
    """A ` Did you mean …?` if one choice is close, else nothing.

    `arithmetic_typo` is `arithmetic` with something added, rather than `arithmetic_sft`, which has as many letters in
    common. Only a choice that differs by a letter or two comes before such a beginning.
    """
    beginnings = [choice for choice in choices if len(choice) > 2 and value.startswith(choice)]
    close = (
        get_close_matches(value, choices, n=1, cutoff=0.9)
        or sorted(beginnings, key=len)[-1:]
        or get_close_matches(value, choices, n=1)
    )
    return f" Did you mean {close[0]}?" if close else ""


@dataclass(frozen=True, slots=True)
class Place:
    """The key that an error location of pydantic refers to."""

    path: str
    """Dotted key as a user writes it."""
    siblings: tuple[str, ...]
    """Valid keys of the same section."""
    field: FieldInfo | None
    """The field of the last key in the schema; None if it is unknown or inside a free-form value."""
    chosen: str = ""
    """The choice of a config group that the last key stands in."""
    owners: tuple[str, ...] = ()
    """Other choices of that group that have a key of the name of the last one, if `chosen` has none."""


def locate(loc: Sequence[str | int], annotation: Any = RunConfig, path: Sequence[str] = ()) -> Place:
    """Follow `loc` from the root, or a section at `path`. Tags of unions, which pydantic inserts, are left out."""
    parts = list(path)
    siblings: tuple[str, ...] = ()
    field: FieldInfo | None = None
    chosen, choices = "", dict[str, type[BaseModel]]()
    owners: tuple[str, ...] = ()
    for key in map(str, loc):
        sections = sections_of(annotation)
        if len(sections) > 1:
            chosen, choices = key, {tag: section for section in sections for tag in tags_of(section)}
            annotation = choices.get(key, Any)
            continue
        if sections:
            fields = sections[0].model_fields
            if ".".join(parts) in SECTION_GROUPS:
                variants = {name: sections_of(option.annotation) for name, option in fields.items()}
                chosen, choices = key, {name: one[0] for name, one in variants.items() if one}
            owners = tuple(name for name, choice in choices.items() if key in choice.model_fields and key not in fields)
            choices = choices if key in choices else {}
            siblings = tuple(fields)
            field = fields.get(key)
            annotation = field.annotation if field else extras_of(sections[0])
        elif get_origin(annotation) is dict:
            field = None
            annotation = get_args(annotation)[1]
        else:
            break  # an error inside a list is reported for the list
        parts.append(key)
    return Place(".".join(parts), siblings, field, chosen, owners)


def all_paths(section: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """All dotted keys of the schema. `*` stands for a name chosen by the user."""
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        annotation: Any = field.annotation
        if get_origin(annotation) is dict:
            annotation, path = get_args(annotation)[1], f"{path}.*"
        for inner in sections_of(annotation):
            yield from all_paths(inner, f"{path}.")
    for inner in sections_of(extras_of(section)):
        yield from all_paths(inner, f"{prefix}*.")


def nearest_key(path: str, siblings: Sequence[str]) -> str | None:
    """The most similar key to a misspelt `path`: a sibling, or the same name in another section."""
    prefix, _, name = path.rpartition(".")
    close = get_close_matches(name, siblings, n=1, cutoff=0.7)
    if close:
        return f"{prefix}.{close[0]}" if prefix else close[0]
    # The last key of a name is kept: the one that has the most sections in common with `path`.
    candidates = sorted(all_paths(), key=lambda candidate: _num_common_sections(candidate, path))
    by_name = {candidate.rpartition(".")[2]: candidate for candidate in candidates if candidate != path}
    elsewhere = get_close_matches(name, list(by_name), n=1, cutoff=0.8)
    return by_name[elsewhere[0]] if elsewhere else None


def _num_common_sections(path: str, other: str) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(path.split("."), other.split("."), strict=False))))


def expectation(field: FieldInfo) -> str:
    """The accepted values of a key in words: `an integer >= 1`, `a number in (0, 1]`, `one of: a, b`."""
    kinds = _alternatives(field.annotation)
    own = _bounds_of_members(field.annotation)
    words = [_kind_words(kind) + _range(own.get(kind, [])) for kind in kinds if kind is not NoneType]
    nullable = " or null" if NoneType in kinds else ""
    return " or ".join(words) + _range(field.metadata) + nullable


def range_words(field: FieldInfo) -> str:
    """The range of a number: ` >= 1`, ` in (0, 1]`; empty if it has none."""
    return _range([*field.metadata, *chain.from_iterable(_bounds_of_members(field.annotation).values())])


def _bounds_of_members(annotation: Any) -> dict[Any, list[Any]]:
    """The bounds of the members of a union that have their own: `Annotated[int, Field(ge=0)] | Literal["auto"]`."""
    if get_origin(annotation) not in (Union, UnionType):
        return {}
    members = [get_args(member) for member in get_args(annotation) if get_origin(member) is Annotated]
    return {kind: own.metadata for kind, own in members if isinstance(own, FieldInfo)}


def _range(bounds: Iterable[Any]) -> str:
    low = high = ""
    for bound in bounds:
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
        item = get_args(kind)[0]
        return f"a list of {'integers' if int in (item, *get_args(item)) else 'texts'}"
    if get_origin(kind) is tuple:
        return f"a list of {len(get_args(kind))} numbers"
    if get_origin(kind) is dict or sections_of(kind):
        return "a section with keys of its own"
    return _NOUNS.get(kind, str(kind))


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, or the type itself."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in _alternatives(member)]
    return [annotation]


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    return [kind for kind in _alternatives(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]


def extras_of(section: type[BaseModel]) -> Any:
    """What a key holds that the user names, and not the schema; Any if there are none."""
    extras = get_type_hints(section).get("__pydantic_extra__")
    return get_args(extras)[1] if extras else Any


def tags_of(section: type[BaseModel]) -> tuple[str, ...]:
    """Values of `type` that select this member of a tagged union."""
    tag = section.model_fields.get("type")
    return get_args(tag.annotation) if tag else ()


def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Key -> the text below its field."""
    return {name: " ".join((field.description or "").split()) for name, field in section.model_fields.items()}
