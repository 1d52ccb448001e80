"""Engines that join and leave while a run trains: by `penstock scale`, or because Ray drains their node.

Consumes: the number of engines that is wanted, and the nodes that are drained. Waits for: a new process to load its
model and to receive the current version; the requests of a leaving engine to end. Unblocked by: these events or their
time limits, of which `weights.drain_timeout_s` is that for requests.

An engine that joins gets the next index that no engine of this run has had, so an id in a log always means one process
or its restarts. It serves once it has acknowledged a version that is new enough, as after a restart.

An engine that leaves is taken out of service first: it gets no new requests, and a publish that begins from then on
leaves it out. Requests that do not end in time are interrupted and resume on other engines from their tokens; this is
charged to no retry and no interruption budget. Its process is ended after a publish that had begun before, because a
transfer to several engines fails for all of them if one disappears. At least one engine stays in service.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from penstock.actors.engine.client import RemoteEngine, in_service
from penstock.actors.weights.publisher import ActorWeightPublisher
from penstock.dataflow.errors import PenstockError
from penstock.platform.checks.cluster import check_cluster
from penstock.platform.cluster.actor_factory import RunActors
from penstock.platform.config.schema import RunConfig
from penstock.rollout.engine_pool.pool import EnginePool

logger = logging.getLogger(__name__)

DRAIN_PERIOD_S = 10.0
"""Seconds between two questions which nodes are being drained."""
MOVE_S = 5.0
"""Longest wait for interrupted requests to be gone from an engine, seconds."""
Progress = Callable[[str], None]
"""Receives one sentence for each engine that joins or leaves."""


@dataclass(slots=True)
class Fleet:
    """The engines of one policy, whose number may change. One change runs at a time."""

    config: RunConfig
    """Configuration of the run."""
    pool: EnginePool
    """Pool of the engines."""
    publisher: ActorWeightPublisher
    """Sends the current version to an engine that joins."""
    actors: RunActors
    """Starts and ends engines."""
    note: Progress
    """Prints a line on the console of the run."""
    _is_changing: bool = False

    async def scale(self, num_engines: int, progress: Progress) -> str:
        """Start engines or let engines leave until there are `num_engines`.

        Args:
            num_engines: Wanted number of engines, at least 1.
            progress: Told of each engine, in addition to the console.

        Returns:
            One sentence about the result.

        Raises:
            PenstockError: If this is refused, or an engine could not join; the others stay.
        """
        if refusal := self._refusal(num_engines):
            raise PenstockError(f"scale: {refusal}")

        def tell(sentence: str) -> None:
            self.note(sentence)
            progress(sentence)

        self._is_changing = True
        try:
            views = self.pool.views()
            if len(views) < num_engines:
                await self._join(num_engines - len(views), tell)
            else:
                views.sort(key=lambda view: (view.in_use, view.outstanding_tokens))
                names = {view.engine_id for view in views[: len(views) - num_engines]}
                leaving = [engine for engine in in_service(self.pool) if engine.engine_id in names]
                await self._leave_together(leaving, "it was told to leave", tell)
        finally:
            self._is_changing = False
        return f"{len(views)} -> {len(self.pool.views())} engines are in service"

    @asynccontextmanager
    async def following(self, draining_nodes: Callable[[], Awaitable[set[str]]]) -> AsyncIterator[None]:
        """While the context is open, let the engines leave whose nodes Ray is draining, e.g. before a preemption.

        Args:
            draining_nodes: Ids of these nodes.
        """
        job = asyncio.create_task(self._follow(draining_nodes), name="draining nodes")
        try:
            yield
        finally:
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    async def _follow(self, draining_nodes: Callable[[], Awaitable[set[str]]]) -> None:
        is_known_to_fail = False
        while True:
            try:
                await self.leave_nodes(await draining_nodes())
            except Exception as error:  # noqa: BLE001 - without the notices, a lost node is still survived
                if not is_known_to_fail:
                    logger.warning("fleet: Ray's notices of draining nodes cannot be followed: %r", error)
                is_known_to_fail = True
            await asyncio.sleep(DRAIN_PERIOD_S)

    async def leave_nodes(self, nodes: set[str]) -> None:
        """Let the engines on these nodes leave, except the last one in service. They are not replaced."""
        if self._is_changing or self.config.cluster.colocated or self.config.partner is not None:
            return
        engines = in_service(self.pool)
        leaving = [engine for engine in engines if engine.node_id in nodes]
        if len(leaving) == len(engines):  # it serves until its node is gone, and is then restarted on another one
            leaving = leaving[1:]
        if not leaving:
            return
        self._is_changing = True
        try:
            await self._leave_together(leaving, "its node is being drained", self.note)
        finally:
            self._is_changing = False

    def _refusal(self, num_engines: int) -> str | None:
        """Why the number of engines cannot become `num_engines` now; None if it can."""
        config, pool = self.config, self.pool
        if type(num_engines) is not int or num_engines < 1:
            return f"--engines {num_engines}: a run needs at least 1 engine, or its requests would wait until it fails."
        if config.cluster.colocated:
            return (
                "cluster.colocated=true: trainer and engines take turns on the same devices, which are divided when "
                "the run starts. Stop it, and resume it with another rollout.num_engines."
            )
        if config.partner is not None:
            return (
                "this run trains two policies, each with its own engines, and the number of engines is fixed there. "
                "Stop it, and resume it with another rollout.num_engines."
            )
        if self._is_changing:
            return "engines are joining or leaving already. Wait until that command has ended."
        if pool.num_returning:
            return (
                f"{pool.num_returning} lost engines are being restarted, so it is not known how many there will be. "
                "Try again when the console says that they are back in service."
            )
        if not pool.views():
            return f"no engine is in service, so the run is about to end: {pool.fenced}"
        if num_engines == len(pool.views()):
            return None
        # Engines join on `cluster.rollout_pool`, so only its number of engines changes.
        elsewhere = config.num_engines - config.rollout.num_engines
        rollout = config.rollout.model_copy(update={"num_engines": max(num_engines - elsewhere, 1)})
        findings = check_cluster(config.model_copy(update={"rollout": rollout}), "train")
        return next((finding.message for finding in findings if finding.severity == "error"), None)

    async def _join(self, count: int, tell: Progress) -> None:
        """Start `count` engines at once.

        Raises:
            PenstockError: The first failure, after all have joined or failed.
        """
        results = await asyncio.gather(*(self._join_one(tell) for _ in range(count)), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            cause = failures[0]
            if not isinstance(cause, PenstockError):
                raise cause
            raise PenstockError(f"scale: {len(failures)} of {count} engines could not join: {cause}") from cause

    async def _join_one(self, tell: Progress) -> None:
        tell("an engine is starting …")
        engine = await self.actors.started(self.config)
        try:
            await self.publisher.catch_up(engine)
        except PenstockError:
            # An engine that the pool has fenced is restarted; one that it has never seen is not, so it is ended here.
            if engine.engine_id not in self.pool.fenced:
                await self.actors.ended(engine)
            raise
        since = f"at v{engine.version}" if engine.version >= 0 else "from the next version on"
        tell(f"{engine.engine_id} has joined and serves {since}")

    async def _leave_together(self, engines: list[RemoteEngine], why: str, tell: Progress) -> None:
        # All are retired before any wait: so none of them can be fenced in between, and none gets the others' requests.
        for engine in engines:
            self.pool.retire(engine.engine_id, why)
            tell(f"{engine.engine_id} is leaving: {why}")
        await asyncio.gather(*(self._leave(engine, tell) for engine in engines))

    async def _leave(self, engine: RemoteEngine, tell: Progress) -> None:
        """End a retired engine once its requests have ended or moved."""
        engine_id, num_moved = engine.engine_id, 0
        try:
            async with asyncio.timeout(self.config.weights.drain_timeout_s):
                await self.pool.wait_drained(engine_id)
        except TimeoutError:
            num_moved = self.pool.move_requests(engine_id)
            # They give their slots back within a moment. One that begins just now is not moved: it ends with the engine
            # and resumes elsewhere.
            with suppress(TimeoutError):
                async with asyncio.timeout(MOVE_S):
                    await self.pool.wait_drained(engine_id)
        async with self.publisher.held_off():
            self.pool.remove(engine_id)
        await self.actors.ended(engine)
        moved = f"; {num_moved} of its requests continue on other engines" if num_moved else ""
        tell(f"{engine_id} has left{moved}")
