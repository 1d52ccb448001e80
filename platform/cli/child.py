"""`penstock` commands as processes of another one, some of them at the same time, which ends them with itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

from penstock.dataflow.errors import PenstockError

_PROGRAM = """
from signal import SIGTERM
from penstock.envs.workers.process_tree import end_with_parent
end_with_parent(SIGTERM)
from penstock.platform.cli.main import main
main()
"""
_KILL_RESERVE_S = 10.0
"""Longer than the grace time of a command, after which it ends itself, seconds."""
_POLL_S = 0.2
_LOG_TAIL_BYTES = 2000
Item = TypeVar("Item")
Done = TypeVar("Done")


@contextmanager
def process_of(
    words: Sequence[str], grace_s: float, output: IO[str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A command as a process, which is ended with the context, with its own processes, within its grace time.

    So it is if this process is killed, or the thread that calls this ends.

    Args:
        words: Command and arguments.
        grace_s: Its `stop_grace_s`.
        output: Where it prints; None is where this process does.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, *words],
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        start_new_session=True,  # a signal to the process group ends it by way of this process, once
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(grace_s + _KILL_RESERVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class EndedError(Exception):
    """A command was ended in order, for the reason that the message gives; it has not failed."""


def run_penstock(
    words: Sequence[str],
    log: Path,
    timeout_s: float,
    name: str,
    grace_s: float,
    ending: Callable[[], str | None] = lambda: None,
) -> None:
    """Run a command with its output added to `log`. An interrupt ends it within its grace time, with its processes.

    Args:
        words: Command and arguments.
        log: File of its output.
        timeout_s: Longest time for it, seconds.
        name: Of it, in messages.
        grace_s: Its `stop_grace_s`.
        ending: Asked all the time; a reason ends it in order.

    Raises:
        EndedError: If it was ended for a reason.
        PenstockError: If it fails, or takes longer.
    """
    ends_at = time.monotonic() + timeout_s
    with log.open("a") as output, process_of(words, grace_s, output) as process:
        while (code := process.poll()) is None:
            if time.monotonic() > ends_at:
                raise PenstockError(f"{name} took longer than {timeout_s:.0f} s; its output is in {log}.")
            if (reason := ending()) is not None:
                raise EndedError(reason)
            time.sleep(_POLL_S)
    if code:
        tail = log.read_text(errors="replace")[-_LOG_TAIL_BYTES:]
        raise PenstockError(f"{name} failed with exit code {code}. The end of {log}:\n{tail}")


def run_side_by_side(
    run: Callable[[Item], Done],
    items: Sequence[Item],
    at_once: int,
    is_ending: threading.Event,
    *,
    first_alone: bool,
) -> list[Done]:
    """Call a function for all items, each call with commands of its own.

    Args:
        run: The function.
        items: Its arguments.
        at_once: How many calls there are at the same time.
        is_ending: Set if one fails or an interrupt comes, so that the others end theirs.
        first_alone: Whether the first call is done before the others, since it makes a warm start that is that of all.
    """
    num_alone = len(items) if at_once == 1 else int(first_alone)
    done = [run(item) for item in items[:num_alone]]
    with ThreadPoolExecutor(at_once) as threads:
        try:
            return done + list(threads.map(run, items[num_alone:]))
        except BaseException:
            is_ending.set()
            threads.shutdown(cancel_futures=True)
            raise
