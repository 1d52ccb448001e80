"""The first process of a sandbox: it runs the programs of one answer one after the other, and kills everything that
they started.

    python -I -S -B -c BOOT RUNNER FOLDERS MODE [OPTIONS]     its code comes over the socket (local.py)

Consumes jobs from its socket, which is its standard input. Waits for: a program's exit, its output, or a limit.
Unblocked by: the first of them, or the socket being closed, upon which it ends. It never learns the expected output of
a program; the judge runs outside.

In a workspace (workspace.py) files stay from one program to the next, and a program may reserve memory that it does not
use. With the option `listen` the first byte comes with a socket that listens in the network of the sandbox, so that the
other end can answer what its programs ask there. With `chroot` programs have another root than this process.

The first byte that it writes means that it is ready. A job is a `marshal`ed dict. The answer is a line of text,
`OUTCOME EXIT_CODE WALL_S STDOUT STDERR DETAIL` with the lengths of both streams, then the streams. In a sandbox it is
process 1, so no process of the sandbox can kill it; it is not dumpable, so none can read its memory.

Every check starts this module in a new interpreter, so modules that programs seldom need are imported lazily.
"""

from __future__ import annotations

import _signal as signal  # see process_tree.py
import gc
import marshal
import os
import resource
import select
import site
import sys
import time

from penstock.envs.workers import process_tree

TYPE_CHECKING = False  # importing `typing` takes as long as starting the interpreter
if TYPE_CHECKING:
    from typing import Any, BinaryIO, NoReturn

SOURCE = "program.py"
"""Name of a program in its own traceback."""
MAX_OPEN_FILES = 256
"""Documented in docs/guides/sandbox.md. Pipes and sockets hold memory that no process accounts for."""
PORT = 41000
"""Port of the socket that is handed out, at 127.0.0.1 of the sandbox. The same in each, since it stands in prompts."""
WORKSPACE, LISTEN, CHROOT = "workspace", "listen", "chroot"
"""Options."""
IMAGE = "/image"
"""Where the root of the programs is mounted, with the option `chroot`."""
_CONNECTION = 0
_BACKLOG = 128
_WORKSPACE_OPEN_FILES = 4096
_CHECK_EVERY_S = 0.02
_CHUNK = 65536
_OWN_TASKS = 1
_USUAL_MODULES = {"collections", "functools", "heapq", "itertools", "json", "math", "random", "re", "string", "typing"}
_CANNOT_START = 127
# A program may have replaced `sys.stdout` and `sys.stderr`, so both the current and the original streams are flushed.
_FLUSHES = [lambda name=name: getattr(sys, name).flush() for name in ("stdout", "stderr", "__stdout__", "__stderr__")]


def main(connection: BinaryIO, folders: str, mode: str, *options: str) -> None:
    """Serve jobs until the socket closes.

    Args:
        connection: The socket, opened for reading.
        folders: Folders of installed packages, which programs may import; separated as in PATH.
        mode: `1` in a sandbox, `0` without isolation.
        options: Of `WORKSPACE`, `LISTEN` and `CHROOT`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_isolated = mode == "1"
    os.environ.pop("PWD", None)  # bwrap sets it
    sys.path += folders.split(os.pathsep)
    site.setquit()  # `exit()`, `quit()` and `help()`, which an interpreter that is started without `site` lacks
    site.sethelper()
    if is_isolated:
        process_tree.set_dumpable(0)
    else:
        process_tree.adopt_orphans()
    if LISTEN in options:
        _hand_out_listener()
    else:
        os.write(_CONNECTION, b".")
    folder = os.getcwd()
    while (job := _receive(connection)) is not None:
        for name in _USUAL_MODULES & set((job["code"] or "").replace(",", " ").split()):
            __import__(name)  # imported before the fork, once for all programs of the answer, which often share code
        # Objects that exist before a program are not searched for garbage when it ends: saves 1 of 20 ms of a check.
        gc.freeze()
        reply = _Run(job, folder, is_isolated=is_isolated, options=options).run()
        if reply is None:  # the client has disconnected
            break
        with open(_CONNECTION, "wb", closefd=False) as writer:
            writer.write(reply)
        if WORKSPACE not in options:
            _empty(folder)
    if not is_isolated:
        _empty(folder)
        os.rmdir(folder)


def _hand_out_listener() -> None:
    """Write the first byte, with a listening socket of this network namespace."""
    import socket

    with socket.socket() as listener, socket.socket(fileno=os.dup(_CONNECTION)) as connection:
        listener.bind(("127.0.0.1", PORT))
        listener.listen(_BACKLOG)
        socket.send_fds(connection, [b"."], [listener.fileno()])


def _receive(connection: BinaryIO) -> dict[str, Any] | None:
    try:
        job: dict[str, Any] = marshal.load(connection)  # noqa: S302  written by our own process outside the sandbox
    except EOFError:
        return None
    return job


def _empty(folder: str) -> None:
    """Remove the files that a program left, whatever their permissions: their owner is this user."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            _empty(entry.path)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


class _Run:
    """Runs and watches one program. Invariant: however `run` ends, no other process of the sandbox is alive then."""

    def __init__(self, job: dict[str, Any], folder: str, *, is_isolated: bool, options: tuple[str, ...] = ()) -> None:
        self._job = job
        self._limits: dict[str, Any] = job["limits"]
        self._max_output = self._limits["max_output_kib"] << 10
        self._folder = folder
        self._is_isolated = is_isolated
        self._options = options
        self._output: dict[int, bytearray] = {}
        self._open: set[int] = set()
        self._poll = select.poll()
        self._unsent = memoryview(job["stdin"])

    def run(self) -> bytes | None:
        """Run the program until it exits or hits a limit; None if the client disconnected."""
        for name, content in self._job["files"].items():
            path = os.path.join(self._folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        started = time.monotonic()
        (stdin, our_stdin), (our_stdout, stdout), (our_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become_program((stdin, stdout, stderr))
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        for fd in (our_stdin, our_stdout, our_stderr):
            os.set_blocking(fd, False)
        self._output = {our_stdout: bytearray(), our_stderr: bytearray()}
        self._open = set(self._output)
        for fd in self._output:
            self._poll.register(fd, select.POLLIN)
        self._poll.register(_CONNECTION, select.POLLRDHUP)
        self._poll.register(our_stdin, select.POLLOUT)
        try:
            ended = self._watch(pid, our_stdin, started + self._limits["wall_s"])
            wall_s = time.monotonic() - started
        finally:
            exit_code = self._end(pid)
        if ended is None:
            return None
        for fd in self._output:  # the rest of the pipes, whose writers are dead
            self._read(fd)
            os.close(fd)
        outcome, detail = ended
        if outcome == "exited" and exit_code == -signal.SIGXCPU:
            outcome, detail = "cpu_time", f"more than {_whole(self._limits['cpu_s'])} s of processor time"
        elif outcome == "exited" and exit_code < 0:
            outcome, detail = "killed", f"by {process_tree.signal_name(-exit_code)}"
        texts = [bytes(found[: self._max_output]) for found in self._output.values()]
        line = f"{outcome} {exit_code} {wall_s:.6f} {len(texts[0])} {len(texts[1])} {detail}\n"
        return line.encode() + b"".join(texts)

    def _watch(self, pid: int, stdin: int, deadline: float) -> tuple[str, str] | None:
        """Wait until the program exits or hits a limit; None if the client disconnected."""
        exited = os.pidfd_open(pid)
        self._poll.register(exited, select.POLLIN)
        next_check = time.monotonic() + _CHECK_EVERY_S
        while True:
            events = dict(self._poll.poll(max(0.0, next_check - time.monotonic()) * 1000))
            now = time.monotonic()
            for fd in self._open & events.keys():
                self._read(fd)
            if sum(map(len, self._output.values())) > self._max_output:
                return "output", f"more than {self._max_output} bytes of output"
            if exited in events:
                os.close(exited)
                return "exited", ""
            if _CONNECTION in events:
                return None
            if stdin in events:
                self._feed(stdin)
            if now >= deadline:
                return "wall_clock", f"more than {self._limits['wall_s']:g} s"
            if now >= next_check:
                if over := self._over_a_limit():
                    return over
                next_check = min(now + _CHECK_EVERY_S, deadline)

    def _over_a_limit(self) -> tuple[str, str] | None:
        limits = self._limits
        pids = process_tree.all_others() if self._is_isolated else process_tree.descendants(os.getpid())
        num_tasks, cpu_s, memory_bytes = process_tree.measure(pids)
        # Checked first: a fork bomb soon has thousands of processes, whose proportional memory takes long to sum.
        if num_tasks > limits["max_processes"]:
            return "processes", f"{num_tasks} processes and threads, more than {limits['max_processes']}"
        most = limits["memory_mib"] << 20
        if memory_bytes > most:  # perhaps only because shared pages count once per process
            memory_bytes = process_tree.proportional_memory_bytes(pids)
            if memory_bytes > most:
                return "memory", f"{memory_bytes >> 20} MiB, more than {limits['memory_mib']} MiB"
        if cpu_s > limits["cpu_s"]:
            return "cpu_time", f"more than {limits['cpu_s']:g} s of processor time"
        if self._is_isolated:  # each file costs the kernel 1 KiB, which neither processes nor the folder account for
            files = os.statvfs(self._folder)
            if files.f_files - files.f_ffree > limits["max_files"]:
                return "memory", f"more than {limits['max_files']} files"
        return None

    def _read(self, fd: int) -> None:
        """Read the pipe until it is empty or the output exceeds the limit."""
        found = self._output[fd]
        try:
            while fd in self._open and len(found) <= self._max_output:
                chunk = os.read(fd, _CHUNK)
                found += chunk
                if not chunk:
                    self._open.remove(fd)
                    self._poll.unregister(fd)
        except BlockingIOError:
            return

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
        """Kill all remaining processes; returns the exit code of the program."""
        if self._is_isolated:
            try:
                os.kill(-1, signal.SIGKILL)  # all processes of this pid namespace except its first one
            except ProcessLookupError:
                pass
        else:
            process_tree.kill_descendants(os.getpid())
        _, status = os.waitpid(pid, 0)
        process_tree.reap_children()
        return os.waitstatus_to_exitcode(status)

    def _become_program(self, standard: tuple[int, int, int]) -> NoReturn:
        """In the forked process: set the standard streams and the limits of the program, and run it."""
        argv: list[str] = self._job["argv"]
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # only the runner has priority (local.py)
            os.setsid()
            for number, fd in enumerate(standard):
                os.dup2(fd, number)
            os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            _limit_resources(self._limits, is_isolated=self._is_isolated, is_workspace=WORKSPACE in self._options)
            if CHROOT in self._options:
                _change_root(self._folder)
            if self._is_isolated:
                process_tree.set_dumpable(1)
            else:
                _drop_permissions(self._job["filter"])
            if argv:
                os.execvp(argv[0], argv)  # noqa: S606  no shell is what we want
        except OSError as error:
            os.write(2, f"{argv[0] if argv else SOURCE}: {error}\n".encode())
            os._exit(_CANNOT_START)
        _run_python(self._job["code"])


def _whole(seconds: float) -> int:
    return int(-(-seconds // 1))


def _limit_resources(limits: dict[str, Any], *, is_isolated: bool, is_workspace: bool) -> None:
    """Set the limits that the kernel enforces per process. The limits of all processes together are polled."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cpu_s = _whole(limits["cpu_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["max_file_mib"] << 20,) * 2)
    if is_workspace:  # programs of Node.js reserve far more memory than they use
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (min(_WORKSPACE_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2
        )
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
        with open("/proc/self/statm", "rb") as file:
            reserved = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, ((limits["memory_mib"] << 20) + reserved,) * 2)
    # The kernel counts this per sandbox, and does not enforce it for root. Without a sandbox it would count all
    # processes of this user.
    if is_isolated:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits["max_processes"] + _OWN_TASKS,) * 2)


def _change_root(folder: str) -> None:
    """Make the image the root of the program, and drop the capability that this needs."""
    import ctypes  # noqa: F401  while their files are visible
    import warnings  # noqa: F401  of `os.execvp`

    os.chroot(IMAGE)
    os.chdir(folder.removeprefix(IMAGE))
    _drop_permissions(None)


def _drop_permissions(bpf: bytes | None) -> None:
    """Drop all capabilities for good, and install the system call filter if there is one."""
    import ctypes

    signal_when_parent_dies, no_new_privileges, seccomp, filter_mode, version_3 = 1, 38, 22, 2, 0x20080522
    libc = ctypes.CDLL(None)
    libc.prctl(signal_when_parent_dies, signal.SIGKILL, 0, 0, 0)
    libc.prctl(no_new_privileges, 1, 0, 0, 0)
    libc.capset((ctypes.c_uint32 * 2)(version_3, 0), (ctypes.c_uint32 * 6)())
    if bpf is not None:
        program = ctypes.create_string_buffer(bpf, len(bpf))
        fields = [("count", ctypes.c_ushort), ("steps", ctypes.c_void_p)]
        header = type("sock_fprog", (ctypes.Structure,), {"_fields_": fields})(len(bpf) // 8, ctypes.addressof(program))
        libc.prctl(seccomp, filter_mode, ctypes.byref(header), 0, 0)


def _run_python(code: str) -> NoReturn:
    """Run Python source as `__main__` and end with the exit code that `python program.py` would have."""
    sys.argv = [SOURCE]
    sys.path.insert(0, "")
    main_module = type(sys)("__main__")
    names = main_module.__dict__
    names["__loader__"] = _Source(code)
    sys.modules["__main__"] = main_module
    exit_code = 0
    try:
        # The program has its own `__future__` imports, not those of this file.
        exec(compile(code, SOURCE, "exec", dont_inherit=True), names)  # noqa: S102  it runs inside the sandbox
    except SystemExit as leaving:
        if isinstance(leaving.code, int):
            exit_code = leaving.code & 0xFF
        elif leaving.code is not None:
            print(leaving.code, file=sys.stderr)
            exit_code = 1
    except BaseException as error:  # any program may raise anything
        import traceback

        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace.tb_next if trace else None)
        exit_code = 1
    # The steps of an interpreter's exit, except the teardown of its modules, which takes 2 of the 20 ms of a check.
    steps = (
        getattr(sys.modules.get("threading"), "_shutdown", None),
        getattr(sys.modules.get("atexit"), "_run_exitfuncs", None),
        *_FLUSHES,
        lambda: names.update(dict.fromkeys(name for name in names if name != "__builtins__")),
        gc.collect,  # flushes files that were not closed
        *_FLUSHES,
    )
    for step in steps:
        try:
            if step is not None:
                step()
        except BaseException:
            pass
    os._exit(exit_code)


class _Source:
    """Gives tracebacks the source lines of a program, which has no file."""

    def __init__(self, code: str) -> None:
        self._code = code

    def get_source(self, _name: str) -> str:
        return self._code
