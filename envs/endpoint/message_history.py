"""The histories of one session, and which of them a request continues, forks or begins.

A program may do with its history what it likes: repeat it, go back in it, rewrite or shorten it, keep several at once.
A thread is one history with recorded tokens: m_1 … m_n, of which some are the policy's answers. A request that repeats

    all messages of a thread, up to its newest answer, which no other request continues    continues the thread
    those up to an earlier answer, or up to one that another request continues             forks it after that answer
    none of its answers, or the same with other tools                                      begins a thread

The longest repetition wins. What follows it is rendered and appended to the tokens; an answer that the program has
rewritten is part of what follows.

    thread: answering --the answer--> waiting --a request that continues it--> answering …

Invariant: the messages of a thread up to an answer are exactly the text of its tokens up to there.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.dataflow.trajectory import MAIN_THREAD
from penstock.envs.endpoint.requests import ApiError, Call, ChatMessage, ChatRequest, bad_request
from penstock.envs.environment import Message
from penstock.envs.tools.functions import CALL_OPENING, hermes_text, parse_calls

if TYPE_CHECKING:
    from collections.abc import Iterator

NewContent = str | tuple[ChatMessage, ...]
"""The text or chat messages that a request adds to a history, without tools; the first adds the whole prompt."""
Form = tuple[bool, tuple[str, ...]]
"""Whether it is a chat, and its tools, which are declared before the messages: threads of other tools share nothing."""


class Place(NamedTuple):
    """Where a request stands among the histories of its session."""

    thread: str
    """Name of the thread that its answer extends."""
    content: NewContent
    """What the request adds to the tokens before it."""
    fork_of: str | None = None
    """Thread whose first `num_turns` turns begin the new thread; None: no fork."""
    num_turns: int = 0


def form_of(request: ChatRequest) -> Form:
    """What all requests of a thread have in common. The order of keys in a tool has no meaning."""
    return request.messages is not None, tuple(json.dumps(tool, sort_keys=True) for tool in request.tool_schemas)


@dataclass(slots=True)
class _Thread:
    """One history."""

    form: Form
    messages: tuple[ChatMessage, ...] = ()
    """Messages of a chat, answers included."""
    text: str = ""
    """Text of plain completions, answers included."""
    starts: list[int] = field(default_factory=list)
    """Number of characters before each answer, of plain completions."""
    ends: list[int] = field(default_factory=list)
    """Number of messages, or of characters, after each answer."""
    is_taken: bool = False
    """A request that continues it is being answered."""

    def num_repeated(self, request: ChatRequest) -> int:
        """How many of its answers a request repeats, with everything before them."""
        if request.messages is None:
            return next((n for n in range(len(self.ends), 0, -1) if self._is_repeated(n, request.prompt)), 0)
        equal = next(
            (
                at
                for at, (one, now) in enumerate(zip(self.messages, request.messages, strict=False))
                if not _equal(one, now)
            ),
            min(len(self.messages), len(request.messages)),
        )
        return bisect_right(self.ends, min(equal, len(request.messages) - 1))  # at least one message is new

    def _is_repeated(self, num_turns: int, prompt: str) -> bool:
        """Whether a prompt of plain completions has an answer; one without text cannot be told from none."""
        start, end = self.starts[num_turns - 1], self.ends[num_turns - 1]
        return prompt.startswith(self.text[:end]) and len(prompt) > start


class Histories:
    """The threads of one session.

    Args:
        is_strict: Only one thread, which every request has to continue; anything else is refused.
    """

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._threads: dict[str, _Thread] = {}
        self._num_opened = 0

    def place(self, request: ChatRequest) -> Place:
        """Find the place of a request. Nothing changes before `answering`.

        Raises:
            ApiError: 400 `history_changed` or `concurrent_request`, if it is strict.
        """
        form = form_of(request)
        repeated = {
            name: num_turns
            for name, one in self._threads.items()
            if one.form == form and (num_turns := one.num_repeated(request))
        }
        if self._is_strict and self._threads:
            self._check_strictly(request, form, repeated)
        if not repeated:
            return Place(self._new_name(), _content(request, 0))
        longest = max(self._threads[name].ends[num_turns - 1] for name, num_turns in repeated.items())
        found = {name: n for name, n in repeated.items() if self._threads[name].ends[n - 1] == longest}
        content = _content(request, longest)
        for name, num_turns in found.items():
            if num_turns == len(self._threads[name].ends) and not self._threads[name].is_taken:
                return Place(name, content)
        name, num_turns = next(iter(found.items()))
        return Place(self._new_name(), content, name, num_turns)

    @contextmanager
    def answering(self, place: Place, request: ChatRequest) -> Iterator[None]:
        """Keep the thread for a request while it is answered. A new thread without an answer is forgotten."""
        thread = self._threads.get(place.thread)
        if thread is None:
            thread = self._threads[place.thread] = _Thread(form_of(request))
            self._num_opened += 1
        thread.is_taken = True
        try:
            yield
        finally:
            thread.is_taken = False
            if not thread.ends:
                del self._threads[place.thread]

    def record(self, place: Place, request: ChatRequest, answer: ChatMessage, sampled: str) -> None:
        """Add a request and its answer.

        Args:
            place: Its place.
            request: The request.
            answer: What was delivered. Later requests may repeat its reasoning or leave it out: the tokens keep it.
            sampled: Text of all sampled tokens, which may extend past a stop text.
        """
        thread = self._threads[place.thread]
        if request.messages is None:
            thread.text = request.prompt + sampled
            thread.starts.append(len(request.prompt))
            thread.ends.append(len(thread.text))
            return
        known = thread.messages
        if place.fork_of is not None and not thread.ends:
            before = self._threads[place.fork_of]
            known = before.messages[: before.ends[place.num_turns - 1]]
        thread.messages = (*known, *request.messages[len(known) :], answer)  # texts of earlier messages are kept once
        thread.ends.append(len(thread.messages))

    def _new_name(self) -> str:
        return f"thread{self._num_opened + 1}" if self._num_opened else MAIN_THREAD

    def _check_strictly(self, request: ChatRequest, form: Form, repeated: dict[str, int]) -> None:
        (name, thread), *_ = self._threads.items()
        if thread.is_taken:
            message = "Another request of this session is being answered. A session is one conversation: wait for it."
            raise bad_request(message, code="concurrent_request")
        if form[0] != thread.form[0]:
            raise _history_changed(request.param, "Chat and plain completions cannot be mixed.")
        if form != thread.form:
            raise _history_changed("tools", "The tools differ from those of the first request.")
        if repeated.get(name) == len(thread.ends):
            return
        if request.messages is None:
            raise _history_changed("prompt", f"The prompt does not begin with the earlier text {_tail(thread.text)}.")
        for index, (known, now) in enumerate(zip(thread.messages, request.messages, strict=False)):
            if not _equal(known, now):
                what = f"messages[{index}] is {_tail(str(tuple(now)))}, but was {_tail(str(tuple(known)))}."
                raise _history_changed(f"messages[{index}]", what)
        there_are = f"There are {len(request.messages)} messages"
        raise _history_changed(
            "messages", f"{there_are}, of which none is new after the {len(thread.messages)} so far."
        )


def _content(request: ChatRequest, end: int) -> NewContent:
    """What a request adds after its first `end` messages or characters."""
    return request.prompt[end:] if request.messages is None else request.messages[end:]


def _equal(known: ChatMessage, now: ChatMessage) -> bool:
    """Whether a message repeats a recorded one.

    White space around the text does not count. Reasoning may be left out, and calls may be spelled in another way.
    """
    if known.role != now.role or now.reasoning not in (known.reasoning, ""):
        return False
    is_same = known.content.strip() == now.content.strip() and known.calls == now.calls
    return is_same or (known.role == "assistant" and _meaning(known) == _meaning(now))


def _meaning(message: ChatMessage) -> tuple[str, Sequence[Call]]:
    """Text and calls, also if the calls are written in the text: some programs parse and render them themselves."""
    content, calls = (message.content, message.calls) if message.calls else _split(message.content)
    return content.strip(), tuple(calls)


def calls_of(message: ChatMessage) -> Sequence[Call]:
    """The calls of an answer, also if they are written in its text."""
    return _meaning(message)[1]


def _history_changed(param: str, what: str) -> ApiError:
    """400: the request does not continue the only history that its session may have."""
    return bad_request(
        f"{what} With env.endpoint.threads=strict a session is one conversation: each request has to repeat all "
        "earlier messages unchanged and add to them.",
        param,
        "history_changed",
    )


def _split(text: str) -> tuple[str, Sequence[Call]]:
    calls = parse_calls(text) if CALL_OPENING in text else []
    if not calls or any(call.problem for call in calls):
        return text, ()
    before = text.partition(CALL_OPENING)[0]
    return before.strip(), [Call.of(call.name, call.arguments) for call in calls]


def as_plain_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Messages with role and text only: calls are in the text, in the form of Hermes and Qwen."""
    return [{"role": one.role, "content": hermes_text(one.content, one.calls)} for one in messages]


def _tail(text: str) -> str:
    return repr(text if len(text) <= 120 else "…" + text[-120:])
