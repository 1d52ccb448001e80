"""Tool calls and reasoning by vLLM's own parsers, as vLLM's server reads a whole answer.

Each turn gets a parser of its own, since they keep the state of one turn. The streaming form is not used
(envs/endpoint/answer_parser.py says why). What a parser raises over the text of a policy concerns that text alone: it
is then read as text without calls, and the log of the engine says so. So is a text over which a parser computes for
longer than `MAX_PARSE_S`: several take time with the square or the cube of the number of marks, and a policy that
repeats an opening mark to the end of its turn would stop the engine for minutes.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from penstock.dataflow.errors import ConfigError
from penstock.envs.endpoint.answer_parser import (
    ParsedAnswer,
    ParserNames,
    SampledTurn,
    checked_call,
    content_after,
)
from penstock.envs.endpoint.requests import MODEL
from penstock.rollout.engines.parser_names import GPT_OSS, GPT_OSS_REASONING, signs_of

logger = logging.getLogger(__name__)

MAX_PARSE_S = 5.0
"""Longest time for one turn, seconds of its thread's CPU time. A call of 30,000 letters takes most parsers tenths of a
second, those of Mistral and Kimi 2 s; that of Granite takes longer than this for a call of 10,000."""


class VllmAnswerParser:
    """One parser of calls, and one of reasoning if it has a name, for one tokenizer.

    Args:
        tokenizer: The tokenizer of the policy, as vLLM loads it.
        names: The parsers.

    Raises:
        ConfigError: If vLLM has no parser of this name, or it needs tokens that the tokenizer does not have.
    """

    def __init__(self, tokenizer: Any, names: ParserNames) -> None:
        _check_name("env.tool_calls", names.tool_calls, ToolParserManager.list_registered())
        if names.reasoning is not None:
            _check_name("env.reasoning_parser", names.reasoning, ReasoningParserManager.list_registered())
        self._tokenizer = tokenizer
        self._names = names
        self._is_gpt_oss = names.tool_calls == GPT_OSS
        try:
            self._parser_type = ParserManager.get_parser(
                tool_parser_name=names.tool_calls,
                reasoning_parser_name=names.reasoning or (GPT_OSS_REASONING if self._is_gpt_oss else None),
                enable_auto_tools=True,
                is_harmony=self._is_gpt_oss,
                tokenizer=tokenizer,
            )
        except Exception as error:  # a parser's own checks of the tokenizer raise what they like
            raise ConfigError([f"env.tool_calls={names.tool_calls}: vLLM says: {error}"]) from error
        assert self._parser_type is not None, "a name of a parser is given"

    def parse(self, turn: SampledTurn) -> ParsedAnswer:
        """Read a whole turn; arguments are checked, since some parsers give those of a cut call."""
        assert self._parser_type is not None
        tools = [ChatCompletionToolsParam.model_validate(tool) for tool in turn.tools]
        given: dict[str, Any] = {"tools": tools} if tools else {}
        request = ChatCompletionRequest(model=MODEL, messages=[{"role": "user", "content": "?"}], **given)
        parser = self._parser_type(self._tokenizer, tools or None)
        try:
            with cpu_limit(MAX_PARSE_S):
                reasoning, content, found = parser.parse(
                    turn.text, request, enable_auto_tools=bool(tools), model_output_token_ids=list(turn.token_ids)
                )
        except Exception:
            # Whatever a policy has sampled, it is no reason to stop the engine.
            logger.exception("%s cannot read a turn of %d characters; it is text", self._names, len(turn.text))
            return ParsedAnswer(turn.text)
        calls = [checked_call(call.name, call.arguments) for call in found or ()]
        well_formed = tuple(call for call in calls if call is not None)
        if tools and well_formed and len(well_formed) == len(calls):
            content = content_after(turn.text, content or "", signs_of(self._names))
            return ParsedAnswer(content, well_formed, reasoning)
        if reasoning is None and not self._is_gpt_oss:
            return ParsedAnswer(turn.text)
        return ParsedAnswer(content or "", (), reasoning)


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError at the first call or return of a function in this thread after this much CPU time.

    A thread cannot be killed. A single call of C, such as one match of a pattern, is not interrupted.
    """
    earliest, end = time.monotonic() + seconds, time.thread_time() + seconds

    def check(*_: object) -> None:
        # The first is read in a twentieth of the time, and a thread cannot have computed for longer than it was there.
        if time.monotonic() > earliest and time.thread_time() > end:
            raise TimeoutError(f"no answer within {seconds:g} s")  # which also removes this function

    sys.setprofile(check)
    try:
        yield
    finally:
        sys.setprofile(None)


def parsers_that_read(tokenizer: Any, turns: Sequence[tuple[SampledTurn, ParsedAnswer]]) -> list[str]:
    """Names of the parsers that read every turn as these calls; of several names of one parser, one.

    First those that give the same content in most turns: a parser of a related family may read a call and leave its
    marks in the content. Then in the order of the alphabet.

    Args:
        tokenizer: As vLLM loads it.
        turns: Turns as a chat template writes them, with what is in them.
    """
    found, seen = list[tuple[int, str]](), set[object]()
    for name in ToolParserManager.list_registered():
        try:
            kind = ToolParserManager.get_tool_parser(name)
            parser = VllmAnswerParser(tokenizer, ParserNames(name))
        except Exception as error:  # noqa: BLE001 - it needs a library or tokens that are not here
            logger.debug("%s: %s", name, error)
            continue
        read = [(parser.parse(turn), expected) for turn, expected in turns]
        if kind not in seen and all(one.calls == expected.calls for one, expected in read):
            num_same = sum(one.content == expected.content for one, expected in read)
            found.append((-num_same, name))
            seen.add(kind)
    return [name for _, name in sorted(found)]


def _check_name(key: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError([f"{key}={name}: this vLLM has no such parser; it has {', '.join(known)}.{hint}"])
