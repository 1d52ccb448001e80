"""Cross-field checks of `dataflow` and `env`: deadlocks, biases, and import paths that do not resolve."""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.dataflow.difficulty import BY_SUCCESS
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.ids import PARTNER
from penstock.dataflow.stages import stage_violations
from penstock.dataflow.staleness import ExpiryPolicy
from penstock.dataflow.task_queue import stream_violations
from penstock.envs.import_path import load_object
from penstock.envs.streams import MAX_HELD_OUT_TASKS, load_task_streams, stages_of
from penstock.platform.checks.algorithm import cannot_divide, misfit, unequal_work
from penstock.platform.cluster.memory import (
    max_live_trajectories,
    payload_bytes,
)
from penstock.platform.config.findings import Finding, Fit, error, warning
from penstock.platform.config.schema import EvaluationConfig, RunConfig

DROP_BIAS = {1: (0.94, 0.19), 2: (0.95, 0.24), 4: (0.97, 0.54), 8: (1.0, 1.0)}
"""η -> trained ÷ sampled mean length, and share of the longest 1 % kept under `drop` (docs/concepts/staleness.md)."""

_SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


def check_dataflow(config: RunConfig) -> Iterator[Finding]:
    """Check that batches can complete and groups can train, and that surplus and streaming fit the other settings."""
    flow, trainer, size = config.dataflow, config.trainer, config.dataflow.group_size
    yield from unequal_work("dataflow.batch_groups", flow.batch_groups, trainer)
    if flow.fewest_members > size:
        yield error(
            f"dataflow.min_group_size={flow.min_group_size} is above group_size={size}: no group could ever be trained "
            f"and the run would wait forever. Use at most {size}.",
            fits=[Fit("dataflow.group_size", flow.fewest_members, f"dataflow.min_group_size={flow.min_group_size}")],
        )
    capacity, needed = max_live_trajectories(config), flow.batch_groups * size
    if capacity is not None and capacity < needed:
        gib = 1.01 * needed * payload_bytes(config) / 2**30
        yield error(
            f"dataflow.max_live_gib={flow.max_live_gib:g} holds {capacity} trajectories of "
            f"model.max_context_tokens={config.model.max_context_tokens}, but a batch has {needed}, batch_groups="
            f"{flow.batch_groups} x group_size={size}: it could never be complete and the run would wait forever. Use "
            f"at least {gib:.3g}."
        )
    lowest, highest = flow.filters.pass_rate or (0.0, 1.0)
    if not any(0 <= lowest <= num / size <= highest <= 1 for num in range(size + 1)):
        yield error(
            f"dataflow.filters.pass_rate=[{lowest:g}, {highest:g}]: no group of dataflow.group_size={size} has such a "
            "share of passing members, so every group would be filtered. Use a wider range within [0, 1]."
        )
    whole_groups = {"group_sizing": flow.group_sizing, "filters.zero_variance": flow.filters.zero_variance or None}
    for key, value in whole_groups.items() if size == 1 else ():
        if value is not None:
            yield error(
                f"dataflow.{key}={str(value).lower()} with dataflow.group_size=1: it compares the answers of a group, "
                f"and there is one. Use group_size of at least 2, or leave {key} out."
            )
    # Redundant groups are cancelled one by one, and only while a batch waits for them.
    if flow.surplus and flow.on_expiry is not ExpiryPolicy.WAIT:
        yield error(
            f"dataflow.surplus={flow.surplus} with dataflow.on_expiry={flow.on_expiry}: redundant groups are cancelled "
            "when a batch waits for them, and only on_expiry=wait waits. Use on_expiry=wait or surplus=0."
        )
    if flow.max_surplus is not None and flow.surplus != "auto":
        yield warning(
            f"dataflow.max_surplus={flow.max_surplus} has no effect with dataflow.surplus={flow.surplus}, which is "
            "fixed. Use surplus=auto, or leave max_surplus out."
        )
    if flow.surplus == "auto":
        derived = ", a quarter of dataflow.batch_groups" if flow.max_surplus is None else ""
        yield warning(
            f"dataflow.surplus=auto: 0 to {flow.largest_surplus} redundant groups (max_surplus{derived}), as versions "
            "come fastest. Stragglers are cancelled, so trained answers are shorter than sampled ones. Watch "
            "length/trained_share and flow/surplus; surplus=0 is unbiased."
        )
    elif flow.surplus:
        yield warning(
            f"dataflow.surplus={flow.surplus}: stragglers are cancelled, so trained answers are shorter than sampled "
            "ones. Watch length/trained_share; surplus=0 is unbiased."
        )
    if flow.on_expiry is ExpiryPolicy.DROP:
        measured = max(eta for eta in DROP_BIAS if eta <= max(flow.max_staleness, 1))
        length, longest = DROP_BIAS[measured]
        yield warning(
            f"dataflow.on_expiry=drop at max_staleness={flow.max_staleness} cancels groups that take too long. In "
            f"simulation at max_staleness={measured}, trained answers had {length:.2f} of the mean length of sampled "
            f"ones, and {longest:.2f} of the longest 1 % of answers were trained (docs/concepts/staleness.md; metric "
            "length/trained_share). on_expiry=wait is unbiased."
        )
    # A streamed batch takes its groups one by one, and none can be removed again.
    if flow.stream_micro_batches and flow.surplus:
        yield error(
            f"dataflow.stream_micro_batches=true with dataflow.surplus={flow.surplus}: redundant groups are cancelled "
            "when a batch closes, but a streamed batch has trained most of its groups by then. Use one of the two."
        )
    if flow.stream_micro_batches and config.cluster.colocated:
        yield error(
            "dataflow.stream_micro_batches=true with cluster.colocated=true: trainer and engines take turns on their "
            "devices, so nothing is generated while the trainer computes. Use one of the two."
        )
    if flow.stream_micro_batches and cannot_divide(config):
        yield error(
            f"dataflow.stream_micro_batches=true with trainer.zero_stage={trainer.zero_stage} in "
            f"model.dtype={config.model.dtype}: the gradient is divided by the batch size after the last part, which "
            "DeepSpeed's plain bfloat16 optimizer does not support. Use trainer.zero_stage=2 or 3."
        )


def check_pace(config: RunConfig) -> Iterator[Finding]:
    """Warn of settings that work but slow the run down."""
    flow, rollout = config.dataflow, config.rollout
    if flow.batch_timeout_s <= rollout.request_timeout_s:
        yield warning(
            f"dataflow.batch_timeout_s={flow.batch_timeout_s:g} is not above rollout.request_timeout_s="
            f"{rollout.request_timeout_s:g}: the run would stop before a lost engine is detected and its requests "
            f"are retried. Use more than {rollout.request_timeout_s:g}."
        )


def check_evaluation(config: RunConfig) -> Iterator[Finding]:
    """Check that evaluations have tasks, that those of `keep_best` compare, and that `patience` has some."""
    evaluation = config.evaluation
    during, at_end = evaluation.num_tasks_during_training, evaluation.num_tasks
    at_end = MAX_HELD_OUT_TASKS if at_end is None else at_end
    if not at_end:
        yield from _of_no_evaluation(config)
        return
    if during is not None and during > at_end:
        yield error(
            f"evaluation.num_tasks_during_training={during} is above evaluation.num_tasks={at_end}: the tasks of an "
            f"evaluation during training are the first of those. Use at most {at_end}, or a larger num_tasks.",
            fits=[
                Fit("evaluation.num_tasks", during, f"evaluation.num_tasks_during_training={during}"),
                Fit("evaluation.num_tasks_during_training", at_end, f"evaluation.num_tasks={at_end}"),
            ],
        )
    if evaluation.keep_best and during is not None and during < at_end:
        yield error(
            f"evaluation.keep_best=true with evaluation.num_tasks_during_training={during} and num_tasks="
            f"{at_end}: the last evaluation would have other tasks than those before it, so the best "
            f"could not be told. Leave num_tasks_during_training out, and use num_tasks={during} if all are too many.",
            fits=[Fit("evaluation.num_tasks", during, "evaluation.keep_best compares evaluations of the same tasks")],
        )
    every = min(EvaluationConfig.model_fields["every_steps"].default, max(1, config.total_steps // 4))
    if evaluation.keep_best and not evaluation.every_steps:
        yield error(
            "evaluation.keep_best=true with evaluation.every_steps=0: only the last policy would be evaluated. Use "
            "every_steps of at least 1.",
            fits=[Fit("evaluation.every_steps", every, "evaluation.keep_best compares evaluations during training")],
        )
    if evaluation.patience is not None and not evaluation.every_steps:
        yield error(
            f"evaluation.patience={evaluation.patience} with evaluation.every_steps=0: without evaluations during "
            "training nothing could end it. Use every_steps of at least 1, or patience=null.",
            fits=[Fit("evaluation.every_steps", every, "evaluation.patience counts evaluations during training")],
        )
    if evaluation.patience is not None and evaluation.every_steps and not evaluation.keep_best:
        yield warning(
            f"evaluation.patience={evaluation.patience} without evaluation.keep_best=true: the training ends when the "
            "policy has not become better for a while, and only this last policy is kept. Use keep_best=true, so that "
            "`penstock export --best` can write the best one."
        )
    if (num_best := config.checkpoint.keep_best) > 1 and not evaluation.keep_best:
        yield error(
            f"checkpoint.keep_best={num_best} with evaluation.keep_best=false: no checkpoint is taken with an "
            "evaluation, so none of the best is kept. Set evaluation.keep_best=true, or leave it out."
        )
    if evaluation.keep_best and not (config.checkpoint.every_minutes or config.checkpoint.every_steps):
        yield warning(
            "evaluation.keep_best=true takes a checkpoint with every evaluation, though checkpoint.every_minutes=0 and "
            "checkpoint.every_steps=0 turn checkpoints off. A killed run is resumed from these."
        )


def _of_no_evaluation(config: RunConfig) -> Iterator[Finding]:
    """Refuse what needs evaluations, if there are none."""
    evaluation = config.evaluation
    for key, value, is_set in (
        ("keep_best", "true", evaluation.keep_best),
        ("patience", evaluation.patience, evaluation.patience is not None),
        ("part", evaluation.part, evaluation.part is not None),
        ("sets", f"{{{', '.join(evaluation.sets)}}}", bool(evaluation.sets)),
        ("num_tasks_during_training", evaluation.num_tasks_during_training, bool(evaluation.num_tasks_during_training)),
        ("every_steps", evaluation.every_steps, evaluation.every_steps and config.is_typed("evaluation.every_steps")),
    ):
        if is_set:
            yield error(
                f"evaluation.{key}={value} with evaluation.num_tasks=0, which is a run without evaluations, so there "
                f"is nothing that it could apply to. Leave {key} out, or use num_tasks of at least 1.",
                fits=[Fit("evaluation.num_tasks", None, f"evaluation.{key} needs evaluations")],
            )


def check_answers(config: RunConfig) -> Iterator[Finding]:
    """Check that several answers of an evaluation can differ."""
    for name in ("", *config.evaluation.sets):
        evaluation, key = config.evaluation.of_set(name), f"evaluation.sets.{name}" if name else "evaluation"
        if evaluation.answers_per_task > 1 and not evaluation.temperature:
            yield error(
                f"{key}.answers_per_task={evaluation.answers_per_task} with {key}.temperature="
                f"{evaluation.temperature:g}: greedy answers to one task are all the same, so pass@k would be the "
                "accuracy. Use a temperature above 0, e.g. that of training, "
                f"{config.rollout.sampling.temperature:g}, or answers_per_task=1.",
                fits=[
                    Fit(
                        f"{key}.temperature",
                        config.rollout.sampling.temperature,
                        f"{key}.answers_per_task={evaluation.answers_per_task} answers differ only above 0",
                    )
                ],
            )


def check_sets(config: RunConfig) -> Iterator[Finding]:
    """Check that each further evaluation set has a name for its metrics and files, and measures something else."""
    evaluation = config.evaluation
    for name, own in evaluation.sets.items():
        key, view = f"evaluation.sets.{name}", evaluation.of_set(name)
        if not _SET_NAME.fullmatch(name) or name == PARTNER:
            yield error(
                f"evaluation.sets: {name!r} is no name of an evaluation set. It is part of metrics and folders: use at "
                f"most 40 letters, digits, - and _, and not {PARTNER!r}, which is that of the second policy."
            )
        during, at_end = own.num_tasks_during_training, view.num_tasks
        if during is not None and at_end is not None and during > at_end:
            yield error(
                f"{key}.num_tasks_during_training={during} is above its num_tasks={at_end}: the tasks of an evaluation "
                f"during training are the first of those. Use at most {at_end}, or a larger num_tasks."
            )
        sampling = (view.answers_per_task, view.temperature)
        if own.env is None and sampling == (evaluation.answers_per_task, evaluation.temperature):
            yield warning(
                f"{key} has the tasks and the sampling of `evaluation` itself, so it measures the same twice. Give it "
                "an env of its own, or another temperature or answers_per_task."
            )


def check_hooks(config: RunConfig) -> Iterator[Finding]:
    """Check that hooks named by import path resolve and have the method that is called."""
    flow, env = config.dataflow, config.env
    hooks = (
        ("dataflow.group_sizing", flow.group_sizing, "group_size", ("task", "stream")),
        ("dataflow.length_limiting", flow.length_limiting, "max_new_tokens", ("task", "stream")),
        ("env.curriculum", env.curriculum, "weights", ("version", "rewards")),
        ("dataflow.filters.user", flow.filters.user, "__call__", ("trajectories",)),
    )
    for key, path, method, parameters in hooks:
        if path is None or (path == BY_SUCCESS and key.startswith("dataflow.")):
            continue
        try:
            target = load_object(path, key)
        except ConfigError as problem:
            yield from (error(violation, key) for violation in problem.violations)
            continue
        if not callable(getattr(target, method, None)) or isinstance(target, type):
            what = "is not callable" if method == "__call__" else f"has no method {method}(...)"
            yield error(f"{key}={path!r} is a {type(target).__name__} and {what}. Name an object that can be used.")
        elif wrong := misfit(target if method == "__call__" else getattr(target, method), parameters):
            yield error(f"{key}={path!r} {wrong}", key)


def check_streams(config: RunConfig) -> Iterator[Finding]:
    """Check that the streams are valid and their quotas can fill the admission window."""
    if not config.env.streams:
        return
    try:
        streams = load_task_streams(config.env, config.seed)
    except ConfigError as problem:
        yield from (error(violation, "env.streams") for violation in problem.violations)
        return
    yield from (error(violation, "env.streams") for violation in stream_violations(streams))
    if not config.env.has_stages:
        return
    yield from (error(violation, "env.streams") for violation in stage_violations(stages_of(config.env)))
    if config.env.curriculum is not None:
        yield error(
            f"env.curriculum={config.env.curriculum} with gates in env.streams: both say which stream is admitted. "
            "Use one of the two."
        )


FLOW_CHECKS = (check_dataflow, check_pace, check_evaluation, check_answers, check_sets, check_hooks, check_streams)
