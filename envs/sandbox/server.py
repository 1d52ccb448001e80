"""The fork server: a warm interpreter that forks once per program. It never sees a job, so nothing can upset it.

Started as `python -m penstock.envs.sandbox.server CONTROL_FD PARENT_PID SETTINGS`. Consumes one socket per program from
the control socket, waits for nothing else, is unblocked by the next one, and ends when the control socket closes.
`SETTINGS` is a JSON object: `isolate`, `read_only_paths`, `preload`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence

from penstock.envs import process_tree
from penstock.envs.sandbox import kernel_calls as kernel
from penstock.envs.sandbox.cell import serve_one
from penstock.envs.sandbox.contract import Limits
from penstock.envs.sandbox.jail import enter_cell, enter_jail, fork_cell

_REAP_EVERY_S = 0.25


def main(arguments: Sequence[str]) -> None:
    """Enter the jail, say what was found, then serve until the control socket closes."""
    control_fd, parent_pid, settings = arguments
    kernel.signal_when_parent_dies(signal.SIGKILL)
    if os.getppid() != int(parent_pid):
        return
    control = socket.socket(fileno=int(control_fd))
    options = json.loads(settings)
    for name in options["preload"]:
        importlib.import_module(name)
    problem = "it was not asked for"
    if options["isolate"]:
        problem = _isolate(options["read_only_paths"])
    if problem:
        kernel.adopt_orphans()
    control.sendall(json.dumps({"is_isolated": not problem, "problem": problem}).encode())
    _serve(control, is_isolated=not problem)


def _isolate(read_only_paths: Sequence[str]) -> str:
    """Enter the jail; what is wrong, or nothing. It is tried by another process first: there is no way back."""
    problem = _try_isolation(read_only_paths)
    if not problem:
        enter_jail(read_only_paths)
    return problem


def _try_isolation(read_only_paths: Sequence[str]) -> str:
    """Enter a jail and a cell in a process of its own; what is wrong, or nothing."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            enter_jail(read_only_paths)
            if fork_cell():  # the first process of the jail must outlive what is tried in it
                process_tree.reap_children()
            else:
                enter_cell(Limits())
                kernel.drop_privileges()
                kernel.refuse_hidden_memory()
                os.write(writer, b"ok")
        except OSError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(pid, 0)
    return "" if said == "ok" else said or "the first process of a cell ended at once"


def _serve(control: socket.socket, *, is_isolated: bool) -> None:
    if is_isolated:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need no burial
    else:
        control.settimeout(_REAP_EVERY_S)
    gc.freeze()  # what is here already is not looked at by a collection in a fork, and so stays shared
    cells: set[int] = set()
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(control, 1, 1)
        except TimeoutError:
            _bury(cells)
            continue
        if not message:  # the end of a jail's first process is that of all others
            if not is_isolated:
                process_tree.kill_descendants(os.getpid())
            return
        pid = fork_cell() if is_isolated else os.fork()
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve_one(socket.socket(fileno=fds[0]), is_isolated=is_isolated)
        cells.add(pid)
        os.close(fds[0])
        if not is_isolated:
            _bury(cells)


def _bury(cells: set[int]) -> None:
    """Without isolation: wait for the dead, and kill what a cell left behind that was itself killed."""
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            cells.discard(pid)
    for child in process_tree.children(os.getpid()):
        if child not in cells:
            process_tree.kill_descendants(child)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
