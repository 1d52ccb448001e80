"""Figures say where they come from, and documents quote the newest ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def cells(results: str, row: str) -> list[str]:
    """The cells of a row of the first table of a results file, after its name."""
    (line,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", read(f"benchmarks/results/{results}"), re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_name_the_commit_and_the_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for what in ("commit", "machine"):
        assert re.search(rf"^- {what}: \S", text, re.MULTILINE), f"no line `- {what}: …` (benchmarks/provenance.py)"


def test_the_readme_quotes_the_newest_figures_of_the_comparison_with_trl() -> None:
    ours, theirs, _ = cells("vs_trl.md", "step, median, s")
    num_steps, of_theirs, _ = cells("vs_trl.md", "steps measured, n")
    assert num_steps == of_theirs
    row = (
        r"^\| step of the demo, median \((\d+) steps each\) \| \[([\d.]+) s\]\(.*?\); "
        r"TRL 1\.16's `GRPOTrainer` ([\d.]+) s\."
    )
    quoted = re.search(row, read("README.md"), re.MULTILINE)
    assert quoted is not None
    assert quoted.groups() == (num_steps, ours, theirs)


def test_the_page_on_weights_quotes_the_newest_figures_of_a_publish_with_its_checks() -> None:
    rounds = json.loads(read("benchmarks/results/publish_path.json"))["seconds"]
    names = ("write", "sum", "stage and compare", "swap", "read back and compare")
    copy_ms = 1e3 * median(rounds["memcpy"])
    parts = [1e3 * median(rounds[name]) for name in names]
    whole = 1e3 * median([sum(one) for one in zip(*(rounds[name] for name in names), strict=True)])
    page = read("docs/concepts/weights.md")
    rows = re.findall(r"^\| (?:the ranks|the engines|all phases) .*? \| ([\d,]+) \| ([\d.]+) \|", page, re.MULTILINE)
    assert rows == [(f"{one:,.0f}", f"{one / copy_ms:.1f}") for one in (*parts, whole)]
    gathered = float(cells("publish_path.md", "**gather and load, equal checks**")[2])
    assert f"takes at least {gathered:.1f}," in page
    assert whole / copy_ms < gathered, "the page says that gathering takes longer"
