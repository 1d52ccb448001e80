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

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.envs.endpoint.answer_parser import ParsedAnswer, SampledTurn
from penstock.envs.endpoint.requests import Call
from penstock.envs.tools.functions import asks_for_calls, hermes_text, with_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_OPENING: list[dict[str, Any]] = [{"role": "user", "content": "?"}]

FORECAST: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_forecast",
        "description": "The weather of the next days.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
"""A tool whose calls show how a chat template writes them."""
_CALLS_IN_A_TURN = (("", ["Oslo"]), ("", ["Oslo", "Bergen"]), ("I will look.", ["Oslo"]))
"""Text and cities of the turns that a template is asked to write."""


class TurnTemplate:
    """The chat template of one tokenizer, checked once, on conversations of our own.

    If it fails on the messages of a task, an environment or an agent program, that is a `TrajectoryError`.

    Attributes:
        reads_own_calls: Whether calls in the template's own form are read, whatever it is; else those of Hermes.

    Raises:
        ConfigError: If there is none, if it refuses an assistant message, or has no generation prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.reads_own_calls = False
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

    @property
    def declares_tools(self) -> bool:
        """Whether the template declares tools itself and asks for calls in a form that is read.

        Seen in what it writes for a tool of ours. Templates that ask for another form than that of Hermes (Llama 3,
        Mistral, Qwen3-Coder) are used without tools, unless a parser of vLLM reads their calls; so are those that
        refuse tools.
        """
        if self.reads_own_calls:
            return bool(FORECAST["function"]["name"] in self._declaration)
        return asks_for_calls(self._declaration)

    @cached_property
    def _declaration(self) -> str:
        """A prompt with a tool of ours; empty if the template refuses tools."""
        try:
            return self._render(_OPENING, _bad_template, tools=[FORECAST])
        except ConfigError:
            return ""

    @cached_property
    def calls_form(self) -> Literal["object", "text"] | None:
        """What the template expects as `arguments` of a call: an object, or its JSON text; None: it writes no calls.

        Seen in what it writes: an object must not come out as Python spells it, nor JSON text within quotes.
        """
        values = {"city": self._marker, "days": 3}
        as_text = json.dumps(values)
        for form, arguments in (("object", values), ("text", as_text)):
            try:
                text = self._render([*_OPENING, _called("", [arguments])], _bad_template, add_generation_prompt=False)
            except ConfigError:
                continue
            is_whole = self._marker in text and "get_forecast" in text
            if form == "object" and is_whole and repr(values) not in text:
                return "object"
            if form == "text" and is_whole and as_text in text:
                return "text"
        return None

    def message_with_calls(self, content: str, calls: Sequence[Call]) -> dict[str, Any]:
        """A message of the assistant in a history, whose calls are written as the template writes them.

        Calls of a template that writes none are in the text, in the form of Hermes and Qwen.

        Args:
            content: Its text; may be empty.
            calls: Their arguments are JSON text. A call whose arguments are no object stays text, too.
        """
        values = [_object(call.arguments) for call in calls]
        if not calls:
            return {"role": "assistant", "content": content}
        if self.calls_form is None or None in values:
            return {"role": "assistant", "content": hermes_text(content, calls)}
        arguments = values if self.calls_form == "object" else [call.arguments for call in calls]
        return _called(content, arguments, [call.name for call in calls])

    def written_calls(self, ends: Sequence[str]) -> Iterator[tuple[SampledTurn, ParsedAnswer]]:
        """Turns with calls as the template writes them, and the calls in them; none if it writes none.

        Turns that it refuses, such as two calls where the family makes one, are left out.

        Args:
            ends: Texts of the tokens that end a turn.
        """
        before = self._declaration
        if self.calls_form is None or not before:
            return
        for content, cities in _CALLS_IN_A_TURN:
            calls = [Call("get_forecast", json.dumps({"city": city, "days": 3})) for city in cities]
            message = self.message_with_calls(content, calls)
            try:
                text = self._render([*_OPENING, message], _bad_template, add_generation_prompt=False, tools=[FORECAST])
            except ConfigError:
                continue
            turn = text[_header_length(before, text) :]
            last = turn.rfind(cities[-1])
            end = min((at for one in ends if one and (at := turn.find(one, last)) >= 0), default=len(turn))
            yield SampledTurn(turn[:end], [FORECAST]), ParsedAnswer(content, tuple(calls))

    def between(
        self,
        messages: Sequence[dict[str, str]],
        end_of_turn: str,
        calls: Sequence[str] = (),
        ends: Sequence[str] = (),
    ) -> str:
        """Text from the end of an answer to the beginning of the next.

        Args:
            messages: The observation.
            end_of_turn: Text of the end token that the policy sampled; empty if its turn was truncated.
            calls: Names of the functions that the answer calls.
            ends: Texts of the tokens that end a turn, to find the end of calls.

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
        after = self._after_calls(messages, calls, ends) if calls and messages[0]["role"] == "tool" else None
        if after is None:
            text = self._render([*_OPENING, self._answer, *messages], _bad_messages)
            _, marker, after = text.partition(self._marker)
            if not marker or self._marker in after:
                roles = [message["role"] for message in messages]
                what = f"renders an answer {text.count(self._marker)} times before messages with roles {roles}"
                raise TrajectoryError("env", f"the chat template {what}; exactly once is needed to place them")
            if messages[0]["role"] == "tool" and not self._writes_results:
                raise TrajectoryError(
                    "env",
                    "the chat template leaves out a tool's result after an answer in which it sees no calls, so the "
                    "policy would not see it. Give results as messages of the user, or use another chat template",
                )
        if end_of_turn and after.lstrip().startswith(end_of_turn):
            return after.lstrip().removeprefix(end_of_turn)
        return after

    @cached_property
    def _writes_results(self) -> bool:
        """Whether the template writes a result that follows an answer without calls; some leave it out (Gemma 4)."""
        result = {"role": "tool", "content": self._marker}
        return self._marker in self._render([*_OPENING, {"role": "assistant", "content": "?"}, result], _bad_messages)

    def _after_calls(self, messages: Sequence[dict[str, str]], calls: Sequence[str], ends: Sequence[str]) -> str | None:
        """Text from the end of an answer with calls, of which templates write their results (Mistral, gpt-oss).

        None: it writes no calls, not so many, or no end after them; then the results follow an answer without calls.
        """
        if self.calls_form is None:
            return None
        values = {"marker": self._marker}
        arguments = values if self.calls_form == "object" else json.dumps(values)
        answered = [*_OPENING, _called("", [arguments] * len(calls), calls)]
        try:
            # The end is looked for before the result, which may be followed by a token that ends turns, too.
            *_, between, _ = self._render([*answered, {"role": "tool", "content": self._marker}], _bad_messages).split(
                self._marker
            )
            text = self._render([*answered, *messages], _bad_messages)
        except (TrajectoryError, ValueError):
            return None
        end = min((at for one in ends if one and (at := between.find(one)) >= 0), default=-1)
        after = text.rpartition(self._marker)[2]
        return after[end:] if end >= 0 and after.startswith(between[:end]) else None

    def around_last_answer(self) -> tuple[str, str]:
        """What the template writes between the generation prompt and an answer, and after one that nothing follows.

        Raises:
            ConfigError: If the template refuses an answer.
        """
        before = self._render(_OPENING, _bad_template)
        text = self._render([*_OPENING, self._answer], _bad_template, add_generation_prompt=False)
        opening, _, closing = text[_header_length(before, text) :].partition(self._marker)
        return opening, closing

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
            rendered = self._tokenizer.apply_chat_template(
                _with_ids(messages), tokenize=False, return_dict=False, **options
            )
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


def _called(content: str, arguments: Sequence[Any], names: Sequence[str] = ("get_forecast",)) -> dict[str, Any]:
    """A message with calls. Ids have the nine letters and digits that templates of Mistral ask for."""
    calls = [
        {"id": f"call{index:05d}", "type": "function", "function": {"name": name, "arguments": one}}
        for index, (name, one) in enumerate(zip(names, arguments, strict=True))
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _with_ids(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which a result has the id and the name of its call: those that it has, or of the calls in order."""
    calls: Iterator[dict[str, Any]] = iter(())
    found = []
    for message in messages:
        if message.get("role") != "tool":
            calls = iter(message.get("tool_calls") or ())
        elif call := next(calls, None):
            of_call = {"tool_call_id": call.get("id"), "name": call.get("function", {}).get("name")}
            message = {key: value for key, value in of_call.items() if value is not None} | message
        found.append(message)
    return found


def _object(arguments: str) -> dict[str, Any] | None:
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _header_length(before: str, text: str) -> int:
    """Where the turn begins in a text whose prompt, with the generation prompt, is `before`.

    Templates that open the reasoning in the generation prompt leave it out of a history: then it begins after the last
    mark or line that both have.
    """
    shared = commonprefix([before, text])  # noqa: RUF071 - they are texts, not paths
    return len(shared) if shared == before else max(shared.rfind(mark) + 1 for mark in (">", "]", "\n"))


def _bad_messages(what: str) -> TrajectoryError:
    return TrajectoryError("env", f"the chat template {what}")


def _bad_template(what: str) -> ConfigError:
    return ConfigError([f"model: the chat template {what}"])
