"""The outputs of a run, as one bundle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.platform.metrics.hub import MetricsHub
from penstock.platform.metrics.memory_sampler import MemorySampler
from penstock.platform.metrics.trajectory_table import BadBatches, TrajectoryTable


@dataclass(frozen=True, slots=True)
class Instruments:
    """Outputs of a run: metrics, trajectories, dumped batches and console notes."""

    hub: MetricsHub
    memory: MemorySampler
    trajectories: TrajectoryTable
    bad_batches: BadBatches
    run_dir: Path
    note: Callable[[str], None]
