"""What `dataflow.surplus=auto` reaches beside every fixed number of redundant groups, by the shipping controller.

    python benchmarks/surplus_auto.py [--set chosen_on] [--seeds 0:3] [--to FILE]    (5 minutes)

Trained groups per virtual second of whole runs of `STEPS` versions, from the first admission to the last publish: the
versions in which `auto` tries levels count. All numbers of a case see the same lengths (same seed). Wasted are sampled
tokens that were not trained. The constants of dataflow/surplus.py were chosen on the cases `chosen_on`; the figures of
benchmarks/results/surplus_auto.md are those of `held_back`, which were not run before.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from comparisons import must_complete
from provenance import provenance

from penstock.platform.cli.simulate import parse_seeds
from penstock.platform.simulator.config import SimulationConfig, parse_simulation

STEPS = 150
ALWAYS = f"grain=256 group_size=2 steps={STEPS}"
FREE_TRAINER = "train_fixed_s=0.5 train_s_per_token=1e-7"
"""Generation decides the speed."""
SETS: dict[str, dict[str, str]] = {
    "chosen_on": {
        "exponential, half of the slots": f"profile=exponential pools=2x16 batch=8 eta=0 max_surplus=4 {FREE_TRAINER}",
        "long tail, full engines, η = 1": f"profile=longtail pools=2x8 batch=8 eta=1 max_surplus=4 {FREE_TRAINER}",
        "constant, full engines": f"profile=constant pools=2x8 batch=8 eta=0 max_surplus=4 {FREE_TRAINER}",
        "long tail, slow trainer, η = 2": "profile=longtail pools=4x8 batch=8 eta=2 train_s_per_token=3e-3",
        # Held back at first; two of them were below 0.95, and CONFIDENCE and MEMORY_VERSIONS were changed for it.
        "short, three engines": f"profile=short pools=3x10 batch=12 eta=0 max_surplus=6 {FREE_TRAINER}",
        "long tail, σ = 1.4": f"profile=longtail sigma=1.4 pools=3x6 batch=6 group_size=3 eta=0 {FREE_TRAINER}",
        "long tail, few slots, η = 2": f"profile=longtail pools=4x4 batch=8 eta=2 {FREE_TRAINER}",
        "exponential, few slots, η = 1": f"profile=exponential pools=2x8 batch=10 eta=1 {FREE_TRAINER}",
        "constant, idle slots": f"profile=constant pools=2x24 batch=10 eta=0 {FREE_TRAINER}",
        "nearly constant, full engines, η = 1": f"profile=short sigma=0.2 pools=2x10 batch=8 eta=1 {FREE_TRAINER}",
        "exponential, slow trainer, η = 1": "profile=exponential pools=4x8 batch=8 eta=1 train_s_per_token=3e-3",
        "long tail, unequal engines": f"profile=longtail pools=3x6 engine_speeds=1,1,2 batch=7 eta=0 {FREE_TRAINER}",
        "episodes of three turns": f"profile=short turns=3 tool_mean_s=4 pools=2x8 batch=8 eta=0 {FREE_TRAINER}",
        "long tail, steps slow down": (
            f"profile=longtail pools=2x16 decode_per_sequence_s=4e-4 batch=8 eta=0 {FREE_TRAINER}"
        ),
    },
    "held_back": {
        "long tail, σ = 1.2, two engines": f"profile=longtail sigma=1.2 pools=2x9 batch=6 eta=0 {FREE_TRAINER}",
        "exponential, four engines": f"profile=exponential pools=4x5 batch=9 eta=0 {FREE_TRAINER}",
        "long tail, idle slots, η = 1": f"profile=longtail pools=3x16 batch=7 eta=1 {FREE_TRAINER}",
        "short, σ = 1, engines of speeds 1 and 3": (
            f"profile=short sigma=1 pools=2x10 engine_speeds=1,3 batch=8 eta=0 {FREE_TRAINER}"
        ),
        "constant, η = 2": f"profile=constant pools=2x12 batch=8 eta=2 {FREE_TRAINER}",
        "long tail, slow rewards": f"profile=longtail pools=2x10 reward_mean_s=20 batch=6 eta=0 {FREE_TRAINER}",
    },
}


class Arm(NamedTuple):
    """One number of redundant groups: trained groups per second of each seed, and the wasted share over all."""

    rates: list[float]
    wasted: float

    @property
    def rate(self) -> float:
        """Over all seeds: their groups ÷ their seconds."""
        return statistics.harmonic_mean(self.rates)


def run(config: SimulationConfig, seeds: Iterable[int]) -> Arm:
    outcomes = [must_complete(config, seed) for seed in seeds]
    rates = [len(one.trained.steps) * config.batch / one.train_s for one in outcomes]
    trained, sampled = (sum(sum(one.trained.lengths) for one in outcomes), sum(one.engines.tokens for one in outcomes))
    return Arm(rates, 1 - trained / sampled)


def table(of_set: str, seeds: range) -> Iterable[str]:
    """The lines of the results, as they become known."""
    yield "| case | s ≤ | s = 0 | best fixed | auto | auto ÷ best | by seed | wasted: best | auto |"
    yield "|---|---|---|---|---|---|---|---|---|"
    ratios = []
    for name, words in SETS[of_set].items():
        base = parse_simulation([*ALWAYS.split(), *words.split()])
        most = base.max_surplus if "max_surplus" in words else max(1, base.batch // 4)
        base = base.model_copy(update={"max_surplus": most})
        arms = {s: run(base.model_copy(update={"surplus": s}), seeds) for s in (*range(most + 1), "auto")}
        auto = arms.pop("auto")
        best = max(arms, key=lambda s: arms[s].rate)
        ratios.append(auto.rate / arms[best].rate)
        of_seeds = sorted(mine / theirs for mine, theirs in zip(auto.rates, arms[best].rates, strict=True))
        yield (
            f"| {name} | {most} | {arms[0].rate:.4f} | {arms[best].rate:.4f} (s = {best}) | {auto.rate:.4f} | "
            f"**{ratios[-1]:.3f}** | {of_seeds[0]:.3f} to {of_seeds[-1]:.3f} | {arms[best].wasted:.0%} | "
            f"{auto.wasted:.0%} |"
        )
    yield ""
    yield f"Lowest ratio {min(ratios):.3f}, mean {statistics.mean(ratios):.3f}, of {len(ratios)} cases."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=SETS, default="held_back")
    parser.add_argument("--seeds", type=parse_seeds, default=range(3), help="FIRST:END, as of penstock simulate")
    parser.add_argument("--to", type=Path, help="results file to write")
    arguments = parser.parse_args()
    logging.getLogger("penstock").setLevel(logging.ERROR)
    lines = []
    for line in table(arguments.set, arguments.seeds):
        print(line, flush=True)
        lines.append(line)
    if arguments.to is not None:
        seeds = f"{arguments.seeds.start} to {arguments.seeds.stop - 1}"
        head = [
            "# `dataflow.surplus=auto` beside every fixed number of redundant groups",
            "",
            f"Trained groups per virtual second over whole runs of {STEPS} versions, and the share of sampled tokens",
            f"that were not trained. Seeds {seeds}, n = {len(arguments.seeds)} each; the same lengths for all numbers.",
            "",
        ]
        tail = ["", *(f"- {one}" for one in provenance())]
        tail.append(
            f"- by: python benchmarks/surplus_auto.py --set {arguments.set} --seeds "
            f"{arguments.seeds.start}:{arguments.seeds.stop}"
        )
        arguments.to.write_text("\n".join([*head, *lines, *tail, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
