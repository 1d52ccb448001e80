"""Measures and kills the descendants of a process. Linux only; the caller is their ancestor.

A process can leave its group and session, but not its ancestors: orphans go to the nearest ancestor that adopts them
(`adopt_orphans`). So descendants are found by parentage.

The runner in every sandbox imports this module (sandbox/runner.py), so it imports little: each import slows down every
check.
"""

from __future__ import annotations

import os
from _signal import SIGKILL, SIGSTOP  # importing `signal` creates enums, which takes half of an interpreter's start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RUNNER = "penstock.envs.sandbox.runner"
"""An argument of the process whose descendants are the programs in sandboxes on this machine (sandbox/runner.py)."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, in any session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(signal: int = SIGKILL) -> None:
    """Ask the kernel for a signal when the parent's thread ends."""
    _prctl(_PR_SET_PDEATHSIG, signal)


def set_dumpable(value: int) -> None:
    """0: other processes of the same user cannot read its memory; 1: they can, and it owns its /proc entries again."""
    _prctl(_PR_SET_DUMPABLE, value)


def _prctl(option: int, value: int) -> None:
    import _ctypes  # importing `ctypes` around it takes a third of the interpreter's start

    program = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]  # the libraries that are loaded already
    address = _ctypes.dlsym(program, "prctl")
    if _ctypes.call_cdeclfunction(address, (option, value, 0, 0, 0)) != 0:
        raise OSError(f"prctl({option}, {value})")


def descendants(pid: int, not_below: str = "") -> list[int]:
    """All living descendants of `pid`, without itself, parents before children.

    Args:
        pid: The ancestor.
        not_below: Leave out the descendants of a process with this argument; the process itself counts.
    """
    found = list(children(pid))
    for child in found:  # grows while it is walked
        below = list(children(child))
        if below and not (not_below and _has_argument(child, not_below.encode())):  # most have no children
            found += below
    return found


def all_others() -> list[int]:
    """Every process of this pid namespace except the caller."""
    me = os.getpid()
    return [pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != me]  # noqa: PTH208


def measure(pids: Iterable[int]) -> tuple[int, float, int]:
    """Sum over those of `pids` that are alive.

    Returns:
        Number of processes and threads; their processor time, including that of reaped children, seconds; sum of
        resident sets, in which shared pages count once per process, bytes.
    """
    num_tasks = ticks = pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # ended meanwhile
            continue
        ticks += sum(map(int, fields[11:15]))
        num_tasks += int(fields[17])
        pages += int(fields[21])
    return num_tasks, ticks / _TICKS_PER_S, pages * _PAGE_BYTES


def proportional_memory_bytes(pids: Iterable[int]) -> int:
    """Memory of those of `pids` that are alive, where a page that n processes share counts 1/n in each.

    Ten times the work of `measure`. A process whose pages cannot be read counts with all its resident pages.
    """
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", "rb") as file:  # noqa: PTH123
                lines = file.read().splitlines()
        except OSError:
            total += measure([pid])[2]
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(b"Pss:"))
    return total


def kill_descendants(pid: int) -> None:
    """Kill all descendants of `pid`, including those that are forked during this call.

    They are stopped before they are killed, so that none can fork while the others are searched. A fork that is under
    way when its process is stopped still completes, and fails only once that process is killed: so they are searched
    until a search after the last kill finds none. They stay zombies until their parent, or the ancestor that adopts
    orphans, reaps them.
    """
    killed: set[int] = set()
    while stopped := _stop_descendants(pid, killed):
        for child in stopped:
            _send(child, SIGKILL)
        killed |= stopped


def _stop_descendants(pid: int, killed: set[int]) -> set[int]:
    """Stop all descendants of `pid` that are not `killed`, and return them."""
    stopped: set[int] = set()
    while new := set(descendants(pid)) - killed - stopped:
        for child in new:
            _send(child, SIGSTOP)
        stopped |= new
    return stopped


def reap_children() -> None:
    """Reap all children of the caller, which has killed them."""
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        return


def children(pid: int) -> Iterator[int]:
    """Living children of `pid`, of all its threads. Fast, since there may be a thousand and the supervisor polls."""
    tasks = f"/proc/{pid}/task"
    try:
        threads = os.listdir(tasks)  # noqa: PTH208 - paths as text: half the time
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"{tasks}/{thread}/children", "rb", buffering=0) as file:  # noqa: PTH123
                found = file.read().split()
        except OSError:
            continue
        yield from map(int, found)


def signal_name(signum: int) -> str:
    """`SIGKILL`; `signal 40` where there is no name, as for most real-time signals."""
    import signal

    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _has_argument(pid: int, word: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
            return word in file.read().split(b"\0")
    except OSError:
        return False


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return
