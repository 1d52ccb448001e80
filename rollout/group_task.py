"""What the members of a group have in common while they are sampled: kept once, not once for each."""

from __future__ import annotations

from penstock.dataflow.ids import GroupId, TrajectoryId
from penstock.dataflow.trajectory import Task
from penstock.rollout.lease import LeaseMaker
from penstock.rollout.routing import EngineView


class GroupTask:
    """A task, and for whom it is answered.

    Attributes:
        task: What is asked. Trajectories of one task share a prefix, and so prefer one engine.
        group: Names the group.
        name: The same as text; its trajectories are `<name>/<member>`.
        slots: A gang to lease from while there is one; else the pool.
        lost_engines: Those that died or stood still over its prompt; None once any engine has answered it.
    """

    __slots__ = ("group", "lost_engines", "name", "slots", "task")

    def __init__(self, task: Task, group: GroupId | str, slots: LeaseMaker | None = None) -> None:
        self.task = task
        self.group = group
        self.name = str(group)
        self.slots = slots
        self.lost_engines: tuple[EngineView, ...] | None = ()

    @property
    def is_harmful(self) -> bool:
        """Whether two engines were lost over its prompt: a third is not given to it."""
        return self.lost_engines is not None and len(self.lost_engines) > 1

    def trajectory_id(self, member: int) -> TrajectoryId:
        return TrajectoryId(f"{self.name}/{member}")

    def member_at(self, member: int, version: int) -> None:
        """Hear which version samples a member: the engine's at dispatch, then that of the first token if it differs.

        Here nobody wants to know.
        """
