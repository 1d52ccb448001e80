"""A population of real runs, one of whose members is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import ENVIRONMENT, PENSTOCK, read_summary
from tests.small_run import small_run_overrides

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

REWARD = "def letters(trajectory, **_): return len(set(trajectory.response)) / 10"
OF_RUN = [
    "dataflow.batch_groups=2",
    "reward.fn=own:letters",
    "model.max_context_tokens=64",
    "checkpoint.every_steps=1",
    "checkpoint.keep=9",
]


def process_of(member: str, parent: psutil.Process) -> psutil.Process | None:
    """The driver of a member."""
    for process in parent.children(recursive=True):
        try:
            if f"name={member}" in process.cmdline():
                return process
        except psutil.NoSuchProcess:
            continue
    return None


def test_a_member_that_is_killed_goes_on_and_the_population_ends_full(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(REWARD)
    words = [
        word
        for word in small_run_overrides(tmp_path, "unused", character_tokenizer(), *OF_RUN)
        if not word.startswith("name=")
    ]
    command = ["population", *words, "trainer.optimizer.lr=1e-4:1e-2", "--members", "3", "--generations", "2"]
    command += ["--steps", "3", "--score", "eval/reward_mean", "--folder", "runs/population"]
    folder = tmp_path / "runs" / "population"
    with (tmp_path / "out.txt").open("w") as out:
        process = subprocess.Popen(
            [PENSTOCK, *command], cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT, env=ENVIRONMENT
        )
        parent, killed = psutil.Process(process.pid), False
        while process.poll() is None:
            driver = None if killed else process_of("member1", parent)
            if driver is not None and (folder / "member1" / "checkpoints" / "step_1").is_dir():
                driver.send_signal(signal.SIGKILL)
                killed = True
            time.sleep(0.02)
    told = (tmp_path / "out.txt").read_text()
    assert process.returncode == 0, told
    assert killed
    assert "member1 has died, 1 of 2 times" in told
    state = json.loads((folder / "population.json").read_text())
    assert state["generation"] == 2
    assert len(state["members"]) == 3
    assert all(member["score"] is not None for member in state["members"])
    (branch,) = [member for member in state["members"] if member["parent"] is not None]
    summary = read_summary(folder / branch["name"])
    assert summary["branched_from"] == {"run": str(folder / branch["parent"]), "step": 3, "restored": "groups"}
    assert [read_summary(folder / member["name"])["steps"] for member in state["members"]] == [6, 6, 6]
    assert f"{branch['parent']}, step 3" in (folder / "population.md").read_text()
