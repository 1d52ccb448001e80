"""Ctrl-C, SIGTERM and errors end every process that was started, with one readable error."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.chaos.processes import start_train, wait_for_line
from tests.command_line import ENVIRONMENT, read_summary, run_cli
from tests.small_run import small_run_overrides

# The first of them also makes the warm policy of the session.
pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.timeout(900)]

LIMIT_S = 30.0


def alive(processes: list[psutil.Process]) -> list[str]:
    return [str(process) for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.full
@pytest.mark.parametrize(
    ("signum", "engine", "marker"),
    [(signal.SIGTERM, "vllm", "eval at v0"), (signal.SIGINT, "vllm", "starting Ray")],
    ids=["sigterm_in_the_first_evaluation", "ctrl_c_while_starting"],
)
def test_a_signal_ends_every_process(
    signum: signal.Signals, engine: str, marker: str, workspace: Path, train_overrides: list[str]
) -> None:
    name = f"ended_{signum.name}_{engine}_{marker.strip().replace(' ', '_').replace('/', '')}"
    process = start_train(workspace, *train_overrides, f"rollout/engine={engine}", f"name={name}", "total_steps=1000")
    later_s = 6.0 if marker == "starting Ray" else 0.0  # Ray is up then, the engine is loading
    end_at(process, marker, later_s, signum)
    summary = read_summary(workspace / "runs" / name)
    assert (summary["status"], summary["steps"], summary["ended_by"]) == ("interrupted", 0, signum.name)
    assert summary["policy_version"] in (None, 0), "nothing was trained"


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_a_random_moment_of_training_leaves_a_policy_that_can_be_evaluated(
    signum: signal.Signals, workspace: Path, train_overrides: list[str]
) -> None:
    step, later_s = random.randint(1, 12), random.uniform(0.0, 1.0)
    name = f"saved_{signum.name}"
    process = start_train(workspace, *train_overrides, "rollout/engine=torch", f"name={name}", "total_steps=1000")
    end_at(process, f"{step}/1000 ", later_s, signum)
    summary = read_summary(workspace / "runs" / name)
    assert summary["status"] == "interrupted"
    assert summary["policy_version"] >= step, f"{signum.name} {later_s:.2f} s after step {step}"
    policy = workspace / "runs" / name / "policy"
    overrides = [*train_overrides, "rollout/engine=torch", f"model.path={policy}"]
    evaluated = run_cli("eval", *overrides, cwd=workspace)
    assert evaluated.returncode == 0, evaluated.stderr
    accuracy = json.loads(evaluated.stdout.splitlines()[-1])["accuracy"]
    assert accuracy > 0.0


def end_at(process: subprocess.Popen[str], marker: str, later_s: float, signum: signal.Signals) -> None:
    """Send a signal to the whole process group, as a terminal, `timeout` or a scheduler does; everything ends."""
    try:
        wait_for_line(process, marker, 300)
        time.sleep(later_s)
        started = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(started) > 3, "Ray and workers are below the driver"
        signalled_s = time.monotonic()
        os.killpg(process.pid, signum)
        process.send_signal(signum)  # once more, as a program does that passes it on
        stdout, stderr = process.communicate(timeout=60)
        psutil.wait_procs(started, timeout=max(0.0, LIMIT_S - (time.monotonic() - signalled_s)))
        left = alive(started)
        took_s = time.monotonic() - signalled_s
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert not left, f"{len(left)} of {len(started)} processes are alive after {took_s:.1f} s: {left}"
    assert took_s < LIMIT_S
    assert process.returncode == 128 + signum
    assert "Traceback" not in stderr, stderr
    assert len([line for line in stderr.splitlines() if not line.startswith("  checking")]) <= 4, stderr
    assert stdout.splitlines()[-1].startswith(("penstock resume ", "penstock train ")), stdout


SLOW_LOSS = """
import time
from penstock.trainer.algorithms.tokens import unclipped
calls = []
def loss(tokens, config):
    calls.append(1)
    time.sleep(40 if len(calls) > {fast} else 0)
    return unclipped(-tokens.advantages * tokens.target)
def reward(trajectory, **_):
    return sum(place * ord(letter) for place, letter in enumerate(trajectory.response, 1)) % 1009 / 1009
"""


# Everyday: tests/unit/platform/test_endings.py, without processes, and the random moment above.
@pytest.mark.full
@pytest.mark.parametrize(
    ("signum", "num_fast", "overrides"),
    [
        (signal.SIGTERM, 2, ["trainer.num_ranks=2", "trainer.zero_stage=3", "cluster.pools.cpu.count=3"]),
        (signal.SIGHUP, 0, ["trainer.backend=torch"]),
        (signal.SIGINT, 3, ["trainer.num_ranks=1", "trainer.lora.rank=4"]),
    ],
    ids=["zero_3_on_two_ranks", "in_the_first_step", "adapters"],
)
def test_a_signal_in_a_step_of_40_s_saves_the_published_policy_and_nothing_is_lost(
    signum: signal.Signals, num_fast: int, overrides: list[str], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW_LOSS.format(fast=num_fast))
    small = small_run_overrides(tmp_path, "slow", character_tokenizer())
    own = ["algorithm/loss=custom", "algorithm.loss.function=slow:loss", "reward.fn=slow:reward", "total_steps=9"]
    own.append("dataflow.batch_groups=2")
    process = start_train(tmp_path, *small, "trainer.backend=deepspeed", *own, *overrides)
    end_at(process, f"{num_fast}/9 " if num_fast else "eval at v0", 6.0, signum)
    run_dir = tmp_path / "runs" / "slow"
    summary = read_summary(run_dir)
    assert (summary["status"], summary["ended_by"]) == ("interrupted", signum.name)
    assert summary["policy_version"] == summary["steps"] == num_fast
    assert (run_dir / "report.html").stat().st_size > 1_000_000
    done = run_cli("export", str(run_dir), "--to", "exported", "--step", str(num_fast), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved, kept = (load_file(one / "model.safetensors") for one in (run_dir / "policy", tmp_path / "exported"))
    assert saved.keys() == kept.keys()
    assert all(bool((saved[name] == kept[name]).all()) for name in saved), "the policy is that of the checkpoint"
    (tmp_path / "slow.py").write_text(SLOW_LOSS.format(fast=1000))
    resumed = run_cli("resume", str(run_dir), f"total_steps={num_fast + 2}", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    ledger = read_summary(run_dir)["ledger"]
    assert ledger["trained"] == 2 * (num_fast + 2), "two groups a step, none twice"


@pytest.mark.full
def test_an_error_in_the_middle_is_one_readable_message(
    workspace: Path, train_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "MARK_OF_THIS_RUN", str(workspace))  # what it starts has it, too
    (workspace / "broken_tasks.py").write_text(
        "from itertools import islice\n"
        "from penstock.envs.tasks.arithmetic import ArithmeticTasks\n"
        "class BrokenTasks(ArithmeticTasks):\n"
        "    def train(self):\n"
        "        yield from islice(super().train(), 5000)\n"
        "        raise ConnectionError('the task server went away')\n"
    )
    done = run_cli(
        "train",
        *train_overrides,
        "rollout/engine=torch",
        "env.factory=broken_tasks:BrokenTasks",
        "name=broken",
        "dataflow.batch_groups=800",
        "dataflow.group_size=2",
        "rollout.sampling.max_new_tokens=8",
        "total_steps=1000",
        cwd=workspace,
    )
    assert done.returncode == 1
    assert "the task server went away" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert len([line for line in done.stderr.splitlines() if not line.startswith("  checking")]) <= 4, done.stderr
    told = (workspace / "runs" / "broken" / "error.txt").read_text()
    summary = read_summary(workspace / "runs" / "broken")
    assert summary["steps"] == summary["policy_version"] > 0, "what was trained until then is saved"
    assert (workspace / "runs" / "broken" / "policy" / "model.safetensors").exists()
    assert "the task server went away" in told
    assert "newest events of the ledger" in told
    assert re.search(r"group \d+ (generating|scoring)", told), told
    left = [p for p in psutil.process_iter(["environ"]) if "MARK_OF_THIS_RUN" in (p.info["environ"] or {})]
    assert not alive(left)


@pytest.mark.full
def test_a_reward_that_comes_to_fail_is_reported_with_its_cause(workspace: Path, train_overrides: list[str]) -> None:
    (workspace / "failing_reward.py").write_text(
        "calls = []\n"
        "def fn(trajectory, **_):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 4:  # the two calls before the start succeed\n"
        "        raise KeyError('no such column')\n"
        "    return 0.0\n"
    )
    done = run_cli(
        "train",
        *train_overrides,
        "rollout/engine=torch",
        "reward.fn=failing_reward.fn",
        "name=failing",
        cwd=workspace,
    )
    assert done.returncode == 1
    assert "no such column" in done.stderr
