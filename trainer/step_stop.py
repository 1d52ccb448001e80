"""Ending a training step before it changes the weights, at the request of another thread of the rank.

A step of minutes cannot be waited for when a run is told to end. The weights that were published last are saved
meanwhile (`PolicyTrainer.held_weights`), which needs them not to change:

    thread of the step     begin ─▶ check before every micro-batch ─▶ decide before the update ─▶ update ─▶ …
    another thread                        request: True if the step ends before its last update

Invariant: if `request` returns True on any rank, no rank makes the last update of the batch. The ranks among which
`decide` reduces (those of one tensor-parallel part) agree there, and the flag of a rank is read under the lock under
which `request` sets it. A rank of another part that has decided otherwise waits for the first in the norm of its
gradient, which is before the update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.errors import StepEndedError

AllReduce = Callable[[NDArray[np.float64], Literal["sum", "max"]], NDArray[np.float64]]


class StepStop:
    """Whether the running step is to end, and whether it still can.

    Attributes:
        has_updated: Whether an update of the running or last batch was made, or may be about to be made.
    """

    def __init__(self) -> None:
        self.has_updated = False
        self._lock = threading.Lock()
        self._is_requested = False
        self._is_decided = False

    def request(self) -> bool:
        """Ask the running step to end, and every later one. Called from another thread.

        Returns:
            Whether this rank ends its step before the last update; if all ranks answer False, it is completed soon.
        """
        with self._lock:
            self._is_requested = True
            return not self._is_decided

    def begin(self) -> None:
        """Call it where a batch begins."""
        self._is_decided = self.has_updated = False
        self.check()

    def check(self) -> None:
        """Call it before each micro-batch.

        Raises:
            StepEndedError: If the step is to end.
        """
        if self._is_requested and not self._is_decided:
            raise StepEndedError("the step was ended before it changed the weights, since the run ends")

    def decide(self, all_reduce: AllReduce, *, is_last: bool, changes: bool = True) -> None:
        """Agree with all ranks whether the update is made. Collective; call it directly before each update.

        Args:
            all_reduce: Of those ranks.
            is_last: Whether it is the last update of the batch.
            changes: Whether it has a gradient.

        Raises:
            StepEndedError: If the step is to end on any rank.
        """
        with self._lock:
            mine, had_updated = self._is_requested, self.has_updated
            self._is_decided = is_last and not mine
            self.has_updated = had_updated or changes  # a snapshot that is asked for now must not miss it
        if all_reduce(np.array([float(mine)]), "max")[0]:
            self._is_decided, self.has_updated = False, had_updated
            self._is_requested = True
            self.check()
