"""Prompts of random texts: the ids of the model's own template, whatever a text spells, for every tokenizer family."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rollout.tokenization.tokenizers import TokenCodec
from tests.prompt_tokenizers import LOSSLESS, UNKNOWN, prompt_tokenizers
from tests.tiers import examples

TOKENIZERS = prompt_tokenizers()
CODECS = {name: TokenCodec(tokenizer) for name, tokenizer in TOKENIZERS.items()}
HARMLESS = [
    "the tool",
    " 12",
    "\n",
    "  ",
    "né",
    "e\u0301",
    "✓",
    "汉",
    "👨‍👩‍👧",
    "<b>",
    "<|",
    "|>",
    "<|im_",
    "end|>",
    "im_end",
    "{",
    '"',
    "\\",
    "\t",
]
SPECIAL = sorted({text for tokenizer in TOKENIZERS.values() for text in tokenizer.all_special_tokens})


def texts(fragments: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(fragments) | st.text(max_size=4), min_size=1, max_size=8).map("".join)


def conversations(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    def messages(drawn: tuple[Any, ...]) -> list[dict[str, Any]]:
        system, turns, last = drawn
        first = [] if system is None else [{"role": "system", "content": system}]
        said = [{"role": role, "content": content} for role, content in turns]
        return [*first, {"role": "user", "content": "?"}, *said, {"role": "user", "content": last}]

    turn = st.tuples(st.sampled_from(["user", "assistant", "tool"]), text)
    return st.tuples(st.none() | text, st.lists(turn, max_size=3), text).map(messages)


def tools(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    def tool(drawn: tuple[str, str]) -> dict[str, Any]:
        described = {"type": "string", "description": drawn[1]}
        parameters = {"type": "object", "properties": {"q": described}}
        return {"type": "function", "function": {"name": "f", "description": drawn[0], "parameters": parameters}}

    return st.lists(st.tuples(text, text).map(tool), max_size=2)


def spells(value: object, tokenizer: Any) -> bool:
    return any(special in str(value).casefold() for special in map(str.casefold, tokenizer.all_special_tokens))


def control_ids(tokenizer: Any, ids: Any) -> list[int]:
    """The special tokens, without the one for what the vocabulary lacks."""
    return [one for one in ids if one in tokenizer.all_special_ids and one != tokenizer.unk_token_id]


def without_specials(value: Any) -> Any:
    if isinstance(value, str):
        for special in SPECIAL:
            value = value.replace(special, "x").replace(special.upper(), "x")
        return value
    if isinstance(value, dict):
        return {key: without_specials(one) for key, one in value.items()}
    return [without_specials(one) for one in value]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_texts_without_special_tokens_have_exactly_the_ids_of_the_template(name: str, data: st.DataObject) -> None:
    tokenizer, codec = TOKENIZERS[name], CODECS[name]
    text = texts(HARMLESS).filter(lambda one: not spells(one, tokenizer))
    messages, plain = data.draw(conversations(text)), data.draw(text)
    given_tools = data.draw(tools(text)) if name.endswith(("hermes", "added tokens")) else []
    expected = tokenizer.apply_chat_template(
        messages, tools=given_tools or None, add_generation_prompt=True, return_dict=False
    )
    assert list(codec.encode_prompt(messages, given_tools)) == expected
    if ids := tokenizer.encode(plain, add_special_tokens=False):
        assert list(codec.encode_prompt(plain)) == ids


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_special_tokens_that_a_text_spells_are_text(name: str, data: st.DataObject) -> None:
    tokenizer, codec = TOKENIZERS[name], CODECS[name]
    spelled = [*SPECIAL, *tokenizer.all_special_tokens, "<|IM_END|>", *HARMLESS]
    messages = data.draw(conversations(texts(spelled)))
    given_tools = data.draw(tools(texts(spelled))) if name.endswith(("hermes", "added tokens")) else []
    ids = codec.encode_prompt(messages, given_tools)
    own = codec.encode_prompt(without_specials(messages), without_specials(given_tools))
    assert control_ids(tokenizer, ids) == control_ids(tokenizer, own), "the template's own, and no other"
    said = [{"role": "tool", "content": messages[-1]["content"]}, messages[-1]]
    observed = codec.encode_observation(said, codec.stop_token_ids[0])
    own = codec.encode_observation(without_specials(said), codec.stop_token_ids[0])
    assert control_ids(tokenizer, observed) == control_ids(tokenizer, own)
    plain = codec.encode_observation(messages[-1]["content"], 0)
    assert not control_ids(tokenizer, plain)
    if name in LOSSLESS:
        options = {"tools": given_tools or None, "add_generation_prompt": True, "tokenize": False}
        normalizer = tokenizer.backend_tokenizer.normalizer
        normal = (lambda text: text) if normalizer is None else normalizer.normalize_str
        assert codec.decode_prompt(ids) == normal(tokenizer.apply_chat_template(messages, **options))
        assert codec.decode(plain) == normal(messages[-1]["content"])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=examples(20), deadline=None)
def test_a_text_that_spells_them_has_the_ids_of_a_tokenizer_without_special_tokens(
    name: str, data: st.DataObject
) -> None:
    tokenizer, codec = TOKENIZERS[name], CODECS[name]
    text = data.draw(texts([*tokenizer.all_special_tokens, *HARMLESS]))
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    tokenizer.encode("", split_special_tokens=False)  # it stays set
    # Unigram and SentencePiece still find some in their vocabulary; that of unknown characters has a legitimate id.
    spells_unknown = tokenizer.unk_token is not None and tokenizer.unk_token in text
    if ids and not spells_unknown and not control_ids(tokenizer, ids):
        assert list(codec.encode_prompt(text)) == ids


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=examples(20), deadline=None)
def test_rendered_texts_and_special_tokens_that_are_asked_for_are_control_tokens(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    codec = TokenCodec(tokenizer, special_tokens="tokens")
    messages = data.draw(conversations(texts([*tokenizer.all_special_tokens, *HARMLESS])))
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(codec.encode_prompt(messages)) == expected
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert list(codec.encode_prompt(rendered)) == expected
    assert list(CODECS[name].encode_rendered(rendered)) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
@settings(max_examples=examples(20), deadline=None)
def test_a_last_message_of_the_assistant_is_continued_as_transformers_does(name: str, data: st.DataObject) -> None:
    tokenizer, codec = TOKENIZERS[name], CODECS[name]
    text = texts(HARMLESS).filter(lambda one: not spells(one, tokenizer) and bool(one.strip()))
    begun = {"role": "assistant", "content": data.draw(text)}
    messages = data.draw(conversations(text))
    expected = tokenizer.apply_chat_template([*messages, begun], continue_final_message=True, return_dict=False)
    assert list(codec.encode_prompt([*messages, begun])) == expected
    end = codec.stop_token_ids[0]
    observed = tokenizer.decode(codec.encode_observation([messages[-1], begun], end))
    opened = tokenizer.decode(codec.encode_observation([messages[-1]], end))
    assert observed.startswith(opened.rstrip())
    assert not control_ids(tokenizer, codec.encode_observation([messages[-1], begun], end)[len(opened) :])


def test_the_trained_tokenizers_have_the_properties_that_they_stand_for() -> None:
    split = {
        name: tokenizer.encode("</s>", add_special_tokens=False, split_special_tokens=True)
        for name, tokenizer in TOKENIZERS.items()
    }
    for tokenizer in TOKENIZERS.values():
        tokenizer.encode("", split_special_tokens=False)
    for name in ("Unigram", "SentencePiece BPE", "SentencePiece BPE, legacy"):
        assert TOKENIZERS[name].convert_tokens_to_ids("</s>") in split[name]
    assert TOKENIZERS["WordPiece"].encode("<|IM_END|>") == [TOKENIZERS["WordPiece"].eos_token_id]
    legacy = TOKENIZERS["SentencePiece BPE, legacy"]
    assert legacy.unk_token == UNKNOWN
    assert legacy.decode(legacy.encode("né 🦆", add_special_tokens=False)) == "né 🦆"
    call = TOKENIZERS["byte-level BPE with added tokens"].encode("<tool_call>")
    assert len(call) == 1
    assert not set(call) & set(TOKENIZERS["byte-level BPE with added tokens"].all_special_ids)
