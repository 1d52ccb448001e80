"""The lifecycle of a command: signal handling, termination of all child processes, and one readable error."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import traceback
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from penstock.actors.processes import descendants, end_processes
from penstock.dataflow.errors import PenstockError

EXIT_OK = 0
GC_GENERATION0_THRESHOLD = 100_000
SAME_SIGNAL_S = 1.0
"""Signals this soon after the first one count as the same: `timeout`, `uv run` and similar wrappers forward a signal
that the terminal has already sent to the whole process group."""


class Interrupted(Exception):  # noqa: N818 - not an error: the user has stopped the run
    """The command was stopped by SIGINT (Ctrl-C) or SIGTERM.

    Attributes:
        signum: Number of the signal.
    """

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


def set_gc_thresholds() -> None:
    """Raise the threshold of the cyclic garbage collector from 700 to 100,000 young objects.

    A run keeps hundreds of thousands of small objects alive (tasks, futures, records of live groups), and traversing
    them took half of the driver's time per trajectory. Objects of the flow are freed by reference counting, so
    collecting cycles late is harmless.
    """
    gc.set_threshold(GC_GENERATION0_THRESHOLD, 20, 100)


class Stop:
    """How a run wants to be stopped.

    Attributes:
        handler: Called at the first signal; returns whether the run ends by itself. `main` is cancelled if not.
    """

    def __init__(self) -> None:
        self.handler: Callable[[], bool] = lambda: False


def run_to_end(main: Callable[[], Coroutine[Any, Any, int]], how: Stop | None = None) -> int:
    """Run `main` with an orderly shutdown on SIGINT and SIGTERM; returns its exit code.

    The first signal cancels `main`, whose context managers stop all processes, or calls the handler of `how`. A second
    one, more than `SAME_SIGNAL_S` later, exits immediately.

    Raises:
        Interrupted: After an orderly shutdown.
        PenstockError: The error that stopped the run, unwrapped from exception groups.
    """
    signals: list[int] = []
    first_at = 0.0
    set_gc_thresholds()
    with asyncio.Runner() as runner:
        loop = runner.get_loop()

        async def supervised() -> int:
            task = asyncio.create_task(main(), name="run")

            def stop(signum: int) -> None:
                nonlocal first_at
                if signals and loop.time() - first_at < SAME_SIGNAL_S:
                    return
                if signals:
                    os._exit(128 + signum)
                first_at = loop.time()
                signals.append(signum)
                if how is None or not how.handler():
                    task.cancel()

            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(signum, stop, signum)
            try:
                return await task
            except asyncio.CancelledError:
                if signals:
                    raise Interrupted(signals[0]) from None
                raise

        try:
            return runner.run(supervised())
        # Task groups wrap errors; the console shows only the first one.
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            # Stops child processes that a failed component has left running.
            end_processes(descendants())


def first_error(error: BaseException) -> BaseException:
    """Return the first leaf of an exception group; a `PenstockError` takes precedence over foreign exceptions."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_error(child) for child in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, PenstockError)), leaves[0])


def write_failure(run_dir: Path, error: BaseException, events: Sequence[str] = ()) -> Path:
    """Write the traceback and the newest ledger events to `error.txt`; the console shows only one sentence."""
    path = run_dir / "error.txt"
    run_dir.mkdir(parents=True, exist_ok=True)  # that it is gone may be the failure
    lines = traceback.format_exception(error)
    if events:
        lines += ["\nThe newest events of the ledger, by time before the error:\n", *(f"{line}\n" for line in events)]
    path.write_text("".join(lines))
    return path
