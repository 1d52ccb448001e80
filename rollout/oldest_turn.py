"""How old an episode is: as its oldest turn, of which several may be sampled at the same time.

The gate dates a group by what it is told of each member: the version at dispatch, then that of the first token. A turn
that begins later begins at `floor` or newer, so only turns at the same time move the date, and it never falls by a
thread that is opened late.
"""

from __future__ import annotations

from typing import Protocol

ANY_VERSION = -1


class VersionWatcher(Protocol):
    """Told which versions sample the members of its group."""

    def member_at(self, member: int, version: int) -> None:
        """The engine's version at dispatch, then the version of the first token, if that is another."""
        ...


class OldestTurn:
    """Watches the turns of one episode, numbered as they begin, and tells the group's watcher of the oldest."""

    def __init__(self, watcher: VersionWatcher | None, member: int) -> None:
        self._watcher = watcher
        self._member = member
        self._num_turns = 0
        self._versions: dict[int, int] = {}

    @property
    def floor(self) -> int:
        """Version of the oldest turn that was dispatched; -1 before the first."""
        return min(self._versions.values(), default=ANY_VERSION)

    def begin(self) -> int:
        """Number of a further turn."""
        self._num_turns += 1
        return self._num_turns - 1

    def member_at(self, turn: int, version: int) -> None:
        """As a group's watcher, of a turn."""
        before = self.floor
        self._versions[turn] = version
        if self._watcher is not None and self.floor != before:
            self._watcher.member_at(self._member, self.floor)
