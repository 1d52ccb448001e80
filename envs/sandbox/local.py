"""The sandbox on this machine: a pool of sandboxes, started ahead, one for each answer.

Consumes: the programs of an answer. Waits for: a slot, then the sandbox's first byte, then a result for each program.
Unblocked by: an earlier answer that ends; the sandbox's start or end; the program's exit or first limit, which the
runner in the sandbox detects, or, if that fails, the wall-clock limit here. A cancelled call ends its sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import marshal
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast, get_args

from penstock.dataflow.errors import ConfigError
from penstock.envs.sandbox import runner as runner_module
from penstock.envs.sandbox.bubblewrap import ACCOUNTS, WORK_DIR, program_arguments, syscall_filter
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Limits, Outcome, Program, SandboxResult, SandboxUnavailableError
from penstock.envs.sandbox.runner import CHROOT, WORKSPACE
from penstock.envs.workers import process_tree
from penstock.envs.workers.permission_hints import ISOLATION_VARIABLE

_PATH_OF_IMAGES = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_TIMEOUT_S = 60.0
_GRACE_S = 5.0
_MAX_ATTEMPTS = 2
_BOOT = """
import marshal, sys
connection = open(0, "rb", closefd=False)
modules = marshal.load(connection)
for name, code in modules:
    sys.modules[name] = module = type(sys)(name)
    exec(code, module.__dict__)
for name, _ in modules:
    del sys.modules[name]
module.main(connection, *sys.argv[2:])
"""
"""The program of the interpreter in a sandbox: it reads the runner's code and runs it."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Isolation:
    """Whether the host can isolate programs."""

    problem: str = ""
    """Why programs do not run in namespaces of their own; empty if they do."""

    @property
    def is_isolated(self) -> bool:
        return not self.problem

    def __str__(self) -> str:
        return "namespaces" if self.is_isolated else f"none ({self.problem})"


class IsolatedRunner:
    """One started runner (runner.py), in a sandbox or, without isolation, in a folder of its own.

    It is started ahead, serves the programs of one answer, or of a workspace, and is used once. The thread that starts
    it must outlive it: the runner dies with that thread.

    Invariant: soon after `end`, none of its processes is alive and none of its files is left.

    Args:
        config: The section `sandbox`.
        max_disk_mib: Size of its working directory, MiB; not enforced without isolation.
        isolate: Whether to start it in a sandbox.
        options: Options of runner.py.
        image: Folder with the root filesystem of its programs; None is the host's.

    Attributes:
        directory: Working directory of programs, as they see it.
        listener: The socket that it has handed out.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(
        self,
        config: SandboxConfig,
        max_disk_mib: int,
        *,
        isolate: bool,
        options: Sequence[str] = (),
        image: str | None = None,
    ) -> None:
        self.max_disk_mib = max_disk_mib
        self.is_isolated = isolate
        self.directory = WORK_DIR if isolate else tempfile.mkdtemp(prefix="penstock-sandbox-")
        self.listener: socket.socket | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        packages = os.pathsep.join(os.path.realpath(path) for path in site.getsitepackages())
        path = _path() if image is None else _PATH_OF_IMAGES
        environment = {"PATH": path, "LANG": "C.UTF-8", "HOME": self.directory,
                       "TMPDIR": self.directory, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
        self.connection, theirs = socket.socketpair()
        runner = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", _BOOT,
                  process_tree.RUNNER, packages, str(int(isolate)), *options, *([CHROOT] if image else [])]  # fmt: skip
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            given: list[int] = []
            if isolate:
                given = [
                    stack.enter_context(_readable(content)).fileno()
                    for content in (ACCOUNTS.encode(), syscall_filter())
                ]
                bwrap = program_arguments(
                    config.read_only_paths, max_disk_mib << 20, *given, image=image, has_terminals=WORKSPACE in options
                )
                runner = [*bwrap, "--", *runner]
            stack.enter_context(_ahead_of_programs())
            self._process = subprocess.Popen(
                runner,
                pass_fds=given,
                env=environment,
                cwd="/" if isolate else self.directory,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        with contextlib.suppress(BrokenPipeError):  # it has ended already; the wait for its first byte reports why
            self.connection.sendall(_runner_code())

    def wait_until_ready(self) -> None:
        """Wait until it can run a program. Blocks; a start takes some tens of milliseconds.

        Raises:
            OSError: If it does not start, with its last line of output.
        """
        self.connection.settimeout(_START_TIMEOUT_S)
        try:
            first, handed, _, _ = socket.recv_fds(self.connection, 1, 1)
        except OSError:  # a time-out is one
            first, handed = b"", []
        if not first:
            raise OSError(self.why_it_ended())
        if handed:
            self.listener = socket.socket(fileno=handed[0])

    async def run(self, programs: Sequence[Program], limits: Limits) -> list[SandboxResult]:
        """Run programs one after the other; skip the rest after a program that hits a limit.

        Raises:
            OSError, EOFError, TimeoutError, ValueError: If the sandbox fails.
        """
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self.connection)
        results: list[SandboxResult] = []
        async with asyncio.timeout(_START_TIMEOUT_S):
            if not await self._reader.read(1):
                raise OSError(self.why_it_ended())
        for program in programs:
            results.append(await self.run_next(program, limits))
            if results[-1].hit_a_limit:
                break
        return results

    async def run_next(self, program: Program, limits: Limits) -> SandboxResult:
        """Run one program, when it is ready and runs no other.

        Raises:
            OSError, EOFError, TimeoutError, ValueError: If the sandbox fails.
        """
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self.connection)
        async with asyncio.timeout(limits.wall_s + _GRACE_S):
            self._writer.write(_to_frame(program, limits, is_isolated=self.is_isolated))
            return await _read_result(self._reader, limits)

    def kill_program(self) -> None:
        """Kill all that runs in it, except for the runner, which reports the end of its program."""
        runners = process_tree.children(self._process.pid) if self.is_isolated else [self._process.pid]
        for runner in runners:
            process_tree.kill_descendants(runner)

    def why_it_ended(self) -> str:
        """The last line of its standard error; kills it if it has not ended."""
        self._process.kill()
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return next(reversed(lines), f"it ended with exit code {self._process.wait()} and no output")

    def end(self) -> None:
        """Kill it and all its processes; a call that waits for its result fails at once."""
        if self._writer is None:
            self.connection.close()
        else:  # closing the socket itself would remove it from the event loop, and its reader would wait forever
            self._writer.transport.abort()
        if self.is_isolated:
            self._process.kill()
        else:
            self._process.send_signal(signal.SIGSTOP)  # so that it starts no further processes
            process_tree.kill_descendants(self._process.pid)
            self._process.kill()
            shutil.rmtree(self.directory, ignore_errors=True)
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def _path() -> str:
    """PATH of programs on the host's files: `python` is this Python, also where PATH names none, or one that is not
    shown to them.
    """
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])  # noqa: PTH120


@contextlib.contextmanager
def _ahead_of_programs() -> Iterator[None]:
    """Give a runner that root starts here real-time priority over the programs that it watches.

    The kernel does not limit the number of root's processes, so only the runner can stop a fork bomb, and among
    thousands of processes it would wait minutes to be scheduled. Programs give up the priority (runner.py).
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):  # root of a container often lacks this permission
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def _readable(content: bytes) -> BinaryIO:
    """A pipe from which `content`, which must fit into it, can be read."""
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    return os.fdopen(reader, "rb")


@functools.cache
def _runner_code() -> bytes:
    """The runner and its imports, compiled once: no source file has to be visible in the sandbox."""
    packages = ("penstock", "penstock.envs", "penstock.envs.workers")  # empty except for the modules below
    sources = dict.fromkeys(packages, "")
    sources |= {module.__name__: inspect.getsource(module) for module in (process_tree, runner_module)}
    return marshal.dumps([(name, compile(source, f"<{name}>", "exec")) for name, source in sources.items()])


def _to_frame(program: Program, limits: Limits, *, is_isolated: bool) -> bytes:
    """Encode a job for the runner."""
    bpf = None
    if not is_isolated:  # in a sandbox, bwrap has installed the filter
        with contextlib.suppress(OSError):
            bpf = syscall_filter()
    return marshal.dumps(
        {"code": program.code, "argv": list(program.argv), "stdin": program.stdin, "files": dict(program.files),
         "limits": limits.model_dump(), "filter": bpf}
    )  # fmt: skip


async def _read_result(reader: asyncio.StreamReader, limits: Limits) -> SandboxResult:
    line = await reader.readuntil(b"\n")
    outcome, exit_code, wall_s, *lengths, detail = line.decode().rstrip("\n").split(" ", 5)
    num_out, num_error = map(int, lengths)
    if outcome not in get_args(Outcome) or max(num_out, num_error) > limits.max_output_kib << 10:
        raise ValueError(f"the runner sent {line!r:.200}")
    texts = [(await reader.readexactly(length)).decode("utf-8", "replace") for length in (num_out, num_error)]
    exited = int(exit_code) if outcome == "exited" else None
    return SandboxResult(cast("Outcome", outcome), exited, texts[0], texts[1], float(wall_s), detail)


def try_isolation(config: SandboxConfig) -> Isolation:
    """Start a sandbox to find out whether the host allows isolation."""
    try:
        isolated_runner = IsolatedRunner(config, config.limits.max_disk_mib, isolate=True)
        try:
            isolated_runner.wait_until_ready()
        finally:
            isolated_runner.end()
    except OSError as error:
        return Isolation(str(error) or repr(error))
    return Isolation()


def judge_isolation(isolation: Isolation, config: SandboxConfig) -> None:
    """Refuse or warn if there is no isolation.

    Raises:
        ConfigError: If `allow_unisolated` is off.
    """
    if isolation.is_isolated:
        return
    problem = isolation.problem
    if ISOLATION_VARIABLE in os.environ:
        problem = "isolation is strict, and sandboxes cannot be nested: use isolation=process or sandbox=remote"
    if not config.allow_unisolated:
        raise ConfigError(
            [
                f"sandbox.allow_unisolated=false, but this host allows no isolation: {problem}. Untrusted "
                "code could read, change and send what you can. Allow user namespaces (sysctl user.max_user_namespaces,"
                " kernel.unprivileged_userns_clone; docker: --security-opt seccomp=unconfined), set sandbox.remote, or "
                "set sandbox.allow_unisolated=true if you trust the code."
            ]
        )
    logger.warning("sandbox: this host allows no isolation (%s): programs run with limits only.", problem)


class LocalSandbox:
    """Runs programs on this machine, those of each answer in a sandbox of their own. Use it from one event loop.

    As many sandboxes are started ahead as have been in use concurrently.

    Args:
        config: The section `sandbox`.
        isolate: False does not try to isolate; for tests and comparisons.
    """

    def __init__(self, config: SandboxConfig, *, isolate: bool = True) -> None:
        self._config = config
        self._isolate = isolate
        self._isolation: Isolation | None = None
        self._slots = asyncio.Semaphore(config.num_slots)
        self._spare: deque[IsolatedRunner] = deque()
        self._busy: set[IsolatedRunner] = set()
        self._most_busy = 1
        self._is_closed = False

    async def start(self) -> Isolation:
        """Find out whether programs can be isolated.

        Raises:
            ConfigError: If the host allows no isolation and `allow_unisolated` is off.
            SandboxUnavailableError: If it has been closed.
        """
        if self._is_closed:
            raise SandboxUnavailableError("sandbox: it has been closed")
        if self._isolation is None:
            found = try_isolation(self._config) if self._isolate else Isolation("it was not asked for")
            judge_isolation(found, self._config)
            self._isolation = found
        return self._isolation

    async def run(self, program: Program, limits: Limits) -> SandboxResult:
        """Run one program. See `Sandbox.run`."""
        return (await self.run_in_turn([program], limits))[0]

    async def run_in_turn(self, programs: Sequence[Program], limits: Limits) -> list[SandboxResult]:
        """Run the programs of one answer. See `Sandbox.run_in_turn`."""
        problem = ""
        async with self._slots:
            for _ in range(_MAX_ATTEMPTS):
                isolation = await self.start()
                isolated_runner = None
                try:
                    isolated_runner = self._take(limits.max_disk_mib, isolate=isolation.is_isolated)
                    return await isolated_runner.run(programs, limits)
                except (OSError, EOFError, TimeoutError, ValueError) as error:
                    problem = f"{type(error).__name__}: {error}"
                finally:
                    if isolated_runner is not None:
                        self._busy.discard(isolated_runner)
                        isolated_runner.end()
        raise SandboxUnavailableError(f"sandbox: a sandbox failed, {_MAX_ATTEMPTS} times in a row: {problem}")

    async def close(self) -> None:
        """End all running programs."""
        self._is_closed = True
        for isolated_runner in [*self._spare, *self._busy]:
            isolated_runner.end()
        self._spare.clear()

    def _take(self, max_disk_mib: int, *, isolate: bool) -> IsolatedRunner:
        """Return a started sandbox, and start as many as may be needed next."""
        while self._spare and self._spare[0].max_disk_mib != max_disk_mib:
            self._spare.popleft().end()
        taken = self._spare.popleft() if self._spare else IsolatedRunner(self._config, max_disk_mib, isolate=isolate)
        self._busy.add(taken)
        self._most_busy = max(self._most_busy, len(self._busy))
        # The spare sandboxes are not needed yet, so a failure to start them now is no failure of this call.
        with contextlib.suppress(OSError):
            while len(self._spare) < self._most_busy:
                self._spare.append(IsolatedRunner(self._config, max_disk_mib, isolate=isolate))
        return taken
