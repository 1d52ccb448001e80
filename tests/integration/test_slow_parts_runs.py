"""What is slow in a real run is named, and a profile shows what it did."""

from __future__ import annotations

import gzip
import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import read_metric, read_summary
from tests.integration.test_fleet import end, output_of, training
from tests.small_run import small_run, train_by_command

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]
HELD_S, PERIOD_S, LONGEST_S = 14.0, 20.0, 420.0


def test_one_of_two_engines_that_is_held_14_of_every_20_seconds_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "held"
    process = training(tmp_path, "held", "rollout.num_engines=2", "rollout.engine.max_num_seqs=4")
    try:
        held = engine_process(run_dir, "engine-1")
        deadline = time.monotonic() + LONGEST_S
        while (said := named(run_dir)) == "" and time.monotonic() < deadline:
            held.send_signal(signal.SIGSTOP)
            time.sleep(HELD_S)
            held.send_signal(signal.SIGCONT)
            time.sleep(PERIOD_S - HELD_S)
        assert "engine-1 samples" in said, output_of(run_dir)
        process.terminate()
        process.wait(timeout=120)
        assert list(read_summary(run_dir)["slow_parts"]) == ["engine-1"]
        assert "engine-1 samples" in (run_dir / "report.html").read_text()
    finally:
        end(process)


def named(run_dir: Path) -> str:
    """The line of the console that says which engine is slow."""
    lines = (run_dir.parents[1] / "output.txt").read_text().splitlines()
    return next((line for line in lines if "samples" in line and "A rank or an engine is slow" in line), "")


def engine_process(run_dir: Path, engine_id: str) -> psutil.Process:
    """The process that wrote the log of an engine."""
    first = (run_dir / "logs" / f"{engine_id}.log").read_text().splitlines()[0]
    return psutil.Process(int(first.split("process ")[1].split(",")[0]))


def test_two_healthy_ranks_are_measured_and_profiled_and_none_is_named(tmp_path: Path) -> None:
    settings = (
        "trainer.backend=deepspeed",
        "trainer.num_ranks=2",
        "dataflow.batch_groups=2",
        "trainer.profile_steps=[2]",
        "total_steps=60",
    )
    run_dir = small_run(train_by_command, tmp_path, "measured", character_tokenizer(), *settings)
    rates = [read_metric(run_dir, f"rank/product_tflops/{rank}") for rank in range(2)]
    assert [len(of_rank) for of_rank in rates] == [60, 60]
    assert min(map(min, rates)) > 0
    assert [len(read_metric(run_dir, f"rank/busy_s/{rank}")) for rank in range(2)] == [60, 60]
    assert max(read_metric(run_dir, "engine/kv_cache_usage/engine-0")) > 0
    assert read_summary(run_dir)["slow_parts"] == {}
    for rank in range(2):
        profile = gzip.decompress((run_dir / "profiles" / f"trainer-{rank}-step-2.json.gz").read_bytes())
        assert any(event["name"] == "aten::mm" for event in json.loads(profile)["traceEvents"])
