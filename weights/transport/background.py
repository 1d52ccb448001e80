"""Work beside decoding: a thread that is polled, and on a GPU a stream of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from penstock.dataflow.errors import WeightSyncError


class BackgroundJob:
    """One job at a time in a thread, for processes that are polled."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error = ""

    def begin(self, name: str, job: Callable[[], None]) -> None:
        """Start a job; it begins once the one before has ended, which the time-outs of its legs see to."""
        self._thread = threading.Thread(target=self._run, args=(self._thread, job), name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def error(self) -> str:
        """Why the job failed, if it has."""
        return self._error

    def _run(self, before: threading.Thread | None, job: Callable[[], None]) -> None:
        if before is not None:
            before.join()
        self._error = ""
        try:
            job()
        except WeightSyncError as error:
            self._error = str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing of this version can be used
            self._error = f"{type(error).__name__}: {error}"


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Work beside what else a GPU does, complete at the end; on the CPU as it is."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
