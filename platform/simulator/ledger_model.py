"""A second model of the ledger, that shares no code with it: what may come next, and what may live at once."""

from __future__ import annotations

from collections import Counter

from penstock.dataflow.ledger import LedgerEvent, Reason
from penstock.dataflow.staleness import FlowLimits
from penstock.platform.simulator.tasks import is_refused, number_of
from penstock.platform.simulator.world import InvariantError, Promises

_NEXT = {
    "admitted": {"generating"},
    "generating": {"scoring"},
    "scoring": {"ready"},
    "ready": {"training"},
    "training": {"trained"},
}
_LIVE = frozenset({"generating", "scoring", "ready", "training"})
_ENDS_TRAINING = frozenset({Reason.BAD_STEP, Reason.ROLLBACK, Reason.RUN_END, Reason.ZERO_VARIANCE})
_UNTRAINED = frozenset({"dropped", "filtered", "failed"})


class LedgerModel:
    """Follows the ledger's events and knows what may come next.

    Attributes:
        live: Group -> state.
        ended: Terminal state -> groups.
        trained: Every group that trained.
        rolled_back: Tasks that were under way when the driver died, and have not started again.
        sizes: Trajectories of each live group.
        live_trajectories: Their sum.
    """

    def __init__(self, limits: FlowLimits, promises: Promises) -> None:
        self.live: dict[int, str] = {}
        self.ended: Counter[str] = Counter()
        self.trained: set[int] = set()
        self.rolled_back: set[str] = set()
        self.num_admitted = 0
        self.sizes: dict[int, int] = {}
        self.live_trajectories = 0
        self._streams: dict[int, str] = {}
        self._live_of: Counter[str] = Counter()
        self._limits = limits
        self._promises = promises

    def follow(self, event: LedgerEvent) -> None:
        """Check one event and take it over."""
        group, state = int(event.group_id), str(event.state)
        if state == "generating":
            if group != self.num_admitted:
                raise InvariantError("I3", f"group {group} was admitted after {self.num_admitted} others")
            self.num_admitted += 1
            self.live[group] = state
            self.rolled_back.discard(event.task_id)
            self._admitted(group, event)
            return
        before = self.live.get(group)
        if before is None:
            raise InvariantError("I2", f"group {group} goes to {state}, but it has ended or never was")
        if state in _UNTRAINED:
            self._may_end(group, before, event)
            if event.reason is Reason.ROLLBACK:
                self.rolled_back.add(event.task_id)
        elif state not in _NEXT[before]:
            raise InvariantError("I2", f"group {group} goes from {before} to {state}")
        if state in _LIVE:
            self.live[group] = state
            return
        del self.live[group]
        self.live_trajectories -= self.sizes.pop(group)
        self._live_of[self._streams.pop(group)] -= 1
        self.ended[state] += 1
        if state == "trained":
            if group in self.trained:
                raise InvariantError("I5", f"group {group} is trained a second time")
            self.trained.add(group)

    def _admitted(self, group: int, event: LedgerEvent) -> None:
        """Count its stream and its trajectories against what they may be."""
        self.sizes[group], self._streams[group] = event.group_size, event.stream
        self.live_trajectories += event.group_size
        self._live_of[event.stream] += 1
        live, most = self._live_of[event.stream], self._promises.quotas.get(event.stream)
        if most is not None and live > most:
            raise InvariantError("quota", f"{live} groups of {event.stream} live, its quota is {most}")
        if (
            self._limits.max_live_trajectories is not None
            and self.live_trajectories > self._limits.max_live_trajectories
        ):
            raise InvariantError(
                "I6", f"{self.live_trajectories} trajectories live, at most {self._limits.max_live_trajectories} fit"
            )

    def _may_end(self, group: int, before: str, event: LedgerEvent) -> None:
        if event.reason is Reason.USER and not is_refused(number_of(event.task_id), self._promises.filter_share):
            raise InvariantError("filter", f"group {group} was filtered, and nobody refuses {event.task_id}")
        if event.reason is Reason.STALE and self._limits.on_expiry == "wait":
            raise InvariantError("I1", f"group {group} was dropped as stale under on_expiry=wait")
        if event.reason is Reason.REDUNDANT and self._limits.surplus == 0:
            raise InvariantError("I6", f"group {group} was dropped as redundant, but there is no surplus")
        if before == "training" and event.reason not in _ENDS_TRAINING:
            raise InvariantError("I2", f"group {group} ended as {event.state}({event.reason}) while it trained")
