"""Checks of the invariants I1 to I9 against a model of the ledger that shares no code with it.

    I1  staleness of every trained token ≤ η, by the version in its id     when a batch closes, and when it trains
    I2  one state at a time, terminal states final                         after every ledger event
    I3  admitted = trained + dropped + filtered + failed + live            after every ledger event
    I4  spans never decrease, sum to the sampled tokens, none missing      engine deltas; when a group is ready
    I5  a group trains at most once                                        when a batch closes, and when it trains
    I6  credits never negative; all free when no group is live             after every event; at the end
    I7  no loss weight on a token the policy did not sample                when a batch trains
    I8  an engine serves only what it has acknowledged                     requests, deltas (tests/simulation/world.py)
    I9  one normaliser per optimizer step, over its whole batch            when a batch trains

The limit of live trajectories is checked as well.
The cheap checks run after every event; the comparison of all live groups runs every `every` events.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.ids import GroupId
from penstock.dataflow.ledger import GroupState, JournalEntry, LedgerEvent, Reason, VersionMark
from penstock.dataflow.staleness import ExpiryPolicy, FlowLimits
from penstock.dataflow.trajectory import GroupPayload, GroupRef, Trajectory
from penstock.dataflow.versions import versions_per_token
from penstock.platform.simulator.world import POSITION_BITS, member_of, task_of, true_reward
from tests.simulation.world import CheckedWorld, InvariantError

RECENT = 32
_NEXT = {
    "generating": {"scoring"},
    "scoring": {"ready"},
    "ready": {"training"},
    "training": {"trained"},
}
_LIVE = frozenset({"generating", "scoring", "ready", "training"})
_ENDS_TRAINING = frozenset({Reason.BAD_STEP, Reason.ROLLBACK, Reason.RUN_END, Reason.ZERO_VARIANCE})
_UNTRAINED = frozenset({"dropped", "filtered", "failed"})


class LedgerModel:
    """A model of the ledger that follows its events and knows the allowed transitions.

    Attributes:
        live: Group -> state.
        ended: Terminal state -> number of groups.
        trained: All trained groups.
        waiting: Live groups that were not dispatched yet or are ready.
        rolled_back: Tasks that were live when the driver died and have not been restarted.
        sizes: Trajectories of each live group.
        live_trajectories: Sum of these sizes.
    """

    def __init__(self, limits: FlowLimits) -> None:
        self.live: dict[int, str] = {}
        self.waiting: set[int] = set()
        self.ended: Counter[str] = Counter()
        self.trained: set[int] = set()
        self.rolled_back: set[str] = set()
        self.num_admitted = 0
        self.sizes: dict[int, int] = {}
        self.live_trajectories = 0
        self._limits = limits

    def follow(self, event: LedgerEvent) -> None:
        """Check one event and apply it."""
        group, state = int(event.group_id), str(event.state)
        if state == "generating":
            if group != self.num_admitted:
                raise InvariantError("I3", f"group {group} was admitted after {self.num_admitted} others")
            self.num_admitted += 1
            self.live[group] = state
            self.waiting.add(group)
            self.rolled_back.discard(event.task_id)
            self.sizes[group] = event.group_size
            self.live_trajectories += event.group_size
            limit = self._limits.max_live_trajectories
            if limit is not None and self.live_trajectories > limit:
                raise InvariantError("I6", f"{self.live_trajectories} trajectories are live, the limit is {limit}")
            return
        before = self.live.get(group)
        if before is None:
            raise InvariantError("I2", f"group {group} goes to {state}, but it has ended or was never admitted")
        if state in _UNTRAINED:
            self._may_end(group, before, event)
            if event.reason is Reason.ROLLBACK:
                self.rolled_back.add(event.task_id)
        elif state not in _NEXT[before]:
            raise InvariantError("I2", f"group {group} goes from {before} to {state}")
        if state == "ready":
            self.waiting.add(group)
        elif state != "scoring":  # whose attempts may all have failed before an engine took them
            self.waiting.discard(group)
        if state in _LIVE:
            self.live[group] = state
            return
        del self.live[group]
        self.live_trajectories -= self.sizes.pop(group)
        self.ended[state] += 1
        if state == "trained":
            self.trained.add(group)

    def _may_end(self, group: int, before: str, event: LedgerEvent) -> None:
        if event.reason is Reason.STALE and self._limits.on_expiry == "wait":
            raise InvariantError("I1", f"group {group} was dropped as stale under on_expiry=wait")
        if event.reason is Reason.REDUNDANT and self._limits.surplus == 0:
            raise InvariantError("I6", f"group {group} was dropped as redundant, but there is no surplus")
        if before == "training" and event.reason not in _ENDS_TRAINING:
            raise InvariantError("I2", f"group {group} ended as {event.state}({event.reason}) while it trained")


class Lineage:
    """What had happened at each cut, remembered outside of the run and its disk.

    Attributes:
        models: Version -> the model of the ledger at its newest cut.
        memories: Version -> what the run knew at its newest cut (tests/simulation/resume_check.py).
    """

    def __init__(self) -> None:
        self.models: dict[int, LedgerModel] = {}
        self.memories: dict[int, dict[str, Any]] = {}


class CheckedDataflow(Dataflow):
    """The production core, which runs the checks after every report.

    Attributes:
        recent: Groups that became ready recently, which faults report again.
    """

    def __init__(
        self, limits: FlowLimits, rules: GroupRules, world: CheckedWorld, every: int, lineage: Lineage
    ) -> None:
        super().__init__(limits, rules)
        self.model = LedgerModel(limits)
        self.ledger.listeners = (self._on_ledger,)
        self._lineage = lineage
        self._world = world
        self._every = every
        self._events = 0
        self.recent: deque[GroupRef] = deque(maxlen=RECENT)

    def state_dict(self) -> dict[str, Any]:
        self._lineage.models[self.version] = copy.deepcopy(self.model)
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any], ready: Mapping[GroupId, GroupRef]) -> None:
        """What is restored is what there was at the cut, group by group."""
        super().load_state_dict(state, ready)
        self.model = copy.deepcopy(self._lineage.models[self.version])
        for group, before in self.model.live.items():
            self.model.live[group] = "ready" if before == "ready" else "generating"
        self._events = -1  # the next check looks at every group
        self.check()

    def _on_ledger(self, event: JournalEntry) -> None:
        if isinstance(event, VersionMark):
            self._world.note(f"version {event.version}")
            return
        self._world.note(f"group {event.group_id} {event.state} {event.reason or ''}")
        self.model.follow(event)

    def record_version(self, group_id: GroupId, member: int, version: int) -> None:
        super().record_version(group_id, member, version)
        if self.model.live.get(int(group_id)) in ("generating", "scoring"):
            self.model.waiting.discard(int(group_id))
        self.check()
        self._world.note(f"member {group_id}/{member} at v{version}")

    def generated(self, group_id: GroupId) -> None:
        super().generated(group_id)
        self.check()

    def ready(self, group: GroupRef) -> bool:
        accepted = super().ready(group)
        if accepted and self.model.live.get(int(group.group_id)) == "ready":
            self._check_group(group)
            self.recent.append(group)
        self.check()
        return accepted

    def end(self, group_id: GroupId, state: GroupState, reason: Reason) -> None:
        super().end(group_id, state, reason)
        self.check()

    def close_batch(self) -> tuple[GroupRef, ...] | None:
        batch = super().close_batch()
        if batch is not None:
            self._check_batch(batch)
            outside, most = self.ledger.counts().live - len(batch), self.limits.max_staleness * len(batch)
            if outside > most:
                raise InvariantError("I6", f"{outside} groups are live beside a full batch, at most {most} may be")
            self._world.note(f"batch at v{self.version}: {[int(group.group_id) for group in batch]}")
        self.check()
        return batch

    def advance(self, version: int) -> None:
        super().advance(version)
        self.check()

    def skip(self) -> None:
        super().skip()
        self.check()

    def check(self) -> None:
        """Run the checks of every event, and periodically those of all live groups."""
        model, counts = self.model, self.ledger.counts()
        ended = (counts.trained, counts.dropped, counts.filtered, counts.failed)
        expected = tuple(model.ended[state] for state in ("trained", "dropped", "filtered", "failed"))
        if (counts.admitted, counts.live, ended) != (model.num_admitted, len(model.live), expected):
            raise InvariantError(
                "I3", f"the ledger has {counts}, but the events give {expected} with {len(model.live)} live"
            )
        limits = self.limits
        if counts.live > limits.window:
            raise InvariantError("I6", f"{counts.live} groups live, the window is {limits.window}")
        free = min(
            limits.window - counts.live,
            limits.total_steps * limits.batch_groups + limits.surplus - (counts.admitted - sum(expected[1:])),
        )
        if limits.max_live_trajectories is not None:
            places = limits.max_live_trajectories - model.live_trajectories
            free = min(free, max(0, places) // self.rules.group_size)
        free = min(free, max(0, limits.max_waiting - len(model.waiting)))
        if limits.surplus == 0 and self.free_credits != free:
            raise InvariantError(
                "I6", f"{self.free_credits} free credits instead of {free}: a credit was lost or duplicated"
            )
        if not 0 <= self.free_credits <= max(free, 0):
            raise InvariantError("I6", f"{self.free_credits} free credits, at most {free} can be")
        self._events += 1
        if self._events % self._every:
            return
        live = {int(record.group_id): str(record.state) for record in self.ledger.live()}
        if live != model.live:
            differing = dict(set(live.items()) ^ set(model.live.items()))
            raise InvariantError("I2", f"live groups differ from the events: {differing}")
        ready = sum(state == "ready" for state in live.values())
        if self.num_ready != ready:
            raise InvariantError("I2", f"{self.num_ready} groups wait to train, but {ready} are in state ready")

    def check_end(self) -> None:
        """Check that no group is live after the end (I3), and that all batches were trained."""
        counts, limits = self.ledger.counts(), self.limits
        if counts.live or counts.trained != limits.total_steps * limits.batch_groups:
            raise InvariantError("I3", f"the run ended with {counts}")
        # With on_expiry=drop, dropped tasks may be ahead of them in the queue when the run ends.
        if self.model.rolled_back and limits.on_expiry is ExpiryPolicy.WAIT:
            raise InvariantError("I3", f"tasks {sorted(self.model.rolled_back)} were lost when the driver died")

    def _check_group(self, group: GroupRef) -> None:
        payload = group.handle
        assert isinstance(payload, GroupPayload)
        if self._world.is_poison(task_of(int(payload.trajectories[0].token_ids[0]))):
            raise InvariantError("failure as data", f"group {group.group_id} is ready, but engines refuse its prompt")
        size = self.model.sizes[int(group.group_id)]
        is_allowed = min(self.rules.min_group_size, size) <= len(payload.trajectories) <= size
        if not is_allowed or len(group.spans) != len(payload.trajectories):
            raise InvariantError("I2", f"group {group.group_id} is ready with {len(payload.trajectories)} members")
        if [member.spans for member in payload.trajectories] != list(group.spans):
            raise InvariantError("I4", f"group {group.group_id} reports other spans than its payload holds")
        for member in payload.trajectories:
            check_trajectory(member, self._world)

    def _check_batch(self, batch: Sequence[GroupRef]) -> None:
        groups = [int(group.group_id) for group in batch]
        if len(groups) != self.limits.batch_groups or len(set(groups)) != len(groups):
            raise InvariantError("I5", f"a batch of {self.limits.batch_groups} closed with groups {groups}")
        for group in batch:
            if int(group.group_id) in self.model.trained:
                raise InvariantError("I5", f"group {group.group_id} goes into a second batch")
            if self.model.live.get(int(group.group_id)) != "training":
                raise InvariantError("I2", f"group {group.group_id} is in a batch and not in training")


def check_trajectory(trajectory: Trajectory, world: CheckedWorld) -> None:
    """Check I4, I7 and the reward of one trajectory against the versions in its token ids."""
    name = trajectory.trajectory_id
    sampled = trajectory.token_ids[trajectory.loss_mask]
    if (sampled < 0).any() or (trajectory.token_ids[~trajectory.loss_mask] >= 0).any():
        raise InvariantError("I7", f"{name}: the loss mask does not match the sampled tokens")
    truth = (sampled >> POSITION_BITS) - 1
    if (np.diff(truth) < 0).any():
        raise InvariantError("I4", f"{name}: an older version sampled after a newer one: {trajectory.spans}")
    if not np.array_equal(truth, versions_per_token(trajectory.spans)):
        raise InvariantError("I4", f"{name}: labelled {trajectory.spans}, sampled by {np.unique(truth)}")
    task, member = task_of(int(trajectory.token_ids[0])), member_of(name)
    if len(sampled) != world.lengths.length(task, member):
        raise InvariantError("I4", f"{name}: {len(sampled)} tokens, not {world.lengths.length(task, member)}")
    if not np.array_equal(sampled & ((1 << POSITION_BITS) - 1), np.arange(len(sampled)) % (1 << POSITION_BITS)):
        raise InvariantError("I4", f"{name}: tokens are missing, repeated or out of order")
    if trajectory.reward != true_reward(task, member):
        raise InvariantError("failure as data", f"{name}: reward {trajectory.reward} is not that of the reward worker")


def check_step(batch: Sequence[GroupRef], weights: Sequence[np.ndarray], version: int, max_staleness: int) -> None:
    """Check I1, I7 and I9 for one optimizer step.

    Args:
        batch: The groups trained.
        weights: Per trajectory `[T] float64`, each token's share of the loss of the whole step.
        version: Version of the trainer before the step.
        max_staleness: η.
    """
    members = [member for group in batch for member in group.handle.trajectories]
    total, token_shares = 0.0, []
    for member, shares in zip(members, weights, strict=True):
        weighted = member.token_ids[shares != 0]
        if (weighted < 0).any():
            raise InvariantError("I7", f"{member.trajectory_id}: a token that was not sampled carries loss weight")
        oldest = int((weighted >> POSITION_BITS).min()) - 1 if len(weighted) else version
        if version - oldest > max_staleness:
            raise InvariantError(
                "I1", f"{member.trajectory_id} trains v{oldest} at v{version}, max_staleness {max_staleness}"
            )
        total += float(shares.sum())
        token_shares.append(shares[shares != 0])
    if np.ptp(np.concatenate(token_shares)) > 1e-12:
        raise InvariantError("I9", "tokens of one step have different shares of its loss: more than one normaliser")
    if abs(total - 1.0) > 1e-9:
        raise InvariantError("I9", f"the loss weights of a step sum to {total}, not 1")
