"""The cells of a sweep: pure.

A cell is one training run. Corrected: the algorithm as its preset has it. Uncorrected: stale tokens count as if the
present policy had sampled them, which is what a preset is measured against; at η = 0 there is no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OF_THEIR_OWN = ("dppo", "topr", "online_dpo")
"""Presets whose loss looks at the behavior policy itself, or at none: there is nothing to leave out."""
UNCORRECTED = ("algorithm.correction=none", "algorithm.proximal=target")


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        algorithm: A preset of `conf/algorithm/`.
        staleness: η.
        is_corrected: See above.
    """

    algorithm: str
    staleness: int
    is_corrected: bool
    seed: int

    @property
    def name(self) -> str:
        """Of its run directory."""
        correction = "" if self.is_corrected else "-uncorrected"
        return f"{self.algorithm}{correction}-eta{self.staleness}-seed{self.seed}"

    @property
    def line(self) -> str:
        """Of the table and the plot."""
        return self.algorithm if self.is_corrected else f"{self.algorithm}, uncorrected"

    def overrides(self, folder: str) -> list[str]:
        """What distinguishes it, after the user's own overrides."""
        correction = () if self.is_corrected else UNCORRECTED
        return [
            f"algorithm={self.algorithm}",
            *correction,
            f"dataflow.max_staleness={self.staleness}",
            f"seed={self.seed}",
            f"name={self.name}",
            f"run_dir={folder}/{self.name}",
            "overwrite=true",
        ]


def grid(
    algorithms: Sequence[str], stalenesses: Sequence[int], seeds: Sequence[int], *, with_uncorrected: bool
) -> Iterator[Cell]:
    """All cells, seed by seed, so that a sweep that is cut short has whole tables of the first seeds."""
    for seed in seeds:
        for algorithm in algorithms:
            for staleness in stalenesses:
                yield Cell(algorithm, staleness, is_corrected=True, seed=seed)
                if with_uncorrected and staleness and algorithm not in OF_THEIR_OWN:
                    yield Cell(algorithm, staleness, is_corrected=False, seed=seed)
