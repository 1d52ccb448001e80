"""The process that only runs the user's reward function.

Forked by its supervisor (supervisor.py) with `SOCKET_FD DEVICE REWARD SANDBOX`, the last two as JSON. It consumes
request frames from the socket, waits for nothing else, and is unblocked by the next frame. It ends when the socket
closes.

Request frame: `!IQ` length and call id, then a pickle of `(trajectory, fields)`.
Reply frame: `!IQ` length and call id (`HELLO_ID` once, after loading the function), then a JSON object: a `Reply`.
Replies are JSON so that the worker executes nothing that the user's code sends.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import socket
import struct
from typing import Any, cast

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import RewardConfig
from penstock.envs.contract import Device, RewardContext, RewardFunction
from penstock.envs.loading import load_reward
from penstock.envs.reward_result import Reply, to_failure, to_reply
from penstock.envs.rewards.composition import is_async_function, is_pure_function
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.workers.permission_hints import permission_hint

HEADER = struct.Struct("!IQ")
HELLO_ID = 0
MAX_REPLY_BYTES = 1 << 20
"""A larger frame is not a reply: the user's code has written into our socket."""


def encode_frame(call_id: int, body: bytes) -> bytes:
    """Encode one frame."""
    return HEADER.pack(len(body), call_id) + body


def encode_reply(call_id: int, reply: Reply) -> bytes:
    """Encode one reply frame."""
    return encode_frame(call_id, json.dumps(reply).encode())


def serve_sync(function: RewardFunction, connection: socket.socket) -> None:
    """Answer the calls in order: the first unanswered call is the one that runs."""
    reader = connection.makefile("rb")
    while header := reader.read(HEADER.size):
        length, call_id = HEADER.unpack(header)
        connection.sendall(encode_reply(call_id, _call(function, reader.read(length))))


def _call(function: RewardFunction, body: bytes) -> Reply:
    try:
        trajectory, fields = pickle.loads(body)  # noqa: S301  written by our own parent
        returned = function(trajectory, **fields)
        return to_reply(asyncio.run(_await(returned)) if inspect.isawaitable(returned) else returned)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  user code: its errors are data
        return to_failure(error)


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
            trajectory, fields = pickle.loads(body)  # noqa: S301  written by our own parent
            return to_reply(await _await(function(trajectory, **fields)))
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001  user code: its errors are data
        return {"timed_out": True} if deadline.expired() else to_failure(error)


def main(arguments: list[str]) -> None:
    """Load the function, send the hello, serve until the socket closes."""
    socket_fd, device, reward, sandbox = arguments
    connection = socket.socket(fileno=int(socket_fd))
    config = RewardConfig.model_validate_json(reward)
    try:
        context = RewardContext(
            SandboxConfig.model_validate_json(sandbox), device=cast("Device", device), is_serving=True
        )
        function = load_reward(config, context)
    except ConfigError as error:
        connection.sendall(encode_reply(HELLO_ID, {"error": " ".join(error.violations) + permission_hint(error)}))
        return
    is_async = is_async_function(function)
    hello: Reply = {"is_async": is_async, "is_pure": is_pure_function(function)}
    connection.sendall(encode_reply(HELLO_ID, hello))
    if is_async:
        asyncio.run(serve_async(function, connection, config.timeout_s))
    else:
        serve_sync(function, connection)
