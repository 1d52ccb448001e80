"""`penstock report RUN`: a self-contained HTML page about a run, which may be incomplete.

The template escapes all text of models, environments and users; what the scripts draw is JSON, and they insert it as
text. The page's `Content-Security-Policy` forbids network access.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from penstock.platform.metrics.atomic_file import write_text_atomically
from penstock.platform.metrics.progress import format_duration
from penstock.platform.metrics.report_charts import (
    STALENESS_COLORS,
    distribution_charts,
    expert_charts,
    flow_charts,
    health_charts,
    learning_charts,
    staleness_charts,
)
from penstock.platform.metrics.report_data import groups_data, timeline_data
from penstock.platform.metrics.run_files import REPORT_FILE
from penstock.platform.metrics.run_record import RunRecord, read_run
from penstock.platform.metrics.trajectory_table import encodable

_FACTS = (
    ("Model", "model.path"),
    ("Engine", "rollout.engine.type"),
    ("Engines", "rollout.num_engines"),
    ("Trainer", "trainer.backend"),
    ("Ranks", "trainer.num_ranks"),
    ("ZeRO stage", "trainer.zero_stage"),
    ("Advantage", "algorithm.advantage.type"),
    ("Loss", "algorithm.loss.type"),
    ("Correction", "algorithm.correction"),
    ("Groups per batch", "dataflow.batch_groups"),
    ("Group size", "dataflow.group_size"),
    ("Max staleness", "dataflow.max_staleness"),
    ("Reward", "reward.fn"),
    ("Environment", "env.factory"),
    ("Seed", "seed"),
)
PHASE_COLORS = {"generate": "#14b8a6", "score": "#f59e0b", "wait": "#94a3b8", "train": "#7c3aed"}
"""Of groups in the timeline."""
_LEDGER_ENDS = ("trained", "dropped", "filtered", "failed", "live")


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run directory and return its path.

    Raises:
        PenstockError: If the directory is not that of a run.
    """
    record = read_run(run_dir)
    path = run_dir / REPORT_FILE
    write_text_atomically(path, render(record))
    return path


def render(record: RunRecord, stamp: str = "") -> str:
    """Return the page as text.

    Args:
        record: The run.
        stamp: State of the run's files if the page is served while the run goes on; it then polls its server.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.j2")
    found = [(label, record.lookup(path)) for label, path in _FACTS]
    facts = [
        (label, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        for label, value in found
        if value is not None
    ]
    if by := record.summary.get("computed_by"):
        facts.append(("Trainer's path", ", ".join(f"{what} {how}" for what, how in by.items())))
    if origin := record.environment.get("branched_from"):
        facts.append(("Branched from", f"{origin['run']}, step {origin['step']}, with its {origin['restored']}"))
    facts += [
        (f"From step {row['after_step'] + 1}", f"{row['key']} {row['before']} → {row['now']} ({row['by']})")
        for row in record.changes
    ]
    facts += [(label, value) for label, value in _machine(record.environment).items() if value]
    sections = {
        "Learning": [*learning_charts(record), *distribution_charts(record)],
        "Staleness": staleness_charts(record),
        "Experts": expert_charts(record),
        "Throughput": flow_charts(record),
    }
    groups = groups_data(record.rows(record.trajectories), record.rows(record.answers))
    page = template.render(
        plotly_js=Markup(get_plotlyjs()),  # noqa: S704 - the library itself
        css=_part("report.css"),
        javascript=_part("report.js"),
        stamp=stamp,
        name=record.summary.get("name") or record.config.get("name") or record.run_dir.resolve().name,
        status=record.summary.get("status", "incomplete"),
        version=record.summary.get("version"),
        command=record.environment.get("command", ""),
        missing=record.missing,
        error=_error(record),
        figures=_headline(record),
        facts=facts,
        sections={title: charts for title, charts in sections.items() if charts},
        health=health_charts(record),
        waits=_wait_bars(record),
        ledger=_ledger(record),
        slow_parts=list(record.summary.get("slow_parts", {}).values()),
        failed_attempts=sorted(record.summary.get("failed_attempts", {}).items(), key=lambda item: -item[1]),
        retries=int(sum(record.values("flow/retries")[-1:])),
        failures=record.failures,
        data={
            **groups,
            "timeline": timeline_data(record.timeline),
            "staleness_colors": STALENESS_COLORS,
            "phase_colors": PHASE_COLORS,
        },
        phases=PHASE_COLORS,
        legend=[
            (f"{age}" if age < len(STALENESS_COLORS) - 1 else f"≥ {age}", color)
            for age, color in enumerate(STALENESS_COLORS)
        ],
        config_text=record.config_text,
    )  # fmt: skip
    return encodable(page)


def _headline(record: RunRecord) -> list[tuple[str, str, str]]:
    """Label, value and detail of each figure at the top of the page."""
    summary = record.summary
    steps = summary.get("steps", max((max(series.steps) for series in record.series.values()), default=0))
    total = record.lookup("total_steps")
    figures = [("Steps", f"{steps:,}", f"of {total:,}" if isinstance(total, int) else "")]
    before, after = summary.get("eval_before"), summary.get("eval_after")
    if record.evaluated_on is None:
        figures.insert(0, ("Evaluation", "none", "evaluation.num_tasks=0"))
    elif after is not None:
        prompts = summary.get("skipped_prompts", {})
        evaluated, skipped = prompts.get("evaluated", 0), prompts.get("held_out", 0)
        details = [f"from {before:.1%}"] if before is not None else []
        details += [f"on {evaluated} of {evaluated + skipped} tasks"] if skipped else []
        figures.insert(0, (f"{record.evaluated_on.capitalize()} accuracy", f"{after:.1%}", ", ".join(details)))
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if last is not None:
        figures.insert(1, ("Reward, last steps", f"{last:.3f}", f"from {first:.3f}" if first is not None else ""))
    if not summary:
        return figures
    seen, bound = summary.get("max_staleness_seen"), summary.get("max_staleness_configured")
    return [
        *figures,
        ("Wall time", format_duration(summary.get("wall_s", 0.0)), f"{summary.get('wall_s', 0.0):,.0f} s"),
        ("Staleness seen", f"{seen}", f"of {bound} allowed"),
        ("Stale tokens", f"{summary.get('share_tokens_stale', 0.0):.1%}", "of those trained"),
        ("Mixed versions", f"{summary.get('multi_version_trajectories', 0):,}", "trajectories"),
        ("Tokens trained", _compact(summary.get("tokens_trained", 0)),
               f"of {_compact(summary.get('tokens_generated', 0))} sampled"),
        ("Peak memory", f"{summary.get('peak_memory_gib', 0.0):.1f} GiB", "PSS, all processes"),
    ]  # fmt: skip


def _compact(count: int) -> str:
    for limit, suffix in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if count >= limit:
            scale = 1000 if suffix == "k" else limit
            return f"{count / scale:.1f} {suffix}"
    return f"{count:,}"


def _wait_bars(record: RunRecord) -> list[dict[str, Any]]:
    """Busy and idle shares of the run, 0..1, for the trainer and the engines."""
    bars = []
    for component, metric, waits_for in (
        ("Trainer", "idle/trainer_share", "waits for a batch, a publish or an evaluation"),
        ("Engines", "idle/engine_share", "wait for credits or new weights"),
    ):
        if (idle := record.share_of_time(metric)) is not None:
            bars.append({"component": component, "busy_share": 1.0 - idle, "idle_share": idle, "waits_for": waits_for})
    return bars


def _ledger(record: RunRecord) -> dict[str, Any] | None:
    """Counts from the summary, or the last logged ones."""
    counts, reasons = record.summary.get("ledger"), record.summary.get("untrained", {})
    if not isinstance(counts, dict):
        latest = {end: record.values(f"flow/{end}") for end in ("admitted", *_LEDGER_ENDS)}
        if not all(latest.values()):
            return None
        counts = {end: int(values[-1]) for end, values in latest.items()}
    ends = [(end, int(counts.get(end, 0))) for end in _LEDGER_ENDS]
    admitted = int(counts.get("admitted", 0))
    is_balanced = admitted == sum(count for _, count in ends)
    return {"admitted": admitted, "ends": ends, "reasons": sorted(reasons.items()), "is_balanced": is_balanced}


def _part(name: str) -> Markup:
    """A style sheet or script of the page."""
    return Markup((Path(__file__).parent / name).read_text(encoding="utf-8"))  # noqa: S704 - our own file


def _machine(environment: Mapping[str, Any]) -> dict[str, str]:
    """Facts of `environment.json`."""
    cpus, packages = environment.get("cpus"), environment.get("packages", {})
    return {
        "Machine": ", ".join(filter(None, [environment.get("system", ""), f"{cpus} CPUs" if cpus else ""])),
        "Python": environment.get("python", ""),
        "Revision": environment.get("git") or "",
        **packages,
    }


def _error(record: RunRecord) -> dict[str, str] | None:
    """What ended a failed run: the sentence, and all of `error.txt`."""
    if not record.error or record.summary.get("status") == "completed":
        return None
    trace = record.error.partition("\nThe newest events of the ledger")[0].strip()
    # The exception is the last line that begins with its type, and what follows it.
    lines = trace.splitlines()
    start = max((index for index, line in enumerate(lines) if re.match(r"(\w+\.)*[A-Z]\w*: ", line)), default=0)
    return {"reason": "\n".join(lines[start:]), "text": record.error}
