"""Splits the text of a turn into reasoning and answer: `<think>…</think>`, then the answer.

    begins --open mark, or the prompt ended with it--> thinks --close mark--> closed --a letter--> answers
    begins --any other letter--> answers

Invariant: reasoning, answer and the text held back are together the text that was read, in this order, except for the
marks and the space around them; the answer is always a suffix of the text. So reading the text in pieces and reading it
at once give the same result.

Only text is split. The sampled tokens are unchanged, and stay in the history of the next turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from penstock.envs.config import ReasoningConfig


class TurnText(NamedTuple):
    """The text of one turn: `reasoning` + `answer`."""

    reasoning: str
    """All text before the answer, marks and space included; may be empty."""
    answer: str


class ReasoningReader:
    """Reads one turn while it is sampled.

    Args:
        marks: Marks around the reasoning.
        before: Text that the turn continues; a chat template may have opened the reasoning at its end.

    Attributes:
        thought: Reasoning so far, without marks.
        answer: Answer so far, from its first letter that is not a space.
    """

    def __init__(self, marks: ReasoningConfig, before: str) -> None:
        self.thought = self.answer = ""
        self._marks = marks
        self._is_open = marks.open is None or before.rstrip().endswith(marks.open)
        self._state: Literal["begins", "thinks", "closed", "answers"] = "begins" if marks.open else "thinks"
        self._held = ""

    def read(self, text: str) -> TurnText:
        """Read a piece; returns the new reasoning, without marks, and the new answer."""
        self._held += text
        thought = answer = ""
        if self._state == "begins":  # wait until it is known whether the text begins with the open mark
            opening, begun = self._marks.open or "", self._held.lstrip()
            if begun.startswith(opening):
                self._state, self._held = "thinks", begun.removeprefix(opening)
            elif not opening.startswith(begun):
                self._state = "thinks" if self._is_open else "answers"
        if self._state == "thinks":
            thought, mark, after = self._held.partition(self._marks.close)
            if mark:
                self._state, self._held = "closed", after
            else:
                self._held = thought[len(thought) - num_begun(thought, [self._marks.close]) :]
                thought = thought[: len(thought) - len(self._held)]
        if self._state == "closed":
            self._held = self._held.lstrip()
            self._state = "answers" if self._held else "closed"
        if self._state == "answers":
            answer, self._held = self._held, ""
        return self._keep(thought, answer)

    def finish(self) -> TurnText:
        """Return the rest at the end of the turn: the text that was held back is not a mark."""
        rest, self._held = self._held, ""
        if self._state == "thinks" or (self._state == "begins" and self._is_open):
            return self._keep(rest, "")
        return self._keep("", "" if self._state == "closed" else rest)

    def _keep(self, thought: str, answer: str) -> TurnText:
        self.thought += thought
        self.answer += answer
        return TurnText(thought, answer)


def split_turn(marks: ReasoningConfig, text: str, before: str) -> TurnText:
    """Split a whole turn that continues the text `before`. If the reasoning is not closed, there is no answer."""
    reader = ReasoningReader(marks, before)
    reader.read(text)
    reader.finish()
    return TurnText(text[: len(text) - len(reader.answer)], reader.answer)


def num_begun(text: str, words: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `words`."""
    longest = min(max(map(len, words), default=0), len(text))
    beginnings = {word[:size] for word in words for size in range(1, len(word))}
    return next((size for size in range(longest, 0, -1) if text[-size:] in beginnings), 0)
