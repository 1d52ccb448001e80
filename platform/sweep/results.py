"""What a sweep has found: a table, a plot, and the figures behind them. Pure but for writing."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from penstock.platform.sweep.grid import Cell


class Found(NamedTuple):
    """One finished cell.

    Attributes:
        accuracy: Greedy, held out, after the last step.
        gain: What it rose by.
        mean_lag: Mean staleness of trained tokens, versions.
        max_lag: Largest of any trained token.
    """

    accuracy: float
    gain: float
    mean_lag: float
    max_lag: int


Results = Mapping[Cell, Found]


def table(results: Results, stalenesses: Sequence[int]) -> list[list[str]]:
    """Header and rows: accuracy by line and η, over seeds as mean (least … greatest); `–` where nothing is."""
    found: dict[tuple[str, int], list[Found]] = defaultdict(list)
    for cell, one in results.items():
        found[cell.line, cell.staleness].append(one)
        if cell.is_corrected and not cell.staleness:  # there is nothing to correct
            found[f"{cell.algorithm}, uncorrected", 0].append(one)
    lines = list(dict.fromkeys(cell.line for cell in results))
    rows = [["algorithm", *(f"η = {eta}" for eta in stalenesses)]]
    rows += [[line, *(_words(found.get((line, eta), [])) for eta in stalenesses)] for line in lines]
    lags = [[one for (_, at), some in found.items() if at == eta for one in some] for eta in stalenesses]
    rows.append(
        [
            "mean lag of trained tokens, versions",
            *(f"{mean(one.mean_lag for one in some):.2f}" if some else "–" for some in lags),
        ]
    )
    return rows


def write(results: Results, stalenesses: Sequence[int], folder: Path) -> None:
    """sweep.md, sweep.json and sweep.html."""
    rows = table(results, stalenesses)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    num_seeds = len({cell.seed for cell in results})
    note = f"Greedy held-out accuracy after training; n = {num_seeds} seed(s) per cell."
    (folder / "sweep.md").write_text("\n".join([note, "", *lines]) + "\n")
    figures = {cell.name: one._asdict() for cell, one in results.items()}
    (folder / "sweep.json").write_text(json.dumps(figures, indent=2) + "\n")
    _plot(results, folder / "sweep.html")


def _plot(results: Results, path: Path) -> None:
    """Accuracy over η, a line per algorithm; dashed where uncorrected."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for line in dict.fromkeys(cell.line for cell in results):
        by_eta: dict[int, list[float]] = defaultdict(list)
        for cell, one in results.items():
            if cell.line == line or (not cell.staleness and line == f"{cell.algorithm}, uncorrected"):
                by_eta[cell.staleness].append(one.accuracy)
        etas = sorted(by_eta)
        means = [mean(by_eta[eta]) for eta in etas]
        spread = {
            "array": [max(by_eta[eta]) - middle for eta, middle in zip(etas, means, strict=True)],
            "arrayminus": [middle - min(by_eta[eta]) for eta, middle in zip(etas, means, strict=True)],
        }
        dash = "dash" if line.endswith("uncorrected") else "solid"
        figure.add_scatter(
            x=[str(eta) for eta in etas], y=means, name=line, error_y=spread, mode="lines+markers", line={"dash": dash}
        )
    figure.update_layout(
        xaxis={"title": "max_staleness η", "type": "category"},
        yaxis={"title": "greedy held-out accuracy", "range": [0, 1.02]},
        template="plotly_white",
        title="Accuracy over the staleness bound",
    )
    figure.write_html(path, include_plotlyjs=True)


def _words(found: Sequence[Found]) -> str:
    if not found:
        return "–"
    values = [one.accuracy for one in found]
    spread = f" ({min(values):.3f} … {max(values):.3f})" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"
