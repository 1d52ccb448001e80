"""The parser of a run: which one it is, and that a lost engine is passed over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import ray

from penstock.actors.engine import client as engine_client
from penstock.actors.engine.answer_parser import EngineAnswerParser, choose_parser
from penstock.dataflow.errors import ConfigError, EngineLostError
from penstock.envs.config import EnvConfig
from penstock.envs.endpoint.answer_parser import HermesParser, ParsedAnswer, ParserNames, SampledTurn
from penstock.rollout.tokenization.tokenizers import TokenCodec, character_tokenizer
from tests.chat_tokenizers import chat_tokenizer, family_tokenizer
from tests.unit.actors.test_engine_client import engine_with, never

TURN = SampledTurn("text")
NAMES = ParserNames("llama3_json")


def replies(answer: str) -> Any:
    async def parse_answer(turn: SampledTurn, names: ParserNames) -> ParsedAnswer:
        assert (turn, names) == (TURN, NAMES)
        return ParsedAnswer(answer)

    return parse_answer


async def dies(*_: object) -> None:
    raise ray.exceptions.ActorDiedError


async def refuses(*_: object) -> None:
    raise ray.exceptions.RayTaskError("call", "a remote traceback", ConfigError(["env.tool_calls=odd: no such parser"]))


async def test_engines_are_asked_in_turn() -> None:
    engines = [engine_with(parse_answer=replies(name)) for name in ("first", "second")]
    parser = EngineAnswerParser(lambda: engines, NAMES)
    assert [(await parser.parse(TURN)).content for _ in range(3)] == ["first", "second", "first"]


@pytest.mark.parametrize("lost", [dies, never])
async def test_an_engine_that_is_lost_or_silent_is_passed_over(lost: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "PARSE_S", 0.05)
    engines = [engine_with(parse_answer=lost), engine_with(parse_answer=replies("second"))]
    assert (await EngineAnswerParser(lambda: engines, NAMES).parse(TURN)).content == "second"


async def test_without_an_engine_that_answers_the_refusal_names_the_parser_and_each_reason() -> None:
    engines = [engine_with(parse_answer=dies)]
    with pytest.raises(EngineLostError, match=r"env\.tool_calls=llama3_json: no engine could read a turn: e: reading"):
        await EngineAnswerParser(lambda: engines, NAMES).parse(TURN)
    with pytest.raises(EngineLostError, match="none is in service"):
        await EngineAnswerParser(list, NAMES).parse(TURN)


async def test_a_parser_that_an_engine_does_not_have_is_refused_and_no_other_engine_is_asked() -> None:
    engines = [engine_with(parse_answer=refuses), engine_with(parse_answer=never)]
    env = EnvConfig(factory="agent", tool_calls="odd")
    with pytest.raises(ConfigError, match=r"env\.tool_calls=odd: no such parser"):
        await choose_parser(env, TokenCodec(character_tokenizer()), lambda: engines)


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (character_tokenizer(), "the chat template writes no calls"),
        (chat_tokenizer("llama"), "the chat template writes no calls"),
        (family_tokenizer("hermes"), "the chat template writes calls in the form of hermes"),
    ],
)
async def test_hermes_is_read_without_engines(tokenizer: Any, why: str) -> None:
    chosen = await choose_parser(EnvConfig(factory="agent"), TokenCodec(tokenizer), list)
    assert isinstance(chosen.parser, HermesParser)
    assert why in chosen.why
    named = await choose_parser(EnvConfig(factory="agent", tool_calls="hermes"), TokenCodec(tokenizer), list)
    assert isinstance(named.parser, HermesParser)


async def test_the_first_parser_that_an_engine_finds_is_used_and_the_others_are_told() -> None:
    asked: list[Sequence[tuple[SampledTurn, ParsedAnswer]]] = []

    async def find_parsers(turns: Sequence[tuple[SampledTurn, ParsedAnswer]]) -> list[str]:
        asked.append(turns)
        return ["llama3_json", "other"]

    async def parse_answer(turn: SampledTurn, names: ParserNames) -> ParsedAnswer:
        return ParsedAnswer(names.tool_calls)

    engine = engine_with(find_parsers=find_parsers, parse_answer=parse_answer)
    codec = TokenCodec(family_tokenizer("llama3_json"))
    chosen = await choose_parser(EnvConfig(factory="agent"), codec, lambda: [engine])
    assert "llama3_json of vLLM reads the calls that the chat template writes (other read them too)" in chosen.why
    assert (await chosen.parser.parse(TURN)).content == "llama3_json"
    assert list(asked[0]) == codec.written_calls()


async def test_where_no_parser_reads_the_template_the_line_shows_its_call() -> None:
    async def find_parsers(_: object) -> list[str]:
        return []

    engine = engine_with(find_parsers=find_parsers)
    codec = TokenCodec(family_tokenizer("mistral"))
    chosen = await choose_parser(EnvConfig(factory="agent"), codec, lambda: [engine])
    assert isinstance(chosen.parser, HermesParser)
    assert "no parser reads the call that the chat template writes, '[TOOL_CALLS]get_forecast" in chosen.why
