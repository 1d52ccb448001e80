"""vLLM's parsers over turns written by hand in each family's form, whole and streamed in random pieces."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from penstock.actors.engine.answer_parser import choose_parser
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ids import EngineId
from penstock.envs.config import EnvConfig
from penstock.envs.endpoint.answer_parser import ContentReader, HermesParser, ParsedAnswer, ParserNames, SampledTurn
from penstock.envs.endpoint.requests import Call
from penstock.rollout.engines.parser_names import registered_parsers, signs_of
from penstock.rollout.tokenization.tokenizers import TokenCodec
from tests.chat_tokenizers import family_tokenizer
from tests.tiers import by_tier
from tests.tool_call_forms import FAMILIES, NESTED, OSLO, QUOTES, TOKYO, TOOLS, Family, Made

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("cpu_profile"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)"),
]
CASES: dict[str, tuple[str, list[Made], str]] = {
    # text before, calls, text after
    "one": ("", [OSLO], ""),
    "two": ("", [OSLO, TOKYO], ""),
    "text before": ("I will look.\n\n", [OSLO], ""),
    "text after": ("", [OSLO], "\nI wait."),
    "quotes": ("", [QUOTES], ""),
    "nested": ("", [NESTED], ""),
    "unicode": ("", [TOKYO], ""),
}
Read = Callable[[Family, str], ParsedAnswer]


@pytest.fixture(scope="module")
def read() -> Read:
    """Reads a turn by the family's parser; a parser is made once."""
    from penstock.rollout.engines.vllm.answer_parser import VllmAnswerParser

    parsers: dict[str, Any] = {}

    def parse(family: Family, text: str) -> ParsedAnswer:
        if family.name not in parsers:
            parsers[family.name] = VllmAnswerParser(family_tokenizer(family.tokens), ParserNames(family.parser))
        ids = family_tokenizer(family.tokens).encode(text, add_special_tokens=False)
        return parsers[family.name].parse(SampledTurn(text, TOOLS, ids))

    return parse


def called(made: Sequence[Made]) -> tuple[Call, ...]:
    return tuple(Call(name, json.dumps(arguments, sort_keys=True)) for name, arguments in made)


def streamed(parsed: ParsedAnswer, text: str, signs: tuple[str, ...], rng: random.Random) -> Iterator[str]:
    """What a program gets if the text arrives in random pieces."""
    reader = ContentReader(signs)
    while text:
        size = rng.choice([1, 1, 2, 3, 5, 8, 40])
        piece, text = text[:size], text[size:]
        yield reader.read(piece)
    yield reader.rest(parsed)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_parser_reads_the_calls_of_its_family(family: Family, case: str, read: Read) -> None:
    before, made, after = CASES[case]
    if case in dict(family.unread):
        parsed = read(family, before + family.write(made) + after)
        assert parsed.calls != called(made), "it reads this now: take it off the list"
        return
    parsed = read(family, before + family.write(made) + after)
    assert parsed.calls == called(made)
    assert parsed.content.startswith(before.rstrip())
    assert parsed.reasoning is None


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_malformed_call_is_text(family: Family, read: Read) -> None:
    for text in (family.broken, f"I will look.\n{family.broken}"):
        assert read(family, text) == ParsedAnswer(text)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_streamed_content_is_that_of_the_whole_turn_wherever_both_are_cut(family: Family, read: Read) -> None:
    rng = random.Random(family.name)
    signs = signs_of(ParserNames(family.parser))
    texts = [before + family.write(made) + after for before, made, after in CASES.values()]
    texts += [f"  1 < 2, I will look.\n{family.broken}  ", "No call, but [a list] and {braces}.\n", " \n", ""]
    whole = "Let me see.\n" + family.write([OSLO])
    num_cuts = by_tier(12, len(whole))
    texts += [whole[:end] for end in sorted(rng.sample(range(len(whole)), min(num_cuts, len(whole))))]
    for text in texts:
        parsed = read(family, text)
        for call in parsed.calls:
            assert isinstance(json.loads(call.arguments), dict), f"{call} of {text!r}"
        for _ in range(by_tier(3, 30)):
            assert "".join(streamed(parsed, text, signs, rng)) == parsed.content, text


def test_a_turn_over_which_a_parser_raises_or_computes_for_too_long_is_text(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.rollout.engines.vllm import answer_parser

    by_name = {family.name: family for family in FAMILIES}
    internlm = by_name["internlm"]
    two = internlm.write([OSLO, TOKYO])
    assert read(internlm, two) == ParsedAnswer(two), "it raises a ValueError"
    monkeypatch.setattr(answer_parser, "MAX_PARSE_S", 0.2)
    for name in ("qwen3_coder", "glm45"):  # each computes for more than half a minute
        call = by_name[name].write([OSLO])
        repeated = call[: len(call) // 2] * 400
        assert read(by_name[name], repeated) == ParsedAnswer(repeated)
        assert read(by_name[name], call).calls == called([OSLO])


def test_an_unknown_parser_and_one_without_its_tokens_are_refused_by_name() -> None:
    from penstock.rollout.engines.vllm.answer_parser import VllmAnswerParser

    with pytest.raises(ConfigError, match=r"env\.tool_calls=lama3_json: .* Did you mean llama3_json\?"):
        VllmAnswerParser(family_tokenizer("plain"), ParserNames("lama3_json"))
    with pytest.raises(ConfigError, match=r"env\.tool_calls=llama3_json: vLLM says: .*<\|python_tag\|>"):
        VllmAnswerParser(family_tokenizer("plain"), ParserNames("llama3_json"))
    with pytest.raises(ConfigError, match=r"env\.reasoning_parser=qwen: "):
        VllmAnswerParser(family_tokenizer("plain"), ParserNames("hermes", "qwen"))


def test_the_names_read_from_vllms_source_are_those_that_it_registers() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert sorted(registered_parsers("tool_parsers") or ()) == ToolParserManager.list_registered()
    assert sorted(registered_parsers("reasoning") or ()) == ReasoningParserManager.list_registered()


@pytest.mark.parametrize(
    ("reasoning", "tokens", "text"),
    [
        ("deepseek_r1", "deepseek_v31", "{0}</think>{1}"),
        ("qwen3", "qwen3_coder", "<think>{0}</think>{1}"),
        ("kimi_k2", "kimi_k2", "<think>{0}</think>{1}"),
        ("seed_oss", "seed_oss", "<seed:think>{0}</seed:think>{1}"),
    ],
)
def test_reasoning_is_split_off_and_nothing_of_it_is_streamed_as_content(
    reasoning: str, tokens: str, text: str
) -> None:
    from penstock.rollout.engines.vllm.answer_parser import VllmAnswerParser

    family = next(one for one in FAMILIES if one.tokens == tokens or one.parser == tokens)
    names = ParserNames(family.parser, reasoning)
    parser = VllmAnswerParser(family_tokenizer(tokens), names)
    call = family.write([OSLO])
    for content, calls in (("It is 4.", ()), (call, called([OSLO]))):
        whole = text.format("Is it {4}?", content)
        parsed = parser.parse(SampledTurn(whole, TOOLS))
        assert (parsed.reasoning, parsed.calls) == ("Is it {4}?", calls)
        assert parsed.content.strip() == ("" if calls else content)
        pieces = list(streamed(parsed, whole, signs_of(names), random.Random(0)))
        assert not any(pieces[:-1])
        assert pieces[-1] == parsed.content
    assert parser.parse(SampledTurn(text.format("a", "b"))).content == "b", "also without tools"


def test_the_channels_of_gpt_oss_are_reasoning_content_and_calls() -> None:
    """From ids of its own vocabulary."""
    import openai_harmony

    from penstock.rollout.engines.vllm.answer_parser import VllmAnswerParser

    try:
        encoding = openai_harmony.load_harmony_encoding("HarmonyGptOss")
    except openai_harmony.HarmonyError as error:
        pytest.skip(f"the vocabulary of gpt-oss is not here: {error}")
    names = ParserNames("openai")
    parser = VllmAnswerParser(family_tokenizer("harmony"), names)

    def read(text: str) -> ParsedAnswer:
        parsed = parser.parse(SampledTurn(text, TOOLS, encoding.encode(text, allowed_special="all")))
        assert "".join(streamed(parsed, text, signs_of(names), random.Random(0))) == parsed.content
        return parsed

    thought = "<|channel|>analysis<|message|>Is it {4}?<|end|><|start|>assistant"
    to_forecast = "<|channel|>commentary to=functions.get_forecast <|constrain|>json<|message|>"
    written = '{"city": "Oslo", "days": 3}'
    assert read(f"{thought}<|channel|>final<|message|>It is 4.") == ParsedAnswer("It is 4.", (), "Is it {4}?")
    assert read(f"<|channel|>final<|message|>It is {written}") == ParsedAnswer(f"It is {written}", ())
    assert read(f"{thought}{to_forecast}{written}") == ParsedAnswer("", called([OSLO]), "Is it {4}?")
    assert read(f"{to_forecast}{written[:-1]}").calls == ()


class HereEngine:
    """Answers as `RemoteEngine` does, in this process."""

    engine_id = EngineId("e")

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def parse_answer(self, turn: SampledTurn, names: ParserNames) -> ParsedAnswer:
        from penstock.rollout.engines.vllm.answer_parser import VllmAnswerParser

        return VllmAnswerParser(self._tokenizer, names).parse(turn)

    async def find_parsers(self, turns: Sequence[tuple[SampledTurn, ParsedAnswer]]) -> list[str]:
        from penstock.rollout.engines.vllm.answer_parser import parsers_that_read

        return parsers_that_read(self._tokenizer, turns)


@pytest.mark.parametrize("family", ["llama3_json", "mistral", "qwen3_coder", "deepseek_v31", "glm45"])
async def test_the_parser_is_the_one_that_reads_what_the_chat_template_writes(family: str) -> None:
    tokenizer = family_tokenizer(family)
    engine: Any = HereEngine(tokenizer)
    chosen = await choose_parser(EnvConfig(factory="agent"), TokenCodec(tokenizer), lambda: [engine])
    assert f"{family} of vLLM reads the calls that the chat template writes" in chosen.why
    form = next(one for one in FAMILIES if one.parser == family and one.tokens in (family, "plain"))
    parsed = await chosen.parser.parse(SampledTurn(form.write([OSLO]), TOOLS))
    assert parsed.calls == called([OSLO])


async def test_a_template_in_the_form_of_hermes_needs_no_engine() -> None:
    codec = TokenCodec(family_tokenizer("hermes"))
    chosen = await choose_parser(EnvConfig(factory="agent"), codec, list)
    assert isinstance(chosen.parser, HermesParser)
    assert "the chat template writes calls in the form of hermes" in chosen.why
