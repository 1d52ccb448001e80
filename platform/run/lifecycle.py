"""The lifecycle of a command: how it ends on a signal, termination of all child processes, and one readable error.

    first signal ─▶ Stop.begin: the command ends in order, within its grace time
    second signal, or the end of the grace time ─▶ every process is killed, and what is lost is said

The processes of Ray are in sessions of their own (actors/cluster.py), so a signal to the process group, as `timeout`, a
scheduler or a closed terminal sends it, reaches this process alone.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from penstock.actors.processes import descendants, end_processes
from penstock.dataflow.errors import PenstockError
from penstock.platform.metrics.atomic_file import write_text_atomically

EXIT_OK = 0
GC_GENERATION0_THRESHOLD = 100_000
SAME_SIGNAL_S = 1.0
"""Signals this soon after the first one count as the same: `timeout`, `uv run` and similar wrappers forward a signal
that the terminal has already sent to the whole process group."""
DEFAULT_GRACE_S = 25.0
SHUTDOWN_S = 8.0
"""Part of the grace time that is kept for ending Ray and its processes, or a third if that is less."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):  # noqa: N818 - not an error: the user has stopped the run
    """The command was stopped by SIGINT (Ctrl-C), SIGTERM or SIGHUP.

    Attributes:
        signum: Number of the signal.
    """

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)

    @property
    def exit_code(self) -> int:
        """That of a command which such a signal has ended, as shells count."""
        return 128 + self.signum


def set_gc_thresholds() -> None:
    """Raise the threshold of the cyclic garbage collector from 700 to 100,000 young objects.

    A run keeps hundreds of thousands of small objects alive (tasks, futures, records of live groups), and traversing
    them took half of the driver's time per trajectory. Objects of the flow are freed by reference counting, so
    collecting cycles late is harmless.
    """
    gc.set_threshold(GC_GENERATION0_THRESHOLD, 20, 100)


class Stop:
    """That a command is to end, and how.

    Attributes:
        reason: What ends it, e.g. `SIGTERM`; empty while nothing does.
        signum: The signal; None for another reason.
        told: Set when it is to end.
        signalled: Set when a signal has told so.
        ends_itself: Whether the command watches `told`. If not, it is cancelled.
        loses: What a second signal would lose, as the end of a sentence.
        next_command: What goes on with what was saved; empty before that.
    """

    def __init__(self, grace_s: float = DEFAULT_GRACE_S) -> None:
        """Create it.

        Args:
            grace_s: Longest time from the signal to the end of the process, seconds.
        """
        self.reason = ""
        self.signum: int | None = None
        self.told = asyncio.Event()
        self.signalled = asyncio.Event()
        self.ends_itself = False
        self.loses: Callable[[], str] = lambda: "what was not saved yet"
        self.next_command = ""
        self.grace_s = grace_s
        self._ends_at = float("inf")

    def begin(self, reason: str, signum: int | None = None) -> None:
        """Tell the command to end. Only a signal has a time limit, and nothing else counts after it."""
        if self.signum is not None:
            return
        self.reason, self.signum = reason, signum
        if signum is not None:
            self._ends_at = time.monotonic() + self.grace_s
            self.signalled.set()
        self.told.set()

    @property
    def left_s(self) -> float:
        """Seconds left for saving what there is; infinite if there is no limit."""
        return self._ends_at - time.monotonic() - min(SHUTDOWN_S, self.grace_s / 3)


def run_to_end(main: Callable[[], Coroutine[Any, Any, int]], stop: Stop | None = None) -> int:
    """Run `main` with an orderly shutdown on SIGINT, SIGTERM and SIGHUP; returns its exit code.

    The first signal cancels `main`, whose context managers stop all processes, unless it ends by itself
    (`Stop.ends_itself`). A second one, more than `SAME_SIGNAL_S` later, ends all processes at once, as does the end of
    the grace time. A signal that is ignored when the command starts (`nohup`) stays ignored.

    Raises:
        Interrupted: After an orderly shutdown.
        PenstockError: The error that stopped the run, unwrapped from exception groups.
    """
    how = stop or Stop()
    set_gc_thresholds()
    runner = asyncio.Runner()
    loop = runner.get_loop()
    task: asyncio.Task[int] | None = None
    signums: list[int] = []
    first_at = 0.0
    is_signalled, is_over = threading.Event(), threading.Event()

    def begin(signum: int) -> None:
        how.begin(signal.Signals(signum).name, signum)
        if task is not None and not how.ends_itself:
            task.cancel()

    # One handler for the whole time, which runs also while the event loop is busy.
    def heard(signum: int, _frame: FrameType | None) -> None:
        nonlocal first_at
        if not signums:
            first_at = time.monotonic()
            signums.append(signum)
            is_signalled.set()
            with suppress(RuntimeError):  # the loop is closed: all but threads has ended
                loop.call_soon_threadsafe(begin, signum)
        elif time.monotonic() - first_at >= SAME_SIGNAL_S:
            end_now(how, f"a second {signal.Signals(signum).name} ends it at once", signums[0])

    def keep_limit() -> None:
        is_signalled.wait()
        if not is_over.wait(how.grace_s):
            end_now(how, f"it has not ended within stop_grace_s={how.grace_s:g}", signums[0])

    async def supervised() -> int:
        nonlocal task
        task = asyncio.create_task(main(), name="run")
        if how.signum is not None and not how.ends_itself:
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if how.signum is not None:
                raise Interrupted(how.signum) from None
            raise

    threading.Thread(target=keep_limit, name="grace time", daemon=True).start()
    handled = [signum for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, heard) for signum in handled}
    try:
        with runner:  # which ends only after all threads that the loop has started
            try:
                return runner.run(supervised())
            # Task groups wrap errors; the console shows only the first one.
            except BaseExceptionGroup as group:
                raise first_error(group) from group
            finally:
                # Stops child processes that a failed component has left running.
                end_processes(descendants())
    finally:
        is_over.set()
        is_signalled.set()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def end_now(how: Stop, why: str, signum: int = signal.SIGTERM) -> None:
    """Kill every process and this one, and say what is lost."""
    with suppress(Exception):  # of any kind, such as a terminal that is gone: nothing may keep the process from ending
        os.write(2, f"penstock: {why}. Lost: {how.loses()}.\n{how.next_command}\n".encode())
    with suppress(Exception):
        for process in descendants():
            with suppress(psutil.NoSuchProcess):
                process.kill()
    os._exit(128 + signum)


def first_error(error: BaseException) -> BaseException:
    """Return the first leaf of an exception group; a `PenstockError` takes precedence over foreign exceptions."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_error(child) for child in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, PenstockError)), leaves[0])


def write_failure(run_dir: Path, error: BaseException, events: Sequence[str] = ()) -> None:
    """Write the traceback and the newest ledger events to `error.txt`, if the disk takes it; the console shows only one
    sentence.
    """
    lines = traceback.format_exception(error)
    if events:
        lines += ["\nThe newest events of the ledger, by time before the error:\n", *(f"{line}\n" for line in events)]
    with suppress(OSError):  # of a full disk, which hides nothing
        # This makes the directory: that it is gone may be the failure.
        write_text_atomically(run_dir / "error.txt", "".join(lines))
