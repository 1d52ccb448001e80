"""SIGTERM at random moments of runs whose steps take 40 s: `python -m tests.endings --moments 8 --early 2`.

Every run is told to end by a signal to its process group, as `timeout` and schedulers send it. Then its policy, summary
and report are there. The policy equals, tensor by tensor, what the engines were sent at the version that the summary
names. `penstock eval` loads it, `penstock resume` goes on, no group is trained twice, no process is left. A run that
was ended before its first step has a summary and a report, and its last line is the command that starts it again.
`--slow reward` has a reward that sleeps instead of the loss. It prints a line for each moment, and exits with 1 if one
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from safetensors.torch import load_file

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import ENVIRONMENT, PENSTOCK, read_summary, run_cli
from tests.small_run import small_run_overrides

MARK = "PENSTOCK_TEST_OF_ENDINGS"
"""Environment variable by which the processes of a run are known."""
SLOW = """
import time
from penstock.trainer.algorithms.tokens import unclipped
calls = []
def loss(tokens, config):
    calls.append(1)
    time.sleep({seconds} if len(calls) > {fast} else 0)
    return unclipped(-tokens.advantages * tokens.target)
def reward(trajectory, **_):
    time.sleep({reward_s})
    return sum(place * ord(letter) for place, letter in enumerate(trajectory.response, 1)) % 1009 / 1009
"""
LIMIT_S = 40.0
"""From the signal to the end of all processes; the grace time is 25 s."""


def main() -> int:
    """Run all moments; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=8, help="of the training")
    parser.add_argument("--early", type=int, default=2, help="before the first step")
    parser.add_argument("--step-s", type=float, default=40.0)
    parser.add_argument("--slow", choices=("loss", "reward"), default="loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="of all runs, e.g. trainer.num_ranks=2 model.path=DIR")
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    num_failed = 0
    for moment in range(options.early + options.moments):
        is_early, num_fast = moment < options.early, chosen.randrange(4)
        later_s = chosen.uniform(0.0, 12.0 if is_early else 1.2 * options.step_s)
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(f"{moment}: {one(Path(folder), options, num_fast, later_s, is_early=is_early)}", flush=True)
            except (AssertionError, subprocess.TimeoutExpired):
                num_failed += 1
                print(f"{moment}: failed {later_s:.1f} s later\n{traceback.format_exc()}", flush=True)
    print(f"{options.early + options.moments - num_failed} of {options.early + options.moments} passed")
    return int(num_failed > 0)


def one(folder: Path, options: argparse.Namespace, num_fast: int, later_s: float, *, is_early: bool) -> str:
    """One run and its end; returns what was seen."""
    slow = options.step_s if options.slow == "loss" else 0.0
    (folder / "slow.py").write_text(SLOW.format(seconds=slow, fast=num_fast, reward_s=0))
    words = small_run_overrides(folder, "slow", character_tokenizer(), "dataflow.batch_groups=2", "total_steps=9")
    words += ["trainer.backend=deepspeed", "weights.transport=gather", f"weights.directory={folder}/published"]
    words += ["algorithm/loss=custom", "algorithm.loss.function=slow:loss", "reward.fn=slow:reward", *options.overrides]
    if options.slow == "reward":
        (folder / "slow.py").write_text(SLOW.format(seconds=0, fast=0, reward_s=options.step_s / 2))
        words += ["reward.timeout_s=300", "dataflow.batch_timeout_s=600"]
    (folder / "published").mkdir()
    process = subprocess.Popen(
        [PENSTOCK, "train", *words],
        cwd=folder,
        env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1", MARK: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with kept_versions(folder) as versions, ended(process):
        marker = "starting Ray" if is_early else "eval at v0"
        lines = read_until(process, marker)
        time.sleep(later_s)
        signalled_s = time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
        rest, _ = process.communicate(timeout=2 * LIMIT_S)
        lines += rest.splitlines()
        took_s = time.monotonic() - signalled_s
    left = [one for one in psutil.process_iter(["environ"]) if (one.info["environ"] or {}).get(MARK) == str(folder)]
    assert not left, f"left after {took_s:.1f} s: {left}"
    assert process.returncode == 128 + signal.SIGTERM, lines
    assert took_s < LIMIT_S, f"{took_s:.1f} s"
    run_dir = folder / "runs" / "slow"
    summary, seen = read_summary(run_dir), f"{later_s:4.1f} s after “{marker}”, ended in {took_s:4.1f} s"
    assert (summary["status"], summary["ended_by"]) == ("interrupted", "SIGTERM"), summary
    assert (run_dir / "report.html").is_file()
    assert lines[-1].startswith("penstock "), lines[-1]
    again = shlex.split(lines[-1])[1:]
    if is_early and summary["policy_version"] is None:
        assert again[0] == "train", lines[-1]
        return f"{seen}: summary, report, {again[0]} …"
    version = summary["policy_version"]
    saved, published = (
        load_file(run_dir / "policy" / "model.safetensors"),
        load_file(versions / f"v{version}.safetensors"),
    )
    assert saved.keys() == published.keys()
    assert all(bool((saved[name] == published[name]).all()) for name in saved), f"the policy is not that of v{version}"
    evaluated = run_cli("eval", *words, f"model.path={run_dir}/policy", cwd=folder)
    assert evaluated.returncode == 0, evaluated.stderr
    json.loads(evaluated.stdout.splitlines()[-1])
    if again[0] == "train":
        assert version == 0, f"no checkpoint, {seen}: {lines[-12:]}"
        return f"{seen}: policy of v0 as published, eval, {again[0]} …"
    (folder / "slow.py").write_text(SLOW.format(seconds=0, fast=0, reward_s=0))
    assert again[0] == "resume", lines[-1]
    resumed = run_cli(*again, f"total_steps={version + 2}", cwd=folder)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    ledger = read_summary(run_dir)["ledger"]
    assert ledger["trained"] == 2 * (version + 2), ledger
    return (
        f"{seen}: policy of v{version} as published, eval, resume to v{version + 2}, {ledger['trained']} groups trained"
    )


def read_until(process: subprocess.Popen[str], marker: str) -> list[str]:
    """Lines up to one with `marker`."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or marker not in lines[-1]:
        line = process.stdout.readline()
        assert line, lines
        lines.append(line)
    return lines


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill it on exit, if it still runs."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def kept_versions(folder: Path) -> Iterator[Path]:
    """Within it, every version that the trainer writes for the engines is kept in the folder that is yielded."""
    kept, is_over = folder / "kept", threading.Event()
    kept.mkdir()

    def keep() -> None:
        while not is_over.wait(0.02):
            for path in (folder / "published").glob("**/v*.safetensors"):
                if not (kept / path.name).exists():
                    try:
                        shutil.copy(path, kept / f"{path.name}.part")
                        (kept / f"{path.name}.part").rename(kept / path.name)
                    except FileNotFoundError:  # the next version has replaced it
                        continue

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield kept
    finally:
        is_over.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
