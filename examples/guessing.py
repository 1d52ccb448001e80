"""A number-guessing game of several turns: the environment says `<` if the number is smaller, `>` if it is larger.

    cd examples
    penstock env play guessing:GuessingGame high=100
    penstock train experiment=arithmetic env.factory=guessing:GuessingGame 'env.args={high: 1000, max_guesses: 12}' \\
        env.episode.max_turns=12 reward=episode evaluation.num_tasks=64 name=guessing

With `chat: false` everything is written in characters that the tiny policies know: `?1-30` asks, `<` and `>` answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from penstock.dataflow.task import Task
from penstock.envs.environment import Action, Done, Environment, Observation
from penstock.envs.tasks.generated_tasks import GeneratedTasks

MAX_HIGH = 1_000_000
_NUMBER = re.compile(r"\d+")


class GuessingGame(GeneratedTasks):
    """Task source of the game.

    Args:
        seed: Order of the training stream.
        high: Numbers are 1..high.
        max_guesses: Guesses before the game is lost.
        chat: Ask in chat messages.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, seed: int, high: int = 30, max_guesses: int = 5, *, chat: bool = False) -> None:
        if not 2 <= high <= MAX_HIGH:
            raise ValueError(f"high={high} is outside 2..{MAX_HIGH}")
        if max_guesses < 1:
            raise ValueError(f"max_guesses={max_guesses} is below 1")
        super().__init__(seed)
        self._high = high
        self._max_guesses = max_guesses
        self._chat = chat

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        """A secret number; the prompt does not depend on it, so the split goes by the secret."""
        return {"prompt": self._prompt(), "secret": rng.randint(1, self._high)}

    def environment(self) -> Environment:
        """A fresh game."""
        return GuessingEpisode(self._max_guesses, is_chat=self._chat)

    def gold_actions(self, task: Task) -> list[str]:
        """Halving, but told the secret if there are too few guesses for that."""
        low, high = 1, self._high
        actions: list[int] = []
        while len(actions) < self._max_guesses - 1:
            actions.append((low + high) // 2)
            if actions[-1] == task.fields["secret"]:
                break
            low, high = (low, actions[-1] - 1) if task.fields["secret"] < actions[-1] else (actions[-1] + 1, high)
        if task.fields["secret"] not in actions:
            actions.append(task.fields["secret"])
        return [str(action) for action in actions]

    def _prompt(self) -> str | list[dict[str, str]]:
        if not self._chat:
            return f"?1-{self._high}"
        rules = f"I think of a number from 1 to {self._high}. Guess it; each turn, answer with one number."
        return [{"role": "user", "content": rules}]


class GuessingEpisode(Environment):
    """One game: reward 1 for the number, 0 if the guesses run out; a turn without a number costs a guess."""

    def __init__(self, max_guesses: int, *, is_chat: bool) -> None:
        self._left = max_guesses
        self._is_chat = is_chat

    def step(self, action: Action) -> Observation | Done:
        """Compare the last number of the turn with the secret."""
        secret, numbers = self.task.fields["secret"], _NUMBER.findall(action.text)
        self._left -= 1
        if numbers and int(numbers[-1][:20]) == secret:
            return Done(1.0)
        counts = {"guesses_without_number": float(not numbers)}
        if self._left == 0:
            return Done(0.0, counts)
        hint = "?" if not numbers else "<" if secret < int(numbers[-1][:20]) else ">"
        words = {"?": "That is no number.", "<": "It is smaller.", ">": "It is larger."}
        return Observation(words[hint] if self._is_chat else hint, counts=counts)
