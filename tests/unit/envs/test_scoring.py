"""A reward runner turns every failure into data, and every other call into its score."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.dataflow.errors import ConfigError, TrajectoryError
from penstock.dataflow.ports import Score
from penstock.envs.config import RewardConfig
from penstock.envs.workers.scoring import RewardRunner
from tests.answers import pair

REWARDS = """
import asyncio, os, signal, subprocess, sys, time
import numpy as np

def length(trajectory, bonus=0.0, **_):
    print("noise " * 1000)
    return len(trajectory.response) + bonus

def obey(trajectory, **_):
    text = trajectory.response
    if text == "hang":
        time.sleep(60)
    if text == "hang with a child":
        subprocess.Popen(["sleep", "61.5"]); time.sleep(60)
    if text == "raise":
        raise RuntimeError("the unit test broke")
    if text == "exit":
        sys.exit(3)
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "die once" and not os.path.exists(os.environ["PENSTOCK_TEST_MARK"]):
        open(os.environ["PENSTOCK_TEST_MARK"], "w").close(); os.kill(os.getpid(), signal.SIGKILL)
    returned = {"nan": float("nan"), "inf": float("inf"), "none": None, "word": "good", "list": [1.0],
                "dict": {"format": 0.25, "answer": 1}, "total": {"reward": 0.5, "answer": 1.0},
                "bad dict": {"answer": None, "format": 1.0}, "empty dict": {}, "numpy": np.float32(0.5), "true": True}
    return returned.get(text, 1.0)

async def obey_async(trajectory, **_):
    text = trajectory.response
    if text == "hang":
        await asyncio.sleep(60)
    if text == "block":
        time.sleep(60)
    if text == "raise":
        raise RuntimeError("the judge broke")
    if text == "cancel":
        raise asyncio.CancelledError("the judge gave up")
    await asyncio.sleep(0.2)
    return 1.0

def obey_later(trajectory, **_):
    return obey_async(trajectory)
"""


Factory = Callable[..., RewardRunner]


@pytest.fixture
async def runner_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Factory]:
    (tmp_path / "penstock_test_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(tmp_path / "mark"))
    runners: list[RewardRunner] = []

    def make(name: str, timeout_s: float = 20.0) -> RewardRunner:
        runners.append(RewardRunner(RewardConfig(fn=f"penstock_test_rewards:{name}", timeout_s=timeout_s)))
        return runners[-1]

    yield make
    for runner in runners:
        await runner.shutdown()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_task_fields_reach_the_function_and_its_output_is_ignored(runner_of: Factory) -> None:
    runner = runner_of("length")
    assert await runner.score(*pair("abc", bonus=0.5)) == Score(3.5, {})
    many = await runner.score_many([pair("x" * n) for n in range(300)])
    assert [score.reward for score in many if isinstance(score, Score)] == list(range(300))


async def test_every_failure_has_its_cause_and_is_never_0(runner_of: Factory) -> None:
    runner = runner_of("obey")
    wanted = {
        "raise": "RuntimeError: the unit test broke",
        "exit": "SystemExit: 3",
        "nan": "returned nan",
        "inf": "returned inf",
        "word": "returned 'good' of type str",
        "list": "of type list",
        "bad dict": "a dict with answer=None",
        "empty dict": "an empty dict",
        "die": "was killed by SIGKILL, 2 times in a row",
    }
    results = await runner.score_many([pair(word) for word in [*wanted, "fine"]])
    for (word, text), result in zip(wanted.items(), results, strict=False):
        assert isinstance(result, TrajectoryError), word
        assert result.kind == "reward"
        assert text in result.detail
    assert results[-1] == Score(1.0, {})


async def test_dicts_and_number_types_become_scores(runner_of: Factory) -> None:
    results = await runner_of("obey").score_many([pair(word) for word in ("dict", "total", "numpy", "true")])
    assert results == [
        Score(1.25, {"format": 0.25, "answer": 1.0}),
        Score(0.5, {"answer": 1.0}),
        Score(0.5, {}),
        Score(1.0, {}),
    ]


async def test_a_hang_costs_one_trajectory_one_time_out_and_the_others_nothing(runner_of: Factory) -> None:
    runner = runner_of("obey", timeout_s=0.3)
    await runner.start()
    first_pid = runner.pid
    words = ["fine", "hang", "fine", "hang with a child", "fine"]
    results = await runner.score_many([pair(word) for word in words])
    for word, result in zip(words, results, strict=True):
        if word == "fine":
            assert result == Score(1.0, {})
        else:
            assert isinstance(result, TrajectoryError)
            assert "timed out after 0.3 s" in result.detail
    assert first_pid is not None
    assert not is_alive(first_pid)
    assert not any(b"61.5" in command for command in command_lines())


async def test_score_raises_the_failure(runner_of: Factory) -> None:
    with pytest.raises(TrajectoryError, match="the unit test broke"):
        await runner_of("obey").score(*pair("raise"))


async def test_a_process_killed_from_outside_is_replaced(runner_of: Factory) -> None:
    runner = runner_of("obey")  # it leaves a mark
    await runner.start()
    first_pid = runner.pid
    assert first_pid is not None
    os.kill(first_pid, signal.SIGKILL)
    async with asyncio.timeout(30.0):
        while runner.pid == first_pid:  # what is below the supervisor may still answer before it is gone
            assert await runner.score(*pair("fine")) == Score(1.0, {})
    assert await runner.score_many([pair("die once"), pair("fine")]) == [Score(1.0, {}), Score(1.0, {})]


@pytest.mark.some(1)
@pytest.mark.parametrize(("num_kills", "is_loaded"), [(2, True), (3, False)])
async def test_a_process_killed_from_outside_while_it_loads_is_replaced_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_kills: int, is_loaded: bool
) -> None:
    marks = tmp_path / "loads"
    (tmp_path / "killed_rewards.py").write_text(
        "import os, signal\n"
        f"loads = open({str(marks)!r}, 'a+')\n"
        "loads.write('x')\n"
        "loads.flush()\n"
        f"if os.path.getsize({str(marks)!r}) <= {num_kills}:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def one(trajectory, **_):\n"
        "    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    runner = RewardRunner(RewardConfig(fn="killed_rewards:one", timeout_s=20.0))
    try:
        if is_loaded:
            assert await runner.score(*pair("fine")) == Score(1.0, {})
        else:
            with pytest.raises(ConfigError, match="its process was killed by SIGKILL while loading it"):
                await runner.start()
        assert marks.read_text() == "x" * 3
    finally:
        await runner.shutdown()


async def test_async_functions_run_concurrently_and_are_cancelled_one_by_one(runner_of: Factory) -> None:
    runner = runner_of("obey_async", timeout_s=0.6)
    await runner.start()
    first_pid = runner.pid
    results = await runner.score_many([pair("hang"), pair("raise"), *[pair("fine")] * 50])
    assert isinstance(results[0], TrajectoryError)
    assert "timed out after 0.6 s" in results[0].detail
    assert isinstance(results[1], TrajectoryError)
    assert "the judge broke" in results[1].detail
    assert results[2:] == [Score(1.0, {})] * 50
    assert runner.pid == first_pid


@pytest.mark.parametrize("name", ["obey_async", "obey_later"])
async def test_a_cancellation_is_an_answer_as_any_other(runner_of: Factory, name: str) -> None:
    runner = runner_of(name)
    await runner.start()
    first_pid = runner.pid
    result, fine = await asyncio.wait_for(runner.score_many([pair("cancel"), pair("fine")]), 10)
    assert isinstance(result, TrajectoryError)
    assert "CancelledError: the judge gave up" in result.detail
    assert (fine, runner.pid) == (Score(1.0, {}), first_pid)


@pytest.mark.full
async def test_an_async_function_that_blocks_its_loop_is_found_and_killed(runner_of: Factory) -> None:
    runner = runner_of("obey_async", timeout_s=0.5)
    results = await runner.score_many([pair("fine"), pair("block"), pair("fine")])
    assert isinstance(results[1], TrajectoryError)
    assert "timed out after 0.5 s" in results[1].detail
    assert results[0] == results[2] == Score(1.0, {})


async def test_a_function_that_does_not_load_is_a_config_error_for_every_caller(runner_of: Factory) -> None:
    runner = runner_of("lenght")
    with pytest.raises(ConfigError, match="Did you mean 'length'"):
        await runner.start()
    with pytest.raises(ConfigError, match="Did you mean 'length'"):
        await runner.score_many([pair("a"), pair("b")])


@pytest.mark.parametrize("missing", ["temporary folder", "interpreter"])
async def test_a_process_that_cannot_be_started_fails_its_calls_and_the_next_call_tries_again(
    runner_of: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    runner, folder = runner_of("obey"), tmp_path / "temporary"
    folder.mkdir()
    with monkeypatch.context() as broken:
        broken.setattr("tempfile.tempdir", str(folder / "gone" if missing == "temporary folder" else folder))
        if missing == "interpreter":
            broken.setattr("sys.executable", str(tmp_path / "gone"))
        (result,) = await runner.score_many([pair("fine")])
        assert isinstance(result, TrajectoryError)
        assert result.kind == "reward"
        assert "its process cannot be started: FileNotFoundError" in result.detail
    assert list(folder.iterdir()) == []
    assert await runner.score(*pair("fine")) == Score(1.0, {})


async def test_shutdown_ends_the_child_and_fails_what_is_unfinished(runner_of: Factory) -> None:
    runner = runner_of("obey")
    await runner.start()
    pid = runner.pid
    assert pid is not None
    pending = asyncio.create_task(runner.score_many([pair("hang")]))
    await asyncio.sleep(0.1)
    await runner.shutdown()
    assert not is_alive(pid)
    (result,) = await pending
    assert isinstance(result, TrajectoryError)
    with pytest.raises(TrajectoryError, match="shut down"):
        await runner.score(*pair("fine"))


def test_the_child_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "penstock_test_rewards.py").write_text(REWARDS)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    )
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while is_alive(child_pid) and not is_zombie(child_pid):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.02)


def command_lines() -> list[bytes]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes())
    return [line for line in lines if line.startswith(b"sleep\0")]


def is_zombie(pid: int) -> bool:
    """A dead process whose new parent has not reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


PARENT = """
import asyncio
from penstock.envs.config import RewardConfig
from penstock.envs.workers.scoring import RewardRunner

async def main():
    runner = RewardRunner(RewardConfig(fn="penstock_test_rewards:obey", timeout_s=60))
    await runner.start()
    print(runner.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
