"""What checks and faults of a simulated run share: the published version, who serves, what was injected."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ids import EngineId, RequestId
from penstock.dataflow.versions import Spans
from penstock.platform.simulator.world import EVALUATION_TASKS, HASH, World

POISON = "planted: the prompt is refused"


class InvariantError(PenstockError):
    """A violated invariant. It stops the run, as every `PenstockError` does.

    Attributes:
        invariant: `I1` to `I9`, or another property.
    """

    def __init__(self, invariant: str, what: str) -> None:
        self.invariant = invariant
        super().__init__(f"{invariant}: {what}")


def stop_run(error: InvariantError) -> None:
    """End the run with a violation, from code whose exceptions would be taken for those of a failed component."""

    def stop() -> None:
        raise error

    asyncio.get_running_loop().call_soon(stop)


@dataclass(slots=True)
class CheckedWorld(World):
    """Shared state of one simulated run with faults.

    Attributes:
        published: Version whose publish finished last; -1 before the first one.
        incarnation: Number of drivers that died before this one.
        faults: Number of injected faults by name.
        poison_share: Share of the training tasks whose prompt every engine refuses.
        num_processes: Engine processes started so far.
    """

    published: int = -1
    incarnation: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    poison_share: float = 0.0
    num_processes: int = 0

    def rng(self, purpose: str) -> random.Random:
        """As the simulator's; another stream in each incarnation."""
        return random.Random(f"{self.seed}/{self.incarnation}/{purpose}")

    def begin_again(self) -> None:
        """Record that the driver died, together with everything that it had started."""
        self.note(f"driver {self.incarnation} died")
        self.incarnation += 1
        self.published = -1

    def is_poison(self, task: int) -> bool:
        """Whether engines refuse the prompt of this task."""
        return task < EVALUATION_TASKS and (task + self.seed) * HASH % 2**32 < self.poison_share * 2**32

    def on_request(self, engine_id: EngineId, version: int, loaded: int, request_id: RequestId) -> None:
        """Check I8: requests are only routed to engines that have acknowledged the published version.

        Args:
            engine_id: The engine.
            version: What the driver takes it to have acknowledged.
            loaded: What its process has loaded.
            request_id: The request.
        """
        if version > loaded:
            raise InvariantError(
                "I8", f"{engine_id} gets {request_id} as if it served v{version}, but its process has v{loaded}"
            )
        if version < self.published:
            raise InvariantError(
                "I8", f"{engine_id} serves v{version} and gets new work; v{self.published} is published"
            )

    def on_tokens(self, engine_id: EngineId, version: int, spans: Spans) -> None:
        """Check I8 (engines label tokens only with acknowledged versions) and I4 (labels never decrease)."""
        if spans and spans[-1].version > version:
            raise InvariantError("I8", f"{engine_id} has acknowledged v{version} and serves {spans}")
        if len(spans) > 1 and any(left.version > right.version for left, right in itertools.pairwise(spans)):
            raise InvariantError("I4", f"{engine_id} stamps decreasing versions {spans}")
