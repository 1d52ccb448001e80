"""What a policy thinks, told from what it answers: `<think>…</think>`, then the answer.

    begins --open mark, or the prompt ended with it--> thinks --close mark--> closed --a letter--> answers
    begins --any other letter--> answers

Invariant: what was held back, thought and answered is the text that was read, in this order, but for the marks and the
space beside them; the answer is always an end of the text. So reading it in pieces gives what reading it whole gives.

Only text is split. The sampled tokens are kept as they came, and stay in the history of the next turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from penstock.envs.config import ReasoningConfig


class Spoken(NamedTuple):
    """The text of one turn: `reasoning` + `answer`.

    Attributes:
        reasoning: All before the answer, marks and space included; empty if there is none.
    """

    reasoning: str
    answer: str


class ReasoningReader:
    """Reads one turn while it is sampled.

    Args:
        marks: Between which it thinks.
        before: Text that the turn goes on from; a chat template may have opened the block at its end.

    Attributes:
        thought: Read so far, without marks.
        answer: Read so far, from its first letter that is no space.
    """

    def __init__(self, marks: ReasoningConfig, before: str) -> None:
        self.thought = self.answer = ""
        self._marks = marks
        self._is_open = marks.open is None or before.rstrip().endswith(marks.open)
        self._state: Literal["begins", "thinks", "closed", "answers"] = "begins" if marks.open else "thinks"
        self._held = ""

    def read(self, text: str) -> Spoken:
        """What a piece lets be said: new thought, without marks, and new answer."""
        self._held += text
        thought = answer = ""
        if self._state == "begins":  # look whether it begins with the open mark, as soon as that can be told
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

    def finish(self) -> Spoken:
        """The same at the end of the turn: what was held back is no mark."""
        rest, self._held = self._held, ""
        if self._state == "thinks" or (self._state == "begins" and self._is_open):
            return self._keep(rest, "")
        return self._keep("", "" if self._state == "closed" else rest)

    def _keep(self, thought: str, answer: str) -> Spoken:
        self.thought += thought
        self.answer += answer
        return Spoken(thought, answer)


def split_turn(marks: ReasoningConfig | None, text: str, before: str) -> Spoken:
    """Split a whole turn that goes on from the text `before`; a block that is never closed leaves no answer."""
    if marks is None:
        return Spoken("", text)
    reader = ReasoningReader(marks, before)
    reader.read(text)
    reader.finish()
    return Spoken(text[: len(text) - len(reader.answer)], reader.answer)


def num_begun(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of `text` with which one of `words` begins, but is not complete."""
    longest = min(max(map(len, words), default=0), len(text))
    beginnings = {word[:size] for word in words for size in range(1, len(word))}
    return next((size for size in range(longest, 0, -1) if text[-size:] in beginnings), 0)
