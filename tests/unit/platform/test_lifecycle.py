"""A command ends in order on the first signal, and at once on a second one or at the end of its grace time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import asyncio, signal, sys, time
from penstock.platform.run import lifecycle
from penstock.platform.run.lifecycle import Interrupted, Stop, run_to_end

lifecycle.SAME_SIGNAL_S = 0.2
for signum in lifecycle.SIGNALS:  # a test that runs in the background may ignore some of them
    signal.signal(signum, signal.SIG_DFL)
blocking = {blocking}

async def main():
    print("started", flush=True)
    if blocking == "the event loop":
        time.sleep(30)
    elif blocking == "a thread":
        await asyncio.to_thread(time.sleep, 30)
    await asyncio.sleep(30)
    return 0

try:
    run_to_end(main, Stop(grace_s={grace_s}))
except Interrupted as interrupted:
    print("in order", flush=True)
    sys.exit(interrupted.exit_code)
"""
LONG_S = 20.0


def started(blocking: str, grace_s: float) -> subprocess.Popen[str]:
    """A command that has started, and waits in this way."""
    program = PROGRAM.format(blocking=repr(blocking), grace_s=grace_s)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    time.sleep(0.2)
    return process


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order(signum: signal.Signals) -> None:
    process = started("nothing", LONG_S)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=LONG_S)
    assert (output, process.returncode) == ("in order\n", 128 + signum)


@pytest.mark.parametrize("blocking", ["the event loop", "a thread"])
def test_it_ends_within_its_grace_time_whatever_runs(blocking: str) -> None:
    process = started(blocking, 1.0)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=LONG_S)
    assert (output, process.returncode) == ("", 128 + signal.SIGTERM)
    assert "it has not ended within stop_grace_s=1. Lost: what was not saved yet." in errors


@pytest.mark.parametrize("blocking", ["the event loop", "a thread"])
def test_a_second_signal_ends_it_at_once_whatever_runs(blocking: str) -> None:
    process = started(blocking, 60.0)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=LONG_S)
    assert (output, process.returncode) == ("", 128 + signal.SIGHUP)
    assert "a second SIGTERM ends it at once. Lost: what was not saved yet." in errors
