"""One policy's side of a run: its engines and its trainer, connected. A run has one, or two (platform/partners.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from penstock.dataflow.ports import SamplingParams
from penstock.platform.config.schema import RunConfig
from penstock.platform.engine_monitor import EngineMonitor
from penstock.platform.engine_restarts import EngineRestarts
from penstock.platform.evaluation import Evaluator
from penstock.platform.ratio_probe import RatioProbe
from penstock.platform.roles import RunActors
from penstock.platform.run import Side
from penstock.rollout.episodes import EpisodePlayer
from penstock.rollout.pool import make_pool
from penstock.rollout.runner import TrajectoryRunner
from penstock.rollout.tokenizers import TokenCodec


@dataclass(frozen=True, slots=True)
class Asking:
    """How policies are asked: the same for all of a run.

    Attributes:
        probes: Prompts of the ratio probe, token ids.
    """

    codec: TokenCodec
    episodes: EpisodePlayer
    sampling: SamplingParams
    probes: Sequence[tuple[int, ...]]


@asynccontextmanager
async def connected(config: RunConfig, actors: RunActors, asking: Asking) -> AsyncIterator[Side]:
    """The side of the policy that `config` describes, in service until the context ends."""
    rollout, pool = config.rollout, make_pool(actors.engines, config.rollout, config.seed)
    limit_s = rollout.request_timeout_s
    runner = TrajectoryRunner(
        pool,
        asking.codec,
        limit_s,
        rollout.max_resumes,
        asking.episodes,
        max_context_tokens=config.model.max_context_tokens,
        vocab_size=config.model.shape.vocab_size,
    )
    probe = RatioProbe(pool, actors.trainer, asking.probes, asking.sampling, config.model.dtype, limit_s)
    publisher = await actors.publisher(pool, config, probe.check)
    # Where roles take turns, a model may load only in the engines' turn: there a lost engine stays lost.
    most = 0 if config.cluster.colocated else rollout.max_engine_restarts
    restarts = EngineRestarts(pool, partial(actors.restarted, config), publisher.catch_up, most)
    try:
        async with (
            restarts.running(),
            EngineMonitor(pool, adapts_concurrency=True).running() as monitor,
        ):
            yield Side(
                runner,
                trainer=actors.take_turns(pool) if config.cluster.colocated else actors.trainer,
                publisher=publisher,
                evaluator=Evaluator(runner, actors.rewards, rollout.sampling.max_new_tokens),
                monitor=monitor,
                forward=actors.trainer if config.prefetches else None,
            )
    finally:
        await publisher.close()
