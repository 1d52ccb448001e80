"""Turns the return value of a reward function into a reward with parts, or into an error that explains the problem.

None, or a dict whose `reward` or every entry is None, is no opinion: there is no reward, and nothing has failed.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TypedDict

from penstock.envs.workers.permission_hints import permission_hint

MAX_DETAIL_CHARACTERS = 4000
MAX_PARTS = 64
ANSWER = "answer"
"""Entry of a dict that is the answer, if it is text, and otherwise a part."""
MAX_ANSWER_CHARACTERS = 4000
_MAX_NAME_CHARACTERS = 100
_MAX_MESSAGE_CHARACTERS = 500


class Reply(TypedDict, total=False):
    """Either `reward` with its `parts`, and the `answer` if the function gives it, or `abstains`, or `error`, or
    `timed_out`; the hello has `is_async`, `is_pure` or `error`.
    """

    reward: float
    parts: dict[str, float]
    answer: str
    abstains: bool
    error: str
    timed_out: bool
    is_async: bool
    is_pure: bool


def to_reply(returned: object, what: str = "the reward function returned", *, may_abstain: bool = True) -> Reply:
    """Turn the return value of the user's function into a reward and its parts, or into an error that describes it.

    A dict names parts; the reward is its `reward` entry, or the sum. Text under `answer` is what it read as the answer.

    Args:
        returned: The return value of the user's code.
        what: Beginning of the error message.
        may_abstain: Whether it may have no opinion; otherwise None is an error.
    """
    if may_abstain and _is_no_opinion(returned):
        return {"abstains": True}
    if not isinstance(returned, Mapping):
        number = _to_number(returned, f"{what} ")
        return {"error": number} if isinstance(number, str) else _judged(number, {}, getattr(returned, ANSWER, None))
    answer = returned.get(ANSWER)
    if isinstance(answer, str):
        returned = {name: value for name, value in returned.items() if name != ANSWER}
    if not returned:
        return {"error": f"{what} an empty dict; it needs at least one number"}
    if len(returned) > MAX_PARTS:
        return {"error": f"{what} a dict with {len(returned)} entries; at most {MAX_PARTS} fit"}
    parts: dict[str, float] = {}
    for name, value in returned.items():
        label = str(name)[:_MAX_NAME_CHARACTERS]
        number = _to_number(value, f"{what} a dict with {label}=")
        if isinstance(number, str):
            return {"error": number}
        parts[label] = number
    total = parts.pop("reward", None)
    return _judged(math.fsum(parts.values()) if total is None else total, parts, answer)


def _judged(reward: float, parts: dict[str, float], answer: object) -> Reply:
    reply: Reply = {"reward": reward, "parts": parts}
    if isinstance(answer, str):
        reply["answer"] = answer[:MAX_ANSWER_CHARACTERS]
    return reply


def is_hello(hello: object) -> bool:
    """Whether it is a well-formed hello, as opposed to bytes that the user's code wrote into our socket."""
    if not isinstance(hello, dict):
        return False
    if "error" in hello:
        return isinstance(hello["error"], str)
    return isinstance(hello.get("is_async"), bool) and isinstance(hello.get("is_pure"), bool)


def is_reply(reply: object) -> bool:
    """Whether it is a well-formed `Reply` to a call."""
    if not isinstance(reply, dict):
        return False
    if "reward" in reply:
        is_judged = are_finite([reply["reward"]]) and are_parts(reply.get("parts"))
        return is_judged and isinstance(reply.get("answer", ""), str)
    return "timed_out" in reply or reply.get("abstains") is True or isinstance(reply.get("error"), str)


def are_parts(parts: object) -> bool:
    """Whether it maps names to finite numbers, as `to_reply` does."""
    return isinstance(parts, dict) and are_finite(parts.values())


def are_finite(numbers: Iterable[object]) -> bool:
    """Whether all are finite floats; JSON reads `NaN`, and `1e999` as infinity."""
    return all(isinstance(number, float) and math.isfinite(number) for number in numbers)


def to_failure(error: BaseException) -> Reply:
    """Describe an exception of the user's function by its traceback, cut to `MAX_DETAIL_CHARACTERS`.

    A hint follows if the cause is a missing permission of isolated code.
    """
    text = "".join(traceback.format_exception(error))
    if len(text) > MAX_DETAIL_CHARACTERS:
        frames = "".join(traceback.format_tb(error.__traceback__))
        message = str(error)
        if len(message) > _MAX_MESSAGE_CHARACTERS:
            message = f"{message[:_MAX_MESSAGE_CHARACTERS]}… ({len(message)} characters)"
        last = f"{type(error).__name__}: {message}"
        text = frames[-(MAX_DETAIL_CHARACTERS - len(last)) :] + last
    return {"error": text.rstrip() + permission_hint(error)}


def _is_no_opinion(returned: object) -> bool:
    if not isinstance(returned, Mapping):
        return returned is None
    return bool(returned) and (returned.get("reward", 0.0) is None or all(one is None for one in returned.values()))


def _to_number(value: object, what: str) -> float | str:
    """The finite number that `value` is, or an error message."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a numpy or torch scalar
    if not isinstance(value, Real):
        return f"{what}{value!r:.200} of type {type(value).__name__}; expected a number, or a dict of numbers"
    number = float(value)
    return number if math.isfinite(number) else f"{what}{number!r}; expected a finite number"
