"""A table of `penstock eval`'s lines, policy x domain: python examples/domains/table.py runs/domains/figures.jsonl"""

from __future__ import annotations

import json
import sys
from pathlib import Path

EXPERTS = {"sums": "add", "differences": "subtract", "products": "multiply"}
"""Evaluation set -> the expert of that domain."""


def table(lines: list[str]) -> str:
    """Accuracy in each domain, and in brackets its share of that of the domain's own expert."""
    found = {}
    for figures in map(json.loads, lines):
        path = Path(figures["model"])
        found[path.parent.name if path.name == "policy" else path.name] = figures["sets"]
    counts = {name: one["tasks"] for name, one in found["base"].items()}
    rows = ["| policy | " + " | ".join(f"{name}, n = {counts[name]}" for name in EXPERTS) + " |", "|---|---|---|---|"]
    for policy, sets in found.items():
        cells = []
        for name, expert in EXPERTS.items():
            accuracy, best = sets[name]["accuracy"], found[expert][name]["accuracy"]
            cells.append(f"{accuracy:.3f} ({accuracy / best:.2f})" if best else f"{accuracy:.3f}")
        rows.append(f"| {policy} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
