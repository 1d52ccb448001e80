"""What the members of a group have in common while they are sampled: the task, its prompt, and how old they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.dataflow.ids import GroupId, TrajectoryId
from penstock.dataflow.trajectory import Task
from penstock.rollout.pool.routing import EngineView
from penstock.rollout.tokenization.tokenizers import TokenCodec

if TYPE_CHECKING:
    from penstock.rollout.pool.pool import EnginePool, Gang


class RolloutContext:
    """A task, and for whom it is answered.

    Attributes:
        task: What is asked. Trajectories of one task share a prefix, and so prefer one engine.
        group: Names the group.
        name: The same as text; its trajectories are `<name>/<member>`.
        slots: A gang to lease from while there is one; else the pool.
        prompts: Its prompt as token ids and as the policy reads it, by the codec of the policy that answers.
        lost_engines: Those that died or stood still over its prompt before any engine answered it.
        is_answered: Whether an engine has answered it with a token.
    """

    def __init__(self, task: Task, group: GroupId | str, slots: EnginePool | Gang | None = None) -> None:
        self.task = task
        self.group = group
        self.name = str(group)
        self.slots = slots
        self.prompts: dict[TokenCodec, tuple[tuple[int, ...], str]] = {}
        self.lost_engines: list[EngineView] = []
        self.is_answered = False

    @property
    def is_harmful(self) -> bool:
        """Whether two engines were lost over its prompt: a third is not given to it."""
        return not self.is_answered and len(self.lost_engines) > 1

    def trajectory_id(self, member: int) -> TrajectoryId:
        return TrajectoryId(f"{self.name}/{member}")

    def record_version(self, member: int, version: int) -> None:
        """Hear which version samples a member: the engine's at dispatch, then that of the first token if it differs.

        Here nobody wants to know.
        """


class OldestTurn:
    """How old an episode is: as its oldest turn, of which several may be sampled at the same time.

    The gate dates a group by what it is told of each member: the version at dispatch, then that of the first token. A
    turn that begins later begins at `min_version` or newer, so only turns at the same time move the date, and it never
    falls by a thread that is opened late.
    """

    def __init__(self, asked: RolloutContext, member: int) -> None:
        self._asked = asked
        self._member = member
        self._versions: dict[RolloutContext, int] = {}

    @property
    def min_version(self) -> int:
        """Version of the oldest turn that was dispatched; -1 before the first."""
        return min(self._versions.values(), default=-1)

    def begin(self) -> RolloutContext:
        """What a further turn is sampled for."""
        return _Turn(self._asked, self)

    def turn_at(self, turn: RolloutContext, version: int) -> None:
        """A turn was dispatched at `version`, or its first token came from it."""
        before = self.min_version
        self._versions[turn] = version
        if self.min_version != before:
            self._asked.record_version(self._member, self.min_version)


class _Turn(RolloutContext):
    """One turn of an episode."""

    def __init__(self, asked: RolloutContext, episode: OldestTurn) -> None:
        super().__init__(asked.task, asked.group, asked.slots)
        self._episode = episode

    def record_version(self, member: int, version: int) -> None:  # noqa: ARG002 - all turns are of one member
        self._episode.turn_at(self, version)
