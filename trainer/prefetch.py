"""What was forwarded for a step before its batch was complete, and whether it is valid (docs/concepts/dataflow.md,
"Prefetch"). Pure: no model, no clock.

Invariant: all that is kept was computed with the weights that the next step begins with. So a step ends with nothing
kept, and so does every other update of weights. The version alone would not do: a step that is skipped keeps the
version, and a critic may have moved in it.

Shape legend: n sampled tokens of a group, members one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.ids import GroupId
from penstock.dataflow.trajectory import GroupPayload

PerToken = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Of one group, each `[n] float32`; None where the algorithm needs none.

    Attributes:
        version: Of the policy that it was computed with.
        seconds: That it took this rank.
        values: V of the critic before each token.
        proximal: Logprobs of the policy.
        reference: Logprobs of the policy without its adapters.
    """

    version: int
    seconds: float
    values: PerToken | None = None
    proximal: PerToken | None = None
    reference: PerToken | None = None


@dataclass(slots=True)
class Prefetched:
    """One rank's; equal on all ranks, since all get the same calls in the same order."""

    _kept: dict[GroupId, Forwarded] = field(default_factory=dict)
    _taken: set[GroupId] = field(default_factory=set)
    _num_tokens: int = 0
    _num_taken_tokens: int = 0
    _seconds: float = 0.0

    def keep(self, group_id: GroupId, forwarded: Forwarded) -> None:
        """A group was forwarded."""
        self._kept[group_id] = forwarded
        self._seconds += forwarded.seconds

    def of(self, payloads: Sequence[GroupPayload], version: int) -> list[Forwarded | None]:
        """What there is of each group of a batch, or of a part of it, that trains from `version`."""
        found = [self._kept.get(payload.group_id) for payload in payloads]
        valid = [one if one is not None and one.version == version else None for one in found]
        for payload, one in zip(payloads, valid, strict=True):
            num_tokens = sum(trajectory.num_sampled_tokens for trajectory in payload.trajectories)
            self._num_tokens += num_tokens
            if one is not None:
                self._taken.add(payload.group_id)
                self._num_taken_tokens += num_tokens
        return valid

    def forget(self) -> tuple[dict[str, float], float]:
        """Weights moved, or may have: nothing is kept any more.

        Returns:
            Metrics of the batch since the last call, and the seconds of all forwards since then.
        """
        used_s = sum(self._kept[group_id].seconds for group_id in self._taken)
        seconds = self._seconds
        metrics = {
            "trainer/prefetched_token_share": self._num_taken_tokens / max(self._num_tokens, 1),
            "trainer/prefetch_used_s": used_s,
            "trainer/prefetch_unused_s": max(seconds - used_s, 0.0),
        }
        self._kept, self._taken = {}, set()
        self._num_tokens, self._num_taken_tokens, self._seconds = 0, 0, 0.0
        return metrics, seconds
