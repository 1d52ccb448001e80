"""Parsers of vLLM are refused by name before a run where there is none of that name, or no vLLM."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from penstock.platform.checks.answer_parsers import check_answer_parsers
from penstock.platform.checks.load import compose_config
from penstock.rollout.engines.parser_names import registered_parsers

TORCH, VLLM = "rollout/engine=torch", "rollout/engine=vllm"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy that `make demo` leaves in runs/ would be read."""
    monkeypatch.chdir(tmp_path)


def refusals(*overrides: str, command: str = "train") -> list[str]:
    config = compose_config(["experiment=arithmetic", *overrides])
    return [finding.message for finding in check_answer_parsers(config, command)]  # type: ignore[arg-type]


def test_without_vllm_only_the_form_of_hermes_is_read() -> None:
    assert refusals(TORCH) == refusals(TORCH, "env.tool_calls=hermes") == []
    (calls,) = refusals(TORCH, "env.tool_calls=llama3_json")
    assert calls.startswith("env.tool_calls=llama3_json is a parser of vLLM, but rollout.engine.type=torch has none.")
    assert calls.endswith("Use rollout/engine=vllm, or env.tool_calls=hermes, whose calls are read without it.")
    (reasoning,) = refusals(TORCH, "env.reasoning_parser=qwen3")
    assert "or env.reasoning_parser=null." in reasoning
    assert refusals(TORCH, "env.tool_calls=llama3_json", command="sft") == [], "which has no engines"


def test_the_reasoning_is_split_by_marks_or_by_a_parser() -> None:
    (both,) = refusals(VLLM, "env.reasoning=think", "env.reasoning_parser=qwen3")
    assert both.startswith("env.reasoning and env.reasoning_parser=qwen3 both split the reasoning off")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)")
def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    assert refusals(VLLM, "env.tool_calls=llama3_json", "env.reasoning_parser=qwen3") == []
    (problem,) = refusals(VLLM, "env.tool_calls=lama3_json")
    assert problem.startswith("env.tool_calls=lama3_json: the installed vLLM has no such parser; it has ")
    assert problem.endswith(" Did you mean llama3_json?")
    assert len(registered_parsers("tool_parsers") or ()) > 30
