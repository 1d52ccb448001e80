"""The two gates that bound staleness, as pure functions of absolute counters.

Symbols: B groups per batch, v published version, η the most versions a trained token may be old.

*Admission* keeps at most (η + 1)·B groups under way, so that what is generating can still be trained
in time on average. Alone it bounds nothing: short groups overtake long ones, and a long group can
see any number of versions go by. *Consumption* closes that hole. A group's deadline is its oldest version + η,
the last v at which it may train. A batch may close at v only if the groups left outside can still
all meet their deadlines, one batch of B per version:

    for every k = 0..η:   #{live groups outside the batch with deadline ≤ v + k}  ≤  k·B

With k = 0 this says: whoever is due now is in. With k > 0: the k batches up to v + k have room for
all who are due by then. If it holds at v it can be made to hold at v + 1 by waiting for groups that
are under way, so nothing ever expires (docs/concepts/staleness.md has the proof and an example).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ExpiryPolicy(StrEnum):
    """What happens to groups that would become too old.

    Attributes:
        WAIT: A batch is held open for them. Unbiased; nothing ever expires.
        TRIM: Their over-old tokens lose their loss weight, the rest trains.
        DROP: They are given up and their tasks start again behind the others. Biased to short answers.
    """

    WAIT = "wait"
    TRIM = "trim"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """What bounds the flow.

    Attributes:
        batch_groups: B, groups per batch.
        max_staleness: η, in versions.
        total_steps: Batches the run trains.
        surplus: Groups admitted beyond the credits (redundant groups); 0 is none.
        on_expiry: What happens to groups that would become too old.
        max_requeues: How often a task starts again after its group was dropped as too old.
        max_live_trajectories: Trajectories under way at once, so that reserved bytes stay bounded; None is no limit.
    """

    batch_groups: int
    max_staleness: int
    total_steps: int
    surplus: int = 0
    on_expiry: ExpiryPolicy = ExpiryPolicy.WAIT
    max_requeues: int = 3
    max_live_trajectories: int | None = None

    @property
    def window(self) -> int:
        """Most groups under way at once: (η + 1)·B + surplus."""
        return (self.max_staleness + 1) * self.batch_groups + self.surplus


def free_credits(limits: FlowLimits, *, admitted: int, returned: int, trained: int, surplus: int = 0) -> int:
    """Groups that may start now.

    Args:
        limits: The bounds.
        admitted: Groups ever admitted.
        returned: Groups that ended untrained; each gave its credit back.
        trained: Groups trained.
        surplus: Redundant groups that may be under way now.

    Returns:
        min(window − under way, total_steps·B − net admissions). Never negative while I6 holds.
    """
    net = admitted - returned
    window = (limits.max_staleness + 1) * limits.batch_groups + surplus
    return min(window - (net - trained), limits.total_steps * limits.batch_groups - net)
