"""Ends a turn with the token that completes a stop text.

Engines are token-in, token-out and have no tokenizer, so the text is read here, where a turn has its tokens together
whatever engines they came from: a stop text is found across decode steps, deltas and interruptions alike. All tokens up
to the one that completes it are kept as they were sampled, with their logprobs and versions, and carry loss. The rule
looks at these tokens only, so they are on-policy. An engine has by then sampled up to `journal_interval_tokens` − 1
tokens more, which are dropped unread.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from penstock.dataflow.ports import TokenDelta
from penstock.rollout.tokenization.tokenizers import TokenCodec
from penstock.rollout.trajectory.conversation import PartialTurn


class StopTextReader:
    """Decodes a turn token by token, and says which token completes a stop text.

    Args:
        codec: Tokenizer of the policy.
        stops: The stop texts.
        keeps_special_tokens: Whether special tokens are text, except for those that end a turn.

    Attributes:
        text: Text so far, by default without special tokens; at the end without the stop text and what follows it in
            its token.
    """

    def __init__(self, codec: TokenCodec, stops: Sequence[str], *, keeps_special_tokens: bool = False) -> None:
        self.text = ""
        self._skips_special = not keeps_special_tokens
        self._ends = codec.stop_token_ids
        self.stops = tuple(stops)
        self._tokenizer = codec.tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=self._skips_special)
        self._longest = max(map(len, self.stops), default=0)

    def completes(self, token_id: int) -> bool:
        """Read a token. If it completes a stop text, cut the text off before it and return True."""
        if token_id in self._ends:
            return False
        try:
            fresh = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # Tokenizers with byte tokens (Llama 2, Gemma): the text of earlier bytes changed, which were no character
            # after all. Their text stays as it was read; the rest is read as if it began here, as vLLM does.
            if "Invalid prefix" not in str(error):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skips_special)
            fresh = self._stream.step(self._tokenizer, token_id)
        if not fresh:
            return False
        begins = max(0, len(self.text) - self._longest)
        self.text += fresh
        places = [place for stop in self.stops if (place := self.text.find(stop, begins)) >= 0]
        if places:
            self.text = self.text[: min(places)]
        return bool(places)


def end_at_stop_texts(turn: PartialTurn, codec: TokenCodec) -> None:
    """Have a turn end with the token that completes one of the stop texts of its sampling parameters."""
    reader = StopTextReader(codec, turn.sampling.stop)

    def read(delta: TokenDelta) -> None:
        num_read = turn.num_tokens - len(delta.token_ids)
        for token_id in delta.token_ids:
            num_read += 1
            if reader.completes(token_id):
                turn.cut(num_read)
                return

    turn.on_delta = read
