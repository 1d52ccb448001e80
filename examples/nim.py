"""Nim, a game of two agents: they take turns to take 1 to `most` stones, and the player of the last stone wins.

The policy plays both agents, in separate threads, `first` and `second`. Each sees the remaining stones at its turn.
The player to move wins with best play unless the number of stones is a multiple of `most + 1`. A move is right if it
leaves such a multiple, or if no move does.

    cd examples
    penstock env play nim:NimGame
    penstock train experiment=arithmetic env.factory=nim:NimGame 'env.args={high: 40}' env.episode.max_turns=40 \\
        reward=episode evaluation.num_tasks=2 name=nim

With `chat: false` everything is written in characters that the tiny policies know: `14:` asks, `3` takes three.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from penstock.dataflow.task import Task
from penstock.envs.environment import Action, Done, Environment, Observation
from penstock.envs.tasks.generated_tasks import GeneratedTasks

PLAYERS = ("first", "second")
MAX_STONES = 1_000_000
_NUMBER = re.compile(r"\d+")


class NimGame(GeneratedTasks):
    """Task source of the game; a task is a number of stones.

    Args:
        seed: Order of the training stream.
        low: Fewest stones to begin with.
        high: Most stones to begin with.
        most: Stones that may be taken in one turn.
        chat: Ask in chat messages.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(self, seed: int, low: int = 4, high: int = 20, most: int = 3, *, chat: bool = False) -> None:
        if not 1 <= low < high <= MAX_STONES:
            raise ValueError(f"low={low}, high={high}: they have to be in 1..{MAX_STONES}, low below high")
        if most < 1:
            raise ValueError(f"most={most} is below 1")
        super().__init__(seed)
        self._low = low
        self._high = high
        self._most = most
        self._chat = chat

    def draw(self, rng: random.Random) -> Mapping[str, Any]:
        """A number of stones."""
        stones = rng.randint(self._low, self._high)
        return {"prompt": opening(stones, stones, self._most, is_chat=self._chat), "stones": stones}

    def split_by(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """The stones alone: text and chat have the same split."""
        return {"stones": row["stones"]}

    def environment(self) -> Environment:
        """A fresh game."""
        return NimEpisode(self._most, is_chat=self._chat)

    def gold_actions(self, task: Task) -> list[str]:
        """Best play of both players."""
        stones, actions = task.fields["stones"], []
        while stones:
            actions.append(stones % (self._most + 1) or 1)
            stones -= actions[-1]
        return [str(action) for action in actions]


class NimEpisode(Environment):
    """One game. The winner's thread has reward 1, the loser's 0; the episode has the share of right moves.

    A turn without a number, or with one that may not be taken, loses the game.
    """

    def __init__(self, most: int, *, is_chat: bool) -> None:
        self._most = most
        self._is_chat = is_chat
        self._num_moves = 0
        self._num_right = 0

    def reset(self, task: Task) -> Observation:
        """The first player begins."""
        self.task = task
        self._left = task.fields["stones"]
        return Observation(task.prompt, thread=PLAYERS[0])

    def step(self, action: Action) -> Observation | Done:
        """Take the last number of the turn from the stones."""
        mover = PLAYERS.index(action.thread)
        numbers = _NUMBER.findall(action.text)
        taken = int(numbers[-1][:20]) if numbers else 0
        self._num_moves += 1
        if not 1 <= taken <= min(self._most, self._left):
            return self._end(1 - mover, {"illegal_moves": 1.0})
        self._num_right += taken == self._left % (self._most + 1) or self._left % (self._most + 1) == 0
        self._left -= taken
        if not self._left:
            return self._end(mover, {"illegal_moves": 0.0})
        return self._prompt_move(PLAYERS[1 - mover], taken)

    def _prompt_move(self, player: str, taken: int) -> Observation:
        if not self._is_chat:
            return Observation(f"{self._left}:", thread=player)
        if self._num_moves == 1:
            return Observation(opening(self.task.fields["stones"], self._left, self._most, is_chat=True), thread=player)
        return Observation(f"The other player took {taken}. {self._left} are left.", thread=player)

    def _end(self, winner: int, counts: Mapping[str, float]) -> Done:
        rewards = {player: float(index == winner) for index, player in enumerate(PLAYERS[: min(self._num_moves, 2)])}
        return Done(self._num_right / self._num_moves, counts, rewards)


def opening(stones: int, left: int, most: int, *, is_chat: bool) -> str | list[dict[str, str]]:
    """The whole prompt of a player."""
    if not is_chat:
        return f"{left}:"
    rules = f"You and another player take 1 to {most} of {stones} stones in turns. Who takes the last one wins."
    turn = "You begin." if left == stones else f"The other player took {stones - left}. {left} are left."
    return [{"role": "user", "content": f"{rules} {turn} Answer each turn with the number that you take."}]
