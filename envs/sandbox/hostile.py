"""Runs hostile programs in a sandbox and judges the results, for `penstock sandbox check`.

A program that breaks out prints `LEAK`. It is contained if it printed none, ended as expected and left no process
behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Limits, Outcome, Program, Sandbox, SandboxResult, SandboxUnavailableError
from penstock.envs.sandbox.local import Isolation, LocalSandbox

_LEAK, _NAP = "LEAK", "$NAP"
_AT_A_TIME = 4
_LOOK_EVERY_S, _MAX_LOOKS, _EMPTY_LOOKS = 0.05, 40, 3
SMALL_LIMITS = Limits(
    wall_s=3.0,
    cpu_s=5.0,
    memory_mib=128,
    max_processes=16,
    max_file_mib=8,
    max_disk_mib=16,
    max_output_kib=64,
)
"""Small, so that a check is quick and harmless."""
_LONG_WALL_S = 10.0
"""Wall-clock limit of a program that another limit should end, seconds: a busy machine allocates memory slowly."""


@dataclass(frozen=True, slots=True)
class HostileCase:
    """One program."""

    name: str
    """What it does."""
    code: str
    """Python source. `$FILE`, `$PORT` and `$NAP` are replaced by values of the trap."""
    expected: tuple[Outcome, ...] = ("exited",)
    """Accepted outcomes."""
    needs_isolation: bool = False
    """Without isolation it would harm the machine, so it is not run."""


HOSTILE_CASES = (
    HostileCase("endless sleep", "import time; time.sleep(1000)", ("wall_clock",)),
    HostileCase(
        "fork bomb",
        """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        ("processes", "wall_clock", "cpu_time"),
        needs_isolation=True,
    ),
    HostileCase(
        "memory bomb in many processes",
        """
        import os, time
        for _ in range(4):
            if os.fork() == 0:
                hoard = b"x" * (60 << 20)
                time.sleep(1000)
        time.sleep(1000)
        """,
        ("memory",),
    ),
    HostileCase(
        "leaves a daemon",
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", "$NAP"])
            os._exit(0)
        time.sleep(0.3)  # until it is a program of its own
        """,
    ),
    HostileCase(
        "reads the host's environment",
        """
        import glob, os
        found = [name for name in os.environ if name.startswith("PENSTOCK_")]
        for path in glob.glob("/proc/*/environ"):
            try:
                found += [path] if b"PENSTOCK_" in open(path, "rb").read() else []
            except OSError:
                pass
        if found:
            print("LEAK", found)
        """,
    ),
    HostileCase(
        "reads the host's files",
        """
        try:
            print("LEAK", open("$FILE").read())
        except OSError:
            pass
        """,
    ),
    HostileCase(
        "opens a socket to the host",
        """
        import socket
        try:
            socket.create_connection(("127.0.0.1", $PORT), timeout=0.5)
            print("LEAK")
        except OSError:
            pass
        """,
    ),
    HostileCase(
        "makes a user namespace",
        """
        import ctypes
        if ctypes.CDLL(None).unshare(0x10000000) == 0:
            print("LEAK")
        """,
    ),
)
"""Some of each kind: time, processes, memory, files, network, escape. tests/hostile_programs.py has more."""


@dataclass(frozen=True, slots=True)
class Trap:
    """Resources of the host that programs must not reach."""

    file: Path
    """Holds a secret that is also in the host's environment. Every user may write to its folder."""
    port: int
    """Port of a listening TCP socket on 127.0.0.1."""
    nap_s: str
    """Argument of `sleep` that identifies a surviving process."""

    def fill(self, code: str) -> str:
        """Replace the placeholders by the trap's values."""
        values = {"$FILE": str(self.file), "$PORT": str(self.port), _NAP: self.nap_s}
        code = dedent(code)
        for name, value in values.items():
            code = code.replace(name, value)
        return code


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on one program."""

    is_contained: bool | None
    """None if it was not run."""
    found: str
    """One short line for the table."""


async def try_all(
    config: SandboxConfig, cases: Sequence[HostileCase] = HOSTILE_CASES, *, isolate: bool
) -> tuple[Isolation, dict[HostileCase, Verdict]]:
    """Run hostile programs in a sandbox, a few concurrently, since many run until a time limit."""
    sandbox = LocalSandbox(config.model_copy(update={"max_concurrency": _AT_A_TIME}), isolate=isolate)
    try:
        with lay_trap() as trap:
            isolation = await sandbox.start()
            trying = (try_case(sandbox, case, trap, is_isolated=isolation.is_isolated) for case in cases)
            verdicts = await asyncio.gather(*trying)
    finally:
        await sandbox.close()
    return isolation, dict(zip(cases, verdicts, strict=True))


async def try_case(sandbox: Sandbox, case: HostileCase, trap: Trap, *, is_isolated: bool) -> Verdict:
    """Run one hostile program and judge its result."""
    if case.needs_isolation and not is_isolated:
        return Verdict(is_contained=None, found="not run: without isolation it would harm this machine")
    limits = SMALL_LIMITS if "wall_clock" in case.expected else SMALL_LIMITS.model_copy(update={"wall_s": _LONG_WALL_S})
    try:
        result = await sandbox.run(Program(trap.fill(case.code)), limits)
    except SandboxUnavailableError as error:
        return Verdict(is_contained=False, found=str(error))
    if _NAP in case.code and await survives(trap):
        return Verdict(is_contained=False, found="a process outlived its program")
    leaks = _LEAK in result.stdout
    is_contained = result.outcome in case.expected and not leaks and _is_bounded(result)
    found = f"it broke out; {result.summary}" if leaks else result.summary
    return Verdict(is_contained=is_contained, found=found)


async def survives(trap: Trap) -> bool:
    """Whether a process of a program is still alive.

    It looks several times: killed processes take a moment to disappear, and one look may miss a process that forks.
    """
    num_empty_looks = 0
    for _ in range(_MAX_LOOKS):
        seen = False
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                seen |= trap.nap_s.encode() in path.read_bytes().split(b"\0")[:2]
        num_empty_looks = 0 if seen else num_empty_looks + 1
        if num_empty_looks == _EMPTY_LOOKS:
            return False
        await asyncio.sleep(_LOOK_EVERY_S)
    return True


@contextmanager
def lay_trap() -> Iterator[Trap]:
    """Set up a secret in the environment and in a file, and a listening socket; remove them afterwards.

    Enter it before the sandbox starts, so that the sandbox could inherit the secret. A decoy process on the host is
    started with the secret in its environment, because `/proc` shows the environment at the start of a process.
    """
    secret, name = secrets.token_hex(8), "KNOWN_TO_THE_HOST"
    nap_s = f"{600 + secrets.randbelow(10**6) / 10**6:.6f}"
    with (
        tempfile.TemporaryDirectory(prefix="penstock-trap-") as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        Path(folder).chmod(0o777)
        file = Path(folder, "secret.txt")
        file.write_text(secret)
        os.environ[name] = secret
        decoy = subprocess.Popen(["sleep", "3600"], stdin=subprocess.DEVNULL)
        try:
            yield Trap(file, server.getsockname()[1], nap_s)
        finally:
            del os.environ[name]
            decoy.kill()
            decoy.wait()


def _is_bounded(result: SandboxResult) -> bool:
    """Whether the output is within the limit, where a byte that is not UTF-8 became a character of three bytes."""
    return max(len(result.stdout.encode()), len(result.stderr.encode())) <= 3 * SMALL_LIMITS.max_output_kib << 10
