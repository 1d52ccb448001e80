"""Checks of who reads tool calls and reasoning: vLLM's parsers exist by name, and only where vLLM is."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from penstock.envs.endpoint.answer_parser import HERMES
from penstock.platform.config.findings import WITHOUT_ENGINES, Command, Finding, error
from penstock.platform.config.schema import RunConfig
from penstock.rollout.engines.parser_names import registered_parsers


def check_answer_parsers(config: RunConfig, command: Command) -> Iterator[Finding]:
    """Check `env.tool_calls` and `env.reasoning_parser`, if the command has engines."""
    env = config.env
    if command in WITHOUT_ENGINES:
        return
    if env.reasoning is not None and env.reasoning_parser is not None:
        yield error(
            f"env.reasoning and env.reasoning_parser={env.reasoning_parser} both split the reasoning off, by marks and "
            "by a parser of vLLM. Set one of them to null."
        )
    named = [
        ("env.tool_calls", None if env.tool_calls == HERMES else env.tool_calls, "tool_parsers"),
        ("env.reasoning_parser", env.reasoning_parser, "reasoning"),
    ]
    without = [view for view in config.rollout_views if view.rollout.engine.type != "vllm"]
    for key, name, package in named:
        if name is None:
            continue
        if without:
            instead = "hermes, whose calls are read without it" if key == "env.tool_calls" else "null"
            yield error(
                f"{key}={name} is a parser of vLLM, but rollout.engine.type={without[0].rollout.engine.type} has none. "
                f"Use rollout/engine=vllm, or {key}={instead}."
            )
            continue
        known = registered_parsers(package)
        if known is not None and name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            yield error(f"{key}={name}: the installed vLLM has no such parser; it has {', '.join(known)}.{hint}")
