"""What plays the episodes of a run; without an environment in the configuration nothing is started."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.envs.endpoint.server import Endpoint
from penstock.envs.episode_host import EpisodeHost
from penstock.platform.config.schema import RunConfig
from penstock.rollout.dialogue import EpisodeBudget
from penstock.rollout.episodes import EpisodePlayer
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
