from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.rollout.tokenization.tokenizers import (
    CHARACTERS,
    TokenCodec,
    byte_tokenizer,
    character_tokenizer,
    load_codec,
)
from tests.chat_tokenizers import chat_tokenizer, family_tokenizer


def test_the_vocabulary_is_exactly_the_32_ids_of_the_tiny_policies() -> None:
    tokenizer = character_tokenizer()
    assert len(tokenizer) == 32
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.convert_tokens_to_ids("0") == 2


def test_every_character_is_one_token_and_decodes_to_itself() -> None:
    codec = TokenCodec(character_tokenizer())
    ids = codec.encode_prompt(CHARACTERS)
    assert ids == tuple(range(2, 32))
    assert codec.decode(ids) == CHARACTERS


def test_every_text_is_its_bytes_and_chat_is_rendered(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    codec = load_codec(tmp_path)
    assert len(codec.tokenizer) == 259
    for text in ("né ✓ 汉\n\t<answer>", bytes(range(128)).decode()):
        ids = codec.encode_prompt(text)
        assert len(ids) == len(text.encode())
        assert codec.decode(ids) == text
    prompt_ids = codec.encode_prompt([{"role": "user", "content": "1+1"}])
    assert codec.tokenizer.decode(prompt_ids) == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    end = codec.stop_token_ids[0]
    said = codec.encode_observation([{"role": "user", "content": "<|im_end|>?"}], end)
    assert codec.decode(said) == "\nuser\n<|im_end|>?\nassistant\n"


@pytest.mark.parametrize("text", ["47+85=", "7+5+0=12;4+8+1=13;132", " 1 , 2 ", "(3*4) - 5\n", "  "])
def test_decode_loses_nothing(text: str) -> None:
    codec = TokenCodec(character_tokenizer())
    ids = codec.encode_prompt(text)
    assert len(ids) == len(text)
    assert codec.decode(ids) == text


def test_special_tokens_are_skipped_when_decoding() -> None:
    assert TokenCodec(character_tokenizer()).decode([0, 3, 4, 1, 0]) == "12"


def test_a_character_without_a_token_is_an_error_and_not_dropped() -> None:
    with pytest.raises(TrajectoryError, match="cannot encode the prompt 'x=1'"):
        TokenCodec(character_tokenizer()).encode_prompt("x=1")


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(TrajectoryError, match="no tokens"):
        TokenCodec(character_tokenizer()).encode_prompt("")


def test_messages_without_a_chat_template_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        TokenCodec(character_tokenizer()).encode_prompt([{"role": "user", "content": "1+1="}])


def test_messages_are_rendered_once_with_the_generation_prompt() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    codec = TokenCodec(tokenizer)
    ids = codec.encode_prompt([{"role": "user", "content": "1+1"}])
    assert ids == codec.encode_prompt("<1+1>=")


def test_stop_tokens_join_the_tokenizer_and_the_generation_config(tiny_policy_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "policy"
    shutil.copytree(tiny_policy_dir, directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 14]}))
    assert load_codec(directory).stop_token_ids == (1, 14)


def test_an_answer_ends_where_its_chat_template_ends_it_though_eos_is_another_token() -> None:
    tokenizer = copy.deepcopy(chat_tokenizer("chatml"))
    tokenizer.eos_token = "<|eot_id|>"
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eot_id|>"])
    codec, question = TokenCodec(tokenizer), [{"role": "user", "content": "?"}]
    assert (codec.named_ends, codec.turn_end, codec.stop_token_ids) == ((eos,), end, (end, eos))
    answer = codec.encode_rendered("4<|im_end|>")
    assert answer[-1] == end
    assert codec.decode_turn(answer) == "4"
    assert codec.decode(codec.encode_observation(question, end)) == "\nuser\n?\nassistant\n"
    assert (codec.end_after(question), codec.end_after("?")) == (end, eos)


@pytest.mark.parametrize(
    ("family", "stops"),
    [
        ("harmony", ["<|call|>"]),  # <|end|> ends each channel of an answer, so no answer would follow the reasoning
        ("glm45", ["<|user|>"]),  # the template writes nothing after an answer
        ("plain", ["<|endoftext|>"]),  # no template
    ],
)
def test_a_template_without_an_end_of_its_own_adds_no_stop_token(family: str, stops: list[str]) -> None:
    codec = TokenCodec(family_tokenizer(family))
    assert codec.tokenizer.convert_ids_to_tokens(codec.stop_token_ids) == stops
    assert codec.turn_end is None
    assert codec.end_after([{"role": "user", "content": "?"}]) == codec.tokenizer.eos_token_id


def test_the_saved_tokenizer_loads_as_it_was(tiny_policy_dir: Path) -> None:
    codec = load_codec(tiny_policy_dir)
    assert codec.stop_token_ids == (1,)
    assert codec.encode_prompt(CHARACTERS) == tuple(range(2, 32))
    assert codec.decode(range(32)) == CHARACTERS


def test_a_directory_without_a_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        load_codec(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"added_tokens": [', '{"tokenizer_class": "TokenizersBackend"}'])
def test_a_damaged_tokenizer_is_named_with_its_files(content: str, tiny_policy_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_policy_dir, tmp_path / "policy")
    (tmp_path / "policy" / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json, tokenizer_config\.json: \w+Error: .*cut off"):
        load_codec(tmp_path / "policy")


def test_a_tokenizer_without_a_vocabulary_is_refused(tiny_policy_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_policy_dir, tmp_path / "policy")
    (tmp_path / "policy" / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "TokenizersBackend", "eos_token": "<e>", "extra_special_tokens": ["<s>"]}
    (tmp_path / "policy" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "policy" / "config.json").write_text('{"model_type": "qwen2"}')  # its class needs no vocabulary
    with pytest.raises(ConfigError, match="special tokens and no others"):
        load_codec(tmp_path / "policy")
