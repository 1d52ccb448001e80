"""An agent program as a process: how it gets its task and its access, what it says at its end, how it is ended.

Consumes: its output, of which the end is kept. Waits for: its end. Unblocked by: it, or by being cancelled, and kills
then all that it started, as far as it can be found by parentage or process group; what is left is ended with the
environment process (keeper.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import IO

from penstock.dataflow.trajectory import Task
from penstock.envs import process_tree
from penstock.envs.contract import RewardResult
from penstock.envs.environment import EndpointAccess
from penstock.envs.keeper import how_it_ended

_TAIL_BYTES = 16 << 10
_LAST_WORDS_S = 1.0


async def run_command(command: Sequence[str], task: Task, access: EndpointAccess) -> RewardResult | None:
    """Run a program to its end.

    Returns:
        The reward that its last line is: a number or an object of numbers; None if it is neither.

    Raises:
        RuntimeError: If it cannot be started, or its exit code is not 0; with the end of what it said.
    """
    process = _start(command, task, access)
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = bytearray(), bytearray()
    listening = asyncio.gather(_keep_tail(process.stdout, out), _keep_tail(process.stderr, err))
    try:
        await _ended(process.pid)
    finally:
        _end(process)
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):  # a daemon of it may hold its output open
            await asyncio.wait_for(listening, _LAST_WORDS_S)
    if process.returncode != 0:
        said = (bytes(err) or bytes(out)).decode(errors="replace").strip()
        raise RuntimeError(f"the agent {how_it_ended(process.returncode)}: {said[-2000:]}")
    return parse_reward(bytes(out).decode(errors="replace"))


def parse_reward(output: str) -> RewardResult | None:
    """The last line with text, if it is a JSON number or an object of numbers."""
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    try:
        said = json.loads(last)
    except (ValueError, RecursionError):
        return None
    if _is_number(said):
        return float(said)
    if isinstance(said, dict) and said and all(map(_is_number, said.values())):
        return {name: float(value) for name, value in said.items()}
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _environment(access: EndpointAccess) -> dict[str, str]:
    """That of the run, with the access; the endpoint is never asked through a proxy."""
    without = [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1,localhost,::1"]
    no_proxy = ",".join(hosts for hosts in without if hosts)
    return {
        **os.environ,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": access.model,
    }


def _start(command: Sequence[str], task: Task, access: EndpointAccess) -> subprocess.Popen[bytes]:
    """Start it, with the task on its standard input."""
    with tempfile.TemporaryFile() as given:
        fields = {"task_id": task.task_id, "prompt": task.prompt, "fields": dict(task.fields)}
        given.write(json.dumps(fields, default=str).encode() + b"\n")
        given.seek(0)
        try:
            return subprocess.Popen(
                command,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(access),
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"the agent {command[0]!r} cannot be started: {error.strerror}") from None


async def _ended(pid: int) -> None:
    """Wait for the end of a child, and leave it to be waited for."""
    loop, pidfd, is_over = asyncio.get_running_loop(), os.pidfd_open(pid), asyncio.Event()
    loop.add_reader(pidfd, is_over.set)
    try:
        await is_over.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def _keep_tail(pipe: IO[bytes], tail: bytearray) -> None:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    try:
        while data := await reader.read(1 << 16):
            tail += data
            del tail[:-_TAIL_BYTES]
    finally:
        transport.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it, if it has not ended, with its descendants and its process group, and wait for it."""
    process_tree.kill_descendants(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
