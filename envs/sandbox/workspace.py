"""A sandbox in which several programs, one after the other, work on the same files, with a way to one address outside.

    a program ─▶ 127.0.0.1:41000 in the sandbox ─▶ Relay, outside ─▶ the address

The sandbox has a network of its own. Its first process makes the listening socket there and hands it out (runner.py),
so nothing in the sandbox passes the bytes on, and no program can stand in for it.

Consumes: programs, one at a time. Waits for: the result. Unblocked by: the program's exit, its first limit, `stop`, or
`close`. Invariant: when `run` has returned, no program runs; after `close` none of its files and connections is left.
"""

from __future__ import annotations

import asyncio
import socket

from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Limits, Program, SandboxResult, SandboxUnavailableError
from penstock.envs.sandbox.local import IsolatedRunner
from penstock.envs.sandbox.runner import LISTEN, PORT, WORKSPACE

Address = tuple[str, int]

MAX_CONNECTIONS = 128
"""Of one relay at a time; further ones are closed."""
MAX_RELAYED_BYTES = 1 << 30
"""Of one relay, both ways together; then its connections are closed."""
_CHUNK = 1 << 16
_CONNECT_S = 10.0
_STOP_EVERY_S = 0.05


class Relay:
    """Passes the connections of a socket to one address, as they are, until it is closed.

    Attributes:
        num_connections: Those that it has passed on.
    """

    def __init__(self, address: Address) -> None:
        self.num_connections = 0
        self._address = address
        self._left_bytes = MAX_RELAYED_BYTES
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept connections; the socket belongs to the relay from now on."""
        self._server = await asyncio.start_server(self._serve, sock=listener)

    async def close(self) -> None:
        """Close the socket and all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._serving) < MAX_CONNECTIONS:
                self._serving.add(task)
                await self._connect(reader, writer)
        except OSError:
            return  # either end has closed the connection, or there is no one at the address
        finally:
            self._serving.discard(task)
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_CONNECT_S):
            their_reader, their_writer = await asyncio.open_connection(*self._address)
        self.num_connections += 1
        ways = [
            asyncio.create_task(self._pass(reader, their_writer)),
            asyncio.create_task(self._pass(their_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            their_writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what one end writes, to its end."""
        while data := await reader.read(_CHUNK):
            self._left_bytes -= len(data)
            if self._left_bytes < 0:
                raise ConnectionAbortedError
            writer.write(data)
            await writer.drain()
        writer.write_eof()


class Workspace:
    """One sandbox. Use it from one event loop, and close it in the thread that has made it, which must outlive it.

    Args:
        config: The section `sandbox`.
        max_disk_mib: Size of its folder, MiB; not enforced without isolation.
        isolate: Whether it is isolated; otherwise its programs have the network of the host.
        image: Folder with the root filesystem of its programs; None is the host's.
        address: Host and port that its programs may reach; None is no address.

    Attributes:
        folder: The folder in which programs start, as they see it.
        address: Where its programs reach the address.

    Raises:
        SandboxUnavailableError: If it does not start.
    """

    def __init__(
        self,
        config: SandboxConfig,
        max_disk_mib: int,
        *,
        isolate: bool,
        image: str | None = None,
        address: Address | None = None,
    ) -> None:
        is_relayed = isolate and address is not None
        options = [WORKSPACE, LISTEN] if is_relayed else [WORKSPACE]
        self.relay = Relay(address) if is_relayed and address is not None else None
        self.address = ("127.0.0.1", PORT) if is_relayed else address
        try:
            self._runner = IsolatedRunner(config, max_disk_mib, isolate=isolate, options=options, image=image)
        except OSError as error:
            raise SandboxUnavailableError(f"sandbox: it cannot be started: {error}") from error
        try:
            self._runner.wait_until_ready()
        except OSError as error:
            self._runner.end()
            raise SandboxUnavailableError(f"sandbox: it does not start: {error}") from error
        self.folder = self._runner.directory

    async def run(self, program: Program, limits: Limits) -> SandboxResult:
        """Run one program to its end; then nothing that it has started runs any more.

        Raises:
            SandboxUnavailableError: If the sandbox itself failed.
        """
        try:
            if self.relay is not None and self._runner.listener is not None:
                listener, self._runner.listener = self._runner.listener, None
                await self.relay.start(listener)
            return await self._runner.run_next(program, limits)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            raise SandboxUnavailableError(f"sandbox: it failed: {type(error).__name__}: {error}") from error

    async def stop(self, running: asyncio.Task[SandboxResult]) -> SandboxResult:
        """Kill the program of a call of `run`, and return its result.

        Raises:
            SandboxUnavailableError: If the sandbox itself failed.
        """
        while not running.done():  # it may not have begun yet
            self._runner.kill_program()
            await asyncio.wait({running}, timeout=_STOP_EVERY_S)
        return running.result()

    async def close(self) -> None:
        """Kill everything in it, and remove its files."""
        self._runner.end()
        if self._runner.listener is not None:
            self._runner.listener.close()
        if self.relay is not None:
            await self.relay.close()


async def run_once(
    program: Program, limits: Limits, config: SandboxConfig, *, isolate: bool, image: str | None = None
) -> SandboxResult:
    """Run one program in a sandbox of its own, without a network.

    Raises:
        SandboxUnavailableError: If the sandbox itself failed.
    """
    workspace = Workspace(config, limits.max_disk_mib, isolate=isolate, image=image)
    try:
        return await workspace.run(program, limits)
    finally:
        await workspace.close()
