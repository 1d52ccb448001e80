"""From pydantic's errors to sentences a user can act on, over the schema as a tree of dotted keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from penstock.platform.config.schema import RunConfig

_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_RANGE_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
_RENAMED = {
    "weights.mode": "weights.transport=gather for mode=gather, weights.transport=auto for mode=direct",
    "weights.memory": "weights.transport: shared_memory for memory=host, cuda_ipc or process_group for memory=device",
    "weights.stage_on": "weights.staging=bucket for stage_on=host, weights.staging=shard for stage_on=device",
    "weights.transport=group": "weights.transport=process_group",
    "weights.transport=object_store": "weights.transport=gather, which takes the object store to other nodes by itself",
    "weights.codec=lora": "weights.transport=auto, by which adapters travel wherever the trainer trains them",
    "algorithm.advantage_std": "algorithm.advantage.std",
    "algorithm.std_epsilon": "algorithm.advantage.epsilon",
    "algorithm.gae_gamma": "algorithm.advantage.gamma, with algorithm/advantage=gae",
    "algorithm.gae_lambda": "algorithm.advantage.lam, with algorithm/advantage=gae",
    "algorithm.whiten": "algorithm.advantage.whiten, with algorithm/advantage=gae or reinforce_pp",
    "algorithm.clip_low": "algorithm.loss.clip_low",
    "algorithm.clip_high": "algorithm.loss.clip_high",
    "algorithm.dual_clip": "algorithm.loss.max_ratio, with algorithm/loss=dual_clip",
    "algorithm.cispo_low": "algorithm.loss.clip_low, with algorithm/loss=cispo",
    "algorithm.sapo_tau_positive": "algorithm.loss.tau_positive, with algorithm/loss=sapo",
    "algorithm.sapo_tau_negative": "algorithm.loss.tau_negative, with algorithm/loss=sapo",
    "algorithm.dppo_delta": "algorithm.loss.delta, with algorithm/loss=dppo",
    "algorithm.dppo_cap": "algorithm.loss.max_weight, with algorithm/loss=dppo",
    "algorithm.pairs": "algorithm.loss.pairs, with algorithm/loss=online_dpo or ipo",
    "algorithm.pair_margin": "algorithm.loss.margin, with algorithm/loss=online_dpo or ipo",
    "algorithm.pair_beta": "algorithm.loss.beta, with algorithm/loss=online_dpo or ipo",
    "algorithm.ipo_length": "algorithm.loss.length, with algorithm/loss=ipo",
    "algorithm.value_clip": "critic.value_clip",
    "algorithm.correction_cap": "algorithm.correction.decoupled.max_weight",
    "algorithm.tis_cap": "algorithm.correction.tis_token.max_weight (or of tis_seq, f_tis), algorithm.kl.max_weight",
    "algorithm.mis_low": "algorithm.correction.mis_token.min_weight",
    "algorithm.mis_high": "algorithm.correction.mis_token.max_weight",
    "algorithm.geo_low": "algorithm.correction.mis_seq_geo.min_weight",
    "algorithm.geo_high": "algorithm.correction.mis_seq_geo.max_weight",
    "algorithm.opsm_delta": "algorithm.correction.opsm.delta",
    "algorithm.f_tis_max_kl": "algorithm.correction.f_tis.max_kl",
    "algorithm.veto_floor": "algorithm.correction.veto.min_weight",
    "algorithm.renormalise": "algorithm.correction.renormalize",
    "algorithm.kl_in": "algorithm.kl.apply_to; kl_in=off is algorithm.kl.coefficient=0",
    "algorithm.kl_coefficient": "algorithm.kl.coefficient",
    "algorithm.kl_estimator": "algorithm.kl.estimator",
    "algorithm.overlong": "algorithm.overlong.mode: keep (once off), penalty, mask or drop",
    "algorithm.overlong_cache_share": "algorithm.overlong.ramp_share",
    "algorithm.lag_decay": "algorithm.staleness_decay",
    "algorithm.loss": "algorithm/loss=NAME, in a file `override /algorithm/loss: NAME`",
    "algorithm.advantage": "algorithm/advantage=NAME, in a file `override /algorithm/advantage: NAME`",
    "algorithm.correction": "algorithm/correction=NAME, in a file `override /algorithm/correction: NAME`",
    "dataflow.prefetch": "dataflow.early_logprobs",
    "evaluation.num_tasks_beside": "evaluation.num_tasks_during_training",
    "sample.side": "sample.split",
}
"""Keys, and values of keys, that were replaced -> by what."""
_CHOICE_ERRORS = {"literal_error", "enum", "union_tag_invalid"}

_FULL_SUPPORT = (
    "it would cut the sampling support: the engine renormalises over what is left and the trainer does not, so every "
    "importance ratio would carry the cut mass. Lower rollout.sampling.temperature instead."
)
_ASKED_AGAIN = "a service that failed is asked again for every program; max_attempts and backoff_s say how often."
REMOVED = {
    "dataflow.filters.max_refills": "1,024 groups that are filtered between two batches stop the run.",
    "dataflow.max_engine_retries": "a trajectory is tried again three times after engine failures.",
    "env.endpoint.max_request_mib": "a request may have 4 MiB.",
    "reward.normalize": "write the weights of reward.parts as they are to count, e.g. with a sum of 1.",
    "rollout.adaptive_concurrency": "an engine that runs out of KV cache always gets fewer requests at a time.",
    "rollout.sampling.top_k": _FULL_SUPPORT,
    "rollout.sampling.top_p": _FULL_SUPPORT,
    "sandbox.remote.failures_to_open": _ASKED_AGAIN,
    "sandbox.remote.open_s": _ASKED_AGAIN,
}
"""Keys that a user may still have in a file -> what happens now, and what to do."""


def describe_errors(error: ValidationError, overrides: Mapping[str, str]) -> dict[str, str]:
    """One sentence per wrong key.

    Args:
        error: What pydantic found.
        overrides: Dotted key -> the override that set it, as typed.

    Returns:
        Dotted key -> sentence, in schema order.
    """
    sentences: dict[str, str] = {}
    for details in error.errors(include_url=False):
        place = locate(details["loc"])
        sentences.setdefault(place.path, _sentence(place, details, _origin(place.path, overrides)))
    return sentences


def _sentence(place: Place, details: ErrorDetails, origin: str) -> str:
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        if place.path in REMOVED:
            return f"{place.path}={_show(value)}{origin}: this key is gone: {REMOVED[place.path]} Leave it out."
        return _unknown_key(place, origin)
    if kind == "union_tag_not_found" or (kind == "missing" and isinstance(value, dict)):
        what = f": {expectation(place.field)}" if place.field else ""
        return f"{place.path} is required and not set{what}."
    where = f"{place.path}={_show(value)}{origin}"
    if place.path in _RENAMED and not isinstance(value, dict):  # a plain value where a section is now
        return f"{where}: this key has settings of its own now. Use {_RENAMED[place.path]}."
    if kind == "value_error":  # a validator of ours has said it
        return f"{where}: {details['ctx']['error']}"
    if kind in _RANGE_ERRORS and place.field:
        return f"{where} is out of range: {place.path} must be{range_words(place.field)}."
    if kind in _CHOICE_ERRORS:
        return _unknown_choice(where, details)
    if kind == "string_pattern_mismatch" and details["ctx"]["pattern"].startswith("^https"):
        return f"{where} is no address: {place.path} must begin with http:// or https://."
    if kind == "string_pattern_mismatch":
        return f"{where} has a character that is not allowed: {place.path} takes letters, digits and . _ - only."
    if place.field is None:
        return f"{where}: {details['msg']}."
    return f"{where} has the wrong type: {place.path} must be {expectation(place.field)}."


def _unknown_key(place: Place, origin: str) -> str:
    if new := _RENAMED.get(place.path):
        return f"{place.path}{origin}: this key was replaced. Use {new}."
    nearest = nearest_key(place.path, place.siblings)
    hint = f" Did you mean {nearest}?" if nearest else ""
    if not hint and place.path in set(all_paths()):
        hint = " Another choice of the group has it."
    parent = place.path.rpartition(".")[0] or "the root"
    return f"{place.path}{origin}: unknown key.{hint} Keys of {parent}: {', '.join(place.siblings)}."


def _unknown_choice(where: str, details: ErrorDetails) -> str:
    value, context = details["input"], details.get("ctx", {})
    if new := _RENAMED.get(where.partition(" (")[0].replace('"', "")):
        return f"{where}: this value was replaced. Use {new}."
    if details["type"] == "union_tag_invalid":
        value = context["tag"]
        where = f"{where.partition('=')[0]}.type={_show(value)}"
    listed = str(context.get("expected_tags") or context["expected"]).replace("'", "").replace(" or ", ", ")
    choices = [choice.strip() for choice in listed.split(",")]
    return f"{where} is no valid choice. Choices: {', '.join(choices)}.{nearest_choice(str(value), choices)}"


def _origin(path: str, overrides: Mapping[str, str]) -> str:
    """Name the override an error comes from, if it comes from one."""
    for key, typed in overrides.items():
        if key == path or path.startswith(f"{key}.") or key.startswith(f"{path}."):
            return "" if typed.lstrip("+").startswith(f"{path}=") and typed[0] != "+" else f" (override `{typed}`)"
    return ""


def _show(value: Any, limit: int = 60) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def nearest_choice(value: str, choices: Sequence[str]) -> str:
    """A ` Did you mean …?` if one choice is close, else nothing."""
    close = get_close_matches(value, choices, n=1)
    return f" Did you mean {close[0]}?" if close else ""


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
        sections = sections_of(annotation)
        if len(sections) > 1:
            annotation = next((section for section in sections if key in tags_of(section)), Any)
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
        for inner in sections_of(annotation):
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


def tags_of(section: type[BaseModel]) -> tuple[str, ...]:
    """Values of `type` that choose this member of a tagged union."""
    tag = section.model_fields.get("type")
    return get_args(tag.annotation) if tag else ()
