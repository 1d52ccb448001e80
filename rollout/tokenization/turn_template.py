"""The text between two turns: an observation as the chat template renders it, from the end of the previous answer.

The history is never rendered again: a template may strip or rewrite the policy's text, but sampled tokens must not
change. Instead, a conversation with a marker as the answer is rendered, and the text after the marker is used:

    …<|im_start|>assistant\\nMARKER<|im_end|>\\n<|im_start|>user\\nobservation<|im_end|>\\n<|im_start|>assistant\\n
                                   └────────────────── this ─────────────────────────────────────────────┘

Messages that end with one of the assistant's are continued by the policy: its header and text come instead of the
generation prompt, as with transformers' `continue_final_message`, and the sampled tokens follow them.

If the policy sampled the end-of-turn token, the token is removed from the front of this text, because the conversation
has it already, with its logprob. If the turn was truncated, the token stays: it is not sampled, is outside the loss,
and closes the turn.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.envs.tools.functions import asks_for_calls, with_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_OPENING = [{"role": "user", "content": "?"}]
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "?", "parameters": {"type": "object", "properties": {}}},
}


class TurnTemplate:
    """The chat template of one tokenizer, checked once, on conversations of our own.

    If it fails on the messages of a task, an environment or an agent program, that is a `TrajectoryError`.

    Raises:
        ConfigError: If there is none, if it refuses an assistant message, or has no generation prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._marker = secrets.token_hex(16)  # random, so that no message contains it
        if not tokenizer.chat_template:
            raise ConfigError(
                ["env.prompt: the task gives chat messages but the tokenizer has no chat template. Give plain text."]
            )
        self._check_generation_prompt()

    def prompt(self, messages: Sequence[dict[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Text of a whole prompt, with the generation prompt; a last message of the assistant is left open instead.

        Args:
            messages: The prompt.
            tools: Tools in the form of OpenAI. The template declares them if it `declares_tools`, else `with_tools`.

        Raises:
            TrajectoryError: kind `env`, if the template refuses the messages, or cannot leave the last one open.
        """
        if tools and self.declares_tools:
            return self._render(messages, _bad_messages, tools=list(tools))
        return self._render(with_tools(messages, tools) if tools else messages, _bad_messages)

    @cached_property
    def declares_tools(self) -> bool:
        """Whether the template declares tools itself and asks for calls in the format that we parse.

        Seen in what it writes for a tool of ours. Templates that ask for another format (Llama 3, Mistral, Qwen3-Coder)
        or refuse tools are used without them.
        """
        try:
            return asks_for_calls(self._render(_OPENING, _bad_template, tools=[_TOOL]))
        except ConfigError:
            return False

    def between(self, messages: Sequence[dict[str, str]], end_of_turn: str) -> str:
        """Text from the end of an answer to the beginning of the next.

        Args:
            messages: The observation.
            end_of_turn: Text of the end token that the policy sampled; empty if its turn was truncated.

        Raises:
            ConfigError: If the template does not render an answer exactly once where a question follows.
            TrajectoryError: kind `env`, if it cannot place these messages.
        """
        if self._num_answers != 1:
            raise ConfigError(
                [
                    f"model: the chat template renders an assistant message {self._num_answers} times where another "
                    "follows; exactly once is needed to place observations after sampled tokens. Use a template that "
                    "keeps assistant messages (tokenizer_config.json, chat_template)."
                ]
            )
        text = self._render([*_OPENING, self._answer, *messages], _bad_messages)
        _, marker, after = text.partition(self._marker)
        if not marker or self._marker in after:
            roles = [message["role"] for message in messages]
            what = f"renders an answer {text.count(self._marker)} times before messages with roles {roles}"
            raise TrajectoryError("env", f"the chat template {what}; exactly once is needed to place them")
        if end_of_turn and after.lstrip().startswith(end_of_turn):
            return after.lstrip().removeprefix(end_of_turn)
        return after

    @property
    def _answer(self) -> dict[str, str]:
        return {"role": "assistant", "content": self._marker}

    @cached_property
    def _num_answers(self) -> int:
        """How often an answer is rendered if a question follows. Computed lazily: single-turn tasks do not need it."""
        return self._render([*_OPENING, self._answer, *_OPENING], _bad_template).count(self._marker)

    def _render(
        self,
        messages: Sequence[dict[str, str]],
        problem: Callable[[str], Exception],
        *,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """The text of messages. With a generation prompt, the policy's turn follows: its own message if the last one is
        the assistant's, which then has no end.
        """
        last = messages[-1]
        if not add_generation_prompt or last.get("role") != "assistant":
            options["add_generation_prompt"] = add_generation_prompt
        elif last.get("tool_calls") or last.get("content") is None:
            raise problem(
                "cannot continue the last message: it is the assistant's, and makes tool calls or has no text. End the "
                "prompt with the results of the calls, or with a message of the user"
            )
        elif last["content"]:
            options["continue_final_message"] = True
        else:
            messages, options["add_generation_prompt"] = messages[:-1], True
        try:
            rendered = self._tokenizer.apply_chat_template(list(messages), tokenize=False, return_dict=False, **options)
        except Exception as cause:  # jinja runs the template's own code, which may raise anything
            roles = [message.get("role") for message in messages]
            raise problem(f"refuses messages with roles {roles}: {type(cause).__name__}: {cause}") from cause
        return str(rendered)

    def _check_generation_prompt(self) -> None:
        """Check that the flag changes the text, or that only space precedes an answer ([/INST] of some models)."""
        with_prompt, without_prompt = (
            self._render(_OPENING, _bad_template, add_generation_prompt=flag) for flag in (True, False)
        )
        if with_prompt != without_prompt:
            return
        answered = self._render([*_OPENING, self._answer], _bad_template, add_generation_prompt=False)
        header = answered.removeprefix(with_prompt).partition(self._marker)[0]
        if header.strip():
            raise ConfigError(
                [
                    f"model: the chat template has no generation prompt: with add_generation_prompt=True it ends in "
                    f"{with_prompt[-20:]!r}, but an answer begins after {header!r}. The policy would have to sample "
                    "that header itself. Add `{% if add_generation_prompt %}…{% endif %}` to it."
                ]
            )


def _bad_messages(what: str) -> TrajectoryError:
    return TrajectoryError("env", f"the chat template {what}")


def _bad_template(what: str) -> ConfigError:
    return ConfigError([f"model: the chat template {what}"])
