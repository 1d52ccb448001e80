"""Which user a process is: in a user namespace of ours, or as root that lets go of what root may."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.envs.sandbox import kernel_calls as kernel

NOBODY_ID = 65534


def is_real_root() -> bool:
    """May this process become another user? In a user namespace of ours only one user exists."""
    return os.geteuid() == 0 and int(Path("/proc/self/uid_map").read_text().split()[2]) > NOBODY_ID


def become_nobody() -> None:
    """Let go of root; a process that is not root stays who it is."""
    if not is_real_root():
        return
    os.setgroups([])
    os.setresgid(*[NOBODY_ID] * 3)
    os.setresuid(*[NOBODY_ID] * 3)
    kernel.set_dumpable(1)  # else /proc/self belongs to root


def map_ids(*, inside: tuple[int, int], outside: tuple[int, int]) -> None:
    """After a new user namespace: user and group outside, asked for before, and their numbers in it."""
    kernel.set_dumpable(1)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside[0]} {outside[0]} 1")
    Path("/proc/self/gid_map").write_text(f"{inside[1]} {outside[1]} 1")


def roots_files_for_nobody() -> int | None:
    """A descriptor by which mounts show root's files as nobody's own; None if the caller is not real root."""
    if not is_real_root():
        return None
    (ready, says_ready), (lifeline, holds_on) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(holds_on)
            become_nobody()
            kernel.unshare(kernel.NEW_USER)
            map_ids(inside=(0, 0), outside=(NOBODY_ID, NOBODY_ID))
            os.write(says_ready, b".")
            os.read(lifeline, 1)
        finally:
            os._exit(0)
    os.close(says_ready)
    os.close(lifeline)
    try:
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY) if os.read(ready, 1) else None
    finally:
        os.close(ready)
        os.close(holds_on)
        os.waitpid(child, 0)
