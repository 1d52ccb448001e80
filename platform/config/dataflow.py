"""The `dataflow` section: batching, staleness, retries and filters."""

from __future__ import annotations

from pydantic import Field

from penstock.dataflow.staleness import ExpiryPolicy
from penstock.platform.config.section import Section


class FilterConfig(Section):
    """Which ready groups are not worth a gradient (docs/concepts/dataflow.md). Each filtered group is replaced.

    Attributes:
        zero_variance: Filter groups whose members all earned the same.
        zero_variance_part: Compare this named part of the reward instead of the sum, e.g. raw correctness.
        max_overlong_share: Filter groups of which a larger share was cut off at the length limit; None is off.
        pass_rate: Keep groups of which a share in [lowest, highest] passes (`dataflow.pass_reward`); None is off.
        user: Import path of a function `(trajectories) -> bool`; groups for which it is false are filtered.
    """

    zero_variance: bool = False
    zero_variance_part: str | None = None
    max_overlong_share: float | None = Field(default=None, ge=0, lt=1)
    pass_rate: tuple[float, float] | None = None
    user: str | None = None


class DataflowConfig(Section):
    """Batching, staleness and retries (docs/concepts/staleness.md).

    Attributes:
        batch_groups: B, groups per training batch.
        group_size: Trajectories per group; they share a baseline.
        pass_reward: Reward from which a trajectory passes, for `filters.pass_rate` and `by_success`.
        group_sizing: `by_success` (dataflow/difficulty.py), or import path of a `GroupSizing` (dataflow/streams.py):
            gives single tasks fewer; None is off.
        length_limiting: `by_success`, or import path of a `LengthLimiting`, that gives single tasks shorter turns; None
            is off.
        max_staleness: η, the oldest a trained token may be, in policy versions. 0 is the synchronous algorithm.
        on_expiry: What happens to groups that would become too old: the batch is held open for them (`wait`), their
            over-old tokens lose their loss weight (`trim`), or they are dropped and their tasks start again (`drop`).
        max_requeues: How often a task starts again after `drop`.
        surplus: Redundant groups admitted beyond the window; when a batch could close but for a few stragglers, as
            many of those are given up. Biased to short answers.
        gang: All members of a group run on one engine and start at one version.
        stream_micro_batches: The trainer begins with the first groups of a batch while the rest is still being
            generated; the gradient is the same.
        prefetch: While the trainer waits for a batch it forwards the groups that are ready (critic, proximal logprobs,
            a reference below adapters); the gradient is the same. Without effect where nothing of the kind is needed,
            with colocated roles, and with `stream_micro_batches`.
        max_retries: Retries of one trajectory after its environment or reward failed.
        min_group_size: A group whose failed members are gone still trains with this many.
        max_live_gib: Memory reserved at admission for the payloads of all live groups, GiB; None is no limit.
        filters: Which ready groups are not trained.
        batch_timeout_s: Longest wait for a batch, seconds, before the run stops and lists what it waits for.
    """

    batch_groups: int = Field(ge=1)
    group_size: int = Field(ge=2)
    pass_reward: float = 1.0
    group_sizing: str | None = None
    length_limiting: str | None = None
    max_staleness: int = Field(default=2, ge=0)
    on_expiry: ExpiryPolicy = ExpiryPolicy.WAIT
    max_requeues: int = Field(default=3, ge=0)
    surplus: int = Field(default=0, ge=0)
    gang: bool = False
    stream_micro_batches: bool = False
    prefetch: bool = True
    max_retries: int = Field(default=2, ge=0)
    min_group_size: int = Field(default=2, ge=2)
    max_live_gib: float | None = Field(default=None, gt=0)
    filters: FilterConfig = FilterConfig()
    batch_timeout_s: float = Field(default=1800.0, gt=0)
