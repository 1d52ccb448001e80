"""What a command does while it prints nothing else, so that it is never silent for long.

On a terminal it is one line, rewritten every second and erased before anything else is printed; elsewhere a line of its
own, whenever `QUIET_S` seconds have passed without another one. A thread prints it, because the event loop may be busy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console

TERMINAL_S, QUIET_S = 1.0, 10.0
"""Time between two lines, on a terminal and elsewhere, seconds."""
_BAR_CELLS = 20
_MIN_RATE_S = 2.0
_ERASE = "\r\x1b[2K"


class Progress(NamedTuple):
    """What a command does now."""

    what: str
    """As a short phrase, e.g. `evaluating v0`. Its time is counted from when it is first seen."""
    done: int | None = None
    """How much of `total` is done; None: that is not known."""
    total: int | None = None
    """In `unit`."""
    unit: str = ""
    """Plural, e.g. `answers`."""
    num_tokens: int | None = None
    """Tokens received from the engines since the start of the command; None: not shown."""


class ProgressLine:
    """Prints the progress of a command on its console. All that is printed on that console goes through `printing`."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._lock = threading.RLock()
        self._printed_at = float("-inf")
        self._is_shown = False
        self._what = ""
        self._began_at = clock()
        self._tokens_at_start = 0

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Within it something else is printed. A console that is gone, such as a closed terminal, ends nothing."""
        with self._lock, suppress(OSError, ValueError):
            self._erase()
            yield
            self._printed_at = self._clock()

    @contextmanager
    def showing(self, progress: Callable[[], Progress]) -> Iterator[None]:
        """Within it, what `progress` says is shown. It is called in another thread."""
        ended = threading.Event()

        def show() -> None:
            while not ended.is_set():
                with self._lock, suppress(OSError, ValueError):
                    self.tick(progress())
                ended.wait(TERMINAL_S)

        thread = threading.Thread(target=show, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with self._lock, suppress(OSError, ValueError):
                self._erase()

    def tick(self, progress: Progress) -> None:
        """Show it, if it is time."""
        now = self._clock()
        if progress.what != self._what:
            self._what, self._began_at, self._tokens_at_start = progress.what, now, progress.num_tokens or 0
        file = self._console.file
        if self._console.is_terminal:
            text = self.text(progress, now)
            while cell_len(text) >= self._console.width:
                text = text[:-1]
            self._erase()
            file.write(text)
            self._is_shown = True
        elif now - self._printed_at >= QUIET_S:
            file.write(self.text(progress, now) + "\n")
            self._printed_at = now
        file.flush()

    def text(self, progress: Progress, now: float) -> str:
        """One line: the phrase, a bar, tokens per second, and the time that it has taken or still takes."""
        passed_s, parts, left = now - self._began_at, [progress.what], ""
        if progress.total:
            done = progress.done or 0
            filled = round(_BAR_CELLS * min(1.0, done / progress.total))
            parts.append(
                f"{'━' * filled}{'─' * (_BAR_CELLS - filled)} {done}/{progress.total} {progress.unit}".rstrip()
            )
            if done and passed_s >= _MIN_RATE_S:
                left = f", {format_duration(passed_s / done * (progress.total - done))} left"
        if progress.num_tokens is not None and passed_s >= _MIN_RATE_S:
            parts.append(f"{format_count((progress.num_tokens - self._tokens_at_start) / passed_s)} tok/s")
        return "  " + " · ".join([*parts, f"{format_duration(passed_s)}{left}"])

    def _erase(self) -> None:
        if self._is_shown:
            self._is_shown = False
            self._console.file.write(_ERASE)


def waiting(what: str) -> AbstractContextManager[None]:
    """Within it, the command says on its error stream what it waits for."""
    return ProgressLine(Console(stderr=True)).showing(lambda: Progress(what))


def format_duration(seconds: float) -> str:
    """Seconds for humans: `42s`, `3m 05s`, `2h 10m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def format_count(value: float) -> str:
    """A count for humans: `640`, `5.2k`."""
    return f"{value:.0f}" if value < 1000 else f"{value / 1000:.1f}k"
