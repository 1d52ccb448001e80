"""Special tokens of a chat template, told apart from texts that merely spell one.

A tokenizer turns every `<|im_end|>` of a text into the control token, also of a user's text. So a prompt, a tool
result or a web page that spells it would end its own message and begin another. A text that spells a special token is
therefore encoded in three steps:

    1. shield   the user's texts   <|im_end|> → mark        before the chat template sees them
    2. rename   the rendered text  <|im_end|> → its alias   so these are the template's own
    3. restore  the rendered text  mark → <|im_end|>        and encode it with a copy of the tokenizer, in which each
                                                            special token has its id and, as its text, its alias

The copy is the model's tokenizer in everything else (merges, normalizer, spaces around special tokens), so the user's
text has the ids that it would have if its letters meant nothing. A text that spells no special token never gets there:
it is encoded as the model's own template would be. Added tokens that are not special, such as `<tool_call>` of Qwen,
are vocabulary and stay single tokens everywhere.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_Value = TypeVar("_Value")
_INDEX_DIGITS = 6


class SpelledTokens:
    """Encodes rendered texts, with the special tokens that the user's texts spell as ordinary text.

    Attributes:
        ids: Text of each special token -> its id.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        special = {index: token for index, token in self._backend.get_added_tokens_decoder().items() if token.special}
        self.ids = {token.content: index for index, token in special.items()}
        self._texts = sorted(self.ids)
        self._numbers = {text: f"{number:0{_INDEX_DIGITS}}" for number, text in enumerate(self._texts)}
        longest_first = sorted(map(re.escape, self._texts), key=len, reverse=True)
        self._pattern = re.compile("|".join(longest_first) or r"(?!)")
        # Digits survive every filter of a template and every normalizer. Random, so that no text contains them.
        self._mark, self._alias = (str(secrets.randbits(100) + 2**100) for _ in range(2))
        self._marked = re.compile(rf"{self._mark}(\d{{{_INDEX_DIGITS}}})")
        # Such a token is also found where only the normalized text spells it, e.g. in other letter case.
        self._is_normalized = self._backend.normalizer is not None and any(one.normalized for one in special.values())

    def first_in(self, value: object) -> str | None:
        """The first special token that a text of `value` spells; None if there is none."""
        for text in _texts_of(value):
            if found := self._pattern.search(text):
                return found.group()
        return None

    def leading(self, text: str) -> list[int]:
        """Ids of the special tokens with which a text begins."""
        found, place = [], 0
        while spelled := self._pattern.match(text, place):
            found.append(self.ids[spelled.group()])
            place = spelled.end()
        return found

    def shield(self, value: _Value) -> _Value:
        """`value`, with a mark in place of each special token that a text in it spells, however deep."""
        return value if self.first_in(value) is None else self._shielded(value)

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a text that was rendered from shielded texts.

        Raises:
            Exception: From the tokenizer, if it cannot encode a character.
        """
        if not self._is_normalized and self._mark not in rendered:
            return list(self._tokenizer.encode(rendered, add_special_tokens=False))
        renamed = self._pattern.sub(lambda found: self._alias_of(found.group()), rendered)
        restored = self._marked.sub(lambda found: self._texts[int(found[1])], renamed)
        return list(self._renamed.encode(restored, add_special_tokens=False).ids)

    def restore(self, rendered: str) -> str:
        """The text that was rendered from shielded texts, as it would read without the shield."""
        return self._marked.sub(lambda found: self._texts[int(found[1])], rendered)

    def _shielded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: self._mark + self._numbers[found.group()], value)
        if isinstance(value, Mapping):
            return {self._shielded(key): self._shielded(one) for key, one in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self._shielded(one) for one in value]
        return value

    def _alias_of(self, text: str) -> str:
        return self._alias + self._numbers[text]

    @cached_property
    def _renamed(self) -> Tokenizer:
        """The copy of the tokenizer. Made when a text first needs it: it takes a second for a large vocabulary."""
        described = json.loads(self._backend.to_str())
        described |= {"post_processor": None, "truncation": None, "padding": None}
        new = {text: self._alias_of(text) for text in self._texts}
        for token in described["added_tokens"]:
            if token["special"]:
                token["content"] = new[token["content"]]
        model = described["model"]
        if isinstance(vocabulary := model["vocab"], dict):
            model["vocab"] = {new.get(text, text): index for text, index in vocabulary.items()}
        else:  # Unigram: pieces with their scores
            model["vocab"] = [[new.get(text, text), score] for text, score in vocabulary]
        if "merges" in model:  # SentencePiece models may put the letters of `<s>` together
            model["merges"] = [pair for pair in model["merges"] if new.keys().isdisjoint((*pair, "".join(pair)))]
        if model.get("unk_token") in new:
            model["unk_token"] = new[model["unk_token"]]
        copy = Tokenizer.from_str(json.dumps(described))
        assert all(copy.token_to_id(alias) == self.ids[text] for text, alias in new.items()), "it keeps its ids"
        return copy


def _texts_of(value: object) -> list[str]:
    """All texts in a value, keys of objects included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _texts_of(part)]
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [text for part in value for text in _texts_of(part)]
    return []
