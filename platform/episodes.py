"""What plays the episodes of a run; without an environment in the configuration nothing is started."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ports import SamplingParams
from penstock.envs.endpoint.questions import Questions
from penstock.envs.endpoint.server import Endpoint
from penstock.envs.episode_host import EpisodeHost
from penstock.platform.config.schema import RunConfig
from penstock.rollout.dialogue import EpisodeBudget
from penstock.rollout.episodes import EpisodePlayer
from penstock.rollout.questions import PolicyAnswers
from penstock.rollout.runner import Runs, TrajectoryRunner
from penstock.rollout.tokenizers import TokenCodec


@asynccontextmanager
async def episode_player(config: RunConfig, codec: TokenCodec) -> AsyncIterator[EpisodePlayer]:
    """A player whose processes, and endpoint, start with the first episode that needs them and end with the context."""
    limits, context = config.env.episode, config.model.max_context_tokens
    budget = EpisodeBudget(limits.max_turns, min(limits.max_tokens or context, context), limits.max_threads)
    host = EpisodeHost(config.env, config.seed)
    endpoint = Endpoint(config.env.endpoint, limits.timeout_s)
    try:
        yield EpisodePlayer(host, codec, budget, endpoint)
    finally:
        await endpoint.close()
        await host.close()


async def answer_questions(config: RunConfig, episodes: EpisodePlayer, runner: Runs, sampling: SamplingParams) -> None:
    """Let the policy answer plain questions until the player is closed, if the configuration has a key for them.

    Raises:
        ConfigError: If the key is not set or too short, or the address cannot be listened on.
    """
    variable = config.env.endpoint.key_variable
    if variable is None:
        return
    assert episodes.endpoint is not None, "a run's player has one"
    assert isinstance(runner, TrajectoryRunner), "the policy's own"
    answers = PolicyAnswers(runner, config.model.max_context_tokens, sampling)
    try:
        questions = Questions(os.environ.get(variable, ""), answers)
    except ValueError as error:
        make_one = "python -c 'import secrets; print(secrets.token_urlsafe())'"
        raise ConfigError(
            [f"env.endpoint.key_variable={variable}: {error}. Before the run: export {variable}=$({make_one})"]
        ) from error
    await episodes.endpoint.answer(questions)
