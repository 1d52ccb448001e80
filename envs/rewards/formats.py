"""Rewards for the form of a response: strings, patterns, JSON, code blocks, length. 0 or 1, or a penalty <= 0."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from penstock.dataflow.trajectory import Trajectory
from penstock.envs.contract import pure
from penstock.envs.rewards.python_code import fenced_blocks


@pure
def contains(trajectory: Trajectory, *, text: str, **_: Any) -> float:
    """1 if `text` occurs in the response, else 0."""
    return float(text in trajectory.response)


@pure
def matches(trajectory: Trajectory, *, pattern: str, **_: Any) -> float:
    """1 if the regular expression `pattern` matches the whole response (the dot matches newlines), else 0.

    A pattern that backtracks endlessly is ended by `reward.timeout_s`.
    """
    return float(re.fullmatch(pattern, trajectory.response, re.DOTALL) is not None)


@pure
def one_code_block(trajectory: Trajectory, **_: Any) -> float:
    """1 if the response holds exactly one fenced code block that is closed, else 0."""
    return float(sum(1 for _ in fenced_blocks(trajectory.response)) == 1)


@pure
def json_valid(trajectory: Trajectory, *, schema: Mapping[str, Any] | None = None, **_: Any) -> float:
    """1 if the last fenced block, or else the whole response, is JSON that satisfies `schema`, else 0.

    Args:
        trajectory: Its response is checked.
        schema: JSON Schema (2020-12 unless it names another version); None accepts any JSON.

    Raises:
        jsonschema.SchemaError: If the schema is invalid, which is an error of the task, not of the response.
    """
    blocks = [code for _, code in fenced_blocks(trajectory.response)]
    try:
        value = json.loads(blocks[-1] if blocks else trajectory.response, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0 if schema is None else float(_validator(json.dumps(schema, sort_keys=True)).is_valid(value))


@lru_cache(maxsize=1024)
def _validator(schema: str) -> Any:
    import jsonschema

    parsed = json.loads(schema)
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
    kind.check_schema(parsed)
    return kind(parsed)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def overlong_penalty(trajectory: Trajectory, *, max_tokens: int, buffer_tokens: int, **_: Any) -> float:
    """Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13), with n sampled tokens:

    0 if n <= max − buffer; (max − buffer − n) / buffer up to max; −1 beyond.

    Args:
        trajectory: Its sampled tokens are counted.
        max_tokens: From this length on the penalty is −1.
        buffer_tokens: Length of the slope, tokens; 0 < buffer <= max.

    Raises:
        ValueError: If the buffer is not in that range.
    """  # noqa: D415
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens={buffer_tokens} must be in 1..max_tokens={max_tokens}")
    over = trajectory.num_sampled_tokens - (max_tokens - buffer_tokens)
    return -min(max(over / buffer_tokens, 0.0), 1.0)


def finished(trajectory: Trajectory, **_: Any) -> float:
    """1 if the response ended by itself, 0 if it was truncated at the length limit."""
    return float(trajectory.finish_reason == "stop")
