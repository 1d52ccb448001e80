"""One child process with user code, as its parent handles it: start, frames and exit. Calls and time-outs are above."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import IsolationConfig, RewardConfig
from penstock.envs.contract import Device
from penstock.envs.reward_result import is_hello, is_reply
from penstock.envs.sandbox.bubblewrap import TMP, user_code_arguments, why_no_namespaces
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.workers.interpreter import Interpreter, find_interpreter, link_source, users_import_path
from penstock.envs.workers.permission_hints import ISOLATION_VARIABLE
from penstock.envs.workers.permissions import environment_for, grants_of_reward
from penstock.envs.workers.reward_child import HEADER, MAX_REPLY_BYTES
from penstock.envs.workers.supervisor import how_it_ended

MAX_LOADS = 3
"""Processes that may be killed in a row while they load the user's code, before that ends the run."""
_KILLED = how_it_ended(-signal.SIGKILL)
_MAX_REPORT_BYTES = 500
_SOURCE = "source"
"""Name of the folder with a link to our package, in the folder for temporary files."""
_EXIT_GRACE_S, _SUPERVISOR_S = 0.2, 2.0
_NO_NAMESPACES = (
    "{section}.isolation=strict, but this host allows no user namespaces: {problem}. Allow user namespaces (sysctl "
    "user.max_user_namespaces, kernel.unprivileged_userns_clone; docker: --security-opt seccomp=unconfined), or set "
    "{section}.isolation=process, which gives it all your permissions."
)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The program of a process, and its limits."""

    label: str
    """What it loads, for messages: `reward.fn='my.reward'`."""
    section: str
    """Configuration section of the limits."""
    module: str
    """Its `main(arguments)` serves frames until its socket closes."""
    arguments: Sequence[str]
    """Arguments of `main` after the number of its socket."""
    max_memory_gib: float | None
    max_processes: int
    grants: IsolationConfig | None
    """Permissions of isolated code; None: it is not isolated."""
    is_hello: Callable[[object], bool]
    """Whether its first frame is well-formed."""
    is_reply: Callable[[object], bool]
    """Whether a later frame is well-formed. The user's code can write into the socket, so after a malformed frame the
    process counts as dead."""
    python: str | None = None
    """Its interpreter, `env.python`; None is ours."""


def reward_spec(reward: RewardConfig, sandbox: SandboxConfig, device: Device) -> ChildSpec:
    """The process of a reward function, whose model runs on `device`."""
    return ChildSpec(
        f"reward.fn={reward.label!r}",
        "reward",
        "penstock.envs.workers.reward_child",
        [device, reward.model_dump_json(), sandbox.model_dump_json()],
        reward.max_memory_gib,
        reward.max_processes,
        grants_of_reward(reward),
        is_hello,
        is_reply,
    )


class ChildProcess:
    """A running child below its supervisor, each in a session of its own.

    Attributes:
        hello: Its first frame, sent when it has loaded the user's code.

    Args:
        spec: Its program and limits.
        on_reply: Called with `(call_id, reply)` for every answer.
        on_exit: Called once if the process ends on its own.
    """

    def __init__(
        self,
        spec: ChildSpec,
        on_reply: Callable[[int, Any], None],
        on_exit: Callable[[ChildProcess], None],
    ) -> None:
        self._spec = spec
        self._on_reply = on_reply
        self._on_exit = on_exit
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: str | None = None
        self._interpreter: Interpreter | None = None
        self._sent_malformed_frame = False
        self.hello: dict[str, Any] = {}

    async def start(self, startup_timeout_s: float) -> None:
        """Start the process and wait until it has loaded the function.

        A process that is killed by SIGKILL meanwhile is replaced, up to `MAX_LOADS` in all: another process did that,
        or the kernel, which was out of memory.

        Raises:
            ConfigError: If the function does not load in time, or should be isolated but the host allows no user
                namespaces, or its interpreter cannot run it.
            OSError: If the machine has no process, memory, file or disk space left for it.
        """
        if self._spec.grants is not None and (problem := await asyncio.to_thread(why_no_namespaces)):
            raise ConfigError([_NO_NAMESPACES.format(section=self._spec.section, problem=problem)])
        if self._spec.python is not None:
            self._interpreter = await asyncio.to_thread(find_interpreter, self._spec.python)
        for loads_left in reversed(range(MAX_LOADS)):
            how = await self._load(startup_timeout_s)
            if not how:
                return
            if how != _KILLED or not loads_left:
                raise ConfigError([f"{self._spec.label}: its process {how} while loading it."])

    async def _load(self, startup_timeout_s: float) -> str:
        """Start the process; returns how it ended if it did so before its first frame, and else nothing.

        Raises:
            ConfigError: If the function does not load.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = self._spawn(theirs)
            except BaseException:
                ours.close()
                raise
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            async with asyncio.timeout(startup_timeout_s):
                _, hello = await self._next_frame(reader, self._spec.is_hello)
        except TimeoutError:
            hello = {"error": f"{self._spec.label} was not loaded within {startup_timeout_s:g} s."}
        except (EOFError, OSError):
            return self.end()
        if "error" in hello:
            self.kill()
            raise ConfigError([hello["error"]])
        self.hello = hello
        self._reading = asyncio.create_task(self._read(reader))
        return ""

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Pass every answer to `on_reply`, until the process ends or sends a malformed frame."""
        while True:
            try:
                call_id, reply = await self._next_frame(reader, self._spec.is_reply)
            except (EOFError, OSError):
                break
            self._on_reply(call_id, reply)
        self._on_exit(self)

    async def _next_frame(
        self, reader: asyncio.StreamReader, is_well_formed: Callable[[object], bool]
    ) -> tuple[int, Any]:
        length, call_id = HEADER.unpack(await reader.readexactly(HEADER.size))
        if length <= MAX_REPLY_BYTES:
            body = await reader.readexactly(length)
            with contextlib.suppress(ValueError, RecursionError):
                if is_well_formed(reply := json.loads(body)):
                    return call_id, reply
        self._sent_malformed_frame = True
        raise EOFError

    def _spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        grants, memory_gib, other = self._spec.grants, self._spec.max_memory_gib, self._interpreter
        self._temporary = tempfile.mkdtemp(prefix=f"penstock-{self._spec.section}-")
        paths = [path or str(Path.cwd()) for path in sys.path]
        environment = environment_for(grants) | {"TMPDIR": self._temporary}
        if other is not None:
            environment = {name: value for name, value in environment.items() if name != "PYTHONHOME"}
            environment |= other.variables()
            link_source(source := f"{self._temporary}/{_SOURCE}")
            paths = [source, *users_import_path()]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        bwrap: list[str] = []
        if grants is not None:
            read = grants.read if other is None else (*grants.read, *other.folders)
            bwrap = user_code_arguments(read, self._temporary, has_network=grants.network)
            if other is not None:  # the folder for temporary files has another name inside
                bwrap += ["--setenv", "PYTHONPATH", os.pathsep.join([f"{TMP}/{_SOURCE}", *paths[1:]])]
            section = f"{self._spec.section} network" if grants.network else self._spec.section
            environment |= {"TMPDIR": TMP, ISOLATION_VARIABLE: section}
        settings = {
            "module": self._spec.module,
            "serve": [str(connection.fileno()), *self._spec.arguments],
            "section": self._spec.section,
            "max_memory_bytes": None if memory_gib is None else int(memory_gib * 2**30),
            "max_processes": self._spec.max_processes,
            "temporary": self._temporary,
            "bwrap": bwrap,
        }
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file:  # an argument has at most 128 KiB
            json.dump(settings, file)
            file.seek(0)
            return subprocess.Popen(
                [
                    sys.executable if other is None else other.path,
                    "-P",
                    "-m",
                    "penstock.envs.workers.supervisor",
                    str(file.fileno()),
                ],
                pass_fds=[connection.fileno(), file.fileno()],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def is_serving(self) -> bool:
        """Whether it has loaded the user's code, so that frames can be written to it."""
        return self._reading is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def write(self, data: bytes) -> None:
        """Queue frames for the process."""
        assert self._writer is not None
        self._writer.write(data)

    def kill(self) -> str:
        """Kill the process and its descendants, and return how it ended. Safe to call again."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.transport.abort()
        how = "was never started" if self._process is None else self._end_supervisor(self._process)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
        return how

    def end(self) -> str:
        """Return how a process ended whose socket is closed; it is most likely about to exit by itself."""
        assert self._process is not None
        if self._sent_malformed_frame:
            return f"sent what is no reply and {self.kill()}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_EXIT_GRACE_S)
        return self.kill()

    def _end_supervisor(self, supervisor: subprocess.Popen[bytes]) -> str:
        """Close the supervisor's standard input, upon which it kills its descendants; return its report."""
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        if supervisor.stdin.closed:
            return how_it_ended(supervisor.returncode)
        supervisor.stdin.close()
        try:
            supervisor.wait(timeout=_SUPERVISOR_S)
        except subprocess.TimeoutExpired:  # it hangs: kill its process group; the child dies with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(supervisor.pid, signal.SIGKILL)
            supervisor.wait()
        with supervisor.stdout:
            # Another process may have inherited the write end, so a blocking read might never return.
            os.set_blocking(supervisor.stdout.fileno(), False)
            report = supervisor.stdout.read(_MAX_REPORT_BYTES)
        return report.decode(errors="replace") if report else how_it_ended(supervisor.returncode)
