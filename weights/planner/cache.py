"""Plans by (model, layouts): made once each, for all engines that lie to the trainer's devices in the same way."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.weights.layout.engine import EngineSide, TrainingSide
from penstock.weights.planner.plan import Plan, make_plan

MAX_PLANS = 8
"""That a cache keeps; of a 7 B policy one has thousands of copies, a few MiB."""

ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class Meeting:
    """Everything that a plan follows from.

    Attributes:
        training: How the trainer holds the model.
        engine: How an engine does.
        item_bytes: Size of an element on the wire.
        resident: `(engine rank, training rank)` on one device, by engine rank.
        training_at: Place of each training rank, numbered in order; empty if no engine rank is in any of them.
        engine_at: Of each engine rank; `ELSEWHERE` where no training rank is. What several have is sent from near.
    """

    training: TrainingSide
    engine: EngineSide
    item_bytes: int
    resident: tuple[tuple[int, int], ...] = ()
    training_at: tuple[str, ...] = ()
    engine_at: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        training: TrainingSide,
        engine: EngineSide,
        item_bytes: int,
        training_at: Sequence[str] = (),
        engine_at: Sequence[str] = (),
        *,
        are_devices: bool,
    ) -> Meeting:
        """From where both sides are, by name; only who shares a place matters, so other names are the same meeting.

        Args:
            training: How the trainer holds the model.
            engine: How an engine does.
            item_bytes: Size of an element on the wire.
            training_at: Node, or device, of each training rank.
            engine_at: Of each engine rank.
            are_devices: What a training rank alone on an engine rank's device holds need not be sent.
        """
        names = list(dict.fromkeys(training_at))
        theirs = tuple(str(names.index(place)) if place in names else ELSEWHERE for place in engine_at)
        ours = tuple(str(names.index(place)) for place in training_at)
        resident = tuple((rank, ours.index(place)) for rank, place in enumerate(theirs) if ours.count(place) == 1)
        if set(theirs) <= {ELSEWHERE}:
            ours = theirs = ()
        return cls(training, engine, item_bytes, resident if are_devices else (), ours, theirs)

    @property
    def fingerprint(self) -> str:
        """Of the model and both layouts; equal on all machines."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


class Planned(NamedTuple):
    """A plan and the engine ranks' buffers, name -> size in elements."""

    plan: Plan
    buffers: tuple[Mapping[str, int], ...]


class PlanCache:
    """The newest plans, by fingerprint. Threads that ask for the same one at once wait for whoever makes it."""

    def __init__(self, max_plans: int = MAX_PLANS) -> None:
        self._max_plans = max_plans
        self._planned: OrderedDict[str, Planned] = OrderedDict()
        self._lock = threading.Lock()

    def plan(self, meeting: Meeting) -> Planned:
        """The plan of a meeting.

        Raises:
            WeightSyncError: If the layout of a tensor is not known on one of the sides.
        """
        key = meeting.fingerprint
        with self._lock:
            planned = self._planned.get(key) or _plan(meeting)
            self._planned[key] = planned
            self._planned.move_to_end(key)
            while len(self._planned) > self._max_plans:
                self._planned.popitem(last=False)
        return planned


def _plan(meeting: Meeting) -> Planned:
    destination = meeting.engine.layout(meeting.training.tensors)
    plan = make_plan(
        meeting.training.layout(),
        destination,
        meeting.item_bytes,
        resident=dict(meeting.resident),
        source_nodes=dict(enumerate(meeting.training_at)),
        destination_nodes=dict(enumerate(meeting.engine_at)),
    )
    return Planned(plan, destination.buffers)
