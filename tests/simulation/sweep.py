"""Seeds of a simulated run with faults: `python -m tests.simulation.sweep KEY=VALUE ... --seeds 0:20 [--json]`.

The keys are those of `penstock simulate` and `faults`, `checkpoint_every`, `check_every` (config.py). Exit code 1 if an
invariant is violated; the command that replays its seed is printed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from penstock.dataflow.errors import PenstockError
from penstock.platform.cli.main import print_error
from penstock.platform.cli.simulate import parse_seeds
from penstock.platform.simulator import sweep as simulator
from tests.simulation.config import FaultyConfig, parse_faulty
from tests.simulation.simulation import Outcome, simulate


@dataclass(slots=True)
class Sweep(simulator.Sweep):
    """Totals over the seeds run so far.

    Attributes:
        faults: Number of injected faults by name.
        ignored_reports: Reports that had no effect.
    """

    faults: Counter[str] = field(default_factory=Counter)
    ignored_reports: int = 0


def run_seeds(
    config: FaultyConfig, seeds: Iterable[int], *, on_seed: Callable[[Outcome], None] = lambda _outcome: None
) -> Sweep:
    """Simulate every seed with faults and checks."""
    sweep = Sweep(config)
    for seed in seeds:
        outcome = simulate(config, seed)
        sweep.add(outcome)
        sweep.faults += outcome.faults
        sweep.ignored_reports += outcome.ignored if outcome.violation is None else 0
        on_seed(outcome)
    return sweep


def summary(sweep: Sweep, overrides: list[str], started: float) -> dict[str, Any]:
    """The summary of `penstock simulate`, with the faults. The synchronous run has the same faults."""
    figures = simulator.summary(sweep, overrides, started, simulate=simulate)
    replay = None if figures["first_failing_seed"] is None else replay_command(overrides, figures["first_failing_seed"])
    return figures | {
        "faults": dict(sorted(sweep.faults.items())),
        "ignored_reports": sweep.ignored_reports,
        "replay": replay,
    }


def replay_command(overrides: list[str], seed: int) -> str:
    """The command that replays one seed."""
    return " ".join(["python -m tests.simulation.sweep", *overrides, f"--seeds {seed}:{seed + 1} --trace"])


def main() -> int:
    """Parse the command line and print the summary; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", default="0:1", metavar="FIRST:END")
    parser.add_argument("--json", action="store_true", help="Print one JSON object as the last line.")
    parser.add_argument("--trace", action="store_true", help="Print the last events of each seed.")
    arguments = parser.parse_intermixed_args()
    logging.getLogger("penstock").setLevel(logging.ERROR)  # fenced engines are part of the simulation

    def report(outcome: Outcome) -> None:
        if outcome.violation is not None:
            print(f"seed {outcome.seed}: {outcome.violation}", file=sys.stderr)
            print(f"  replay: {replay_command(arguments.overrides, outcome.seed)}", file=sys.stderr)
        if arguments.trace:
            print("\n".join(outcome.tail), file=sys.stderr)

    try:
        config, seeds = parse_faulty(arguments.overrides), parse_seeds(arguments.seeds)
    except PenstockError as error:
        print_error(error)
        return 2
    started = time.monotonic()
    figures = summary(run_seeds(config, seeds, on_seed=report), arguments.overrides, started)
    print(json.dumps(figures, indent=None if arguments.json else 2))
    return int(bool(figures["violations"]))


if __name__ == "__main__":
    sys.exit(main())
