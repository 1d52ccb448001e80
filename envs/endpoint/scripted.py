"""Agent programs answered without a model: by a script (`penstock env check`), or by a person (`penstock env play`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from penstock.dataflow.errors import TrajectoryError
from penstock.envs.config import EnvConfig
from penstock.envs.endpoint.message_history import Part
from penstock.envs.endpoint.requests import too_many_turns
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.endpoint.session import Answer, Exchange, Piece
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.envs.workers.episode_host import PlayedEpisode

Say = Callable[[Part], Awaitable[str | None]]
"""The next answer to what is new; None if there is none left."""


class ScriptedPolicy:
    """Answers in words: a word counts as a token.

    Attributes:
        num_answers: Given so far.
        is_over: It was asked once more than it had answers.
    """

    def __init__(self, say: Say) -> None:
        self.num_answers = 0
        self.is_over = False
        self._say = say

    async def answer(self, part: Part, exchange: Exchange) -> Answer:
        """Say the next answer.

        Raises:
            ApiError: 429, if there is none.
        """
        text = await self._say(part)
        if text is None:
            self.is_over = True
            raise too_many_turns(self.num_answers)
        self.num_answers += 1
        exchange.say(Piece(text))
        return Answer(text, text, "stop", len(str(part).split()), len(text.split()))


async def play_program(config: EnvConfig, played: PlayedEpisode, name: str, say: Say) -> EpisodeReply:
    """Let a program play to its end; one that went on asking may end as it likes, as in training.

    Raises:
        TrajectoryError: kind `env`, if it fails.
    """
    policy = ScriptedPolicy(say)
    endpoint = Endpoint(config.endpoint, config.episode.timeout_s)
    try:
        async with endpoint.open(name) as session:
            return await session.serve(played.run(session.access), policy)
    except TrajectoryError:
        if policy.is_over:
            return {"reward": 0.0}
        raise
    finally:
        await endpoint.close()
