"""Builds the components of the flow from the configuration: limits, task queue, filters."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import cast

from penstock.dataflow.difficulty import BY_SUCCESS, LengthBySuccess, SizeBySuccess
from penstock.dataflow.filters import (
    MAX_REFILLS,
    FilterChain,
    GroupFilter,
    has_parts,
    overlong,
    pass_rate,
    user,
    zero_variance,
)
from penstock.dataflow.stages import GatedStages
from penstock.dataflow.staleness import FlowLimits
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import Curriculum, GroupSizing, LengthLimiting, LengthLimits, TaskQueue
from penstock.envs.import_path import load_object
from penstock.envs.streams import load_task_streams, stages_of
from penstock.platform.cluster.memory import max_live_trajectories
from penstock.platform.config.schema import DataflowConfig, RunConfig

MAX_REFILLS_PER_GROUP = 16
"""Maximum number of groups filtered for each group of a batch: more than 94 % of all groups."""


def flow_limits(config: RunConfig) -> FlowLimits:
    """Limits of the flow."""
    flow = config.dataflow
    return FlowLimits(
        batch_groups=flow.batch_groups,
        max_staleness=flow.max_staleness,
        total_steps=config.total_steps,
        surplus=flow.largest_surplus,
        adapts_surplus=flow.surplus == "auto",
        on_expiry=flow.on_expiry,
        max_requeues=flow.max_requeues,
        max_live_trajectories=max_live_trajectories(config),
    )


def make_task_queue(
    config: RunConfig, note: Callable[[str], None] = lambda _: None, fits: Callable[[Task], bool] | None = None
) -> TaskQueue:
    """Build the task queue with its streams, curriculum and group sizes; `note` logs the stages that begin, and tasks
    that do not fit are skipped.
    """
    flow, env = config.dataflow, config.env
    longest = config.rollout.sampling.max_new_tokens
    sizing = _hook(flow.group_sizing, "dataflow.group_sizing", SizeBySuccess(flow.group_size, flow.pass_reward))
    limiting = _hook(flow.length_limiting, "dataflow.length_limiting", LengthBySuccess(longest, flow.pass_reward))
    stages = stages_of(env)
    named = None if env.curriculum is None else load_object(env.curriculum, "env.curriculum")
    curriculum = GatedStages(stages, note) if stages else cast("Curriculum | None", named)
    return TaskQueue(
        load_task_streams(env, config.seed),
        window=flow_limits(config).window,
        group_size=flow.group_size,
        sizing=cast("GroupSizing | None", sizing),
        lengths=None if limiting is None else LengthLimits(longest, cast("LengthLimiting", limiting)),
        curriculum=curriculum,
        fits=fits,
    )


def _hook(named: str | None, key: str, by_success: object) -> object | None:
    """Return the built-in hook or the one at an import path; None if `named` is None."""
    if named is None:
        return None
    return by_success if named == BY_SUCCESS else load_object(named, key)


def make_filters(flow: DataflowConfig, reward_parts: Collection[str] = ()) -> FilterChain:
    """Build the enabled filters, cheapest first; `reward_parts` are the ones that `algorithm.reward_weights` needs."""
    config = flow.filters
    filters: list[GroupFilter] = [has_parts(reward_parts)] if reward_parts else []
    if config.zero_variance:
        filters.append(zero_variance(config.zero_variance_part, reward_parts))
    if config.max_overlong_share is not None:
        filters.append(overlong(config.max_overlong_share))
    if config.pass_rate is not None:
        filters.append(pass_rate(*config.pass_rate, flow.pass_reward))
    if config.user is not None:
        filters.append(user(load_object(config.user, "dataflow.filters.user")))
    return FilterChain(filters, max(MAX_REFILLS, MAX_REFILLS_PER_GROUP * flow.batch_groups))
