"""Calls into an engine's workers that do not wait for a step of the engine.

vLLM runs a `collective_rpc` between two steps, so it waits for the running one: seconds, if that computes the prompts
of many requests. What can be done during decoding (fetching a version, joining a group) is asked of a thread in each
worker instead, over a socket of this machine. It answers when the work is done.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from penstock.dataflow.errors import EngineLostError, WeightSyncError

Address = tuple[str, bytes]
"""Name of a socket of Linux's abstract namespace, which leaves no file behind, and the key without which it accepts
nobody."""


def serve(methods: Mapping[str, Callable[..., Any]]) -> Address:
    """Start the thread of this worker, which serves one client, a call at a time; returns where."""
    name, key = f"\0penstock-{secrets.token_hex(8)}", secrets.token_bytes(32)
    listener = Listener(name, family="AF_UNIX", authkey=key)

    def answer_calls() -> None:
        with listener, accepted(listener) as connection, suppress(EOFError, OSError):  # until the engine is gone
            while True:
                number, method, arguments = connection.recv()
                result, error = None, ""
                try:
                    result = methods[method](*arguments)
                except WeightSyncError as refusal:
                    error = str(refusal)
                except Exception as failure:  # noqa: BLE001 - any failure means that this version cannot be used
                    error = f"{type(failure).__name__}: {failure}"
                connection.send((number, result, error))

    threading.Thread(target=answer_calls, name="penstock calls", daemon=True).start()
    return name, key


def accepted(listener: Listener) -> Connection:
    """The connection of the first client that has the key."""
    while True:
        try:
            return listener.accept()
        except AuthenticationError:
            continue


class WorkerCalls:
    """The client of all workers of an engine.

    A call that is late is given up, not ended: its answer is skipped when it comes, and the next call waits for its
    turn.
    """

    def __init__(self, engine_id: str, addresses: Mapping[int, Address]) -> None:
        """Connect; `addresses` is where each rank listens."""
        self._engine_id = engine_id
        self._connections: dict[int, Connection] = {
            rank: Client(name, family="AF_UNIX", authkey=key) for rank, (name, key) in sorted(addresses.items())
        }
        self._turns = {rank: threading.Lock() for rank in self._connections}  # a call that was cancelled still listens
        self._number = 0

    async def call(self, what: str, timeout_s: float, name: str, *arguments: Any) -> list[Any]:
        """Call a method in every worker at once; returns their results by rank.

        Args:
            what: It is for, for messages.
            timeout_s: Longest wait, seconds.
            name: Of the method.
            arguments: Of the method.

        Raises:
            WeightSyncError: If it fails in a worker, or one has not answered in time.
            EngineLostError: If a worker has ended.
        """
        self._number += 1
        deadline = time.monotonic() + timeout_s
        waits = [
            asyncio.to_thread(self._ask, rank, (self._number, name, arguments), deadline) for rank in self._connections
        ]
        answers = dict(zip(self._connections, await asyncio.gather(*waits), strict=True))
        if late := [str(rank) for rank, answer in answers.items() if answer is None]:
            limit = f"{timeout_s:g} s (weights.timeout_s)"
            raise WeightSyncError(
                f"{what}: rank {', '.join(late)} of {self._engine_id} has not finished after {limit}."
            )
        answered = [answer for answer in answers.values() if answer is not None]
        if wrong := [error for _, error in answered if error]:
            raise WeightSyncError(f"{self._engine_id}: {wrong[0]}")
        return [result for result, _ in answered]

    def _ask(self, rank: int, message: tuple[int, str, tuple[Any, ...]], deadline: float) -> tuple[Any, str] | None:
        """Result and error of one worker; None if it is late."""

        def left_s() -> float:
            return max(deadline - time.monotonic(), 0.0)

        connection, turn = self._connections[rank], self._turns[rank]
        if not turn.acquire(timeout=left_s()):
            return None
        try:
            connection.send(message)
            while connection.poll(left_s()):
                number, result, error = connection.recv()
                if number == message[0]:
                    return result, error
        except (EOFError, OSError) as error:
            raise EngineLostError.final(f"{self._engine_id}: its worker of rank {rank} has ended") from error
        finally:
            turn.release()
        return None

    def close(self) -> None:
        """End the threads of the workers."""
        for connection in self._connections.values():
            connection.close()
