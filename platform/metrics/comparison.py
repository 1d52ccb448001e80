"""`penstock compare RUN RUN…`: what runs were configured differently, and what came of it, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from statistics import fmean

from penstock.platform.metrics.leaves import leaves
from penstock.platform.metrics.progress import format_duration
from penstock.platform.metrics.run_record import RunRecord

MISSING = "–"
OF_EVERY_RUN = frozenset({"name", "run_dir", "overwrite", "resume"})
"""Keys that differ between any two runs and say nothing."""


def compare(records: Sequence[RunRecord]) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of two tables: results, and the keys of the configuration that are not equal in all runs.

    Args:
        records: The runs, in the order of the columns.

    Returns:
        Rows whose first cell is the name of the figure or key, followed by a cell per run.
    """
    results = [[name, *(_shown(figure, record) for record in records)] for name, figure in _FIGURES.items()]
    results = [row for row in results if set(row[1:]) != {MISSING}]
    configs = [{key: json.dumps(value) for key, value in leaves(record.config)} for record in records]
    keys = sorted({key for config in configs for key in config} - OF_EVERY_RUN)
    rows = [[key, *(config.get(key, MISSING) for config in configs)] for key in keys]
    return results, [row for row in rows if len(set(row[1:])) > 1]


def _shown(figure: Callable[[RunRecord], str], record: RunRecord) -> str:
    try:
        return figure(record)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError):  # not measured, or not at all yet
        return MISSING


def _change(before: str, after: str, form: str) -> Callable[[RunRecord], str]:
    def figure(record: RunRecord) -> str:
        found = [record.summary.get(key) for key in (before, after)]
        told = [MISSING if value is None else f"{value:{form}}" for value in found]
        return MISSING if told == [MISSING, MISSING] else " → ".join(told)

    return figure


def _last_staleness(record: RunRecord) -> str:
    return f"{fmean(record.values('staleness/mean_versions')[-10:]):.2f}"


_FIGURES: dict[str, Callable[[RunRecord], str]] = {
    "status": lambda record: str(record.summary.get("status", "incomplete")),
    "steps": lambda record: (
        f"{max(max(series.steps) for series in record.series.values()):,}"
        if not record.summary
        else f"{record.summary['steps']:,}"
    ),
    "evaluated on": lambda record: f"{record.evaluated_on} tasks" if record.evaluated_on else "nothing",
    "accuracy": _change("eval_before", "eval_after", ".1%"),
    "reward on these tasks": _change("eval_reward_before", "eval_reward_after", ".3f"),
    "reward, first → last steps": _change("reward_first", "reward_last", ".3f"),
    "wall time": lambda record: format_duration(record.summary["wall_s"]),
    "trained tokens per second": lambda record: f"{record.summary['tokens_trained'] / record.summary['wall_s']:,.0f}",
    "mean staleness, last 10 steps": _last_staleness,
    "trainer idle, last 10 steps": lambda record: f"{record.share_of_time('idle/trainer_share', 10):.0%}",
    "engines idle, last 10 steps": lambda record: f"{record.share_of_time('idle/engine_share', 10):.0%}",
    "groups failed": lambda record: f"{record.summary['ledger']['failed']:,}",
    "groups dropped": lambda record: f"{record.summary['ledger']['dropped']:,}",
    "peak memory": lambda record: f"{record.summary['peak_memory_gib']:.1f} GiB",
}
