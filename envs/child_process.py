"""The parent's side of one reward process: its birth, its frames, its death. Knows nothing of calls or time-outs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

from penstock.dataflow.errors import ConfigError
from penstock.envs.reward_child import HEADER, HELLO_ID, Reply


class RewardProcess(asyncio.Protocol):
    """A running `penstock.envs.reward_child` in a session (process group) of its own.

    Args:
        fn_path: Import path of the reward function.
        timeout_s: Longest time for one call, seconds.
        on_reply: Called with `(call_id, reply)` for every answer.
        on_exit: Called once if the process ends without having been asked to.
    """

    def __init__(
        self,
        fn_path: str,
        timeout_s: float,
        on_reply: Callable[[int, Reply], None],
        on_exit: Callable[[RewardProcess], None],
    ) -> None:
        self._fn_path = fn_path
        self._timeout_s = timeout_s
        self._on_reply = on_reply
        self._on_exit = on_exit
        self._buffer = bytearray()
        self._hello: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self.is_async = False

    async def start(self, startup_timeout_s: float) -> None:
        """Start the process and wait until it has loaded the function.

        Raises:
            ConfigError: If the function does not load, or not in time.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = self._spawn(theirs)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        try:
            async with asyncio.timeout(startup_timeout_s):
                hello = await self._hello
        except TimeoutError:
            hello = {"error": f"reward.fn={self._fn_path!r} was not loaded within {startup_timeout_s:g} s."}
        if "error" in hello:
            self.kill()
            raise ConfigError([hello["error"]])
        self.is_async = hello["is_async"]

    def _spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        arguments = [str(connection.fileno()), str(os.getpid()), self._fn_path, str(self._timeout_s)]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "penstock.envs.reward_child", *arguments],
            pass_fds=[connection.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def write(self, data: bytes) -> None:
        """Queue frames for the process."""
        assert self._transport is not None
        self._transport.write(data)

    def kill(self) -> str:
        """End the process with everything it started, and say how it ended. Safe to call again."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()
        if self._process is None:
            return "was never started"
        if self._process.returncode is None:  # until it is reaped, its id names our group and no other
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
        return _how_it_ended(self._process.returncode)

    def end(self) -> str:
        """Reap a process whose socket is closed, and say how it ended by itself."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.2)
        return self.kill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            length, call_id = HEADER.unpack_from(self._buffer, start)
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            self._deliver(call_id, json.loads(self._buffer[start + HEADER.size : end]))
            start = end
        del self._buffer[:start]

    def _deliver(self, call_id: int, reply: Reply) -> None:
        if self._is_closed:
            return
        if call_id == HELLO_ID and not self._hello.done():
            self._hello.set_result(reply)
        else:
            self._on_reply(call_id, reply)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._is_closed:
            return
        if not self._hello.done():
            self._hello.set_result(
                {"error": f"reward.fn={self._fn_path!r}: its process {self.end()} while loading it."}
            )
        else:
            self._on_exit(self)


def _how_it_ended(returncode: int | None) -> str:
    if returncode is None:
        return "did not end"
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"ended with exit code {returncode}"
