"""Ways to form groups that only tests put into a simulated run: streams with quotas, a user's filter, several sizes.

A task is a number, which decides stream, filter and size. Their limits are checked in addition to I1 to I9.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.dataflow.difficulty import LengthBySuccess, SizeBySuccess
from penstock.dataflow.filters import FilterChain, user
from penstock.dataflow.ids import GroupId
from penstock.dataflow.ledger import JournalEntry, LedgerEvent, Reason
from penstock.dataflow.stages import GatedStages, Stage
from penstock.dataflow.staleness import FlowLimits
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import MIN_GROUP_SIZE, LengthLimits, TaskQueue, TaskStream
from penstock.dataflow.trajectory import GroupRef, Trajectory
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.parts import TrainingTasks, number_of
from penstock.platform.simulator.simulation import MAX_REFILLS, environment_of
from penstock.platform.simulator.world import EVALUATION_TASKS, HASH, member_of, task_of
from tests.simulation.checks import CheckedDataflow
from tests.simulation.config import FaultyConfig, parse_faulty
from tests.simulation.faulty_parts import FaultyRewards
from tests.simulation.simulation import Outcome, Seams, simulate
from tests.simulation.world import InvariantError

PASS_REWARD, GATE = 0.5, 0.3
_ENDED = frozenset({"trained", "dropped", "filtered", "failed"})


@dataclass(frozen=True, slots=True)
class Wiring:
    """How groups are formed.

    Attributes:
        streams: Task streams, of weights 1, 2, …; several have quotas of 1.2 ÷ streams each.
        filter_share: Share of tasks whose groups the user's filter refuses.
        abstain_share: Share of the members on which the reward has no opinion.
        sizing: Groups get 2 to `group_size` trajectories, by their task.
        hooks: The shipping difficulty and stages: what a checkpoint keeps of hooks.
    """

    streams: int = 1
    filter_share: float = 0.0
    abstain_share: float = 0.0
    sizing: bool = False
    hooks: bool = False

    @property
    def quota(self) -> float:
        return 1.0 if self.hooks else min(1.0, 1.2 / self.streams)

    def refuses(self, number: int) -> bool:
        return number * HASH % 2**32 < self.filter_share * 2**32

    def abstains(self, number: int, member: int) -> bool:
        return (17 * number + member + 1) * HASH % 2**32 < self.abstain_share * 2**32

    def filters(self) -> FilterChain:
        def keep(members: Sequence[Trajectory]) -> bool:
            return not self.refuses(task_of(int(members[0].token_ids[0])))

        return FilterChain([user(keep)] if self.filter_share else [], MAX_REFILLS)

    def task_queue(self, config: SimulationConfig, limits: FlowLimits, queue: type[TaskQueue] = TaskQueue) -> TaskQueue:
        """Of n endless streams, the one numbered i has every n-th task from i on."""
        n = self.streams
        tasks = [TrainingTasks(environment_of(config), first=i, every=n) for i in range(n)]
        streams = [TaskStream(f"stream-{i}", tasks[i], weight=1.0 + i, quota=self.quota) for i in range(n)]
        streams = streams if n > 1 else [TaskStream("", tasks[0])]
        sizing = VariedSizes(config.group_size) if self.sizing else None
        if not self.hooks:
            return queue(streams, limits.window, config.group_size, sizing)
        longest = config.lengths.cap
        lengths = LengthLimits(longest, LengthBySuccess(longest, PASS_REWARD))
        last = streams[-1].name
        stages = GatedStages([Stage(one.name, None if one.name == last else GATE, 2) for one in streams])
        by_success = SizeBySuccess(config.group_size, PASS_REWARD)
        return queue(streams, limits.window, config.group_size, by_success, lengths, stages)


class VariedSizes:
    """`GroupSizing`: 2 to `largest` trajectories, by the task."""

    def __init__(self, largest: int) -> None:
        self._largest = largest

    def group_size(self, task: Task, _stream: str) -> int:
        return self._largest - number_of(task.task_id) % (self._largest - MIN_GROUP_SIZE + 1)


class WiredDataflow(CheckedDataflow):
    """Also holds the run to its quotas and its filter."""

    wiring: Wiring

    def __init__(self, limits: FlowLimits, *arguments, **named) -> None:
        self._streams: dict[int, str] = {}
        self._live_of: Counter[str] = Counter()
        super().__init__(limits, *arguments, **named)
        self._most = math.ceil(self.wiring.quota * limits.window)

    def load_state_dict(self, state: Mapping[str, Any], ready: Mapping[GroupId, GroupRef]) -> None:
        super().load_state_dict(state, ready)
        self._streams = {int(record.group_id): record.stream for record in self.ledger.live()}
        self._live_of = Counter(self._streams.values())

    def _on_ledger(self, event: JournalEntry) -> None:
        super()._on_ledger(event)
        if isinstance(event, LedgerEvent):
            self._follow(event)

    def _follow(self, event: LedgerEvent) -> None:
        group, stream = int(event.group_id), event.stream
        if event.state == "generating":
            self._streams[group] = stream
            self._live_of[stream] += 1
            if self.wiring.streams > 1 and self._live_of[stream] > self._most:
                raise InvariantError("quota", f"{self._live_of[stream]} groups of {stream} live, at most {self._most}")
        if event.state in _ENDED:
            self._live_of[self._streams.pop(group)] -= 1
        if event.reason is Reason.USER and not self.wiring.refuses(number_of(event.task_id)):
            raise InvariantError("filter", f"group {group} was filtered, but no filter refuses {event.task_id}")
        if event.reason is Reason.ABSTAINED:
            number = number_of(event.task_id)
            if not any(self.wiring.abstains(number, member) for member in range(event.group_size)):
                raise InvariantError("abstained", f"group {group} of {event.task_id} has a reward for every member")

    def ready(self, group: GroupRef) -> bool:
        number = number_of(group.task_id)
        for member in group.handle.trajectories:
            if self.wiring.abstains(number, member_of(member.trajectory_id)):
                raise InvariantError("abstained", f"{member.trajectory_id} is ready without an opinion of the reward")
        return super().ready(group)

    def close_batch(self) -> tuple[GroupRef, ...] | None:
        batch = super().close_batch()
        for group in batch or ():
            if self.wiring.refuses(number_of(group.task_id)):
                raise InvariantError("filter", f"group {group.group_id} of {group.task_id} trains, its task is refused")
        return batch


class WiredRewards(FaultyRewards):
    """Without an opinion on some members."""

    wiring: Wiring

    def reward_of(self, task: int, member: int) -> float | None:
        is_training = task < EVALUATION_TASKS
        return None if is_training and self.wiring.abstains(task, member) else super().reward_of(task, member)


def parse_wired(overrides: Sequence[str]) -> tuple[FaultyConfig, Wiring]:
    """`KEY=VALUE` words of `penstock simulate`, and those of a `Wiring`."""
    words = dict(override.split("=") for override in overrides)
    wiring = Wiring(
        streams=int(words.pop("streams", "1")),
        filter_share=float(words.pop("filter_share", "0")),
        abstain_share=float(words.pop("abstain_share", "0")),
        sizing=words.pop("sizing", "false") == "true",
        hooks=words.pop("hooks", "false") == "true",
    )
    return parse_faulty([f"{key}={value}" for key, value in words.items()]), wiring


def wired(wiring: Wiring, seams: Seams | None = None, queue: type[TaskQueue] = TaskQueue) -> Seams:
    """`seams` with the parts of `wiring`."""
    seams, named = seams or Seams(), {"wiring": wiring}
    core = type("Wired", (WiredDataflow, *([] if seams.core is CheckedDataflow else [seams.core])), named)

    rewards = type("Rewarding", (WiredRewards, *([] if seams.rewards is FaultyRewards else [seams.rewards])), named)

    def make_task_queue(config: SimulationConfig, limits: FlowLimits) -> TaskQueue:
        return wiring.task_queue(config, limits, queue)

    return replace(seams, core=core, rewards=rewards, task_queue=make_task_queue, filters=wiring.filters)


def simulate_wired(overrides: Sequence[str], seed: int) -> Outcome:
    """One seed of a run with this wiring."""
    config, wiring = parse_wired(overrides)
    return simulate(config, seed, wired(wiring))
