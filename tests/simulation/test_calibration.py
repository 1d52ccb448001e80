"""The fit on metrics of a run whose costs are known, and the prediction of its step time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from calibration import calibrate, fit
from comparisons import enough_steps, must_complete

from penstock.dataflow.errors import PenstockError
from penstock.platform.cli.plan import halves
from penstock.platform.simulator.config import SimulationConfig

KNOWN = SimulationConfig(
    profile="short",
    prompt_tokens=8,
    grain=1,
    engines=2,
    slots=16,
    kv_tokens=1_000_000,
    prefill_s_per_token=0.0,
    decode_base_s=4e-3,
    decode_per_sequence_s=2e-4,
    train_s_per_token=3e-4,
    train_fixed_s=0.3,
    weight_bytes=1_000_000,
    publish_bytes_per_s=2e6,
    swap_s=0.2,
    reward_mean_s=0.0,
    batch=16,
    group_size=4,
    eta=2,
    steps=enough_steps(2) + 12,
)

PROMPTS = KNOWN.prompt_tokens * KNOWN.batch * KNOWN.group_size
"""Tokens of the prompts of a batch: they are trained on, and the metrics do not count them."""


def settings(**flow: Any) -> dict[str, Any]:
    """The sections of `config.yaml` that are read."""
    return {
        "dataflow": {
            "batch_groups": KNOWN.batch,
            "group_size": KNOWN.group_size,
            "max_staleness": KNOWN.eta,
            "on_expiry": "wait",
            "surplus": 0,
            "min_group_size": 2,
            "stream_micro_batches": False,
            **flow,
        },
        "rollout": {
            "num_engines": KNOWN.engines,
            "engine": {"max_num_seqs": KNOWN.slots},
            "sampling": {"max_new_tokens": KNOWN.lengths.cap},
            "routing": "least_loaded",
            "adaptive_concurrency": True,
        },
        "weights": {"update_mode": "recompute_kv", "overlap": True},
        "cluster": {"colocated": False},
    }


def row(step_s: float, tokens: float, *, running: float, busy_s: float, trainer_s: float) -> dict[str, float]:
    """Metrics of one step."""
    return {
        "throughput/step_s": step_s,
        "throughput/trained_tokens_per_s": tokens / step_s,
        "throughput/generated_tokens_per_s": tokens / step_s,
        "trainer/step_s": trainer_s,
        "flow/live": running * KNOWN.engines / KNOWN.group_size + 5,
        "flow/ready": 5.0,
        "idle/engine_share": 1 - busy_s / (step_s * KNOWN.engines),
        "length/mean_tokens": tokens / (KNOWN.batch * KNOWN.group_size),
        "weights/stall_s": KNOWN.swap_s,
        "weights/publish_s": KNOWN.swap_s + KNOWN.weight_bytes / KNOWN.publish_bytes_per_s,
        "weights/bytes": float(KNOWN.weight_bytes),
    }


def exact_rows() -> list[dict[str, float]]:
    """Steps whose seconds follow the cost model, at different sizes and numbers of running sequences."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(12):
        tokens, running = float(rng.uniform(5e3, 2e4)), float(rng.integers(2, KNOWN.slots))
        busy_s = KNOWN.decode_base_s * tokens / running + KNOWN.decode_per_sequence_s * tokens
        trainer_s = KNOWN.train_fixed_s + KNOWN.train_s_per_token * (tokens + PROMPTS)
        rows.append(row(busy_s, tokens, running=running, busy_s=busy_s, trainer_s=trainer_s))
    return rows


def test_known_costs_are_found_again() -> None:
    found = fit(exact_rows(), settings(), sigma=0.5)
    for name in (
        "decode_base_s",
        "decode_per_sequence_s",
        "train_fixed_s",
        "train_s_per_token",
        "publish_bytes_per_s",
        "swap_s",
    ):
        assert getattr(found, name) == pytest.approx(getattr(KNOWN, name), rel=1e-6), name


def test_a_run_is_simulated_as_it_was_configured() -> None:
    found = fit(exact_rows(), settings(stream_micro_batches=True, surplus=3, min_group_size=3), sigma=0.5)
    assert (found.stream, found.surplus, found.min_group_size) == (True, 3, 3)
    assert (found.update_mode, found.overlap) == ("recompute_kv", True)
    assert (found.routing, found.adaptive_concurrency) == ("least_loaded", True)


def test_steps_without_tokens_do_not_spoil_the_fit() -> None:
    """Tokens are counted when their trajectory ends: a step may have all of two, the next one none."""
    rows = exact_rows()
    for early, late in zip(rows[::2], rows[1::2], strict=True):
        early["throughput/generated_tokens_per_s"] += (
            late["throughput/generated_tokens_per_s"] * late["throughput/step_s"] / early["throughput/step_s"]
        )
        late["throughput/generated_tokens_per_s"] = 0.0
    found, exact = fit(rows, settings(), sigma=0.5), fit(exact_rows(), settings(), sigma=0.5)
    full = [one.decode_base_s / KNOWN.slots + one.decode_per_sequence_s for one in (found, exact)]
    assert full[0] == pytest.approx(full[1], rel=0.5)


@pytest.mark.full
def test_the_step_time_of_a_synthetic_run_is_predicted(tmp_path: Path) -> None:
    outcome = must_complete(KNOWN, seed=3)
    ends = [end for end, _, _ in outcome.trained.steps]
    busy_share = outcome.engines.busy_s / (outcome.virtual_s * KNOWN.engines)
    rows = [
        row(
            end - before,
            tokens - PROMPTS,
            running=KNOWN.slots,
            busy_s=busy_share * (end - before) * KNOWN.engines,
            trainer_s=busy_s,
        )
        for before, (end, busy_s, tokens) in zip(ends, outcome.trained.steps[1:], strict=False)
    ]
    lines = [json.dumps({"step": step, "time_s": 0.0, "metrics": metrics}) for step, metrics in enumerate(rows)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    config = settings()
    config["weights"] = {"update_mode": "keep_kv", "overlap": False}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    figures = calibrate(tmp_path)
    assert figures["predicted_over_measured"] == pytest.approx(1.0, abs=0.1)


def test_a_machine_that_becomes_slower_affects_the_fit_and_the_comparison_alike(tmp_path: Path) -> None:
    slower = [row(1 + step / 40, 1e4, running=8, busy_s=1.0, trainer_s=0.5) for step in range(41)]
    lines = [json.dumps({"step": step, "time_s": 0.0, "metrics": metrics}) for step, metrics in enumerate(slower)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    fitted, compared = (np.mean([one["throughput/step_s"] for one in half]) for half in halves(tmp_path))
    assert fitted == pytest.approx(compared, rel=0.1)


def test_a_run_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 0, "time_s": 0.0, "metrics": exact_rows()[0]}), encoding="utf-8"
    )
    with pytest.raises(PenstockError, match=r"0 training steps after the first, but 4 are needed"):
        calibrate(tmp_path)
