"""The codec between text and token ids: the only place where text becomes token ids.

Prompts are rendered once; sampled tokens are never tokenised again. A policy that is trained from scratch has one of
two tokenizers, whose tokens are single characters of arithmetic, or single bytes of any text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.envs.config import EnvConfig, ReasoningConfig, SpecialTokens
from penstock.envs.endpoint.answer_parser import ParsedAnswer, SampledTurn
from penstock.envs.reasoning import TurnText, split_turn
from penstock.rollout.tokenization.special_tokens import SpelledTokens
from penstock.rollout.tokenization.turn_template import TurnTemplate
from penstock.weights.hf_folder import model_folder, read_json_object
from penstock.weights.model_config import NewTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_Value = TypeVar("_Value")
PAD_TOKEN = "<pad>"  # noqa: S105 - a vocabulary entry
EOS_TOKEN = "<eos>"  # noqa: S105 - a vocabulary entry
CHARACTERS = "0123456789+-*=() ;" + ",.:/?<>#|!&\n"
"""The characters of arithmetic, then spares: with `<pad>` and `<eos>` exactly 32 ids, so every id has a text."""
MAX_TOKENS_PER_CHARACTER = 4
"""Bytes of the longest character in UTF-8."""
TURN_BEGINS, TURN_ENDS = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer of the tiny policies: `<pad>` = 0, `<eos>` = 1, then `CHARACTERS` in order.

    No chat template. A character outside the vocabulary is an error when encoding, never dropped.
    """
    from transformers import PreTrainedTokenizerFast  # seconds, and torch with it

    vocabulary = {token: index for index, token in enumerate([PAD_TOKEN, EOS_TOKEN, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unknown>"))  # noqa: S106 - absent on purpose
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer that encodes any text: `<pad>` = 0, two marks of chat turns, then the 256 bytes; 259 ids.

    Its chat template is ChatML.
    """
    from transformers import PreTrainedTokenizerFast  # seconds, and torch with it

    marks = [PAD_TOKEN, TURN_BEGINS, TURN_ENDS]
    vocabulary = {token: index for index, token in enumerate([*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=TURN_ENDS,
        additional_special_tokens=[TURN_BEGINS],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


NEW_TOKENIZERS: dict[NewTokenizer, Callable[[], PreTrainedTokenizerFast]] = {
    "characters": character_tokenizer,
    "bytes": byte_tokenizer,
}
"""`model.tokenizer` -> the tokenizer of a policy that is trained from scratch."""


class TokenCodec:
    """Encodes prompts and decodes answers of one policy.

    Attributes:
        named_ends: End tokens (eos) of tokenizer and generation config, ascending.
        turn_end: The special token with which the chat template ends an answer; None: there is no template, or it ends
            an answer with text or nothing. Base models often name another one as eos.
        stop_token_ids: Ids after which an answer ends: `named_ends` and `turn_end`, ascending.
        reasoning: Marks around the reasoning; None: the whole text is the answer.

    Args:
        tokenizer: The tokenizer of the policy.
        generation_eos_ids: End tokens of the generation config.
        reasoning: As the attribute.
        special_tokens: What a special token is that a prompt or an observation spells (special_tokens.py).

    Raises:
        ConfigError: If a mark is a special token, since decoded text leaves special tokens out.
    """

    reasoning: ReasoningConfig | None = None

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        generation_eos_ids: Iterable[int] = (),
        reasoning: ReasoningConfig | None = None,
        special_tokens: SpecialTokens = "text",
    ) -> None:
        self.tokenizer = tokenizer
        self.reasoning = reasoning
        self._keeps_special_as_text = special_tokens == "text"
        self._texts: dict[tuple[int, ...], str] = {}
        marks = {"open": reasoning.open, "close": reasoning.close} if reasoning else {}
        hidden = [
            f"env.reasoning.{key}={mark!r}" for key, mark in marks.items() if mark in tokenizer.all_special_tokens
        ]
        if hidden:
            raise ConfigError(
                [
                    f"{' and '.join(hidden)}: a special token of the tokenizer, which is left out of texts, so where "
                    "the answer begins could not be told. Give the token `special: false` in tokenizer.json."
                ]
            )
        tokenizer_eos = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.named_ends = tuple(sorted({*tokenizer_eos, *generation_eos_ids}))
        self.turn_end = self._end_of_template()
        derived = () if self.turn_end is None else (self.turn_end,)
        self.stop_token_ids = tuple(sorted({*self.named_ends, *derived}))

    def _end_of_template(self) -> int | None:
        """`turn_end`: of the special tokens that follow an answer, the first of `named_ends`, else the first.

        Where special tokens also precede the answer within the turn, as in the channels of gpt-oss, one that is not
        named may end a part of the turn only.
        """
        try:
            opening, closing = self.turn_template.around_last_answer()
        except ConfigError:  # the first task with messages reports it
            return None
        ends = self._spelled.leading(closing.lstrip())
        is_one_part = self._spelled.first_in(opening) is None
        return next((token for token in ends if token in self.named_ends), ends[0] if ends and is_one_part else None)

    def end_after(self, prompt: str | Sequence[dict[str, str]]) -> int:
        """The token that ends a given answer to a prompt: the template's after messages, eos after plain text."""
        if self.turn_end is not None and not isinstance(prompt, str):
            return self.turn_end
        eos = self.tokenizer.eos_token_id
        return self.stop_token_ids[0] if eos is None else int(eos)

    def encode_prompt(
        self, prompt: str | Sequence[dict[str, str]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Tokenise plain text as it is, or render chat messages and tokenise that.

        After the messages comes the generation prompt; a last message of the assistant is continued instead. No special
        token is added to plain text: the model sees exactly what the environment wrote.

        Args:
            prompt: Text or chat messages.
            tools: Tools in the form of OpenAI, declared with chat messages; no effect on text.

        Raises:
            ConfigError: If the task gives messages and the tokenizer has no chat template.
            TrajectoryError: kind `env`, if the prompt is neither text nor messages, is empty, holds a character that
                cannot be encoded, or is refused by the chat template.
        """
        if not isinstance(prompt, str) and not _are_messages(prompt):
            gave = f"{prompt!r:.200} of type {type(prompt).__name__}"
            raise TrajectoryError("env", f"the prompt is {gave}; expected text, or chat messages (at least one)")
        text = self._shielded(prompt)
        ids = self._encode(text if isinstance(text, str) else self.turn_template.prompt(text, self._shielded(tools)))
        if not ids:
            raise TrajectoryError("env", f"the prompt {prompt!r} has no tokens, so there is nothing to continue")
        return ids

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Tokenise text that a program has rendered itself: special tokens that it spells are control tokens.

        Raises:
            TrajectoryError: kind `env`, if a character of it cannot be encoded.
        """
        return self._encode(text)

    def encode_observation(
        self, content: str | Sequence[dict[str, str]], last_token: int, calls: Sequence[str] = ()
    ) -> tuple[int, ...]:
        """Tokens between a turn and the next: plain text as it is, or messages rendered by the chat template.

        Args:
            content: The observation; may be empty text.
            last_token: Last sampled token of the previous turn. If it is an end token, it is not repeated.
            calls: Names of the functions that the previous turn calls, if the observation begins with their results.

        Raises:
            ConfigError: If the template can place no observation at all (turn_template.py).
            TrajectoryError: kind `env`, if it cannot place this one, or a character of it cannot be encoded.
        """
        text = self._shielded(content)
        if isinstance(text, str):
            return self._encode(text)
        end = str(self.tokenizer.decode([last_token])) if last_token in self.stop_token_ids else ""
        return self._encode(self.turn_template.between(text, end, self._shielded(calls), self._ends))

    @property
    def _ends(self) -> list[str]:
        """Texts of the tokens that end a turn."""
        return [self.decode_prompt([token]) for token in self.stop_token_ids]

    def spelled_token(self, prompt: object) -> str | None:
        """The first special token that a prompt spells and that stays text; None if there is none."""
        return self._spelled.first_in(prompt) if self._keeps_special_as_text else None

    @cached_property
    def _spelled(self) -> SpelledTokens:
        return SpelledTokens(self.tokenizer)

    def _shielded(self, value: _Value) -> _Value:
        return self._spelled.shield(value) if self._keeps_special_as_text else value

    def _encode(self, rendered: str) -> tuple[int, ...]:
        """Token ids of a text that was rendered from shielded texts."""
        encode = self._spelled.encode if self._keeps_special_as_text else self._encode_plain
        try:
            return tuple(encode(rendered))
        except Exception as cause:  # `tokenizers` raises bare Exception
            text = self._spelled.restore(rendered)
            unknown = next((char for char in text if not self._knows(char)), None)
            which = str(cause) if unknown is None else f"it knows no {unknown!r}"
            raise TrajectoryError("env", f"the tokenizer cannot encode the prompt {text!r}: {which}") from cause

    def _encode_plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _knows(self, text: str) -> bool:
        try:
            self._encode_plain(text)
        except Exception:  # noqa: BLE001 - `tokenizers` raises bare Exception
            return False
        return True

    @cached_property
    def turn_template(self) -> TurnTemplate:
        """The chat template.

        Raises:
            ConfigError: If there is none, or it cannot be used.
        """
        return TurnTemplate(self.tokenizer)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids without special tokens; spaces stay as sampled."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def decode_prompt(self, token_ids: Iterable[int]) -> str:
        """Text of a prompt or an observation as the model sees it, special tokens included."""
        return str(self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """Text of a turn with its special tokens, except for the one that ended it."""
        ends = len(token_ids) > 0 and token_ids[-1] in self.stop_token_ids
        return self.decode_prompt(token_ids[:-1] if ends else token_ids)

    def written_calls(self) -> list[tuple[SampledTurn, ParsedAnswer]]:
        """Turns with calls as the chat template writes them; none if it writes none, or there is none to use."""
        try:
            turns = self.turn_template
        except ConfigError:
            return []
        written = turns.written_calls(self._ends)
        return [(replace(turn, token_ids=self.encode_rendered(turn.text)), read) for turn, read in written]

    def token_texts(self, token_ids: Iterable[int]) -> list[str]:
        """Text of each token, special tokens included.

        A character whose bytes are several tokens is the text of the last one, and the others are empty.
        """
        texts, pending = [], []
        for token in map(int, token_ids):
            pending.append(token)
            text = self._text_of(tuple(pending))
            if text.endswith("\ufffd") and len(pending) < MAX_TOKENS_PER_CHARACTER:
                texts.append("")
            else:
                texts.append(text)
                pending.clear()
        if pending and texts:  # the last character is incomplete
            texts[-1] = self._text_of(tuple(pending))
        return texts

    def _text_of(self, token_ids: tuple[int, ...]) -> str:
        text = self._texts.get(token_ids)
        if text is None:
            text = str(self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))
            piece = self.tokenizer.convert_ids_to_tokens(token_ids[0])
            if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" "):
                text = f" {text}"  # SentencePiece leaves out a space at the beginning
            self._texts[token_ids] = text
        return text

    def split(self, token_ids: Iterable[int], before: str) -> TurnText:
        """Split the text of a sampled turn that continues the text `before` into reasoning and answer."""
        text = self.decode(token_ids)
        return TurnText("", text) if self.reasoning is None else split_turn(self.reasoning, text, before)


def _are_messages(prompt: object) -> bool:
    """Whether it is a non-empty list of objects; the chat template checks their fields."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(one, Mapping) for one in prompt)


def make_codec(
    tokenizer: PreTrainedTokenizerFast, env: EnvConfig | None, generation_eos_ids: Iterable[int] = ()
) -> TokenCodec:
    """The codec of a tokenizer with the settings of `env`."""
    if env is None:
        return TokenCodec(tokenizer, generation_eos_ids)
    return TokenCodec(tokenizer, generation_eos_ids, env.reasoning, env.special_tokens)


def _why_unreadable(folder: Path, cause: Exception) -> str:
    """Why the library cannot make a tokenizer of a folder. Of a damaged file it says no more than a missing key."""
    reason = " ".join(str(cause).split()).rstrip(".")
    if not (names := sorted(path.name for path in folder.glob("tokenizer*"))):
        return f"no tokenizer can be loaded from it: {reason}."
    return (
        f"no tokenizer can be loaded from its {', '.join(names)}: {type(cause).__name__}: {reason}. Is one of them cut "
        "off, or the file of something else? Is one missing? Download or copy them again."
    )


def load_codec(model_path: str | Path, env: EnvConfig | None = None) -> TokenCodec:
    """Load the codec of a Hugging Face model: a directory, or a hub name in the local cache.

    Args:
        model_path: Where its tokenizer is.
        env: Has the marks of the policy's reasoning, and what special tokens are in its texts.

    Raises:
        ConfigError: If there is no tokenizer at `model_path`, it has no end token, or it hides the marks.
    """
    from transformers import AutoTokenizer

    folder = model_folder(str(model_path)) or Path(model_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except Exception as cause:
        raise ConfigError([f"model.path={model_path}: {_why_unreadable(folder, cause)}"]) from cause
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise ConfigError(
            [
                f"model.path={model_path}: its tokenizer has {len(tokenizer)} special tokens and no others: it reads "
                "no text. Is tokenizer.json, or the vocabulary that tokenizer_config.json needs, missing?"
            ]
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            [
                f"model.path={model_path}: its tokenizer, {type(tokenizer).__name__}, has no tokenizer.json, without "
                "which special tokens and stop texts cannot be told from other text. Convert it to a fast tokenizer."
            ]
        )
    try:
        codec = make_codec(tokenizer, env, _configured_eos_ids(folder))
    except ValueError as problem:
        raise ConfigError([f"model.path={model_path}: {problem}"]) from problem
    if not codec.stop_token_ids:
        raise ConfigError(
            [
                f"model.path={model_path}: neither its tokenizer nor generation_config.json nor config.json names an "
                "end token (eos_token_id), and no chat template ends an answer with a special token, so every answer "
                "would run to its length limit. Set eos_token in tokenizer_config.json."
            ]
        )
    return codec


def _configured_eos_ids(folder: Path) -> list[int]:
    """`eos_token_id` of generation_config.json or else of config.json: an int, a list or absent.

    Raises:
        ValueError: If a file cannot be read.
    """
    for file in (folder / "generation_config.json", folder / "config.json"):
        eos = read_json_object(file).get("eos_token_id") if file.exists() else None
        if eos is not None:
            return [int(eos)] if isinstance(eos, int) else [int(token) for token in eos]
    return []
