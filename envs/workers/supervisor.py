"""The process between a worker and the user's code: it always kills every process that the user's code has started.

Started as `python -m penstock.envs.workers.supervisor SETTINGS_FD`; the user's code runs in its child. It consumes
nothing. Waits for: the child's exit, the end of its own standard input (the worker closed it, or died), or a limit.
Unblocked by: the first of them. Then it kills every descendant, writes to its standard output how the child ended,
removes the child's folder for temporary files, and exits. If it is killed itself, the child dies with it. It lives
as long as the child does, beside each, so it imports little.

`SETTINGS_FD` is an open file with a JSON object: `module` (whose `main` is the child), `serve` (its arguments),
`section` (of the configuration, for messages), `max_memory_bytes`, `max_processes`, `temporary` (the folder), `bwrap`
(the command line of `bwrap`, which then starts the user's code; empty: it is not isolated).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.envs.workers import process_tree

_CHECK_EVERY_MS = 50
_STDIN = 0  # closed by the worker, or by its death
_SIGNALLED = 128
_NUM_BWRAP_PROCESSES = 2  # bwrap outside the sandbox, and its first process inside


def main(arguments: Sequence[str]) -> None:
    """Start the child, watch it and end it. With a second argument, run as the child, in its sandbox."""
    with open(int(arguments[0]), encoding="utf-8", closefd=False) as file:
        file.seek(0)
        settings = json.load(file)
    if len(arguments) > 1:
        _serve(settings)
        return
    process_tree.adopt_orphans()
    me = os.getpid()
    child = os.fork()
    if child == 0:
        _become_child(settings, me, arguments[0])
        return
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # only the child keeps the socket
    problem = _watch(child, settings)
    process_tree.kill_descendants(me)
    _, status = os.waitpid(child, 0)
    process_tree.reap_children()
    shutil.rmtree(settings["temporary"], ignore_errors=True)
    exit_code = os.waitstatus_to_exitcode(status)
    if settings["bwrap"] and exit_code > _SIGNALLED:  # bwrap reports a signal of its child like this
        exit_code = _SIGNALLED - exit_code
    with contextlib.suppress(OSError):
        os.write(1, (problem or how_it_ended(exit_code)).encode())
    os._exit(0)


def how_it_ended(returncode: int | None) -> str:
    """How a process ended, for messages; `returncode` as in `subprocess.Popen`."""
    if returncode is None:
        return "did not end"
    if returncode < 0:
        return f"was killed by {process_tree.signal_name(-returncode)}"
    return f"ended with exit code {returncode}"


def _become_child(settings: Mapping[str, Any], supervisor: int, settings_fd: str) -> None:
    os.setsid()
    process_tree.end_with_parent()
    if os.getppid() != supervisor:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not settings["bwrap"]:
        _serve(settings)
        return
    command = [sys.executable, "-P", "-m", "penstock.envs.workers.supervisor", settings_fd, "serve"]
    os.execv(settings["bwrap"][0], [*settings["bwrap"], "--", *command])  # noqa: S606  no shell is what we want


def _serve(settings: Mapping[str, Any]) -> None:
    importlib.import_module(settings["module"]).main(settings["serve"])


def _watch(child: int, settings: Mapping[str, Any]) -> str:
    """Wait until the child has exited or must be killed; returns the reason to kill it, else an empty string.

    Programs in the sandbox have their own limits: they count neither as processes nor as memory of the user's code.
    """
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.register(_STDIN, select.POLLIN)
    max_memory, max_processes, section = settings["max_memory_bytes"], settings["max_processes"], settings["section"]
    num_bwrap = _NUM_BWRAP_PROCESSES if settings["bwrap"] else 0
    while not poll.poll(_CHECK_EVERY_MS):
        pids = process_tree.descendants(os.getpid(), not_below=process_tree.RUNNER)
        num_processes = len(pids) - num_bwrap
        if num_processes > max_processes:
            return f"was killed: it had {num_processes} processes, more than {section}.max_processes={max_processes}"
        memory = process_tree.measure(pids)[2]
        if max_memory is not None and memory > max_memory:
            memory = process_tree.proportional_memory_bytes(pids)
            if memory > max_memory:
                limit = f"{section}.max_memory_gib={max_memory / 2**30:g}"
                return f"was killed: it used {memory / 2**30:.2f} GiB, more than {limit}"
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
