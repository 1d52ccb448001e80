"""vLLM's parsers by name, without an import of vLLM, which takes seconds: what they are, and how their calls begin."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from penstock.envs.endpoint.answer_parser import ANY_TEXT, ParserNames

GPT_OSS, GPT_OSS_REASONING = "openai", "openai_gptoss"
"""The parsers of gpt-oss, whose turns are tokens in channels: vLLM reads reasoning and calls together, from ids."""
_SIGNS = ("<", "[", "{", "```", "functools", "function call")
"""One of these begins every call that a parser of vLLM 0.32 reads: marks, JSON, Python, words of two families."""


def signs_of(names: ParserNames) -> tuple[str, ...]:
    """`AnswerParser.signs` of vLLM's parsers."""
    return ANY_TEXT if reads_reasoning(names) else _SIGNS


def reads_reasoning(names: ParserNames) -> bool:
    return names.reasoning is not None or names.tool_calls == GPT_OSS


def registered_parsers(package: str) -> list[str] | None:
    """Names in the table of an installed package of vLLM, read from its source.

    Args:
        package: `tool_parsers` or `reasoning`.

    Returns:
        The names in their order; None if vLLM is not installed, or has its table elsewhere.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / package / "__init__.py"
    if not path.exists():
        return None
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            keys = [key.value for key in statement.value.keys if isinstance(key, ast.Constant)]
            return [key for key in keys if isinstance(key, str)]
    return None
