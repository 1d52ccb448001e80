"""The process that runs the user's reward function, and nothing else.

Started as `python -m penstock.envs.reward_child SOCKET_FD PARENT_PID FN TIMEOUT_S`. It consumes request frames from the
socket, waits for nothing else, and is unblocked by the next frame. It ends when the socket closes or its parent dies.

Request frame: `!IQ` length and call id, then a pickle of `(trajectory, fields)`.
Reply frame: `!IQ` length and call id (`HELLO_ID` once, after loading the function), then a JSON object: a `Reply`.
Replies are JSON so that nothing the user's code sends is executed by the worker.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import math
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from numbers import Real
from typing import Any, TypedDict

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import RewardConfig
from penstock.envs.contract import RewardFunction
from penstock.envs.loading import load_reward

HEADER = struct.Struct("!IQ")
HELLO_ID = 0
MAX_TRACEBACK_CHARACTERS = 4000
_PR_SET_PDEATHSIG = 1


class Reply(TypedDict, total=False):
    """Either `reward` with its `parts`, or `error`, or `timed_out`; the hello carries `is_async` or `error`."""

    reward: float
    parts: dict[str, float]
    error: str
    timed_out: bool
    is_async: bool


def encode_frame(call_id: int, body: bytes) -> bytes:
    """One frame as it goes over the wire."""
    return HEADER.pack(len(body), call_id) + body


def encode_reply(call_id: int, reply: Reply) -> bytes:
    """One reply frame."""
    return encode_frame(call_id, json.dumps(reply).encode())


def to_reply(returned: object) -> Reply:
    """Turn what the user's function returned into a reward and its parts, or into an error that says what it was.

    A dict names parts; the reward is its `reward` entry, or the sum.
    """
    if not isinstance(returned, Mapping):
        number = _to_number(returned, "the reward function returned ")
        return {"error": number} if isinstance(number, str) else {"reward": number, "parts": {}}
    if not returned:
        return {"error": "the reward function returned an empty dict; it needs at least one number"}
    parts: dict[str, float] = {}
    for name, value in returned.items():
        number = _to_number(value, f"the reward function returned a dict with {name}=")
        if isinstance(number, str):
            return {"error": number}
        parts[str(name)] = number
    total = parts.pop("reward", None)
    return {"reward": math.fsum(parts.values()) if total is None else total, "parts": parts}


def _to_number(value: object, what: str) -> float | str:
    """The finite number that `value` is, or a sentence that says why it is none."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a numpy or torch scalar
    if not isinstance(value, Real):
        return f"{what}{value!r:.200} of type {type(value).__name__}; expected a number, or a dict of numbers"
    number = float(value)
    return number if math.isfinite(number) else f"{what}{number!r}; expected a finite number"


def _failure(error: BaseException) -> Reply:
    return {"error": "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARACTERS:]}


def serve_sync(function: RewardFunction, connection: socket.socket) -> None:
    """Answer one call after the other, in order: the first unanswered call is the one that runs."""
    reader = connection.makefile("rb")
    while header := reader.read(HEADER.size):
        length, call_id = HEADER.unpack(header)
        connection.sendall(encode_reply(call_id, _call(function, reader.read(length))))


def _call(function: RewardFunction, body: bytes) -> Reply:
    try:
        trajectory, fields = pickle.loads(body)  # noqa: S301  our own parent wrote it
        returned = function(trajectory, **fields)
        return to_reply(asyncio.run(_await(returned)) if inspect.isawaitable(returned) else returned)
    except (Exception, SystemExit) as error:  # noqa: BLE001  user code: whatever it raises is data
        return _failure(error)


async def _await(awaitable: Any) -> object:
    return await awaitable


async def serve_async(function: RewardFunction, connection: socket.socket, timeout_s: float) -> None:
    """Answer calls concurrently, each within its own time-out."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    running: set[asyncio.Task[None]] = set()

    async def answer(call_id: int, body: bytes) -> None:
        writer.write(encode_reply(call_id, await _call_async(function, body, timeout_s)))

    while True:
        try:
            length, call_id = HEADER.unpack(await reader.readexactly(HEADER.size))
            body = await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        task = asyncio.create_task(answer(call_id, body))
        running.add(task)
        task.add_done_callback(running.discard)


async def _call_async(function: RewardFunction, body: bytes, timeout_s: float) -> Reply:
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            trajectory, fields = pickle.loads(body)  # noqa: S301  our own parent wrote it
            return to_reply(await _await(function(trajectory, **fields)))
    except (Exception, SystemExit) as error:  # noqa: BLE001  user code: whatever it raises is data
        return {"timed_out": True} if deadline.expired() else _failure(error)


def _is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies, and end now if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(0)


def main(arguments: list[str]) -> None:
    """Load the function, say hello, serve until the socket closes."""
    socket_fd, parent_pid, fn_path, timeout_s = arguments
    _die_with_parent(int(parent_pid))
    connection = socket.socket(fileno=int(socket_fd))
    try:
        function = load_reward(RewardConfig(fn=fn_path))
    except ConfigError as error:
        connection.sendall(encode_reply(HELLO_ID, {"error": " ".join(error.violations)}))
        return
    is_async = _is_async(function)
    connection.sendall(encode_reply(HELLO_ID, {"is_async": is_async}))
    if is_async:
        asyncio.run(serve_async(function, connection, float(timeout_s)))
    else:
        serve_sync(function, connection)


if __name__ == "__main__":
    main(sys.argv[1:])
