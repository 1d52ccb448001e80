"""Logs of worker processes: what they and their children print is in one file, and its last error is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.actors.engine import actor
from penstock.actors.engine.actor import EngineActor
from penstock.actors.worker_log import LOGS_VARIABLE, keep_output, last_error
from penstock.dataflow.errors import EngineLostError

PROGRAM = """
import os, subprocess, sys
from penstock.actors.worker_log import keep_output
keep_output("engine-0")
print("to stdout")
print("to stderr", file=sys.stderr)
subprocess.run([sys.executable, "-c", "print('of a child')"], check=True)
os.kill(os.getpid(), 9)
"""


def test_the_log_of_a_killed_process_has_all_that_it_and_its_children_printed(tmp_path: Path) -> None:
    environment = os.environ | {LOGS_VARIABLE: str(tmp_path)}
    for _ in range(2):  # a restart appends
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == -9
        assert done.stdout == ""
    lines = (tmp_path / "engine-0.log").read_text().splitlines()
    assert [line.partition(": process")[0] for line in lines] == [
        "--- engine-0", "to stdout", "to stderr", "of a child"
    ] * 2  # fmt: skip


@pytest.mark.parametrize("folder", ["", "not_there"])
def test_without_a_folder_that_can_be_reached_the_output_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], folder: str
) -> None:
    monkeypatch.setenv(LOGS_VARIABLE, str(tmp_path / folder) if folder else "")
    keep_output("engine-0")
    print("still here")
    assert capfd.readouterr().out == "still here\n"
    assert not list(tmp_path.iterdir())
    assert last_error("engine-0") == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ValueError: head_dim 12 is not supported\nshutting down", "ValueError: head_dim 12 is not supported"),
        (
            "(EngineCore pid=71) ERROR 11-25 12:00:01 [core.py:99] RuntimeError: no attention backend\n"
            "(EngineCore pid=71) Process EngineCore:\n",
            "RuntimeError: no attention backend",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried\nbye", "torch.OutOfMemoryError: CUDA out of memory. Tried"),
        (
            "(Worker_TP1 pid=72) ERROR 11-25 12:00:01 [multiproc_executor.py:953] ValueError: Free memory on device "
            "cuda:1 (15.56/24.0 GiB) on startup is less than desired GPU memory utilization (0.81, 19.48 GiB).\n"
            "(EngineCore pid=71) ERROR 11-25 12:00:02 [core.py:1510] Exception: WorkerProc initialization failed due "
            "to an exception in a background process. See stack trace for root cause.\n"
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
            "ValueError: Free memory on device cuda:1 (15.56/24.0 GiB) on startup is less than desired GPU memory "
            "utilization (0.81, 19.48 GiB).",
        ),
    ],
)
def test_the_last_error_is_found_without_the_prefix_of_its_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: str
) -> None:
    monkeypatch.setenv(LOGS_VARIABLE, str(tmp_path))
    (tmp_path / "engine-1.log").write_text(f"OSError: an earlier one\n{text}")
    assert last_error("engine-1") == f"its last error is: {found} ({tmp_path}/engine-1.log)"


def test_a_log_without_an_error_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOGS_VARIABLE, str(tmp_path))
    (tmp_path / "engine-1.log").write_text("INFO loading\n" * 100_000)
    assert last_error("engine-1") == f"see {tmp_path}/engine-1.log"


async def test_an_engine_that_vllm_refuses_for_lack_of_memory_is_told_which_keys_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_spec: object) -> None:
        (tmp_path / "engine-3.log").write_text(
            "(EngineCore pid=7) ERROR 11-25 12:00:01 [core.py:99] ValueError: Free memory on device cuda:0 (15.56/24.0 "
            "GiB) on startup is less than desired GPU memory utilization (0.81, 19.48 GiB).\n"
        )
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setenv(LOGS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(actor, "keep_output", lambda _role: None)
    monkeypatch.setattr(actor, "create_engine", fails)
    with pytest.raises(EngineLostError, match=r"15\.56/24\.0.*19\.48 GiB.*memory_gib.*kv_cache_gib"):
        await EngineActor(SimpleNamespace(engine_id="engine-3")).start()


async def test_an_engine_that_cannot_start_is_reported_with_the_last_error_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_spec: object) -> None:
        with (tmp_path / "engine-3.log").open("a") as log:
            log.write("(EngineCore pid=7) ERROR 11-25 12:00:01 [core.py:99] ValueError: head_dim 12 is not supported\n")
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setenv(LOGS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(actor, "keep_output", lambda _role: None)  # it would take the output of the tests
    monkeypatch.setattr(actor, "create_engine", fails)
    with pytest.raises(EngineLostError) as raised:
        await EngineActor(SimpleNamespace(engine_id="engine-3")).start()
    assert str(raised.value) == (
        "engine-3 cannot start: RuntimeError: Engine core initialization failed. See root cause above.; its last error "
        f"is: ValueError: head_dim 12 is not supported ({tmp_path}/engine-3.log)"
    )


def test_an_error_of_an_earlier_process_explains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOGS_VARIABLE, str(tmp_path))
    (tmp_path / "engine-1.log").write_text(
        "--- engine-1: process 100, 2026-01-01 00:00:00\nRuntimeError: CUDA error: out of memory\n"
        "--- engine-1: process 200, 2026-01-01 03:00:00\nINFO loading\n"
    )
    assert last_error("engine-1") == f"see {tmp_path}/engine-1.log"
