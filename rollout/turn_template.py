"""What stands between two turns: an observation as the chat template renders it, from the end of the answer before it.

The history is never rendered again: a template may strip or rewrite what the policy said, and sampled tokens must stay
as they are. A dialogue with a marker in the place of the answer is rendered, and what follows the marker is kept:

    …<|im_start|>assistant\\nMARKER<|im_end|>\\n<|im_start|>user\\nobservation<|im_end|>\\n<|im_start|>assistant\\n
                                   └────────────────── this ─────────────────────────────────────────────┘

If the policy sampled the end-of-turn token itself, it is taken off the front, for it is there already, with
its logprob. If the turn was cut off, it stays: an unsampled token, outside the loss, that closes
the turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from penstock.dataflow.errors import ConfigError

MARKER = "PENSTOCK-ANSWER"
_OPENING = [{"role": "user", "content": "?"}]


class TurnTemplate:
    """The chat template of one tokenizer, checked once.

    Raises:
        ConfigError: If there is none, if it drops what an assistant says, or does not ask for an answer at its end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise ConfigError(
                ["env.prompt: the task gives chat messages but the tokenizer has no chat template. Give plain text."]
            )
        self._check_generation_prompt()

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """A whole prompt, generation prompt included."""
        return tuple(
            self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def between(self, messages: Sequence[dict[str, str]], end_of_turn: str) -> str:
        """Text from the end of an answer to the beginning of the next.

        Args:
            messages: The observation.
            end_of_turn: Text of the end token that the policy sampled; empty if its turn was cut off.

        Raises:
            ConfigError: If the template does not render the answer exactly once.
        """
        text = self._render([*_OPENING, {"role": "assistant", "content": MARKER}, *messages])
        if text.count(MARKER) != 1:
            raise ConfigError(
                [
                    f"model: the chat template renders an assistant message {text.count(MARKER)} times where another "
                    "follows; exactly once is needed to place observations behind sampled tokens. Use a template that "
                    "keeps assistant messages (tokenizer_config.json, chat_template)."
                ]
            )
        after = text.partition(MARKER)[2]
        if end_of_turn and after.lstrip().startswith(end_of_turn):
            return after.lstrip().removeprefix(end_of_turn)
        return after

    def _render(self, messages: Sequence[dict[str, str]], *, asks: bool = True) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=asks, tokenize=False))
        except Exception as cause:  # jinja runs the template's own code, which raises what it likes
            roles = [message["role"] for message in messages]
            raise ConfigError(
                [f"model: the chat template refuses messages with roles {roles}: {type(cause).__name__}: {cause}"]
            ) from cause

    def _check_generation_prompt(self) -> None:
        """Either asking changes something, or nothing but space stands before an answer ([/INST] of some models)."""
        asked, unasked = self._render(_OPENING), self._render(_OPENING, asks=False)
        if asked != unasked:
            return
        answered = self._render([*_OPENING, {"role": "assistant", "content": MARKER}])
        header = answered.removeprefix(asked).partition(MARKER)[0]
        if header.strip():
            raise ConfigError(
                [
                    f"model: the chat template has no generation prompt: with add_generation_prompt=True it ends in "
                    f"{asked[-20:]!r}, but an answer begins behind {header!r}. The policy would have to sample that "
                    "header itself. Add `{% if add_generation_prompt %}…{% endif %}` to it."
                ]
            )
