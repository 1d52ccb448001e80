"""What a process and all it started use, and how to end all of it. Linux; the caller is their ancestor.

A process can leave its group and session, but not its ancestors: orphans go to the nearest ancestor that adopts them
(`adopt_orphans`). So descendants are found by parentage.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """What living processes use.

    Attributes:
        num_tasks: Processes and threads.
        cpu_s: Processor time of the living, and of the dead whom one of them waited for, seconds.
        memory_bytes: Sum of resident sets; shared pages count once per process.
    """

    num_tasks: int
    cpu_s: float
    memory_bytes: int


def descendants(pid: int) -> list[int]:
    """All living descendants of `pid`, without itself, parents before children."""
    found = list(children(pid))
    for child in found:  # grows while it is walked
        found += children(child)
    return found


def descendants_outside(pid: int, module: str) -> list[int]:
    """The same without those below a process that was started as `python -m module`, which itself counts."""
    found = list(children(pid))
    for child in found:  # grows while it is walked
        below = list(children(child))
        if below and not _runs(child, module):  # most have none, and need not be asked what they run
            found += below
    return found


def all_others() -> list[int]:
    """Every process of this pid namespace but the caller."""
    me = os.getpid()
    return [pid for path in Path("/proc").iterdir() if path.name.isdigit() and (pid := int(path.name)) != me]


def measure(pids: Iterable[int]) -> Usage:
    """Sum over those of `pids` that are alive."""
    num_tasks = ticks = pages = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # ended meanwhile
            continue
        ticks += sum(map(int, fields[11:15]))
        num_tasks += int(fields[17])
        pages += int(fields[21])
    return Usage(num_tasks, ticks / _TICKS_PER_S, pages * _PAGE_BYTES)


def proportional_memory_bytes(pids: Iterable[int]) -> int:
    """Memory of those of `pids` that are alive, where a page that n processes share counts 1/n in each.

    Ten times the work of `measure`; processes that do not let us look count with all their resident pages.
    """
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines()
        except OSError:
            total += measure([pid]).memory_bytes
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(b"Pss:"))
    return total


def kill_descendants(pid: int) -> None:
    """Kill all descendants of `pid`, also those that are born meanwhile.

    They are stopped before they are killed, so that none can start another one while its neighbours are found. The dead
    stay zombies until their parent, or the ancestor that adopts orphans, has waited for them.
    """
    seen: set[int] = set()
    while fresh := [child for child in descendants(pid) if child not in seen]:
        for child in fresh:
            _send(child, signal.SIGSTOP)
        seen.update(fresh)
    for child in seen:
        _send(child, signal.SIGKILL)


def reap_children() -> None:
    """Wait for all children of the caller, who has killed them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def children(pid: int) -> Iterator[int]:
    """Living children of `pid`, of all its threads: there may be a thousand, and the keeper looks often."""
    tasks = f"/proc/{pid}/task"
    try:
        threads = os.listdir(tasks)  # noqa: PTH208 - paths as text: half the time
    except OSError:
        return
    for thread in threads:
        with contextlib.suppress(OSError), open(f"{tasks}/{thread}/children", "rb", buffering=0) as file:  # noqa: PTH123
            yield from map(int, file.read().split())


def signal_name(signum: int) -> str:
    """`SIGKILL`; `signal 40` where there is no name, as for most real-time signals."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _runs(pid: int, module: str) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(pair == (b"-m", module.encode()) for pair in pairwise(arguments))


def _send(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)
