"""The sandbox on this machine: a warm fork server in a jail, and one cell per program.

A program's cell ends when its socket closes, so a cancelled `run` ends its program. A fork server that dies, or makes
no cells any more, is replaced; one cell that fails is no reason to end the programs in the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.dataflow.errors import ConfigError
from penstock.envs.sandbox.cell import LENGTH
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import (
    FORK_SERVER,
    Limits,
    Program,
    SandboxResult,
    SandboxUnavailableError,
    decode_result,
    encode_job,
)

_START_TIMEOUT_S = 60.0
_GRACE_S, _END_TIMEOUT_S = 5.0, 2.0
_MAX_ATTEMPTS = 2
_MAX_HELLO_BYTES = 65536
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Isolation:
    """What the host allows.

    Attributes:
        is_isolated: Programs run in namespaces of their own.
        problem: Why not, else empty.
    """

    is_isolated: bool
    problem: str

    def __str__(self) -> str:
        return "namespaces" if self.is_isolated else f"none ({self.problem})"


class ForkServer:
    """A running fork server. Blocking; a start takes some tens of milliseconds.

    Raises:
        SandboxUnavailableError: If it does not start.
    """

    def __init__(self, config: SandboxConfig, *, isolate: bool = True) -> None:
        settings = {"isolate": isolate, "read_only_paths": config.read_only_paths, "preload": config.preload}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", FORK_SERVER,
                 str(theirs.fileno()), str(os.getpid()), json.dumps(settings)],
                pass_fds=[theirs.fileno()],
                env=_environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        self._control.settimeout(_START_TIMEOUT_S)
        try:
            hello = self._control.recv(_MAX_HELLO_BYTES)
        except TimeoutError:
            hello = b""
        if not hello:
            raise SandboxUnavailableError(self._why_it_did_not_start())
        self.isolation = Isolation(**json.loads(hello))

    def open_cell(self) -> socket.socket:
        """The client's end of a new cell's socket.

        Raises:
            OSError: If the server is gone.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    @property
    def is_alive(self) -> bool:
        """Is the other end of the control socket open?"""
        poll = select.poll()
        try:
            poll.register(self._control, 0)  # a hang-up is reported unasked
        except ValueError:  # closed by us
            return False
        return not poll.poll(0)

    def close(self) -> None:
        """End it with all programs that run. Safe to call again."""
        self._control.close()  # upon which it ends all that runs
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _why_it_did_not_start(self) -> str:
        self._process.kill()
        assert self._process.stderr is not None
        last = next(reversed(self._process.stderr.read().decode(errors="replace").strip().splitlines()), "no output")
        self.close()
        return f"sandbox: its fork server did not start: {last}"


def find_isolation(config: SandboxConfig) -> Isolation:
    """Try what the host allows, and say it once if that is nothing.

    Raises:
        ConfigError: If the host allows no isolation and `allow_unisolated` is off.
        SandboxUnavailableError: If the fork server does not start.
    """
    server = ForkServer(config)
    server.close()
    judge_isolation(server.isolation, config)
    return server.isolation


def judge_isolation(isolation: Isolation, config: SandboxConfig) -> None:
    """Refuse or warn where there is no isolation.

    Raises:
        ConfigError: If `allow_unisolated` is off.
    """
    if isolation.is_isolated:
        return
    if not config.allow_unisolated:
        raise ConfigError(
            [
                f"sandbox.allow_unisolated=false, but this host allows no isolation: {isolation.problem}. Untrusted "
                "code could read, change and send what you can. Allow user namespaces (sysctl user.max_user_namespaces,"
                " kernel.unprivileged_userns_clone; docker: --security-opt seccomp=unconfined), set sandbox.remote, or "
                "set sandbox.allow_unisolated=true if you trust the code."
            ]
        )
    logger.warning("sandbox: this host allows no isolation (%s): programs run with limits only.", isolation.problem)


class LocalSandbox:
    """Runs programs on this machine. Use it from one event loop, whose thread must outlive it.

    Args:
        config: The section `sandbox`.
        isolate: False does not even try to isolate; for tests and comparisons.
    """

    def __init__(self, config: SandboxConfig, *, isolate: bool = True) -> None:
        self._config = config
        self._isolate = isolate
        self._slots = asyncio.Semaphore(config.num_slots)
        self._starting = asyncio.Lock()
        self._server: ForkServer | None = None
        self._is_closed = False

    async def start(self) -> Isolation:
        """Have the fork server ready before the first program; says which isolation was found.

        Raises:
            ConfigError: If the host allows no isolation and `allow_unisolated` is off.
            SandboxUnavailableError: If the fork server does not start.
        """
        async with self._starting:
            if self._is_closed:
                raise SandboxUnavailableError("sandbox: it has been closed")
            if self._server is None:
                server = ForkServer(self._config, isolate=self._isolate)  # started by this thread: it dies with it
                try:
                    judge_isolation(server.isolation, self._config)
                except ConfigError:
                    server.close()
                    raise
                self._server = server
            return self._server.isolation

    async def run(self, program: Program, limits: Limits) -> SandboxResult:
        """Run one program. See `Sandbox.run`."""
        problem = ""
        async with self._slots:
            for _ in range(_MAX_ATTEMPTS):
                isolation = await self.start()
                server = self._server
                try:
                    async with asyncio.timeout(limits.wall_s + _GRACE_S):
                        return await self._run(program, limits, isolation)
                except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                    problem = f"{type(error).__name__}: {error}"
                    if server is not None and not await _makes_cells(server):
                        self._drop(server)
        raise SandboxUnavailableError(f"sandbox: a cell did not answer, {_MAX_ATTEMPTS} times in a row: {problem}")

    async def close(self) -> None:
        """End the fork server and every program that runs."""
        self._is_closed = True
        self._drop(self._server)

    def _drop(self, server: ForkServer | None) -> None:
        if server is not None and server is self._server:
            self._server = None
            server.close()

    async def _run(self, program: Program, limits: Limits, isolation: Isolation) -> SandboxResult:
        assert self._server is not None
        job: dict[str, Any] = encode_job(program, limits)
        directory = None if isolation.is_isolated else tempfile.mkdtemp(prefix="penstock-sandbox-")
        connection = self._server.open_cell()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            try:
                body = json.dumps({**job, "directory": directory}).encode()
                writer.write(LENGTH.pack(len(body)) + body)
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                reply = json.loads(await reader.readexactly(length))
            finally:
                writer.close()
        finally:
            if directory is not None:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        if "error" in reply:
            raise SandboxUnavailableError(f"sandbox: the cell could not be made: {reply['error']}")
        return decode_result(reply["result"])


async def _makes_cells(server: ForkServer) -> bool:
    """Try it: a cell whose client leaves before it has sent a job ends at once."""
    try:
        with server.open_cell() as connection:
            connection.settimeout(0)
            connection.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_GRACE_S):
                await asyncio.get_running_loop().sock_recv(connection, 1)
    except OSError:  # a time-out is one
        return False
    return server.is_alive


def _environment() -> dict[str, str]:
    """What the fork server inherits: nothing that could be a secret."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    return {"PATH": os.defpath, "LANG": "C.UTF-8", **kept, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
