"""`penstock plan`: the fastest predicted uses of the devices of a run that fit in memory, and why the others lose."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Column, Table

from penstock.dataflow.errors import ConfigError, PenstockError
from penstock.platform.checks.cluster import check_pools
from penstock.platform.checks.configuration import check_config
from penstock.platform.cluster.costs import Prediction, Scales, Workload, generate_s, predict, send_s, swap_s, train_s
from penstock.platform.cluster.planner import OF_TRAINER, Candidate, Plan, Search, excess_gib, search
from penstock.platform.config.compose import compose_all
from penstock.platform.config.findings import Finding
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.run_files import METRICS_FILE
from penstock.platform.metrics.trackers.jsonl import read_metrics
from penstock.platform.metrics.trajectory_table import TRAJECTORIES_DIR, read_trajectories
from penstock.platform.run.saved_config import read_saved_config

NUM_PLANS = 5
WARM_STEPS = 1
FEWEST_STEPS = 4
_WIDTH = 170

Row = dict[str, float]
"""Metrics of one training step."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The cost model scaled to half of the steps of a run, and compared with the other half."""

    workload: Workload
    scales: Scales
    predicted_step_s: float
    """By the scaled model."""
    measured_step_s: float
    """Mean of the steps that were not fitted."""


def run_plan(
    overrides: Sequence[str],
    *,
    config_dir: Path | None,
    calibrate: Path | None,
    answer_tokens: float | None,
    as_json: bool,
) -> int:
    """Search and print; returns 1 if no plan fits.

    Raises:
        ConfigError: If the configuration is invalid apart from what is searched, its accelerators are not known, or
            no answers have that mean length.
    """
    composition = compose_all(overrides, config_dir)
    config = composition.config
    problems = composition.problems or [finding.message for finding in check_pools(config)] if config else []
    if config is None or problems:
        raise ConfigError(problems or composition.problems)
    composition.settle(_check_unsearched)
    config = composition.config
    assert config is not None, "settling replaces it by another one"
    longest = config.rollout.sampling.max_new_tokens
    if answer_tokens is not None and not 0 < answer_tokens <= longest:
        raise ConfigError(
            [
                f"--answer-tokens {answer_tokens:g} is not in (0, {longest}]: answers have at most "
                f"rollout.sampling.max_new_tokens={longest} tokens, so no step would take what is predicted. Give a "
                "mean length in this range."
            ]
        )
    calibration = None if calibrate is None else calibrated(calibrate, config)
    workload = Workload.assumed(config, answer_tokens)
    if calibration is not None and answer_tokens is None:
        workload = calibration.workload
    found = search(config, workload, Scales() if calibration is None else calibration.scales)
    refused = Counter[str]()
    best = list(best_plans(found, refused))
    if as_json:
        figures = _figures(found, workload, calibration, best, refused)
        print(json.dumps({"derived": list(composition.derived.values())} | figures))
    else:
        for sentence in composition.derived.values():
            print(f"warning {sentence}")
        _print(found, workload, calibration, best, refused)
    return int(not best)


def _check_unsearched(config: RunConfig) -> Iterator[Finding]:
    """Run the checks of `penstock train`, apart from those of settings of the trainer that are searched."""
    searched = [f"trainer.{name}" for name in OF_TRAINER]
    return (finding for finding in check_config(config, "train") if not finding.touches(searched))


def best_plans(found: Search, refused: Counter[str]) -> Iterator[Candidate]:
    """The fastest plans that fit and can start, each with another split or another tensor parallelism.

    Args:
        found: The candidates.
        refused: Counts the messages of the checks that refuse a candidate.
    """
    seen: set[tuple[int, int]] = set()
    for candidate in found.fitting():
        plan = candidate.plan
        if (plan.num_ranks, plan.tensor_parallel_size) in seen:
            continue
        findings = check_config(plan.applied(found.config), "train")
        errors = [finding.message for finding in findings if finding.severity == "error"]
        if errors:
            refused[errors[0]] += 1
            continue
        seen.add((plan.num_ranks, plan.tensor_parallel_size))
        yield candidate
        if len(seen) == NUM_PLANS:
            return


def calibrated(run_dir: Path, config: RunConfig) -> Calibration:
    """Scale the cost model to a run.

    Args:
        run_dir: Of the run.
        config: What is planned; its pools name the accelerators of pools of the run that have no type.

    Raises:
        ConfigError: If the directory holds no run, or its accelerators are not known.
        PenstockError: If the run has too few steps.
    """
    run = RunConfig.model_validate(read_saved_config(run_dir))
    pools = {
        name: pool if pool.accelerator_type or name not in config.cluster.pools
        else pool.model_copy(update={"accelerator_type": config.cluster.pools[name].accelerator_type})
        for name, pool in run.cluster.pools.items()
    }  # fmt: skip
    run = run.model_copy(update={"cluster": run.cluster.model_copy(update={"pools": pools})})
    fitted, compared = halves(run_dir)
    prompts = [
        len(ids) - row["num_tokens"]
        for table in sorted((run_dir / TRAJECTORIES_DIR).glob("step_*.parquet"))
        for row in read_trajectories(table)
        if (ids := row.get("token_ids"))
    ]
    answer_tokens = float(column(fitted, "length/mean_tokens").mean())
    prompt_tokens = float(np.mean(prompts)) if prompts else Workload.assumed(run).prompt_tokens
    workload = Workload(prompt_tokens, answer_tokens)
    step_s = column(fitted, "throughput/step_s")
    busy_s = step_s * (1 - column(fitted, "idle/engine_share"))
    scales = Scales(
        train=float(column(fitted, "trainer/step_s").mean()) / train_s(run, workload),
        generate=float(busy_s.mean()) / generate_s(run, workload),
        publish=float(column(fitted, "weights/publish_s").mean()) / (send_s(run) + swap_s(run)),
    )
    measured = float(column(compared, "throughput/step_s").mean())
    return Calibration(workload, scales, predict(run, workload, scales).step_s, measured)


def halves(run_dir: Path) -> tuple[list[Row], list[Row]]:
    """Metrics of the steps to fit and of those to compare, without the first one, which compiles and allocates.

    They are alternating eighths of the run, so that a machine that becomes slower during it affects both.

    Raises:
        PenstockError: If the run has too few steps.
    """
    rows = training_rows(run_dir)[WARM_STEPS:]
    if len(rows) < FEWEST_STEPS:
        raise PenstockError(
            f"{run_dir}: {len(rows)} training steps after the first, but {FEWEST_STEPS} are needed, half to fit "
            "the costs and half to compare. Use a longer run of `penstock train`."
        )
    length = max(len(rows) // 8, 1)
    fitted = [row for step, row in enumerate(rows) if step // length % 2 == 0]
    return fitted, [row for step, row in enumerate(rows) if step // length % 2]


def training_rows(run_dir: Path) -> list[Row]:
    """Metrics of every training step, without evaluations."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        raise PenstockError(
            f"{path}: no such file. Give --calibrate the directory of a run, e.g. runs/arithmetic-seed0."
        )
    lines = [dict(record.metrics) for record in read_metrics(run_dir)]
    return [metrics for metrics in lines if "throughput/step_s" in metrics and "length/mean_tokens" in metrics]


def column(rows: list[Row], name: str) -> NDArray[np.float64]:
    return np.array([row.get(name, 0.0) for row in rows], dtype=np.float64)


def _figures(
    found: Search,
    workload: Workload,
    calibration: Calibration | None,
    best: Sequence[Candidate],
    refused: Counter[str],
) -> dict[str, Any]:
    config, scales = found.config, Scales() if calibration is None else calibration.scales
    given = Candidate(Plan.of(config), predict(config, workload, scales))
    nearest = min(found.too_large, key=lambda one: one.excess_gib, default=None)
    return {
        "workload": asdict(workload),
        "calibration": None if calibration is None else asdict(calibration),
        "plans": [_figures_of(one) | {"overrides": one.plan.overrides(config)} for one in best],
        "given": _figures_of(given) | {"over_memory_gib": max(excess_gib(config), 0.0)},
        "slower": [
            {"bound": bound, "count": len(slower), "fastest": _figures_of(slower[0])}
            for bound, slower in _slower(found, best)
        ],
        "over_memory": {"count": len(found.too_large), "nearest": None if nearest is None else asdict(nearest)},
        "refused": dict(refused.most_common()),
    }


def _figures_of(one: Candidate) -> dict[str, Any]:
    return {"plan": asdict(one.plan), "predicted": asdict(one.predicted)}


def _print(
    found: Search,
    workload: Workload,
    calibration: Calibration | None,
    best: Sequence[Candidate],
    refused: Counter[str],
) -> None:
    console, config = Console(highlight=False, soft_wrap=True, markup=False, emoji=False), found.config
    console.width = max(console.width, _WIDTH)  # also where the output is piped
    console.print(
        f"prompts of {workload.prompt_tokens:.0f} and answers of {workload.answer_tokens:.0f} tokens on average; "
        f"{config.dataflow.batch_groups} groups x {config.dataflow.group_size} in a step"
    )
    scales = Scales() if calibration is None else calibration.scales
    if calibration is None:
        console.print("Costs are assumed from data sheets. `--calibrate RUN` scales them to a run of yours.")
    else:
        off = calibration.predicted_step_s / calibration.measured_step_s
        console.print(
            f"calibrated: training x {scales.train:.3g}, generation x {scales.generate:.3g}, publishing x "
            f"{scales.publish:.3g}; a step of the run is predicted to take {calibration.predicted_step_s:.3g} s, and "
            f"took {calibration.measured_step_s:.3g} s in the half that was not fitted ({off:.2f})"
        )
    columns = [Column(one, no_wrap=True) for one in ("", "step s", "trainer", "engines")]
    figures = ("train s", "generate s", "publish s", "trainer idle", "engines idle")
    columns += [*(Column(one, justify="right") for one in figures), Column("bound by", no_wrap=True)]
    table = Table(*columns, title="fastest plans", title_justify="left")
    for number, one in enumerate(best, start=1):
        table.add_row(str(number), *_row(one.plan, one.predicted))
    given, excess = _row(Plan.of(config), predict(config, workload, scales)), excess_gib(config)
    if excess > 0:
        given[-1] = f"over memory by {excess:.1f} GiB"
    table.add_row("given", *given, style="dim")
    console.print(table)
    for number, one in enumerate(best, start=1):
        console.print(f"{number}: {' '.join(one.plan.overrides(config))}")
    if not best:
        console.print("No plan fits.")
    for sentence in _others(found, best, refused):
        console.print(sentence)


def _row(plan: Plan, predicted: Prediction) -> list[str]:
    return [
        f"{predicted.step_s:.3g}",
        plan.trainer_words,
        f"{plan.num_engines} over {plan.tensor_parallel_size}",
        f"{predicted.train_s:.3g}",
        f"{predicted.generate_s:.3g}",
        f"{predicted.publish_s:.3g}",
        f"{predicted.trainer_idle:.0%}",
        f"{predicted.engine_idle:.0%}",
        predicted.bound,
    ]


def _slower(found: Search, best: Sequence[Candidate]) -> Iterator[tuple[str, list[Candidate]]]:
    """What they are bound by, and the plans that lose for it, fastest first."""
    shown = {(one.plan.num_ranks, one.plan.tensor_parallel_size) for one in best}
    for bound in ("trainer", "engines", "both"):
        slower = [
            one
            for one in found.candidates
            if one.predicted.bound == bound and (one.plan.num_ranks, one.plan.tensor_parallel_size) not in shown
        ]
        if slower:
            yield bound, slower


def _others(found: Search, best: Sequence[Candidate], refused: Counter[str]) -> Iterator[str]:
    """Why other plans lose, one sentence for each reason."""
    waits = {"trainer": "engines wait for the trainer", "engines": "the trainer waits for engines"}
    for bound, slower in _slower(found, best):
        plan, predicted = slower[0].plan, slower[0].predicted
        idle = predicted.engine_idle if bound == "trainer" else predicted.trainer_idle
        yield (
            f"{len(slower)} slower plans in which {waits.get(bound, 'they take turns')}: from "
            f"{predicted.step_s:.3g} s ({plan.words}; {idle:.0%} idle)"
        )
    if found.too_large:
        nearest = min(found.too_large, key=lambda one: one.excess_gib)
        yield (
            f"{len(found.too_large)} settings over memory: the nearest, {nearest.what}, by "
            f"{nearest.excess_gib:.1f} GiB on a device"
        )
    for message, count in refused.most_common():
        yield f"{count} plans refused: {message}"
