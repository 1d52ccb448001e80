"""Packing on long-tailed lengths: how full micro-batches are, and how even ranks.

    python benchmarks/packing.py            (seconds; writes benchmarks/results/packing.md)

Lognormal lengths, mean 1,024 tokens, cut at the budget of 8,192; as many sequences as fill the given number of bins (a
bin is a micro-batch of a rank). Columns: useful tokens over bins × budget, one row per micro-batch (variable-length
attention); useful over padded tokens, several rows under a mask (sdpa, where rows are kept short on purpose, since a
mask costs a row's square); the same with every sequence padded to the longest; the most loaded rank's cost over the
mean (`sequence_cost`), and what the longest sequence alone forces it to.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np
from provenance import provenance

from penstock.trainer.batches.packing import BatchPlan, RowLayout, plan_batch, sequence_cost

BUDGET = 8192
MEAN_TOKENS = 1024
ATTENTION_SHARE = 2e-5
SEEDS = range(20)
RESULT = Path(__file__).parent / "results" / "packing.md"


def lengths_for(num_bins: int, sigma: float, seed: int) -> list[int]:
    """As many as make `num_bins` bins 98 % full."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < 0.98 * num_bins * BUDGET:
        drawn = rng.lognormal(np.log(MEAN_TOKENS) - sigma**2 / 2, sigma)
        lengths.append(int(np.clip(drawn, 1, BUDGET)))
    return lengths


def plan_of(lengths: list[int], num_ranks: int, layout: RowLayout) -> BatchPlan:
    return plan_batch(lengths, num_ranks, BUDGET, attention_share=ATTENTION_SHARE, layout=layout)


def full(lengths: list[int], num_ranks: int) -> float:
    """Useful tokens over the tokens that all micro-batches may hold."""
    return sum(lengths) / (sum(map(len, plan_of(lengths, num_ranks, "single_row").ranks)) * BUDGET)


def padded_to_longest(lengths: list[int]) -> float:
    """Every sequence padded to the longest of the batch, whatever the number of rows."""
    return sum(lengths) / (len(lengths) * max(lengths))


def imbalance(lengths: list[int], num_ranks: int, layout: RowLayout) -> tuple[float, float]:
    """Max over mean of the ranks' costs, and what the longest sequence alone forces."""
    costs = [
        sum(sequence_cost(lengths[i], ATTENTION_SHARE) for micro_batch in rank for row in micro_batch.rows for i in row)
        for rank in plan_of(lengths, num_ranks, layout).ranks
    ]
    mean = sum(costs) / num_ranks
    return max(costs) / mean, sequence_cost(max(lengths), ATTENTION_SHARE) / mean


def main() -> None:
    columns = ("bins", "σ", "ranks", "one row: of the budget", "several rows: of the padded", "pad to longest")
    header = f"| {' | '.join(columns)} | max ÷ mean cost | forced |"
    lines = ["# Packing of long-tailed lengths", "", header, "|" + " --- |" * 8]
    for num_bins in (32, 64, 256):
        for sigma in (0.5, 1.0, 1.5):
            for num_ranks in (1, 8):
                draws = [lengths_for(num_bins, sigma, seed) for seed in SEEDS]
                single = [full(lengths, num_ranks) for lengths in draws]
                rows = [plan_of(lengths, num_ranks, "rows").efficiency for lengths in draws]
                longest = median(padded_to_longest(lengths) for lengths in draws)
                uneven, forced = zip(*(imbalance(lengths, num_ranks, "single_row") for lengths in draws), strict=True)
                lines.append(
                    f"| {num_bins} | {sigma} | {num_ranks} | {median(single):.3f} ({min(single):.3f}) | "
                    f"{median(rows):.3f} ({min(rows):.3f}) | {longest:.2f} | {median(uneven):.3f} ({max(uneven):.3f}) "
                    f"| {median(forced):.2f} |"
                )
    notes = [f"median and worst of {len(SEEDS)} seeds", *provenance(), "by: python benchmarks/packing.py"]
    lines += ["", *(f"- {note}" for note in notes)]
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
