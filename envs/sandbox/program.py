"""The last steps of a forked process before it is the untrusted program."""

from __future__ import annotations

import atexit
import contextlib
import gc
import linecache
import math
import os
import resource
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from penstock.envs.sandbox import kernel_calls as kernel
from penstock.envs.sandbox.contract import Limits, Program

_SOURCE = "program.py"
_OWN_TASKS = 1  # the cell's first process
_CANNOT_START = 127
_MAX_OPEN_FILES = 256  # said in docs/guides/sandbox.md; pipes and sockets hold memory that no process shows


def become_program(
    program: Program, limits: Limits, directory: str, standard: tuple[int, int, int], *, is_isolated: bool
) -> NoReturn:
    """Take the standard streams, the limits and the environment of the program, and run it.

    Args:
        program: What to run.
        limits: What it may use.
        is_isolated: Is this a cell of its own?
        directory: Working directory and home.
        standard: File descriptors of stdin, stdout and stderr; all others are closed.
    """
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        for number, fd in enumerate(standard):
            os.dup2(fd, number)
        os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.chdir(directory)
        environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": directory, "TMPDIR": directory,
                       "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # fmt: skip
        os.environ.clear()
        os.environ.update(environment)
        _limit_resources(limits, is_isolated=is_isolated)
        kernel.set_dumpable(1)
        kernel.drop_privileges()
        with contextlib.nullcontext() if is_isolated else contextlib.suppress(OSError):  # server.py has tried it
            kernel.refuse_hidden_memory()
        if program.argv:
            os.execvp(program.argv[0], program.argv)  # noqa: S606  no shell is what we want
        _run_python(program.code or "")
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(2, f"{program.argv[0] if program.argv else _SOURCE}: {error}\n".encode())
    finally:
        os._exit(_CANNOT_START)


def _limit_resources(limits: Limits, *, is_isolated: bool) -> None:
    """Let the kernel refuse what one process may not have; what all may have together is watched from outside."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cpu_s = math.ceil(limits.cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.max_file_bytes, limits.max_file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))
    reserved = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes + reserved,) * 2)
    if is_isolated:  # counted per cell; outside one it would count everything that this user runs
        resource.setrlimit(resource.RLIMIT_NPROC, (limits.max_processes + _OWN_TASKS,) * 2)


def _run_python(code: str) -> NoReturn:
    """Run Python source as `__main__` and end with the exit code that `python program.py` would have."""
    sys.argv = [_SOURCE]
    sys.path[:] = ["", *sys.path]
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    linecache.cache[_SOURCE] = (len(code), None, code.splitlines(keepends=True), _SOURCE)
    exit_code = 0
    try:
        exec(compile(code, _SOURCE, "exec"), main.__dict__)  # noqa: S102  what the sandbox is for
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join()
    except SystemExit as leaving:
        exit_code = _exit_code(leaving.code)
    except BaseException as error:  # noqa: BLE001  any program may raise anything
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace.tb_next if trace else None)
        exit_code = 1
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()  # noqa: SLF001  the only way to run them without tearing down the interpreter
    _flush_standard_streams()
    with contextlib.suppress(BaseException):
        _let_go_of(main)
    _flush_standard_streams()  # of what that has printed
    os._exit(exit_code)


def _let_go_of(module: ModuleType) -> None:
    """Forget its names as the interpreter does at its end, so that files that nobody closed are written."""
    for name in [name for name in module.__dict__ if name != "__builtins__"]:
        module.__dict__[name] = None
    gc.collect()


def _flush_standard_streams() -> None:
    """Those of now and those of the beginning: a program may have put others in their places."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(BaseException):
            if stream is not None:
                stream.flush()


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
