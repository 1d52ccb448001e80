"""How old an episode is: as its oldest turn, of which several may be sampled at the same time.

The gate dates a group by what it is told of each member: the version at dispatch, then that of the first token. A turn
that begins later begins at `floor` or newer, so only turns at the same time move the date, and it never falls by a
thread that is opened late.
"""

from __future__ import annotations

from penstock.rollout.group_task import GroupTask

ANY_VERSION = -1


class OldestTurn:
    """Watches the turns of one episode, and tells its group of the oldest."""

    def __init__(self, asked: GroupTask, member: int) -> None:
        self._asked = asked
        self._member = member
        self._versions: dict[GroupTask, int] = {}

    @property
    def floor(self) -> int:
        """Version of the oldest turn that was dispatched; -1 before the first."""
        return min(self._versions.values(), default=ANY_VERSION)

    def begin(self) -> GroupTask:
        """What a further turn is sampled for."""
        return _Turn(self._asked, self)

    def turn_at(self, turn: GroupTask, version: int) -> None:
        """A turn was dispatched at `version`, or its first token came from it."""
        before = self.floor
        self._versions[turn] = version
        if self.floor != before:
            self._asked.member_at(self._member, self.floor)


class _Turn(GroupTask):
    """One turn of an episode."""

    __slots__ = ("_episode",)

    def __init__(self, asked: GroupTask, episode: OldestTurn) -> None:
        super().__init__(asked.task, asked.group, asked.slots)
        self._episode = episode

    def member_at(self, member: int, version: int) -> None:  # noqa: ARG002 - all turns are of one member
        self._episode.turn_at(self, version)
