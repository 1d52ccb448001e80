"""The socket on which a driver takes commands while it runs, and the client of `penstock scale` and `penstock set`.

One JSON object per line. The client sends one, the name of a command with its argument: `{"scale": 3}` or
`{"set": ["total_steps=200"]}`. The driver answers with any number of `{"progress": sentence}` lines, and at last one
`{"done": sentence}` or `{"error": sentence}`. Between them it sends `{}` every `ALIVE_S`, so that the client notices a
driver that hangs. A command goes on if its client goes away.

The socket is in the run directory, which only one driver has at a time; so a socket that is there when a driver starts
belongs to a dead one. The path of a socket has at most 107 bytes on Linux. If the run directory is deeper, the socket
is reached through a link in the system's temporary folder, which the file `control` in the run directory names.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.dataflow.errors import PenstockError
from penstock.platform.metrics.run_files import CONTROL_LINK_FILE, CONTROL_SOCKET

logger = logging.getLogger(__name__)

LONGEST_PATH_BYTES = 107
LONGEST_LINE_BYTES = 1 << 16
REQUEST_S, ALIVE_S, SEND_S, END_S = 10.0, 5.0, 10.0, 2.0
"""Longest wait for the command of a client, period of the signs of life, longest wait for a client to read a line, and
for the last lines at the end of the run; seconds."""
SILENCE_S = 60.0
"""A client gives up on a driver that sends nothing for so long, seconds."""

Command = Callable[[Any, Callable[[str], None]], Awaitable[str]]
"""Checks its argument and does it; is given a function for progress, and returns the last sentence."""


@asynccontextmanager
async def served_control(
    run_dir: Path, commands: Mapping[str, Command], note: Callable[[str], None]
) -> AsyncIterator[None]:
    """Take commands while the context is open. A run whose directory can hold no socket goes on without it.

    Args:
        run_dir: Directory of the run, which this process has locked.
        commands: By name.
        note: Told if there is no socket.
    """
    server = ControlServer(commands)
    _remove_socket(run_dir)
    try:
        address = _make_address(run_dir)
        listener = await asyncio.start_unix_server(server.serve, address, limit=LONGEST_LINE_BYTES)
        (run_dir / CONTROL_SOCKET).chmod(0o600)
    except OSError as error:  # some network file systems have no sockets
        names = " and ".join(f"`penstock {name}`" for name in commands)
        note(f"{names} cannot reach this run, because {run_dir} can hold no socket: {error}")
        _remove_socket(run_dir)
        yield
        return
    try:
        yield
    finally:
        listener.close()
        await server.close()
        _remove_socket(run_dir)


class ControlServer:
    """Answers clients. Each command is a task of its own, which ends with the run at the latest."""

    def __init__(self, commands: Mapping[str, Command]) -> None:
        self._known = commands
        self._clients: set[asyncio.Task[Any]] = set()
        self._commands: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one client."""
        task = asyncio.current_task()
        assert task is not None, "called in a task"
        self._clients.add(task)
        # The client may have gone or hang; that is no matter of the run.
        with suppress(OSError, TimeoutError):
            try:
                await self._answer(reader, writer)
            finally:
                self._clients.discard(task)
                writer.close()

    async def close(self) -> None:
        """End the commands that run, and tell their clients."""
        for command in self._commands:
            command.cancel()
        if self._clients:
            await asyncio.wait(self._clients, timeout=END_S)
        for client in self._clients:
            client.cancel()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(REQUEST_S):
            try:
                name, argument = self._read(await reader.readline())
            except ValueError as error:  # also of a line that is too long
                await _send(writer, {"error": f"control: {error}"})
                return
        lines: asyncio.Queue[dict[str, str]] = asyncio.Queue()
        command = asyncio.create_task(self._run(name, argument, lines), name=name)
        self._commands.add(command)
        command.add_done_callback(self._commands.discard)
        while True:
            try:
                async with asyncio.timeout(ALIVE_S):
                    line = await lines.get()
            except TimeoutError:
                line = {}
            await _send(writer, line)
            if "done" in line or "error" in line:
                return

    def _read(self, line: bytes) -> tuple[str, Any]:
        """The command that a client sends.

        Raises:
            ValueError: If the line is something else.
        """
        command = json.loads(line)
        if not isinstance(command, dict) or len(command) != 1 or next(iter(command)) not in self._known:
            raise ValueError(f"a line is {{NAME: argument}}, with a name of {sorted(self._known)}")
        ((name, argument),) = command.items()
        return name, argument

    async def _run(self, name: str, argument: Any, lines: asyncio.Queue[dict[str, str]]) -> None:
        # Overwritten unless the task is cancelled, even before its first step of work.
        last = {"error": "the run has ended, or its trainer went back to a checkpoint; look at its console."}
        try:
            answer = await self._known[name](argument, lambda sentence: lines.put_nowait({"progress": sentence}))
            last = {"done": answer}
        except PenstockError as error:
            last = {"error": str(error)}
        except Exception as error:
            logger.exception("control: %s has failed; the run continues", name)
            last = {"error": f"{type(error).__name__}: {error}"}
        finally:
            lines.put_nowait(last)


def request(run_dir: Path, name: str, argument: object, progress: Callable[[str], None]) -> str:
    """Send a command to the driver of a run, and wait until it is done.

    Args:
        run_dir: Directory of the run.
        name: Of the command.
        argument: Of the command, as JSON types.
        progress: Receives the driver's sentences.

    Returns:
        The last sentence of the driver.

    Raises:
        PenstockError: If there is no such run, it is not running, it refuses, or it is silent for `SILENCE_S`.
    """
    if not run_dir.is_dir():
        raise PenstockError(f"{run_dir}: no such run directory. Runs are in runs/ unless run_dir says otherwise.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(SILENCE_S)
        try:
            connection.connect(str(_address(run_dir)))
        except OSError as error:
            raise PenstockError(
                f"{run_dir}: this run is not running, or is still starting, or runs on another machine, so it takes no "
                f"commands ({error}). `penstock resume {run_dir} KEY=VALUE` changes keys of one that has ended."
            ) from error
        try:
            connection.sendall(json.dumps({name: argument}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                while raw := lines.readline(LONGEST_LINE_BYTES):
                    line = json.loads(raw)
                    if "error" in line:
                        raise PenstockError(line["error"])
                    if "done" in line:
                        return str(line["done"])
                    if "progress" in line:
                        progress(str(line["progress"]))
        except TimeoutError as error:
            raise PenstockError(f"{run_dir}: its driver has sent nothing for {SILENCE_S:g} s: it hangs.") from error
        except (OSError, ValueError) as error:
            raise PenstockError(f"{run_dir}: the connection to its driver broke: {error}") from error
    raise PenstockError(f"{run_dir}: the run ended before it had answered.")


async def _send(writer: asyncio.StreamWriter, line: dict[str, str]) -> None:
    text = {key: value[: LONGEST_LINE_BYTES // 16] for key, value in line.items()}  # up to 12 bytes per character
    writer.write(json.dumps(text).encode() + b"\n")
    async with asyncio.timeout(SEND_S):
        await writer.drain()


def _make_address(run_dir: Path) -> Path:
    """The path to bind: in the run directory, or a link to it that is short enough for a socket."""
    path = run_dir.resolve() / CONTROL_SOCKET
    if len(os.fsencode(path)) <= LONGEST_PATH_BYTES:
        return path
    link = Path(tempfile.mkdtemp(prefix="penstock-")) / "run"
    link.symlink_to(run_dir.resolve())
    (run_dir / CONTROL_LINK_FILE).write_text(f"{link / CONTROL_SOCKET}\n")
    return link / CONTROL_SOCKET


def _address(run_dir: Path) -> Path:
    """The path to connect to."""
    try:
        return Path((run_dir / CONTROL_LINK_FILE).read_text().strip())
    except FileNotFoundError:
        return run_dir.resolve() / CONTROL_SOCKET


def _remove_socket(run_dir: Path) -> None:
    """Remove the socket of this driver or of a dead one, and its link."""
    named = run_dir / CONTROL_LINK_FILE
    if named.exists():
        folder = _address(run_dir).parent.parent
        if folder.name.startswith("penstock-") and (folder / "run").is_symlink():
            shutil.rmtree(folder, ignore_errors=True)
        named.unlink()
    (run_dir / CONTROL_SOCKET).unlink(missing_ok=True)
