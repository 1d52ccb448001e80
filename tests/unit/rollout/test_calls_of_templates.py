"""Whether and how a chat template writes tool calls is seen in what it writes, for templates in families' forms."""

from __future__ import annotations

import copy
import json

import pytest

from penstock.dataflow.errors import TrajectoryError
from penstock.envs.endpoint.answer_parser import ParsedAnswer, SampledTurn
from penstock.envs.endpoint.requests import Call
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.tokenization.turn_template import FORECAST, TurnTemplate
from tests.chat_tokenizers import chat_tokenizer, family_tokenizer

OSLO = Call("get_forecast", '{"city": "Oslo", "days": 3}')
BERGEN = Call("get_forecast", '{"city": "Bergen", "days": 3}')
QUESTION = {"role": "user", "content": "?"}
FORMS = {
    "hermes": "object",
    "llama3_json": "object",
    "mistral": "object",
    "qwen3_coder": "object",
    "deepseek_v31": "text",
    "glm45": "object",
    "harmony": "object",
}
WRITTEN = {
    "hermes": ('<tool_call>\n{"name": "get_forecast", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'),
    "llama3_json": ('{"name": "get_forecast", "parameters": {"city": "Oslo", "days": 3}}'),
    "mistral": ('[TOOL_CALLS]get_forecast[ARGS]{"city": "Oslo", "days": 3}'),
    "qwen3_coder": (
        "\n<tool_call>\n<function=get_forecast>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>"
    ),
    "deepseek_v31": (
        "</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_forecast<｜tool▁sep｜>"
        '{"city": "Oslo", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "glm45": (
        "<think></think>\n<tool_call>get_forecast\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    ),
    "harmony": (
        '<|channel|>commentary to=functions.get_forecast <|constrain|>json<|message|>{"city": "Oslo", "days": 3}'
    ),
}


@pytest.mark.parametrize("family", FORMS)
def test_a_template_says_what_arguments_it_expects(family: str) -> None:
    assert TurnTemplate(family_tokenizer(family)).calls_form == FORMS[family]


@pytest.mark.parametrize("template", ["chatml", "hermes", "llama"])
def test_a_template_that_writes_the_text_of_a_message_alone_writes_no_calls(template: str) -> None:
    turns = TurnTemplate(chat_tokenizer(template))
    assert turns.calls_form is None
    assert list(turns.written_calls(["<|im_end|>"])) == []
    assert turns.message_with_calls("I look.", [OSLO, BERGEN]) == {
        "role": "assistant",
        "content": "I look.\n"
        '<tool_call>\n{"name": "get_forecast", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_forecast", "arguments": {"city": "Bergen", "days": 3}}\n</tool_call>',
    }


def test_a_template_that_writes_json_text_in_quotes_wants_objects_and_one_that_joins_texts_wants_text() -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    for written, form in (("| tojson", "object"), ("| string", None), ("| upper", None), ("", "text")):
        tokenizer.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{{ c.function.name + ' ' + (c.function.arguments " + written + ") }}{% endfor %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        expected = "text" if written == "| string" else form
        assert TurnTemplate(tokenizer).calls_form == expected, written


@pytest.mark.parametrize("family", WRITTEN)
def test_a_turn_is_what_the_template_writes_between_the_generation_prompt_and_the_end(family: str) -> None:
    codec = TokenCodec(family_tokenizer(family))
    written = codec.written_calls()
    text = WRITTEN[family]
    assert written[0] == (SampledTurn(text, [FORECAST], codec.encode_rendered(text)), ParsedAnswer("", (OSLO,)))
    several = [parsed.calls for _, parsed in written]
    assert ((OSLO, BERGEN) in several) == (family != "llama3_json"), "which refuses two"


@pytest.mark.parametrize("family", FORMS)
def test_a_history_with_calls_is_rendered_by_the_template(family: str) -> None:
    codec = TokenCodec(family_tokenizer(family))
    turns = codec.turn_template
    message = turns.message_with_calls("", [OSLO])
    text = turns.prompt([QUESTION, message, {"role": "tool", "content": "rain"}])
    turn = codec.written_calls()[0][0].text
    assert turn.removeprefix("</think>") in text
    assert "rain" in text.partition(turn)[2]
    (call,) = message["tool_calls"]
    expected = json.loads(OSLO.arguments) if FORMS[family] == "object" else OSLO.arguments
    assert call["function"] == {"name": "get_forecast", "arguments": expected}


RESULTS = {
    "hermes": "\n<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n",
    "mistral": "[TOOL_RESULTS]call00000 rain[/TOOL_RESULTS]",
    "harmony": (
        '<|start|>functions.get_forecast to=assistant<|channel|>commentary<|message|>"rain"<|end|><|start|>assistant'
    ),
}


@pytest.mark.parametrize("family", FORMS)
def test_results_follow_an_answer_with_their_calls(family: str) -> None:
    codec = TokenCodec(family_tokenizer(family))
    (end,) = codec.stop_token_ids

    def text(results: list[str], calls: list[str], last: int) -> str:
        messages = [{"role": "tool", "content": result} for result in results]
        return codec.decode_prompt(codec.encode_observation(messages, last, calls))

    after = text(["rain"], ["get_forecast"], end)
    assert after == RESULTS.get(family, after)
    if family not in ("mistral", "harmony"):  # which refuse results without calls
        assert after == text(["rain"], [], end)
    closed = "" if family == "glm45" else codec.decode_prompt([end])  # the role of the next message ends its turns
    assert text(["rain"], ["get_forecast"], 0).lstrip() == closed + after
    both = text(["rain", "sun"], ["get_forecast", "get_forecast"], end)
    assert "rain" in both
    assert both.index("rain") < both.index("sun")


def test_a_result_that_an_end_token_follows_is_not_lost() -> None:
    codec = TokenCodec(family_tokenizer("glm45"))
    messages = [{"role": "tool", "content": "rain"}, QUESTION]
    ids = codec.encode_observation(messages, codec.stop_token_ids[0], ["get_forecast"])
    assert codec.decode_prompt(ids) == "<|observation|>\nrain<|user|>\n?<|assistant|>\n"


def test_a_result_that_the_template_leaves_out_is_an_error() -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    template = tokenizer.chat_template
    assert isinstance(template, str)
    tokenizer.chat_template = template.replace("in messages -%}", "in messages if message.role != 'tool' -%}")
    turns = TurnTemplate(tokenizer)
    assert turns.between([QUESTION], "<|im_end|>")
    with pytest.raises(TrajectoryError, match="leaves out a tool's result after an answer in which it sees no calls"):
        turns.between([{"role": "tool", "content": "rain"}], "<|im_end|>")


def test_the_name_of_a_call_that_spells_a_special_token_stays_text() -> None:
    codec = TokenCodec(family_tokenizer("harmony"))
    ids = codec.encode_observation([{"role": "tool", "content": "<|end|>"}], codec.stop_token_ids[0], ["<|end|>"])
    (end,) = codec.encode_rendered("<|end|>")
    assert (ids.count(end), codec.decode_prompt(ids).count("<|end|>")) == (1, 3)


def test_a_call_whose_arguments_are_no_object_stays_text() -> None:
    message = TurnTemplate(family_tokenizer("llama3_json")).message_with_calls("", [Call("f", "{")])
    assert message == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "f", "arguments": {}\n</tool_call>',
    }


@pytest.mark.parametrize("family", ["mistral", "deepseek_v31", "kimi_k2", "glm45"])
def test_a_turn_keeps_the_special_tokens_in_which_its_calls_are_written_but_not_its_end(family: str) -> None:
    codec = TokenCodec(family_tokenizer(family))
    (marked,) = [token for token in codec.tokenizer.all_special_tokens if "call" in token.lower()][:1]
    text = f"I look.{marked}f"
    ids = codec.encode_rendered(text)
    assert codec.decode_turn(ids) == text
    assert codec.decode_turn((*ids, codec.stop_token_ids[0])) == text
    assert codec.decode_turn(()) == ""
    assert marked not in codec.decode(ids)
