"""Context of a rollout: what the trajectories of a group share while they are sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.dataflow.ids import GroupId, TrajectoryId
from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.trajectory import Task
from penstock.rollout.pool.routing import EngineView
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
    """

    def __init__(self, task: Task, group: GroupId | str) -> None:
        self.task = task
        self.group = group
        self.name = str(group)
        self.prompts: dict[TokenCodec, tuple[tuple[int, ...], str]] = {}
        self.turns: dict[int, PartialTurn] = {}
        self.saved_tokens: dict[int, TokenDelta] = {}
        self.lost_engines: list[EngineView] = []
        self.is_answered = False

    @property
    def is_suspect(self) -> bool:
        """Whether two engines were lost on the prompt, so that it is not sent to a third."""
        return not self.is_answered and len(self.lost_engines) > 1

    def trajectory_id(self, member: int) -> TrajectoryId:
        return TrajectoryId(f"{self.name}/{member}")

    def record_version(self, member: int, version: int) -> None:
        """Record the version that samples the trajectory `member`: the engine's at dispatch, then the first token's if
        it differs. The base class ignores it.
        """


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
        return _Turn(self._context, self)

    def record_turn_version(self, turn: RolloutContext, version: int) -> None:
        """Record the version of a turn, at dispatch or with its first token."""
        before = self.min_version
        self._versions[turn] = version
        if self.min_version != before:
            self._context.record_version(self._member, self.min_version)


class _Turn(RolloutContext):
    """One turn of an episode."""

    def __init__(self, context: RolloutContext, episode: OldestTurn) -> None:
        super().__init__(context.task, context.group)
        self._episode = episode

    def record_version(self, member: int, version: int) -> None:  # noqa: ARG002 - all turns are of one trajectory
        self._episode.record_turn_version(self, version)
