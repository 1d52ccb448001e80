"""Small tokenizers of every family, trained on a few sentences, with the chat templates of tests/data."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from penstock.rollout.tokenization.tokenizers import byte_tokenizer
from tests.chat_tokenizers import CORPUS, TEMPLATES, chat_tokenizer

CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
UNKNOWN = "<unk>"
SENTENCES = [*CORPUS, 'im_start im_end eot_id text <s> </s> {"name": "add"}', "né ✓ 汉 👨‍👩‍👧"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _wrapped(backend: Tokenizer, template: str, end: str, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, clean_up_tokenization_spaces=False, **options
    )
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text().rstrip("\n")
    return tokenizer


def bpe_with_added_tokens() -> PreTrainedTokenizerFast:
    """Like Qwen: byte-level BPE, special tokens behind the vocabulary, and added tokens that are not special."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(CHATML)
    backend.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    return _wrapped(backend, "hermes", "<|im_end|>")


def bpe_that_eats_spaces() -> PreTrainedTokenizerFast:
    """Like Phi 3 and RoBERTa: special tokens that take the space around them, and a post-processor that names one."""
    backend = Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False, rstrip=True) for text in CHATML]
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", backend.token_to_id("<|endoftext|>"))]
    )
    return _wrapped(backend, "chatml", "<|im_end|>")


def sentencepiece_bpe(*, is_legacy: bool) -> PreTrainedTokenizerFast:
    """Like Llama 2 and Mistral: BPE over `▁` with byte fallback, special tokens within the vocabulary."""
    special = [UNKNOWN, "<s>", "</s>", *CHATML]
    trained = Tokenizer(models.BPE(unk_token=UNKNOWN))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    known = trained.get_vocab()
    learned = sorted((text for text in known if text not in special), key=known.__getitem__)
    vocabulary = {text: index for index, text in enumerate([*special, *BYTES, *learned])}
    merges = [(left, right) for left in learned for right in learned if left + right in vocabulary]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True)
    )
    backend.add_special_tokens(special)
    if is_legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(backend, "chatml", "<|im_end|>", bos_token="<s>", unk_token=UNKNOWN)


def unigram() -> PreTrainedTokenizerFast:
    """Like T5 and Gemma's relatives: pieces with scores, the special ones among them, where Viterbi could find them."""
    special = [UNKNOWN, "<s>", "</s>", *CHATML]
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=special, unk_token=UNKNOWN, show_progress=False)
    backend.train_from_iterator(SENTENCES * 4, trainer)
    return _wrapped(backend, "chatml", "<|im_end|>", bos_token="<s>", unk_token=UNKNOWN)


def wordpiece() -> PreTrainedTokenizerFast:
    """Like BERT: lower case, words and their continuations; its special tokens are also found in capitals."""
    special = ["[UNK]", *CHATML]
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    tokens = [AddedToken(text, special=True, normalized=True) for text in special]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=tokens, show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    return _wrapped(backend, "chatml", "<|im_end|>", unk_token="[UNK]")


@cache
def prompt_tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    """Name -> tokenizer."""
    return {
        "bytes": byte_tokenizer(),
        "byte-level BPE, chatml": chat_tokenizer("chatml"),
        "byte-level BPE, hermes": chat_tokenizer("hermes"),
        "byte-level BPE, llama": chat_tokenizer("llama"),
        "byte-level BPE with added tokens": bpe_with_added_tokens(),
        "byte-level BPE that eats spaces": bpe_that_eats_spaces(),
        "SentencePiece BPE": sentencepiece_bpe(is_legacy=False),
        "SentencePiece BPE, legacy": sentencepiece_bpe(is_legacy=True),
        "Unigram": unigram(),
        "WordPiece": wordpiece(),
    }


LOSSLESS = [
    "bytes",
    "byte-level BPE, chatml",
    "byte-level BPE, hermes",
    "byte-level BPE, llama",
    "byte-level BPE with added tokens",
]
"""Their tokens decode to exactly the encoded text."""
