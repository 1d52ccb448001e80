"""The only thread that uses the torch engine's model, and how other threads run actions in it between decode steps.

Consumes: actions from its inbox. Waits for: the inbox, only when there is nothing to decode. Unblocked by: any action.
Invariant: model, cache and batch are changed in this thread only, so an action sees no half-done decode step.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import torch

from penstock.dataflow.errors import EngineLostError
from penstock.dataflow.ids import RequestId
from penstock.rollout.engines.torch.decoding import DecodeBatch, Deltas

Result = TypeVar("Result")
Action = Callable[[DecodeBatch], Any]


class DecodeThread:
    """Steps a `DecodeBatch` while it has work, and runs actions between the steps."""

    def __init__(
        self,
        batch: DecodeBatch,
        threads: int,
        on_deltas: Callable[[Deltas], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Store the batch; `start` begins to serve.

        Args:
            batch: Used by this thread alone.
            threads: CPU threads of a forward pass.
            on_deltas: Called in this thread with the deltas of one decode step or one abort, never empty. It must
                return at once.
            on_lost: Called in this thread with the reason when the thread has failed and serves nothing any more.
        """
        self.batch = batch
        self._threads = threads
        self._on_deltas = on_deltas
        self._on_lost = on_lost
        self._inbox: queue.SimpleQueue[tuple[Action, Future[Any]]] = queue.SimpleQueue()
        # Taken by `call` and at the end of the thread, so that no action is queued after the thread has ended.
        self._gate = threading.Lock()
        self._is_open = True
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-decode", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def call(self, action: Callable[[DecodeBatch], Result]) -> Future[Result]:
        """Run `action` on the batch after the current decode step; the future gets its result or exception.

        Raises:
            EngineLostError: If the thread has ended.
        """
        future: Future[Result] = Future()
        with self._gate:
            if not self._is_open:
                raise EngineLostError("the decode thread has ended")
            self._inbox.put((action, future))
        return future

    def abort(self, request_id: RequestId) -> Future[None]:
        """Abort one request; when the future is done, its last delta has been reported."""
        return self.call(lambda batch: self._report(batch.abort(request_id)))

    def stop(self, timeout_s: float) -> None:
        """End the thread after the current step. Blocks at most `timeout_s` seconds.

        Raises:
            EngineLostError: If it has not ended by then.
        """
        self._is_stopping.set()
        with suppress(EngineLostError):
            self.call(lambda _batch: None)  # wakes it if it is idle
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise EngineLostError(f"the decode thread has not ended within {timeout_s} s; it is inside a decode step")

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP counts threads per calling thread
        try:
            while not self._is_stopping.is_set():
                self._report(self.batch.step())
                if not self.batch.can_step:
                    self._execute(*self._inbox.get())
                while not self._inbox.empty():
                    self._execute(*self._inbox.get())
        except Exception:  # noqa: BLE001 - top level of the thread: callers must learn of any failure
            self._on_lost(f"the decode thread failed:\n{traceback.format_exc()}")
        finally:
            with self._gate:
                self._is_open = False
            while not self._inbox.empty():
                _, future = self._inbox.get()
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineLostError("the decode thread has ended"))

    def _execute(self, action: Action, future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(action(self.batch))
        except Exception as error:  # noqa: BLE001 - the caller gets it from the future
            future.set_exception(error)

    def _report(self, deltas: Deltas) -> None:
        if deltas:
            self._on_deltas(deltas)
