"""The charts of the report: Plotly figures as HTML fragments. They contain only numbers and no text of a model."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup

from penstock.platform.metrics.hub import catalog
from penstock.platform.metrics.run_record import RunRecord, Series

INK, MUTED, GRID = "#1f2937", "#6b7280", "#eceff3"
"""In dark mode, report.css replaces these."""
BLUE, TEAL, AMBER, VIOLET = "#2563eb", "#0d9488", "#d97706", "#7c3aed"
FONT = "Inter, 'Segoe UI', system-ui, -apple-system, 'Helvetica Neue', Arial, sans-serif"

STALENESS_COLORS = ("#14b8a6", "#3b82f6", "#f59e0b", "#f97316", "#e11d48")
"""Colors of staleness 0, 1, 2, 3 and ≥ 4 versions, used in the histogram and in the span bars."""

_SMOOTHING_STEPS = 10
_MAX_POINTS = 600
"""Of a line; neighbouring steps of a longer run are drawn as their mean."""
_MAX_LINES = 12
"""Of one chart with a line for each rank or engine."""
_COLORS = (TEAL, BLUE, AMBER, VIOLET, "#db2777", "#65a30d")


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with its title and caption."""

    title: str
    caption: str
    html: Markup


def staleness_color(staleness: int) -> str:
    """Color of a token of this staleness."""
    return STALENESS_COLORS[max(0, min(staleness, len(STALENESS_COLORS) - 1))]


def learning_charts(record: RunRecord) -> list[Chart]:
    """Training reward and held-out accuracy over the steps."""
    charts = []
    reward = record.series.get("reward/mean")
    if reward:
        figure = _figure("step")
        _add_raw_and_smooth(figure, reward, BLUE)
        caption = f"Mean reward of the trained trajectories per step; the line is the mean of {_SMOOTHING_STEPS} steps."
        charts.append(Chart("Training reward", caption, _html(figure)))
    # The first and the last evaluation are also in the summary.
    logged = record.series.get("eval/accuracy", Series([], []))
    accuracy = dict(zip(logged.steps, logged.values, strict=True))
    for step, key in ((0, "eval_before"), (record.summary.get("steps"), "eval_after")):
        if isinstance(step, int) and isinstance(record.summary.get(key), int | float):
            accuracy.setdefault(step, record.summary[key])
    # A figure without the tasks that were too long would look like one of all.
    counted = ""
    if any(skipped := record.values("eval/skipped")):
        num_skipped, num_tasks = max(zip(skipped[::-1], record.values("eval/tasks")[::-1], strict=False))
        counted = f" On {num_tasks:.0f} of {num_tasks + num_skipped:.0f} tasks: the other prompts are too long."
    kind = (record.evaluated_on or "held-out").capitalize()
    trained = (
        "none of which is trained on" if kind == "Held-out" else "which are trained on, too: it says what is learned"
    )
    if kind == "Held-out and training":
        trained = "some of which are trained on, too"
    charts += _evaluation_chart(
        record, f"{kind} accuracy", f"Share of solved tasks, {trained}.{counted}", "eval/accuracy",
        Series(sorted(accuracy), [accuracy[step] for step in sorted(accuracy)]), ".0%",
    )  # fmt: skip
    rewards = record.values("eval/reward_mean")
    if rewards != logged.values:  # with rewards of 0 and 1 they are the same
        overall = record.series.get("eval/reward_mean", Series([], []))
        caption = f"Mean reward on the same tasks.{counted}"
        charts += _evaluation_chart(record, f"{kind} reward", caption, "eval/reward_mean", overall, "")
    passed = {name.rpartition("/")[2]: name for name in record.series if re.fullmatch(r"eval/pass_at/\d+", name)}
    lines = [(f"pass@{k}", passed[k], color) for k, color in zip(sorted(passed, key=int), itertools.cycle(_COLORS))]
    voted = {name.rpartition("/")[2]: name for name in record.series if re.fullmatch(r"eval/maj_at/\d+", name)}
    lines += [(f"maj@{k}", name, _COLORS[-1]) for k, name in voted.items()]
    caption = "Share of tasks that one of k answers solves, and that the most frequent of k answers solves."
    return charts + _line_chart(record, f"{kind} pass@k", caption, lines, ".0%")


def _evaluation_chart(
    record: RunRecord, title: str, caption: str, metric: str, overall: Series, y_format: str
) -> list[Chart]:
    """A chart of one metric of the evaluations, with a line for each evaluation set; empty if there was none."""
    prefix = f"{metric}/"
    sets = {name.removeprefix(prefix): one for name, one in record.series.items() if name.startswith(prefix)}
    if record.lookup("evaluation.sets"):  # which are not among the tasks of the others
        lines = {"evaluation": overall, **sets}
    else:
        lines = sets if len(sets) > 1 else {"all": overall}
    figure = _figure("step")
    for (name, series), color in zip(lines.items(), itertools.cycle(_COLORS)):
        if series.steps:
            figure.add_scatter(
                x=series.steps, y=series.values, name=name, mode="lines+markers", line={"color": color, "width": 2.5},
                marker={"size": 8}, hovertemplate=f"step %{{x}}: %{{y:{y_format or '.4g'}}}<extra>{name}</extra>",
            )  # fmt: skip
    figure.update_layout(showlegend=len(lines) > 1)
    figure.update_yaxes(tickformat=y_format)
    return [Chart(title, caption, _html(figure))] if figure.data else []


def distribution_charts(record: RunRecord) -> list[Chart]:
    """How rewards and lengths of the sampled trajectories are distributed over the run."""
    rewards = [(step, reward) for step, reward, _ in record.outcomes if reward is not None]
    lengths = [(step, float(num_tokens)) for step, _, num_tokens in record.outcomes]
    caption = "Share of the sampled trajectories; strong color is many."
    return [
        *_heatmap("Rewards over the run", f"{caption} One column per recorded step or several.", rewards, TEAL),
        *_heatmap("Lengths over the run", f"{caption} In sampled tokens.", lengths, BLUE),
    ]


def _heatmap(title: str, caption: str, points: list[tuple[int, float]], color: str) -> list[Chart]:
    """Columns are steps, rows are bins of the values; each column sums to 1."""
    if len({step for step, _ in points}) < 2:
        return []
    values = np.array([float(f"{value:.4g}") for _, value in points])  # equal ones have one row
    steps, column = np.unique([step for step, _ in points], return_inverse=True)
    distinct = np.unique(values)
    if len(distinct) <= 12:  # e.g. rewards of 0 and 1
        centers, row = distinct, np.searchsorted(distinct, values)
    else:
        edges = np.linspace(values.min(), values.max(), 25)
        centers, row = (edges[1:] + edges[:-1]) / 2, np.clip(np.searchsorted(edges, values, "right") - 1, 0, 23)
    counts = np.zeros((len(centers), len(steps)))
    np.add.at(counts, (row, column), 1.0)
    shares = counts / counts.sum(axis=0)
    figure = _figure("step")
    figure.add_heatmap(
        x=steps.tolist(), y=[float(f"{center:.4g}") for center in centers], z=np.round(shares, 3).tolist(),
        colorscale=[[0, "rgba(128,128,128,0.06)"], [1, color]], zmin=0, zmax=float(shares.max()), showscale=False,
        hovertemplate="step %{x}, about %{y}: %{z:.0%}<extra></extra>",
    )  # fmt: skip
    if len(distinct) <= 12:
        figure.update_yaxes(type="category")
    return [Chart(title, caption, _html(figure))]


def staleness_charts(record: RunRecord) -> list[Chart]:
    """Histogram of the trained tokens' staleness, and staleness over the steps."""
    charts = []
    if total := sum(record.staleness.values()):
        bound = record.summary.get("max_staleness_configured", record.lookup("dataflow.max_staleness"))
        versions = list(range(max([*record.staleness, bound if isinstance(bound, int) else 0]) + 1))
        tokens = [record.staleness.get(age, 0) for age in versions]
        shares = [count / total for count in tokens]
        figure = _figure("staleness (versions)")
        figure.add_bar(
            x=versions, y=shares, marker={"color": [staleness_color(age) for age in versions], "cornerradius": 5},
            width=0.62,
            customdata=tokens, text=[f"{share:.1%}" for share in shares], textposition="outside", cliponaxis=False,
            hovertemplate="staleness %{x}: %{customdata:,} tokens<extra></extra>",
        )  # fmt: skip
        figure.update_xaxes(tickmode="linear", dtick=max(1, len(versions) // 12), range=[-0.6, max(versions) + 0.9])
        figure.update_yaxes(tickformat=".0%", range=[0, max(shares) * 1.15])
        caption = "Share of the trained tokens by the number of versions between sampling and training."
        if isinstance(bound, int):
            figure.add_vline(x=bound + 0.5, line={"color": INK, "width": 1.5, "dash": "dot"})
            figure.add_annotation(
                x=bound + 0.46, y=1.06, yref="paper", text=f"max_staleness {bound}", showarrow=False, xanchor="right",
                font={"size": 12, "color": INK},
            )  # fmt: skip
            caption += " No token may be to the right of the bound."
        charts.append(Chart("Staleness of the trained tokens", caption, _html(figure)))
    lines = [("max", "staleness/max_versions", AMBER), ("mean", "staleness/mean_versions", BLUE)]
    charts += _line_chart(record, "Staleness over the run", "Of the tokens trained in each step, in versions.", lines)
    return charts


def expert_charts(record: RunRecord) -> list[Chart]:
    """The experts of a mixture over the steps; empty for a dense model."""
    shares = [
        ("differing", "routing/differing_share", AMBER),
        ("of no engine", "routing/unknown_share", BLUE),
        ("idle experts", "routing/idle_experts_share", TEAL),
    ]
    prefix = "routing/staleness_differing_share/"
    by_age = sorted(name for name in record.series if name.startswith(prefix))
    aged = [
        (f"staleness {name.removeprefix(prefix).replace('_', ' to ')}", name, staleness_color(number))
        for number, name in enumerate(by_age)
    ]
    load = [("busiest expert", "routing/max_load", VIOLET), ("balance loss", "routing/balance_loss", TEAL)]
    return [
        *_line_chart(
            record,
            "Choice of experts",
            "Share of the tokens × layers for which the trainer's router would choose other experts than the engine, "
            "for which no engine has recorded any, and share of the experts without a token.",
            shares,
            ".1%",
        ),
        *_line_chart(
            record, "Differing choices by staleness", "The same, of the tokens of one staleness.", aged, ".1%"
        ),
        *_line_chart(record, "Load of experts", "Tokens of the busiest expert over the mean of all.", load),
    ]


def flow_charts(record: RunRecord) -> list[Chart]:
    """Throughput and waiting times over the steps."""
    throughput = [
        ("sampled", "throughput/generated_tokens_per_s", TEAL),
        ("trained", "throughput/trained_tokens_per_s", BLUE),
    ]
    idle = [("trainer", "idle/trainer_share", BLUE), ("engines", "idle/engine_share", TEAL)]
    ranks, engines = _lines_of(record, "rank/product_tflops/", 1.0), _lines_of(record, "engine/kv_cache_usage/", -1.0)
    return [
        *_line_chart(record, "Throughput", "Tokens per second, sampled by the engines and trained.", throughput),
        *_line_chart(record, "Idle over the run", "Idle share of each step.", idle, ".0%"),
        *_line_chart(record, "Speed of the ranks", "TFLOP/s of a product of fixed size, once a step.", ranks),
        *_line_chart(record, "KV cache", "Largest share of each engine's cache that was in use.", engines, ".0%"),
    ]


def _lines_of(record: RunRecord, prefix: str, sign: float) -> list[tuple[str, str, str]]:
    """Lines of a metric of each rank or engine: of the `_MAX_LINES` with the smallest mean, with −1 the largest."""
    means = {name: _mean(one.values) for name, one in record.series.items() if name.startswith(prefix)}
    shown = sorted(means, key=lambda name: sign * means[name])[:_MAX_LINES]
    names = sorted(shown, key=lambda name: (len(name), name))  # engine-2 before engine-10
    kind = prefix.partition("/")[0]
    labels = [name.removeprefix(prefix) for name in names]
    return [
        (label if label.startswith(kind) else f"{kind} {label}", name, color)
        for label, name, color in zip(labels, names, itertools.cycle(_COLORS))
    ]


def health_charts(record: RunRecord) -> list[Chart]:
    """Small charts of metrics that indicate whether a run is healthy."""
    specifications = (
        ("Truncated turns", "Share of turns cut off at the token limit.", "length/truncated_share", BLUE),
        ("Groups without signal", "Share whose rewards are all equal.", "reward/zero_variance_share", BLUE),
        ("Entropy", "Nats per sampled token.", "loss/entropy", VIOLET),
        ("Gradient norm", "Before clipping.", "loss/grad_norm", VIOLET),
        ("Behavior weight", "Mean of exp(proximal − behavior); 1 is on-policy.", "ratio/behavior_mean", AMBER),
        ("Logprob mismatch", "Mean |proximal − behavior|, nats.", "mismatch/abs_logprob_mean", AMBER),
        ("Answer length", "Sampled tokens per trajectory, mean.", "length/mean_tokens", BLUE),
        ("Generation stall", "Seconds from freeze to resume per publish.", "weights/stall_s", TEAL),
        ("Changed weights", "Share of elements that differ from the previous version.", "weights/changed_share", TEAL),
    )
    charts = []
    for title, caption, metric, color in specifications:
        if metric in record.series:
            figure = _figure("step", height=210)
            _add_raw_and_smooth(figure, record.series[metric], color)
            healthy = f" Healthy: {catalog()[metric]['healthy']}."
            charts.append(Chart(title, caption + healthy, _html(figure)))
    return charts


def _line_chart(
    record: RunRecord, title: str, caption: str, lines: list[tuple[str, str, str]], y_format: str = ""
) -> list[Chart]:
    """A chart of several metrics, given as (name, metric, color); empty if none of them was logged."""
    figure = _figure("step")
    for name, metric, color in lines:
        if series := record.series.get(metric):
            mode = "lines+markers" if len(series.steps) < 3 else "lines"
            series = _thinned(series)
            figure.add_scatter(x=series.steps, y=series.values, name=name, mode=mode, line={"color": color, "width": 2})
    figure.update_layout(showlegend=True)
    figure.update_yaxes(tickformat=y_format, rangemode="tozero")
    return [Chart(title, caption, _html(figure))] if figure.data else []


def _add_raw_and_smooth(figure: go.Figure, series: Series, color: str) -> None:
    is_short = len(series.steps) < 3
    thin = _thinned(series)
    _set_range_of_constant(figure, series.values)
    figure.add_scatter(
        x=thin.steps, y=thin.values, mode="lines+markers" if is_short else "lines",
        opacity=1.0 if is_short else 0.3, line={"color": color, "width": 1.2},
        hovertemplate="step %{x}: %{y:.4g}<extra></extra>",
    )  # fmt: skip
    if not is_short:
        windows = [series.values[max(0, end - _SMOOTHING_STEPS) : end] for end in range(1, len(series.values) + 1)]
        smooth = _thinned(Series(series.steps, list(map(_mean, windows))))
        figure.add_scatter(
            x=smooth.steps, y=smooth.values, mode="lines",
            line={"color": color, "width": 2.5}, hoverinfo="skip",
        )  # fmt: skip


def _set_range_of_constant(figure: go.Figure, values: Sequence[float]) -> None:
    """Show a constant from 0 on, where Plotly would show a range of 2 around it."""
    finite = [value for value in values if math.isfinite(value)]
    if finite and max(finite) - min(finite) <= 1e-6 * abs(max(finite)) and max(finite) > 0:
        figure.update_yaxes(range=[0, 2 * max(finite)])


def _thinned(series: Series) -> Series:
    """At most `_MAX_POINTS` points: means of neighbouring steps, at the last of them; six digits of each."""
    every = max(1, -(-len(series.steps) // _MAX_POINTS))
    starts = range(0, len(series.steps), every)
    parts = [series.values[start : start + every] for start in starts]
    return Series(
        [series.steps[min(start + every, len(series.steps)) - 1] for start in starts],
        [float(f"{_mean(part):.6g}") for part in parts],
    )


def _mean(values: Sequence[float]) -> float:
    """Mean of the finite ones, since one NaN would hide its neighbours; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _figure(x_title: str, height: int = 290) -> go.Figure:
    title = {"font": {"color": MUTED, "size": 12}, "standoff": 8}
    axis = {
        "gridcolor": GRID, "zeroline": False, "linecolor": "#cbd5e1", "ticks": "", "automargin": True,
        "tickfont": {"color": MUTED, "size": 12}, "title": title,
    }  # fmt: skip
    layout = {
        "template": "none", "height": height, "margin": {"l": 44, "r": 14, "t": 14, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 13, "color": INK}, "showlegend": False,
        "hovermode": "x unified", "bargap": 0.3,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12, "color": MUTED}},
        "xaxis": {**axis, "title": {**title, "text": x_title}, "showgrid": False}, "yaxis": axis,
    }  # fmt: skip
    return go.Figure(layout=layout)  # in one piece: updates validate all of it again


def _html(figure: go.Figure) -> Markup:
    """Plotly's HTML, which the template does not escape because it contains only numbers."""
    config = {"displayModeBar": False, "responsive": True}
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, default_width="100%", config=config))  # noqa: S704
