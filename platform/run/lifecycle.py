"""A run from start to end: signals, the end of every process, and one readable error instead of a wall of traces."""

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
"""Signals that come so soon after the first are that one: `timeout`, `uv run` and the like pass on what the terminal
has sent to the whole process group."""


class Interrupted(Exception):  # noqa: N818 - not an error: somebody asked the run to end
    """Ctrl-C or SIGTERM.

    Attributes:
        signum: Which signal.
    """

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(signal.Signals(signum).name)


def set_gc_thresholds() -> None:
    """Look for garbage in cycles after 100,000 young objects instead of 700.

    A run keeps hundreds of thousands of small objects alive (tasks, futures, records of live groups), and walking them
    was half of the time of a trajectory. What the flow lets go is freed by reference counts, so cycles may wait.
    """
    gc.set_threshold(GC_GENERATION0_THRESHOLD, 20, 100)


def run_to_end(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run `main` with SIGINT and SIGTERM turned into an orderly end; returns its exit code.

    The first signal cancels `main`, whose context managers end every process; a second one, later than
    `SAME_SIGNAL_S`, kills at once.

    Raises:
        Interrupted: After the orderly end.
        PenstockError: What stopped the run, unwrapped from exception groups.
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
        except BaseExceptionGroup as group:  # task groups wrap errors; a person wants the one that came first
            raise first_error(group) from group
        finally:
            end_processes(descendants())  # nothing is left behind, whatever the parts did


def first_error(error: BaseException) -> BaseException:
    """The first leaf of an exception group, our own errors before foreign ones."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_error(child) for child in error.exceptions]
    return next((leaf for leaf in leaves if isinstance(leaf, PenstockError)), leaves[0])


def write_failure(run_dir: Path, error: BaseException, events: Sequence[str] = ()) -> Path:
    """Keep the whole traceback in the run directory, and what happened before; the console shows one sentence."""
    path = run_dir / "error.txt"
    lines = traceback.format_exception(error)
    if events:
        lines += ["\nThe newest events of the ledger, by time before the error:\n", *(f"{line}\n" for line in events)]
    path.write_text("".join(lines))
    return path
