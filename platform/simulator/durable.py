"""What outlives a simulated driver: the bytes of its journal, and its checkpoints.

    journal   admit … trained × B, mark v1, … trained × B, mark v2, admit, rea▒        (torn where the driver died)
    resume    ─────────────── up to the mark of the newest checkpoint ───────▶ │ what lived then: dropped(rollback)

A new incarnation goes on from the newest checkpoint. What the journal says after its mark speaks of weights that are
lost, so it is cut off there, and the journal goes on with what the new incarnation does.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field

from penstock.dataflow.journal import Resumed, decode, encode, resume
from penstock.dataflow.ledger import JournalEntry, LedgerEvent, Reason, VersionMark
from penstock.platform.simulator.parts import Trained


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a new incarnation begins.

    Attributes:
        version: Of the newest checkpoint.
        trained: What had been trained into it.
        history: Events of the journal up to its mark, then the rollbacks.
    """

    version: int
    trained: Trained
    resumed: Resumed
    history: tuple[LedgerEvent, ...]


@dataclass(slots=True)
class DurableState:
    """The disk of a run."""

    max_requeues: int
    _lines: list[bytes] = field(default_factory=list)
    _checkpoints: dict[int, Trained] = field(default_factory=lambda: {0: Trained()})

    def write(self, entry: JournalEntry) -> None:
        self._lines.append(encode(entry))

    def checkpoint(self, version: int, trained: Trained) -> None:
        self._checkpoints[version] = copy.deepcopy(trained)

    @property
    def length(self) -> int:
        """Lines written."""
        return len(self._lines)

    def tear(self, length: int, rng: random.Random) -> None:
        """The driver died after it wrote `length` lines, in the middle of the last one."""
        del self._lines[length:]
        if self._lines:
            self._lines[-1] = self._lines[-1][: rng.randrange(len(self._lines[-1]) + 1)]

    def restore(self) -> Restored:
        """Resume from the newest checkpoint whose mark the journal reached."""
        entries = list(decode(self._lines))
        marks = {entry.version: index for index, entry in enumerate(entries) if isinstance(entry, VersionMark)}
        version = max(version for version in self._checkpoints if version in marks or version == 0)
        kept = entries[: marks[version] + 1] if version else []
        resumed = self.resume(kept, version)
        known = set(kept)  # a task that was rolled back before, and had not started again
        rolled_back = [e for e in resumed.restarts if e.reason is Reason.ROLLBACK and e not in known]
        self._lines = [encode(entry) for entry in (*kept, *rolled_back)]
        self._checkpoints = {old: trained for old, trained in self._checkpoints.items() if old <= version}
        history = (*(entry for entry in kept if isinstance(entry, LedgerEvent)), *rolled_back)
        return Restored(version, copy.deepcopy(self._checkpoints[version]), resumed, history)

    def resume(self, entries: list[JournalEntry], version: int) -> Resumed:
        """The shipping code."""
        return resume(entries, version, self.max_requeues)
