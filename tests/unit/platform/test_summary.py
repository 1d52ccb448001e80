"""summary.json, staleness.json and the memory sampler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from penstock.platform.metrics.atomic_file import write_atomically
from penstock.platform.metrics.memory_sampler import MemorySampler, pss_bytes
from penstock.platform.metrics.summary import (
    LedgerCounts,
    RunSummary,
    first_and_last_mean,
    write_staleness,
    write_summary,
)

KEYS = {
    "eval_before", "eval_after", "reward_first", "reward_last", "steps", "wall_s", "trained_groups",
    "max_staleness_configured", "max_staleness_seen", "share_tokens_stale", "multi_version_trajectories",
    "tokens_generated", "tokens_trained", "peak_memory_gib", "ledger", "untrained", "name", "seed", "status", "version",
    "partner_eval_before", "partner_eval_after", "policy_version", "failed_attempts", "skipped_prompts",
    "eval_reward_before", "eval_reward_after", "evaluated_on", "ended_by", "slow_parts",
    "computed_by",
    "branched_from",
}  # fmt: skip


def test_the_summary_has_exactly_the_promised_keys(tmp_path: Path) -> None:
    summary = RunSummary(
        name="demo", seed=1, status="completed", version="0.1.0", eval_before=0.5, eval_after=None, reward_first=0.4,
        reward_last=0.8, steps=3, wall_s=12.5, trained_groups=6, max_staleness_configured=2, max_staleness_seen=1,
        share_tokens_stale=0.25, multi_version_trajectories=4, tokens_generated=100, tokens_trained=90,
        peak_memory_gib=1.5, ledger=LedgerCounts(admitted=8, trained=6, dropped=1, filtered=1, failed=0, live=0),
    )  # fmt: skip
    write_summary(tmp_path, summary)
    content = json.loads((tmp_path / "summary.json").read_text())
    assert set(content) == KEYS
    assert content["eval_after"] is None
    assert content["ledger"] == {"admitted": 8, "trained": 6, "dropped": 1, "filtered": 1, "failed": 0, "live": 0}
    assert summary.ledger.is_balanced
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (None, None)),
        ([0.5], (0.5, 0.5)),
        ([0.0, 1.0, 2.0], (0.0, 2.0)),
        ([0.0, 1.0, 2.0, 3.0], (0.5, 2.5)),
        ([float(n) for n in range(100)], (4.5, 94.5)),
    ],
)
def test_first_and_last_reward_are_means_over_at_most_ten_steps_and_half_the_run(values, expected) -> None:
    assert first_and_last_mean(values) == expected


def test_the_staleness_histogram_is_sorted_by_staleness(tmp_path: Path) -> None:
    write_staleness(tmp_path, {2: 5, 0: 10, 1: 7})
    assert (tmp_path / "staleness.json").read_text() == '{"0": 10, "1": 7, "2": 5}\n'


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_sampler_keeps_the_peak_of_what_it_read() -> None:
    totals = iter([1 << 30, 3 << 30, 2 << 30])
    sampler = MemorySampler(read_total=lambda: next(totals))
    assert [sampler.sample() for _ in range(3)] == [1.0, 3.0, 2.0]
    assert (sampler.latest_gib, sampler.peak_gib) == (2.0, 3.0)
    assert sampler.stop() == 3.0


def test_the_memory_of_a_child_and_of_an_orphaned_grandchild_counts() -> None:
    size, nearly_gib = 192 << 20, 0.75 * 192 / 1024  # our own share of common pages changes by some MiB meanwhile
    grandchild = f"import time; block = bytearray({size}); print('ready', flush=True); time.sleep(60)"
    child = (
        f"import subprocess, sys; block = bytearray({size});"
        f"p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], stdout=subprocess.PIPE);"
        "p.stdout.readline(); print(p.pid, flush=True); sys.stdin.read()"
    )
    sampler = MemorySampler()
    alone = sampler.sample()
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        grandchild_pid = int(process.stdout.readline())
        try:
            assert sampler.sample() - alone > 2 * nearly_gib
            process.stdin.close()
            process.wait(10)
            assert sampler.sample() - alone > nearly_gib, "the grandchild lost its parent and still counts"
        finally:
            os.kill(grandchild_pid, 9)
    assert sampler.peak_gib - alone > 2 * nearly_gib


def test_a_process_that_is_gone_has_no_memory() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    handle = psutil.Process(process.pid)
    assert pss_bytes(handle) > 0
    process.communicate()
    assert pss_bytes(handle) == 0


def test_the_background_thread_samples_and_stops() -> None:
    sampler = MemorySampler(interval_s=0.01, read_total=lambda: 1 << 30)
    sampler.start()
    deadline = time.monotonic() + 10
    while sampler.peak_gib == 0 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert sampler.stop() == 1.0
