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
