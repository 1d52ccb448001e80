"""One program from its job to its result: the first process of a cell, which starts it, watches it and ends it.

Consumes one job frame from its socket; waits for the program's end, its output, or a limit; is unblocked by the first
of them, or by the client's end of the socket being closed, which ends the program too.

Frame, both ways: `!I` length, then a JSON object (contract.py): the job, then `{"result": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any, NoReturn

from penstock.envs import process_tree
from penstock.envs.sandbox import kernel_calls as kernel
from penstock.envs.sandbox.contract import Limits, Outcome, Program, SandboxResult, decode_job, encode_result
from penstock.envs.sandbox.jail import WORK_DIR, enter_cell
from penstock.envs.sandbox.program import become_program

LENGTH = struct.Struct("!I")
_LOOK_EVERY_S = 0.02
_CHUNK = 65536


def serve_one(connection: socket.socket, *, is_isolated: bool) -> NoReturn:
    """Run the job that comes over `connection` and end."""
    reply: dict[str, Any]
    try:
        job = _receive(connection)
        if job is None:  # the client has given up
            os._exit(0)
        program, limits = decode_job(job)
        if is_isolated:
            enter_cell(limits)
            kernel.set_dumpable(0)
            directory = WORK_DIR
        else:
            kernel.adopt_orphans()
            directory = job["directory"]
        _write_files(directory, program)
        result = _Cell(connection, program, limits, directory, is_isolated=is_isolated).run()
        reply = {"error": "the client left"} if result is None else {"result": encode_result(result)}
    except (OSError, KeyError, TypeError, ValueError) as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
    body = json.dumps(reply).encode()
    with contextlib.suppress(OSError):
        connection.sendall(LENGTH.pack(len(body)) + body)
    os._exit(0)


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    with connection.makefile("rb") as reader:
        header = reader.read(LENGTH.size)
        if len(header) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(header)
        body = reader.read(length)
    job: dict[str, Any] | None = json.loads(body) if len(body) == length else None
    return job


def _write_files(directory: str, program: Program) -> None:
    for name, content in program.files.items():
        path = Path(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


class _Cell:
    """Watches one program. Invariant: whatever way `run` ends, no other process of the cell is alive."""

    def __init__(
        self, connection: socket.socket, program: Program, limits: Limits, directory: str, *, is_isolated: bool
    ) -> None:
        self._connection = connection
        self._program = program
        self._limits = limits
        self._directory = directory
        self._is_isolated = is_isolated
        self._output: dict[int, bytearray] = {}
        self._poll = select.poll()
        self._unsent = memoryview(program.stdin)

    def run(self) -> SandboxResult | None:
        """Run the program to its end or first limit; None if the client left."""
        started = time.monotonic()
        pid, stdin, stdout, stderr = self._start()
        ended: tuple[Outcome, str] | None = None
        try:
            ended = self._watch(pid, stdin, started + self._limits.wall_s)
            wall_s = time.monotonic() - started
            if ended is None:
                return None
        finally:
            status = self._end(pid)
        for fd in (stdout, stderr):
            self._read_rest(fd)
        outcome, detail = ended
        exit_code = None
        if outcome == "exited":
            outcome, detail, exit_code = self._how_it_ended(status)
        text = {fd: bytes(self._output[fd]).decode("utf-8", "replace") for fd in (stdout, stderr)}
        return SandboxResult(outcome, exit_code, text[stdout], text[stderr], round(wall_s, 6), detail)

    def _start(self) -> tuple[int, int, int, int]:
        """Returns: Process id, our ends of stdin, stdout and stderr."""
        (stdin, our_stdin), (our_stdout, stdout), (our_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            standard = (stdin, stdout, stderr)
            become_program(self._program, self._limits, self._directory, standard, is_isolated=self._is_isolated)
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        for fd in (our_stdin, our_stdout, our_stderr):
            os.set_blocking(fd, False)
        self._output = {our_stdout: bytearray(), our_stderr: bytearray()}
        for fd in self._output:
            self._poll.register(fd, select.POLLIN)
        self._poll.register(self._connection, select.POLLRDHUP)
        if self._unsent:
            self._poll.register(our_stdin, select.POLLOUT)
        else:
            os.close(our_stdin)
        return pid, our_stdin, our_stdout, our_stderr

    def _watch(self, pid: int, stdin: int, deadline: float) -> tuple[Outcome, str] | None:
        """Wait for the end; None if the client left."""
        end = os.pidfd_open(pid)
        self._poll.register(end, select.POLLIN)
        next_look = time.monotonic() + _LOOK_EVERY_S
        while True:
            events = dict(self._poll.poll(max(0.0, next_look - time.monotonic()) * 1000))
            now = time.monotonic()
            for fd in [fd for fd in self._output if fd in events]:
                self._read(fd)
            if sum(map(len, self._output.values())) > self._limits.max_output_bytes:
                return "output", f"more than {self._limits.max_output_bytes} bytes of output"
            if end in events:
                return "exited", ""
            if self._connection.fileno() in events:
                return None
            if stdin in events:
                self._feed(stdin)
            if now >= deadline:
                return "wall_clock", f"more than {self._limits.wall_s:g} s"
            if now >= next_look:
                if over := self._over_a_limit():
                    return over
                next_look = min(now + _LOOK_EVERY_S, deadline)

    def _over_a_limit(self) -> tuple[Outcome, str] | None:
        limits = self._limits
        usage = process_tree.measure(members := self._members())
        if usage.memory_bytes > limits.memory_bytes:  # perhaps only because shared pages count more than once
            memory_bytes = process_tree.proportional_memory_bytes(members)
            if memory_bytes > limits.memory_bytes:
                return "memory", f"{memory_bytes >> 20} MiB, more than {limits.memory_bytes >> 20} MiB"
        if usage.cpu_s > limits.cpu_s:
            return "cpu_time", f"more than {limits.cpu_s:g} s of processor time"
        if usage.num_tasks > limits.max_processes:
            return "processes", f"{usage.num_tasks} processes and threads, more than {limits.max_processes}"
        return None

    def _members(self) -> list[int]:
        return process_tree.all_others() if self._is_isolated else process_tree.descendants(os.getpid())

    def _read(self, fd: int) -> None:
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        self._output[fd] += chunk
        if not chunk:
            self._poll.unregister(fd)

    def _read_rest(self, fd: int) -> None:
        """Read what is in the pipe, whose writers are dead, and keep what the limit allows."""
        with contextlib.suppress(BlockingIOError):
            while len(self._output[fd]) <= self._limits.max_output_bytes and (chunk := os.read(fd, _CHUNK)):
                self._output[fd] += chunk
        del self._output[fd][self._limits.max_output_bytes :]

    def _feed(self, stdin: int) -> None:
        try:
            self._unsent = self._unsent[os.write(stdin, self._unsent[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._poll.unregister(stdin)
            os.close(stdin)

    def _end(self, pid: int) -> int:
        """Kill all that is left; the wait status of the program."""
        if self._is_isolated:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # everyone in this pid namespace but its first process
        else:
            process_tree.kill_descendants(os.getpid())
        _, status = os.waitpid(pid, 0)
        process_tree.reap_children()
        return status

    def _how_it_ended(self, status: int) -> tuple[Outcome, str, int | None]:
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return "exited", "", code
        if -code == signal.SIGXCPU:
            return "cpu_time", f"more than {math.ceil(self._limits.cpu_s)} s of processor time", None
        return "killed", f"by {process_tree.signal_name(-code)}", None
