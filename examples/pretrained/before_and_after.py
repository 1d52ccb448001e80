"""What a policy answered before and after a run: python examples/pretrained/before_and_after.py runs/facts-seed0"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq

NUM_SHOWN = 3
"""Of each evaluation set."""


def accuracy(run: Path) -> None:
    """Greedy accuracy by training step and evaluation set, and that of the sampled answers that were trained on."""
    print("step  accuracy of greedy answers, held out        reward of sampled answers")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    sampled: list[float] = []
    for row in rows:
        metrics = row["metrics"]
        if "reward/mean" in metrics:
            sampled.append(metrics["reward/mean"])
        sets = {name.rpartition("/")[2]: one for name, one in metrics.items() if name.startswith("eval/accuracy/")}
        if not sets and "eval/accuracy" in metrics:
            sets = {"all": metrics["eval/accuracy"]}
        if sets:
            last = sampled[-3:]
            of_sets = "  ".join(f"{name} {one:.2f}" for name, one in sets.items())
            of_batches = f"{sum(last) / len(last):.2f} in the last {len(last)} batches" if last else ""
            print(f"{row['step']:4}  {of_sets:40}    {of_batches}")


def transcripts(run: Path) -> None:
    """The same tasks, answered by the first policy and by the last."""
    first, *_, last = sorted((run / "evaluations").glob("*.parquet"))
    before, after = ({row["trajectory_id"]: row for row in pq.read_table(one).to_pylist()} for one in (first, last))
    shown: dict[str, int] = {}
    for name, row in sorted(before.items(), key=lambda one: one[1]["evaluation_set"]):
        of_set = row["evaluation_set"]
        if name not in after or shown.setdefault(of_set, 0) == NUM_SHOWN:
            continue
        shown[of_set] += 1
        print(f"\n{of_set or 'held out'}: {row['prompt'].strip()}")
        for when, one in (("before", row), ("after", after[name])):
            turns = [turn["text"] for turn in json.loads(one["turns"]) if turn["role"] == "policy"]
            print(f"  {when:6} {one['reward']:g}  {', then '.join(map(repr, turns or [one['response']]))}")


if __name__ == "__main__":
    accuracy(Path(sys.argv[1]))
    transcripts(Path(sys.argv[1]))
