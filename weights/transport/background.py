"""Work in the background of decoding: a thread that is polled, and on a GPU a separate CUDA stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from penstock.dataflow.errors import WeightSyncError


class BackgroundJob:
    """Runs one job at a time in a thread; its end is polled."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error = ""

    def begin(self, name: str, job: Callable[[], None]) -> None:
        """Start a job; it runs after the previous one has ended, which the time-outs of that job guarantee."""
        self._thread = threading.Thread(target=self._run, args=(self._thread, job), name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def error(self) -> str:
        """Why the job failed; empty if it has not."""
        return self._error

    def _run(self, previous: threading.Thread | None, job: Callable[[], None]) -> None:
        if previous is not None:
            previous.join()
        self._error = ""
        try:
            job()
        except WeightSyncError as error:
            self._error = str(error)
        except Exception as error:  # noqa: BLE001 - any failure means that this version cannot be used
            self._error = f"{type(error).__name__}: {error}"


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Run the body on a new CUDA stream and synchronize it at the end; on the CPU, run it unchanged."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
