"""Which parser reads a policy's turns, and the parsers that engines run.

Consumes: turns that have ended. Waits for: one engine to read a turn, at most `PARSE_S`. Unblocked by: its answer; an
engine that is lost or silent is passed over, and the next one is asked. With no engine left it is an `EngineLostError`.
Turns are asked one call each; there are few, since a turn of an agent takes seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.actors.engine.client import RemoteEngine
from penstock.dataflow.errors import EngineLostError
from penstock.envs.config import EnvConfig
from penstock.envs.endpoint.answer_parser import (
    HERMES,
    AnswerParser,
    HermesParser,
    ParsedAnswer,
    ParserNames,
    SampledTurn,
)
from penstock.rollout.engines.parser_names import reads_reasoning, signs_of
from penstock.rollout.tokenization.tokenizers import TokenCodec

Engines = Callable[[], Sequence[RemoteEngine]]
"""The engines that are in service now."""


class EngineAnswerParser:
    """`AnswerParser` by parsers of the engines' library.

    Args:
        engines: Asked in turn.
        names: The parsers.
    """

    keeps_special_tokens = True

    def __init__(self, engines: Engines, names: ParserNames) -> None:
        self.signs = signs_of(names)
        self.reads_reasoning = reads_reasoning(names)
        self._engines = engines
        self._names = names
        self._turns = itertools.count()

    async def parse(self, turn: SampledTurn) -> ParsedAnswer:
        """See `AnswerParser`."""
        engines, lost = self._engines(), list[str]()
        first = next(self._turns) % max(len(engines), 1)
        for engine in (*engines[first:], *engines[:first]):
            try:
                return await engine.parse_answer(turn, self._names)
            except EngineLostError as error:
                lost.append(str(error))
        reasons = "; ".join(lost) or "none is in service"
        raise EngineLostError(f"env.tool_calls={self._names.tool_calls}: no engine could read a turn: {reasons}")


class ChosenParser(NamedTuple):
    """The parser of a run, and the line that says why it is this one."""

    parser: AnswerParser
    why: str


async def choose_parser(env: EnvConfig, codec: TokenCodec, engines: Engines) -> ChosenParser:
    """The parser that `env.tool_calls` names, or that reads what the chat template itself writes.

    The template is asked to write turns with calls of a tool of ours, and the parsers whether they read these calls
    back: first that of Hermes, which needs no engine, then all of vLLM. If one of vLLM is chosen, the template declares
    tools from now on.

    Raises:
        ConfigError: If vLLM has no parser of this name, or it does not fit the tokenizer.
        EngineLostError: If no engine answers.
    """
    name, reasoning = env.tool_calls, env.reasoning_parser

    def hermes(why: str) -> ChosenParser:
        if reasoning is None:
            return ChosenParser(HermesParser(), f"env.tool_calls: {why}")
        return ChosenParser(EngineAnswerParser(engines, ParserNames(HERMES, reasoning)), f"env.tool_calls: {why}")

    if name == HERMES:
        return hermes("hermes, as configured")
    if name is not None:
        parser = EngineAnswerParser(engines, ParserNames(name, reasoning))
        await parser.parse(SampledTurn("?"))  # refuses a name or a tokenizer now, not after the first turn
        _declare_tools(codec)
        return ChosenParser(parser, f"env.tool_calls: {name} of vLLM, as configured")
    written = codec.written_calls()
    if not written:
        return hermes("the chat template writes no calls, so the policy is asked for those of hermes")
    plain = [(SampledTurn(codec.decode(codec.encode_rendered(turn.text)), turn.tools), read) for turn, read in written]
    if all([(await HermesParser().parse(turn)).calls == read.calls for turn, read in plain]):
        return hermes("the chat template writes calls in the form of hermes")
    found = await _first_answer(engines, written)
    if not found:
        call = f"{written[0][0].text!r:.200}"
        return hermes(f"no parser reads the call that the chat template writes, {call}; the policy is asked for hermes")
    also = f" ({', '.join(found[1:])} read them too)" if found[1:] else ""
    _declare_tools(codec)
    why = f"env.tool_calls: {found[0]} of vLLM reads the calls that the chat template writes{also}"
    return ChosenParser(EngineAnswerParser(engines, ParserNames(found[0], reasoning)), why)


def _declare_tools(codec: TokenCodec) -> None:
    """Let the chat template declare tools in its own way, since the calls that it asks for are read."""
    if codec.tokenizer.chat_template:
        codec.turn_template.reads_own_calls = True


async def _first_answer(engines: Engines, written: Sequence[tuple[SampledTurn, ParsedAnswer]]) -> list[str]:
    lost: list[str] = []
    for engine in engines():
        try:
            return await engine.find_parsers(written)
        except EngineLostError as error:
            lost.append(str(error))
    raise EngineLostError(f"env.tool_calls: no engine could look for a parser: {'; '.join(lost) or 'none serves'}")
