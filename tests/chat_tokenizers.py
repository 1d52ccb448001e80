"""A small byte-level BPE tokenizer with the chat templates of tests/data."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
END_OF_TURN = {"chatml": "<|im_end|>", "hermes": "<|im_end|>", "llama": "<|eot_id|>"}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CORPUS = ["the tool answered the user", "call the tool with numbers 12 34 56", "You are helpful. assistant user system"]


@cache
def chat_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """`template` is a file name in tests/data/chat_templates without its suffix."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END_OF_TURN[template], clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text().rstrip("\n")
    return tokenizer


FAMILY_TOKENS: dict[str, tuple[str, ...]] = {
    # the last one ends a turn
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "llama3_json": ("<|begin_of_text|>", "<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": (
        *("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
    ),
    "mistral_v3": ("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "</s>"),
    "qwen3_coder": ("<|im_start|>", "<|im_end|>"),
    "deepseek_v31": (
        *("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜end▁of▁sentence｜>"),
    ),
    "glm45": (
        *("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|observation|>", "<|user|>"),
    ),
    "kimi_k2": (
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        *("<|tool_call_argument_begin|>", "<think>", "</think>", "<|im_end|>"),
    ),
    "granite": ("<|tool_call|>", "<|end_of_text|>"),
    "jamba": ("<tool_calls>", "</tool_calls>", "<|endoftext|>"),
    "internlm": ("<|action_start|>", "<|action_end|>", "<|plugin|>", "<|im_end|>"),
    "seed_oss": ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>", "<seed:bos>", "<seed:eos>"),
    "minimax_m2": ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>", "[e~["),
    "llama4_pythonic": ("<|python_start|>", "<|python_end|>", "<|eot|>"),
    "step3": (
        *("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>"),
        *("<｜tool_sep｜>", "<|EOT|>"),
    ),
    "gigachat3": ("<|role_sep|>", "<|message_sep|>", "</s>"),
    "harmony": ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>"),
    "plain": ("<|endoftext|>",),
}
"""Special tokens of a family, as small tokenizers have them."""


@cache
def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens of a family; with its chat template, if tests/data has one."""
    special = FAMILY_TOKENS[family]
    vocabulary = {token: index for index, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=special[-1],
        additional_special_tokens=list(special[:-1]),
        clean_up_tokenization_spaces=False,
    )
    template = TEMPLATES / "families" / f"{family}.jinja"
    tokenizer.chat_template = template.read_text().rstrip("\n") if template.exists() else None
    return tokenizer
