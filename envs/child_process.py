"""The parent's side of one process with user code: its birth, its frames, its death. Knows no calls or time-outs."""

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
from typing import Any, cast

from penstock.dataflow.errors import ConfigError
from penstock.envs.config import RewardConfig
from penstock.envs.contract import Device
from penstock.envs.keeper import how_it_ended
from penstock.envs.reward_child import HEADER, HELLO_ID, MAX_REPLY_BYTES
from penstock.envs.reward_result import is_hello, is_reply
from penstock.envs.rights import Grants, environment_for, grants_of_reward
from penstock.envs.sandbox.bubblewrap import user_code_arguments, why_no_jails
from penstock.envs.sandbox.config import SandboxConfig

_MAX_END_BYTES = 500
_LAST_BREATH_S, _KEEPER_S = 0.2, 2.0
_NO_JAILS = (
    "{section}.isolation=strict, but this host makes no jails: {problem}. Allow user namespaces (sysctl "
    "user.max_user_namespaces, kernel.unprivileged_userns_clone; docker: --security-opt seccomp=unconfined), or set "
    "{section}.isolation=process: then it has your rights."
)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """Which program a process runs, and its limits.

    Attributes:
        label: What it loads, for messages: `reward.fn='my.reward'`.
        section: Of the configuration, where the limits are.
        module: Its `main(arguments)` serves frames until its socket closes.
        arguments: Behind the number of its socket.
        grants: What jailed code may have; None: it is not jailed.
        is_hello: Whether what it says first is well-formed.
        is_reply: The same of an answer. The user's code can write into the socket, so a process that sends anything
            else has died.
    """

    label: str
    section: str
    module: str
    arguments: Sequence[str]
    max_memory_gib: float | None
    max_processes: int
    grants: Grants | None
    is_hello: Callable[[object], bool]
    is_reply: Callable[[object], bool]


def reward_spec(reward: RewardConfig, sandbox: SandboxConfig, device: Device) -> ChildSpec:
    """The process of a reward function, and what its model runs on."""
    return ChildSpec(
        f"reward.fn={reward.label!r}",
        "reward",
        "penstock.envs.reward_child",
        [device, reward.model_dump_json(), sandbox.model_dump_json()],
        reward.max_memory_gib,
        reward.max_processes,
        grants_of_reward(reward),
        is_hello,
        is_reply,
    )


class ChildProcess(asyncio.Protocol):
    """A running child below its keeper, each in a session of its own.

    Attributes:
        hello: What it said when it had loaded what it serves.

    Args:
        spec: What it runs.
        on_reply: Called with `(call_id, reply)` for every answer.
        on_exit: Called once if the process ends without having been asked to.
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
        self._buffer = bytearray()
        self._hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: str | None = None
        self._is_closed = False
        self._sent_nonsense = False
        self.hello: dict[str, Any] = {}

    async def start(self, startup_timeout_s: float) -> None:
        """Start the process and wait until it has loaded the function.

        Raises:
            ConfigError: If the function does not load, or not in time, or should be jailed where there are no jails.
            OSError: If the machine has no process, memory, file or disk space left for it.
        """
        if self._spec.grants is not None and (problem := await asyncio.to_thread(why_no_jails)):
            raise ConfigError([_NO_JAILS.format(section=self._spec.section, problem=problem)])
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = self._spawn(theirs)
            except BaseException:
                ours.close()
                raise
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        try:
            async with asyncio.timeout(startup_timeout_s):
                hello = await self._hello
        except TimeoutError:
            hello = {"error": f"{self._spec.label} was not loaded within {startup_timeout_s:g} s."}
        if "error" in hello:
            self.kill()
            raise ConfigError([hello["error"]])
        self.hello = hello

    def _spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        grants = self._spec.grants
        self._temporary = tempfile.mkdtemp(prefix=f"penstock-{self._spec.section}-")
        memory_gib = self._spec.max_memory_gib
        settings = {
            "module": self._spec.module,
            "serve": [str(connection.fileno()), *self._spec.arguments],
            "section": self._spec.section,
            "max_memory_bytes": None if memory_gib is None else int(memory_gib * 2**30),
            "max_processes": self._spec.max_processes,
            "temporary": self._temporary,
            "has_network": grants is not None and grants.network,
            "jail": []
            if grants is None
            else user_code_arguments(grants.read, self._temporary, has_network=grants.network),
        }
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        with tempfile.TemporaryFile("w+", encoding="utf-8") as file:  # an argument has at most 128 KiB
            json.dump(settings, file)
            file.seek(0)
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "penstock.envs.keeper", str(file.fileno())],
                pass_fds=[connection.fileno(), file.fileno()],
                env={**environment_for(grants), "PYTHONPATH": paths},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def hello_came(self) -> bool:
        """Whether it serves, and can be written to."""
        return self._hello.done() and not self._is_closed

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
        how = "was never started" if self._process is None else self._end_keeper(self._process)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
        return how

    def end(self) -> str:
        """Say how a process ended whose socket is closed: it is most likely about to end by itself."""
        assert self._process is not None
        if self._sent_nonsense:
            return f"sent what is no reply and {self.kill()}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_LAST_BREATH_S)
        return self.kill()

    def _end_keeper(self, keeper: subprocess.Popen[bytes]) -> str:
        """Close the keeper's standard input, upon which it kills all that is below it; then what it says."""
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        if keeper.stdin.closed:
            return how_it_ended(keeper.returncode)
        keeper.stdin.close()
        try:
            keeper.wait(timeout=_KEEPER_S)
        except subprocess.TimeoutExpired:  # it is stuck: the child dies with it, and then what shares its group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(keeper.pid, signal.SIGKILL)
            keeper.wait()
        with keeper.stdout:
            os.set_blocking(keeper.stdout.fileno(), False)  # who got hold of its other end does not hold us up
            said = keeper.stdout.read(_MAX_END_BYTES)
        return said.decode(errors="replace") if said else how_it_ended(keeper.returncode)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            length, call_id = HEADER.unpack_from(self._buffer, start)
            end = start + HEADER.size + length
            if length <= MAX_REPLY_BYTES and len(self._buffer) < end:
                break
            if length > MAX_REPLY_BYTES or not self._deliver(call_id, self._buffer[start + HEADER.size : end]):
                self._sent_nonsense = True
                self._buffer.clear()
                assert self._transport is not None
                self._transport.abort()
                return
            start = end
        del self._buffer[:start]

    def _deliver(self, call_id: int, body: bytearray) -> bool:
        """Hand on what came; whether it is well-formed."""
        if self._is_closed:
            return True
        try:
            reply = json.loads(body)
        except (ValueError, RecursionError):
            return False
        is_first = call_id == HELLO_ID and not self._hello.done()
        if not (self._spec.is_hello(reply) if is_first else self._spec.is_reply(reply)):
            return False
        if is_first:
            self._hello.set_result(reply)
        else:
            self._on_reply(call_id, reply)
        return True

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._is_closed:
            return
        if not self._hello.done():
            self._hello.set_result({"error": f"{self._spec.label}: its process {self.end()} while loading it."})
        else:
            self._on_exit(self)
