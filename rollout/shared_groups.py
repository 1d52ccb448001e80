"""Groups that two policies answer together: even members are the policy's, odd ones its partner's."""

from __future__ import annotations

from dataclasses import replace

from penstock.dataflow.ids import PARTNER
from penstock.dataflow.ports import SamplingParams
from penstock.dataflow.trajectory import Trajectory
from penstock.rollout.group_task import GroupTask
from penstock.rollout.partial import ResumeStats
from penstock.rollout.pool import EnginePool
from penstock.rollout.runner import Runs


class SharedGroups:
    """Runs trajectories on the engines of whoever answers them.

    Version v of either is what it learned from the first v batches, and both train every batch: a group is as old as
    its oldest token, whoever sampled it.
    """

    def __init__(self, policy: Runs, partner: Runs) -> None:
        self._policy = policy
        self._partner = partner

    @property
    def pool(self) -> EnginePool:
        """Engines of the policy."""
        return self._policy.pool

    @property
    def stats(self) -> ResumeStats:
        """What was resumed on either's engines."""
        return self._policy.stats + self._partner.stats

    async def run(self, asked: GroupTask, member: int, sampling: SamplingParams) -> Trajectory:
        """As `TrajectoryRunner.run`."""
        assert asked.slots is None, "a gang is on one engine, and these are of two policies"
        if member % 2 == 0:
            return await self._policy.run(asked, member, sampling)
        return replace(await self._partner.run(asked, member, sampling), policy_id=PARTNER)
