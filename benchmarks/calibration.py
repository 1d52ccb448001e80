"""Fits the simulator's costs to a real run and compares the predicted with the measured step time.

    python benchmarks/calibration.py runs/arithmetic-seed0 [--json]        (`make calibrate RUN=runs/arithmetic-seed0`)

The costs are fitted to half of the steps, and the comparison uses the other half:

    training      trainer/step_s = fixed + per_token · trained tokens               least squares, both ≥ 0
    decoding      engine-seconds = base · tokens / n + per_sequence · tokens        least squares, both ≥ 0, then scaled
                                                                                    to the sum of the engine-seconds
    publishing    publish_s − stall_s during generation, stall_s while frozen       medians
    lengths       lognormal of the mean length; σ from the trajectory table

The settings of the dataflow and of weight updates are those of the run's configuration.

n is the mean number of running sequences per engine, estimated from the metrics as min(slots, trajectories of groups
that are not ready ÷ engines). All other work of engine and trainer, and the sharing of cores, is part of these costs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from comparisons import enough_steps, must_complete, steady_step_s
from numpy.typing import NDArray

from penstock.dataflow.errors import PenstockError
from penstock.platform.cli.main import print_error
from penstock.platform.cli.plan import Row, column, halves
from penstock.platform.metrics.trajectory_table import TRAJECTORIES_DIR, read_trajectories
from penstock.platform.simulator.config import SimulationConfig
from penstock.platform.simulator.sweep import rounded

PROMPT_TOKENS = 8
"""Any number serves: what prompts cost is part of the fitted costs."""


def calibrate(run_dir: Path) -> dict[str, Any]:
    """Fit the costs, simulate, and compare.

    Raises:
        PenstockError: If the run has too few steps.
    """
    fitted, compared = halves(run_dir)
    settings = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    config = fit(fitted, settings, lengths_sigma(run_dir))
    predicted = steady_step_s(must_complete(config, seed=0), config)
    window = config.eta + 1  # nothing is generated during the last steps, which empty the window
    steady = compared[:-window] or compared
    measured = float(np.mean([row["throughput/step_s"] for row in steady]))
    return {
        "run": run_dir.name,
        "steps_fitted": len(fitted),
        "steps_compared": len(steady),
        "predicted_step_s": rounded(predicted),
        "measured_step_s": rounded(measured),
        "predicted_over_measured": rounded(predicted / measured),
        "measured_step_s_of_fitted": rounded(float(column(fitted, "throughput/step_s").mean())),
        "costs": {name: getattr(config, name) for name in _FITTED},
    }


_FITTED = (
    "decode_base_s",
    "decode_per_sequence_s",
    "train_fixed_s",
    "train_s_per_token",
    "weight_bytes",
    "publish_bytes_per_s",
    "swap_s",
    "mean_tokens",
    "sigma",
)


def fit(rows: list[Row], settings: dict[str, Any], sigma: float) -> SimulationConfig:
    """Return a simulation with the costs of the run."""
    flow, rollout, weights = settings["dataflow"], settings["rollout"], settings["weights"]
    engines, slots = rollout["num_engines"], rollout["engine"]["max_num_seqs"]
    step_s = column(rows, "throughput/step_s")
    # The metric counts sampled tokens, but the simulated trainer is charged for prompts, too.
    prompts = PROMPT_TOKENS * flow["batch_groups"] * flow["group_size"]
    tokens = column(rows, "throughput/trained_tokens_per_s") * step_s + prompts
    fixed_s, per_token_s = two_terms(np.ones(len(rows)), tokens, column(rows, "trainer/step_s"))
    generating = (column(rows, "flow/live") - column(rows, "flow/ready")) * flow["group_size"] / engines
    busy_s = step_s * (1 - column(rows, "idle/engine_share")) * engines
    sampled = column(rows, "throughput/generated_tokens_per_s") * step_s
    running = np.clip(generating, 1.0, slots)
    base_s, per_sequence_s = two_terms(sampled / running, sampled, busy_s)
    # Tokens are counted when their trajectory ends, which may be in a later step, so only the sums are exact.
    scale = float(busy_s.sum() / np.maximum((base_s * sampled / running + per_sequence_s * sampled).sum(), 1e-9))
    stall_s = float(np.median(column(rows, "weights/stall_s")))
    publish_s = float(np.median(column(rows, "weights/publish_s")))
    num_bytes = int(np.median(column(rows, "weights/bytes")))
    return SimulationConfig(
        profile="longtail",
        mean_tokens=float(np.mean(column(rows, "length/mean_tokens"))),
        sigma=min(sigma, 3.0),
        cap_tokens=rollout["sampling"]["max_new_tokens"],
        prompt_tokens=PROMPT_TOKENS,
        grain=1,
        engines=engines,
        slots=slots,
        trainer_devices=1,
        colocated=settings["cluster"]["colocated"],
        decode_base_s=base_s * scale,
        decode_per_sequence_s=per_sequence_s * scale,
        prefill_s_per_token=0.0,
        train_s_per_token=max(per_token_s, 1e-12),
        train_fixed_s=max(fixed_s, 1e-6),
        weight_bytes=num_bytes,
        publish_bytes_per_s=num_bytes / max(publish_s - stall_s, 1e-6),
        swap_s=stall_s,
        reward_mean_s=0.0,
        steps=enough_steps(flow["max_staleness"]),
        batch=flow["batch_groups"],
        group_size=flow["group_size"],
        eta=flow["max_staleness"],
        on_expiry=flow["on_expiry"],
        surplus=flow["surplus"],
        max_surplus=flow.get("max_surplus") or max(1, flow["batch_groups"] // 4),
        min_group_size=min(2, flow["group_size"]) if (least := flow["min_group_size"]) is None else least,
        stream=flow["stream_micro_batches"],
        routing=rollout["routing"],
        adaptive_concurrency=True,
        update_mode=weights["update_mode"],
        overlap=weights["overlap"],
    )


def lengths_sigma(run_dir: Path) -> float:
    """σ of the logarithm of the sampled lengths in the trajectory table; 0.5 if there is no table."""
    tables = sorted((run_dir / TRAJECTORIES_DIR).glob("step_*.parquet"))
    lengths = [row["num_tokens"] for table in tables for row in read_trajectories(table)]
    return float(np.std([math.log(max(length, 1)) for length in lengths])) if lengths else 0.5


def two_terms(
    first: NDArray[np.float64], second: NDArray[np.float64], target: NDArray[np.float64]
) -> tuple[float, float]:
    """Least squares of `target = a · first + b · second` with a, b ≥ 0."""
    (a, b), *_ = np.linalg.lstsq(np.stack([first, second], axis=1), target, rcond=None)
    if a < 0:
        return 0.0, float(second @ target / (second @ second))
    if b < 0:
        return float(first @ target / (first @ first)), 0.0
    return float(a), float(b)


def main() -> int:
    """Parse the command line and print the figures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="Run directory, e.g. runs/arithmetic-seed0.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    arguments = parser.parse_args()
    try:
        figures = calibrate(arguments.run)
    except PenstockError as error:
        print_error(error)
        return 1
    print(json.dumps(figures, indent=None if arguments.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
