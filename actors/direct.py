"""A connection between the driver and an actor, beside Ray: for what is sent often and is small.

A call of a Ray actor takes milliseconds; a message here takes a tenth of one. Ray still places the actor, carries the
secret to the driver, and knows why an actor died.

The actor listens, the driver connects and shows the secret; before that nothing of what it sends is read. After that
both ends trust each other: messages are pickles. Frame: `!Q` length, then the pickle; a frame of length 0 is a sign of
life, which the listening end gives.
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.actors.silence import silence_limit

LENGTH = struct.Struct("!Q")
SIGN_OF_LIFE_S = 20.0
"""How often the listening end gives one, seconds."""
SILENCE_S = 80.0
"""After how long without any the other end is taken for dead, seconds."""
_SECRET_BYTES = 32
_GREETING_S = 10.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where an actor listens, and what it wants to hear first."""

    host: str
    port: int
    secret: bytes


class Connection:
    """One end. Not bounded by itself: whoever sends bounds what is under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: object) -> None:
        """Send a message; what becomes of it if the other end has gone is for `receive` to find out.

        Raises:
            Exception: Whatever the message's pickling raises.
        """
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._writer.write(LENGTH.pack(len(body)) + body)

    async def receive(self, silence_s: float | None) -> Any:
        """The next message.

        Args:
            silence_s: Longest wait for anything, signs of life included, seconds of a loop that does not stand still
                (actors/silence.py); None is no limit.

        Raises:
            TimeoutError: If there was nothing for that long.
            EOFError: If the other end has closed.
            OSError: If the connection broke.
        """
        while True:
            async with silence_limit(silence_s):
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                body = await self._reader.readexactly(length)
            if body:
                return pickle.loads(body)  # noqa: S301  both ends are ours: the secret was shown

    async def give_signs_of_life(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(SIGN_OF_LIFE_S)
            self._writer.write(LENGTH.pack(0))

    def close(self) -> None:
        self._writer.close()


class Listener:
    """The actor's end. One client at a time; a new one takes the place of the one before.

    Args:
        on_message: Called with every message.
    """

    def __init__(self, on_message: Callable[[Any], None]) -> None:
        self._on_message = on_message
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._server: asyncio.Server | None = None
        self._client: Connection | None = None

    async def listen(self, host: str) -> Address:
        """Listen on a free port of this address of the machine. Safe to call again."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, host, 0)
        _, port = self._server.sockets[0].getsockname()[:2]
        return Address(host, port, self._secret)

    def send(self, message: object) -> None:
        """Send to the client; without one it is lost, as the one that it was for has gone."""
        if self._client is not None:
            self._client.send(message)

    async def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Connection(reader, writer)
        signs: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(_GREETING_S):
                shown = await reader.readexactly(_SECRET_BYTES)
            if not secrets.compare_digest(shown, self._secret):
                return
            self._client = client
            signs = asyncio.create_task(client.give_signs_of_life())
            while True:
                self._on_message(await client.receive(None))
        except (TimeoutError, EOFError, OSError):
            pass  # it has gone, or was none of ours
        finally:
            if signs is not None:
                signs.cancel()
            if self._client is client:
                self._client = None
            client.close()


async def connect(address: Address, timeout_s: float) -> Connection:
    """The driver's end.

    Raises:
        OSError: If nobody listens there, or no packet gets there within `timeout_s` (TimeoutError).
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(address.secret)
    return Connection(reader, writer)
