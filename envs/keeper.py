"""The process between a reward worker and the user's code: it ends all that the user's code has started, always.

Started as `python -m penstock.envs.keeper SETTINGS_FD`; the user's code runs in its child. It consumes nothing; waits
for the child's end, for the end of its own standard input (the worker closed it, or died), or for a limit; is unblocked
by the first of them, kills every descendant, says on its standard output how the child ended, removes the child's
folder for temporary files, and ends. If it is killed itself, the child dies with it.

`SETTINGS_FD` is an open file with a JSON object: `module` (whose `main` is the child), `serve` (its arguments),
`section` (of the configuration, for messages), `max_memory_bytes`, `max_processes`, `temporary`, `grants` (of contained
code, else null).
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from penstock.envs import process_tree
from penstock.envs.containment import Processes, enter, has_ended, open_processes
from penstock.envs.missing_rights import contained_variable
from penstock.envs.sandbox import kernel_calls as kernel
from penstock.envs.sandbox.contract import RUNNER
from penstock.envs.view import TEMPORARY

_LOOK_EVERY_MS = 50
_LIFELINE = 0


def main(arguments: Sequence[str]) -> None:
    """Start the child, watch it, end it."""
    with open(int(arguments[0]), encoding="utf-8") as file:  # noqa: PTH123  a descriptor, not a path
        settings = json.load(file)
    kernel.adopt_orphans()
    me = os.getpid()
    keeper = os.pidfd_open(me)
    try:
        contained = None if settings["grants"] is None else open_processes()
    except OSError as error:
        _say_and_end(error)
    child = os.fork()
    if child == 0:
        _become_child(settings, keeper, contained)
        return
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # the socket is the child's
    problem = _watch([child, *([contained.init] if contained else [])], settings)
    process_tree.kill_descendants(me)
    _, status = os.waitpid(child, 0)
    process_tree.reap_children()
    shutil.rmtree(settings["temporary"], ignore_errors=True)
    with contextlib.suppress(OSError):
        os.write(1, (problem or how_it_ended(os.waitstatus_to_exitcode(status))).encode())
    os._exit(0)


def how_it_ended(returncode: int | None) -> str:
    """The end of a process in words; `returncode` as in `subprocess.Popen`."""
    if returncode is None:
        return "did not end"
    if returncode < 0:
        return f"was killed by {process_tree.signal_name(-returncode)}"
    return f"ended with exit code {returncode}"


def _become_child(settings: Mapping[str, Any], keeper: int, contained: Processes | None) -> None:
    os.setsid()
    kernel.signal_when_parent_dies(signal.SIGKILL)
    if has_ended(keeper):
        os._exit(0)
    os.close(keeper)
    os.environ["TMPDIR"] = settings["temporary"]
    if contained is not None:
        _contain(settings, contained)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tempfile.tempdir = None
    importlib.import_module(settings["module"]).main(settings["serve"])


def _contain(settings: Mapping[str, Any], processes: Processes) -> None:
    grants = settings["grants"]
    try:
        enter(grants["read"], settings["temporary"], processes.owners, has_network=grants["network"])
    except OSError as error:
        _say_and_end(error)
    os.environ["TMPDIR"] = TEMPORARY
    os.environ.update(contained_variable(settings["section"], has_network=grants["network"]))


def _say_and_end(error: OSError) -> NoReturn:
    """The host could contain user code before, and cannot now."""
    os.write(1, f"could not be contained, {error}: it ".encode())
    os._exit(1)


def _watch(heads: Sequence[int], settings: Mapping[str, Any]) -> str:
    """Wait until the child, the first of `heads`, has to end or has ended; why it had to, or nothing.

    What it started is below it, or, if that is orphaned, below the other.

    Programs in the sandbox have limits of their own: they count neither as processes nor as memory of the reward.
    """
    poll = select.poll()
    poll.register(os.pidfd_open(heads[0]), select.POLLIN)
    poll.register(_LIFELINE, select.POLLIN)
    max_memory, max_processes, section = settings["max_memory_bytes"], settings["max_processes"], settings["section"]
    while not poll.poll(_LOOK_EVERY_MS):
        below = (process_tree.descendants_outside(head, RUNNER) for head in heads)
        members = [heads[0], *itertools.chain.from_iterable(below)]
        memory = process_tree.measure(members)[2]
        if len(members) > max_processes:
            return f"was killed: it had {len(members)} processes, more than {section}.max_processes={max_processes}"
        if max_memory is not None and memory > max_memory:
            memory = process_tree.proportional_memory_bytes(members)
            if memory > max_memory:
                limit = f"{section}.max_memory_gib={max_memory / 2**30:g}"
                return f"was killed: it used {memory / 2**30:.2f} GiB, more than {limit}"
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
