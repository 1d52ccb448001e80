"""The bound on staleness: its definition, and the limits that set it.

Symbols: B groups per batch, v published version, η maximum staleness of a trained token in versions.

*Admission* keeps at most (η + 1)·B groups live, so that on average generating groups can be trained in time. It also
stops while 2·B groups wait, for an engine or for the trainer: more of them would not be trained earlier, only be older
then. Admission alone does not bound staleness: short groups overtake long ones, and any number of versions can be
published while a long group generates. *Consumption* adds the bound. The deadline of a group is its oldest version +
η, the last v at which it may train. A batch may close at v only if all groups left outside can still meet their
deadlines, with one batch of B per version:

    for every k = 0..η:   #{live groups outside the batch with deadline ≤ v + k}  ≤  k·B

For k = 0, every group that is due now is in the batch. For k > 0, the k batches up to v + k have capacity for all
groups that are due by then. If the condition holds at v, waiting for live groups makes it hold at v + 1, so no group
ever expires (docs/concepts/staleness.md has the proof and an example).

Both gates are in dataflow/gates.py; dataflow/core.py checks every group once more when a batch takes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ExpiryPolicy(StrEnum):
    """What happens to groups that would become too old.

    Attributes:
        WAIT: The batch waits for them. Unbiased; no group expires.
        TRIM: Their tokens that are too old get no loss weight; the remaining tokens train.
        DROP: They are cancelled and their tasks are requeued. Biased towards short answers.
    """

    WAIT = "wait"
    TRIM = "trim"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Limits of the flow."""

    batch_groups: int
    """B, groups per batch."""
    max_staleness: int
    """η, in versions."""
    total_steps: int
    """Number of batches to train."""
    surplus: int = 0
    """Largest number of groups admitted beyond the credits (redundant groups); 0 disables them."""
    on_expiry: ExpiryPolicy = ExpiryPolicy.WAIT
    """What happens to groups that would become too old."""
    max_requeues: int = 3
    """Maximum number of restarts of a task whose groups were dropped as too old."""
    max_live_trajectories: int | None = None
    """Maximum number of live trajectories, which bounds reserved memory; None is no limit."""
    adapts_surplus: bool = False
    """Whether the number changes between batches, up to `surplus` (`AdaptiveSurplus`)."""

    @property
    def window(self) -> int:
        """Maximum number of live groups: (η + 1)·B + surplus."""
        return (self.max_staleness + 1) * self.batch_groups + self.surplus

    @property
    def max_waiting(self) -> int:
        """No group is admitted while so many wait, not dispatched yet or ready to train: 2·B + surplus.

        One batch for the next step and one more, so that the trainer seldom waits for long answers (ADR 0029).
        """
        return 2 * self.batch_groups + self.surplus
