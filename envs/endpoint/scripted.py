"""Answers agent programs without a model: by a script (`penstock env check`), or by a person (`penstock env play`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from penstock.dataflow.errors import TrajectoryError
from penstock.envs.config import EnvConfig
from penstock.envs.endpoint.answer_parser import HermesParser, SampledTurn
from penstock.envs.endpoint.answers import answer_message
from penstock.envs.endpoint.message_history import Histories, as_plain_messages
from penstock.envs.endpoint.requests import too_many_turns
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.endpoint.session import Answer, Exchange, Piece
from penstock.envs.environment import Message
from penstock.envs.tools.functions import with_tools
from penstock.envs.workers.episode_child import EpisodeReply
from penstock.envs.workers.episode_host import PlayedEpisode

NewText = str | list[Message]
"""What a request adds to its history: text, or chat messages, with the tools in the first."""
Say = Callable[[NewText], Awaitable[str | None]]
"""Returns the answer to the new messages; None if there is no answer left."""


class ScriptedPolicy:
    """Answers from `say`; a word counts as a token.

    Attributes:
        num_answers: Answers given so far.
        is_over: A request came after the last answer.
    """

    def __init__(self, say: Say, *, is_strict: bool = False) -> None:
        self.num_answers = 0
        self.is_over = False
        self._say = say
        self._histories = Histories(is_strict=is_strict)
        self._threads: set[str] = set()

    async def answer(self, exchange: Exchange) -> Answer:
        """Give the next answer.

        Raises:
            ApiError: 400, if there is no answer left.
        """
        request = exchange.request
        place = self._histories.place(request)
        content = place.content if isinstance(place.content, str) else as_plain_messages(place.content)
        if request.tools and place.thread not in self._threads and not isinstance(content, str):
            content = with_tools(content, request.tool_schemas)
        with self._histories.answering(place, request):
            text = await self._say(content)
            if text is None:
                self.is_over = True
                raise too_many_turns(self.num_answers)
            self.num_answers += 1
            self._threads.add(place.thread)
            read = await HermesParser().parse(SampledTurn(text, request.tool_schemas))
            lengths = len(str(content).split()), len(text.split())
            answer = Answer(read.content, text, "stop", *lengths, calls=read.calls)
            self._histories.record(place, request, answer_message(answer), text)
        exchange.say(Piece(read.content))
        return answer


async def play_program(config: EnvConfig, played: PlayedEpisode, name: str, say: Say) -> EpisodeReply:
    """Run a program to its end. If it continues after the last answer, its errors are ignored, as in training.

    Raises:
        TrajectoryError: kind `env`, if it fails.
    """
    policy = ScriptedPolicy(say, is_strict=config.endpoint.threads == "strict")
    endpoint = Endpoint(config.endpoint, config.episode.timeout_s)
    try:
        async with endpoint.open(name) as session:
            return await session.serve(played.run(session.access), policy.answer)
    except TrajectoryError:
        if policy.is_over:
            return {"reward": 0.0, **await played.cut_off()}
        raise
    finally:
        await endpoint.close()
