"""What surrounds a simulated run: how its end is told, and when garbage is collected."""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator
from pathlib import Path

from penstock.platform.simulator.world import InvariantError


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage rarely: with 10,000 live groups the collector took a quarter of the time and found nothing.

    These hold 1.2 million objects, and a batch that trains lets half of them go and makes as many anew.
    """
    before = gc.get_threshold()
    gc.set_threshold(2_000_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def describe(error: BaseException) -> str:
    """One line: what broke, and for unexpected errors where."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    cause: BaseException | None = error
    while cause is not None:
        error, cause = (cause if isinstance(cause, InvariantError) else error), cause.__context__
    if isinstance(error, InvariantError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{where}: {error}"
