"""Context of a rollout: what the trajectories of a group share while they are sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.dataflow.ids import GroupId, TrajectoryId
from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.task import Task
from penstock.rollout.engine_pool.routing import EngineView
from penstock.rollout.tokenization.tokenizers import TokenCodec

if TYPE_CHECKING:
    from penstock.rollout.trajectory.conversation import PartialTurn


class RolloutContext:
    """A task and the group that answers it.

    Attributes:
        task: Its trajectories share a prompt prefix and so prefer one engine.
        group: Id of the group.
        name: The id as text; trajectories are named `<name>/<member>`.
        prompts: Token ids and decoded text of the prompt, for each codec (one per policy).
        turns: The turn that each member samples, for members of a single turn; a checkpoint keeps its tokens.
        saved_tokens: Tokens of a checkpoint with which the turn of a member begins.
        lost_engines: Engines that died or hung on the prompt before any engine returned a token for it.
        is_answered: Whether an engine has returned a token for the prompt.
        record_version: Takes a member and the version that samples it: the engine's at dispatch, then the first
            token's if it differs.
    """

    def __init__(
        self,
        task: Task,
        group: GroupId | str,
        record_version: Callable[[int, int], None] = lambda _member, _version: None,
    ) -> None:
        self.task = task
        self.group = group
        self.name = str(group)
        self.prompts: dict[TokenCodec, tuple[tuple[int, ...], str]] = {}
        self.turns: dict[int, PartialTurn] = {}
        self.saved_tokens: dict[int, TokenDelta] = {}
        self.lost_engines: list[EngineView] = []
        self.is_answered = False
        self.record_version = record_version

    @property
    def is_suspect(self) -> bool:
        """Whether two engines were lost on the prompt, so that it is not sent to a third."""
        return not self.is_answered and len(self.lost_engines) > 1

    def trajectory_id(self, member: int) -> TrajectoryId:
        return TrajectoryId(f"{self.name}/{member}")


class OldestTurn:
    """Oldest version of an episode, several turns of which may be sampled concurrently.

    The consumption gate computes the deadline of a group from the versions that are recorded for its trajectories. A
    later turn starts at `min_version` or newer, so only concurrent turns can change the recorded version, and a thread
    that is opened late never lowers it.
    """

    def __init__(self, context: RolloutContext, member: int) -> None:
        self._context = context
        self._member = member
        self._versions: dict[RolloutContext, int] = {}

    @property
    def min_version(self) -> int:
        """Oldest version of the dispatched turns; -1 before the first."""
        return min(self._versions.values(), default=-1)

    def begin(self) -> RolloutContext:
        """Create the context of one more turn."""
        turn = RolloutContext(self._context.task, self._context.group)
        turn.record_version = lambda _member, version: self._record(turn, version)  # all are of one trajectory
        return turn

    def _record(self, turn: RolloutContext, version: int) -> None:
        before = self.min_version
        self._versions[turn] = version
        if self.min_version != before:
            self._context.record_version(self._member, self.min_version)
