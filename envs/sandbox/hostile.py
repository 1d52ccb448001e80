"""Run the hostile programs and judge what became of them: for `penstock sandbox check` and for the tests.

A program is contained if it did not print `LEAK`, ended as expected and left no process behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Limits, Program, Sandbox, SandboxResult, SandboxUnavailableError
from penstock.envs.sandbox.hostile_cases import HOSTILE_CASES, LEAK, HostileCase
from penstock.envs.sandbox.local import Isolation, LocalSandbox

_MIB = 1 << 20
_NAP = "$NAP"
_AT_A_TIME = 4
_LOOK_EVERY_S, _MAX_LOOKS, _EMPTY_LOOKS = 0.05, 40, 3
SMALL_LIMITS = Limits(
    wall_s=3.0,
    cpu_s=5.0,
    memory_bytes=128 * _MIB,
    max_processes=16,
    max_file_bytes=8 * _MIB,
    max_disk_bytes=16 * _MIB,
    max_output_bytes=64 << 10,
)
"""So that a check is quick and harmless."""
_PATIENCE_S = 10.0
"""What a program has that another limit should end, seconds: a busy machine hands out memory slowly."""


@dataclass(frozen=True, slots=True)
class Trap:
    """What is laid out on the host for programs to find.

    Attributes:
        file: Holds a secret that is in the host's environment too. Its folder lets every user write.
        port: Of a listening TCP socket on 127.0.0.1.
        nap_s: Argument of `sleep` by which a survivor is known.
    """

    file: Path
    port: int
    nap_s: str

    def fill(self, code: str) -> str:
        """Put the trap's values in place of their names."""
        values = {
            "$FILE": str(self.file),
            "$FOLDER": str(self.file.parent),
            "$PORT": str(self.port),
            _NAP: self.nap_s,
            "$HOST_PID": str(os.getpid()),
        }
        for name, value in values.items():
            code = code.replace(name, value)
        return code


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one program.

    Attributes:
        is_contained: None if it was not run.
        found: One short line.
    """

    is_contained: bool | None
    found: str


async def try_all(config: SandboxConfig, *, isolate: bool) -> tuple[Isolation, dict[HostileCase, Verdict]]:
    """Run every hostile program in a sandbox, a few at a time, since most end by a time limit."""
    sandbox = LocalSandbox(config.model_copy(update={"max_concurrency": _AT_A_TIME}), isolate=isolate)
    try:
        with lay_trap() as trap:
            isolation = await sandbox.start()
            trying = (try_case(sandbox, case, trap, is_isolated=isolation.is_isolated) for case in HOSTILE_CASES)
            verdicts = await asyncio.gather(*trying)
    finally:
        await sandbox.close()
    return isolation, dict(zip(HOSTILE_CASES, verdicts, strict=True))


async def try_case(sandbox: Sandbox, case: HostileCase, trap: Trap, *, is_isolated: bool) -> Verdict:
    """Run one hostile program and judge what became of it."""
    if case.needs_isolation and not is_isolated:
        return Verdict(is_contained=None, found="not run: without isolation it would hurt this machine")
    limits = SMALL_LIMITS if "wall_clock" in case.expected else replace(SMALL_LIMITS, wall_s=_PATIENCE_S)
    try:
        result = await sandbox.run(Program(trap.fill(case.code)), limits)
    except SandboxUnavailableError as error:
        return Verdict(is_contained=False, found=str(error))
    if _NAP in case.code and await survives(trap):
        return Verdict(is_contained=False, found="a process outlived its program")
    leaks = LEAK in result.stdout
    is_contained = result.outcome in case.expected and not leaks and _is_bounded(result)
    found = f"it got what it wanted; {result.summary}" if leaks else result.summary
    return Verdict(is_contained=is_contained, found=found)


async def survives(trap: Trap) -> bool:
    """Is a process still alive that a program left behind? The dead need a moment; one look may miss a birth."""
    num_empty_looks = 0
    for _ in range(_MAX_LOOKS):
        seen = any(trap.nap_s.encode() in line.split(b"\0")[:2] for line in _command_lines())
        num_empty_looks = 0 if seen else num_empty_looks + 1
        if num_empty_looks == _EMPTY_LOOKS:
            return False
        await asyncio.sleep(_LOOK_EVERY_S)
    return True


@contextmanager
def lay_trap() -> Iterator[Trap]:
    """A secret in the environment and in a file, a listening socket, and a name for survivors. Gone afterwards.

    Lay it before the sandbox starts, so that what the sandbox inherits is seen. A process on the host has the secret in
    the environment that it was started with, which is what `/proc` shows.
    """
    secret, name = secrets.token_hex(8), "KNOWN_TO_THE_HOST"
    nap_s = f"{600 + secrets.randbelow(10**6) / 10**6:.6f}"
    with tempfile.TemporaryDirectory(prefix="penstock-trap-") as folder, socket.create_server(("127.0.0.1", 0)) as door:
        Path(folder).chmod(0o777)
        file = Path(folder, "secret.txt")
        file.write_text(secret)
        os.environ[name] = secret
        decoy = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL)
        try:
            yield Trap(file, door.getsockname()[1], nap_s)
        finally:
            del os.environ[name]
            decoy.kill()
            decoy.wait()


def _is_bounded(result: SandboxResult) -> bool:
    """A byte that is no UTF-8 becomes a character of three."""
    return max(len(result.stdout.encode()), len(result.stderr.encode())) <= 3 * SMALL_LIMITS.max_output_bytes


def _command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()
