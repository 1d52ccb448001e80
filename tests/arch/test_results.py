"""Figures say where they come from, and documents quote the newest ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def cells(results: str, row: str) -> list[str]:
    """The cells of a row of the first table of a results file, after its name."""
    (line,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", read(f"benchmarks/results/{results}"), re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


def milliseconds(row: str) -> int:
    return int(cells("weights_time.md", row)[0].removesuffix(" ms"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_name_the_commit_and_the_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for what in ("commit", "machine"):
        assert re.search(rf"^- {what}: \S", text, re.MULTILINE), f"no line `- {what}: …` (benchmarks/provenance.py)"


def test_the_readme_quotes_the_newest_figures_of_the_comparison_with_trl() -> None:
    ours, theirs, _ = cells("vs_trl.md", "step, median, s")
    num_steps, of_theirs, _ = cells("vs_trl.md", "steps measured, n")
    assert num_steps == of_theirs
    quoted = re.search(r"takes ([\d.]+) s, one of TRL 1\.16's `GRPOTrainer` ([\d.]+) s.*?n = (\d+)", read("README.md"))
    assert quoted is not None
    assert quoted.groups() == (ours, theirs, num_steps)


def test_the_page_on_weights_quotes_the_newest_figures_of_a_publish_with_its_checks() -> None:
    parts = [milliseconds(row) for row in ("sums", "write", "stage: map and check", "swap", "read back")]
    whole, copy = sum(parts), milliseconds("memcpy")
    page = read("docs/concepts/weights.md")
    rows = re.findall(r"^\| (?:the ranks|the engines|all phases) .*? \| ([\d,]+) \| ([\d.]+) \|", page, re.MULTILINE)
    expected = [(f"{one:,}", f"{one / copy:.1f}") for one in (*parts, whole)]
    assert rows == expected
    gathered = [milliseconds(row) for row in ("gather, put and load", "all-gather, put and load")]
    assert f"({gathered[0]:,} ms and {gathered[1]:,} ms)" in page
    assert gathered[0] < whole, "the page says that a whole publish is slower"
