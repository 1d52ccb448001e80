"""What a sandboxed program can see and reach: two layers of Linux namespaces.

The *jail* is entered once, by the fork server: a root file system that holds the system's programs and the Python
installation, read-only, and nothing else; no network; no process of the machine. Each program then gets a *cell* of its
own inside it: a user without any right, its own processes, network (none) and working directory. A cell ends with its
first process: the kernel kills all others in it, whatever session they are in, and forgets its files.

Entering needs either root with CAP_SYS_ADMIN or a kernel that lets users make user namespaces. Whether that works is
found out by trying.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.envs.sandbox import kernel_calls as kernel
from penstock.envs.sandbox.contract import Limits
from penstock.envs.sandbox.users import NOBODY_ID, become_nobody, is_real_root, map_ids

WORK_DIR = "/tmp"  # noqa: S108  the cell's own, empty and gone with it
_NEW_ROOT = "/sys"  # a folder that exists everywhere and holds nothing that a program needs
_CELL_ID = 1000
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ACCOUNTS = {
    "passwd": f"root:x:0:0::/:/bin/sh\nuser:x:{_CELL_ID}:{_CELL_ID}::{WORK_DIR}:/bin/sh\n",
    "group": f"root:x:0:\nuser:x:{_CELL_ID}:\n",
    "hostname": "sandbox\n",
}
_CELL = kernel.NEW_USER | kernel.NEW_MOUNTS | kernel.NEW_IPC | kernel.NEW_NETWORK
_JAIL = (_CELL & ~kernel.NEW_USER) | kernel.NEW_PIDS | kernel.NEW_HOSTNAME


def enter_jail(extra_paths: Sequence[str]) -> None:
    """Leave the machine behind. Returns in a new process, the first of the jail; the caller's waits for it and ends.

    Args:
        extra_paths: Host paths that stay visible, read-only, besides the system's programs and this Python.

    Raises:
        OSError: If the host does not allow it, with the step that failed.
    """
    visible = _visible_paths(extra_paths)
    try:
        kernel.unshare(_JAIL)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        user = os.geteuid(), os.getegid()
        kernel.unshare(_JAIL | kernel.NEW_USER)
        map_ids(inside=(0, 0), outside=user)
    _fork_and_follow()
    kernel.signal_when_parent_dies(signal.SIGKILL)
    _build_root(visible)


def fork_cell() -> int:
    """Fork the first process of a cell, whose processes are its own. Each fork costs a check milliseconds: this is one.

    Returns:
        As `os.fork`. The child goes on with `enter_cell`.

    Raises:
        OSError: If the host does not allow it.
    """
    kernel.unshare(kernel.NEW_PIDS)
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            kernel.forget_new_pids()
    return pid


def enter_cell(limits: Limits) -> None:
    """Leave the jail behind: called in a child of `fork_cell`, which then has all rights inside the cell.

    Raises:
        OSError: If the host does not allow it.
    """
    owner = NOBODY_ID if is_real_root() else os.geteuid()
    kernel.unshare(kernel.NEW_MOUNTS)
    kernel.mount("tmpfs", WORK_DIR, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV,
                 f"size={limits.max_disk_bytes},nr_inodes=4096,mode=0700,uid={owner},gid={owner}")  # fmt: skip
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    become_nobody()
    user = os.geteuid(), os.getegid()
    kernel.unshare(_CELL)
    map_ids(inside=(_CELL_ID, _CELL_ID), outside=user)
    Path("/proc/sys/user/max_user_namespaces").write_text("0")  # no further rights by nesting


def _fork_and_follow() -> None:
    """Go on in a child, the first process of the new pid namespace; the parent ends as the child ends."""
    child = os.fork()
    if child == 0:
        return
    for fd in (0, 1, 2):
        os.close(fd)
    os.closerange(3, 256)  # the sockets are the child's alone, so that their ends are noticed
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _visible_paths(extra_paths: Sequence[str]) -> list[str]:
    """Absolute host paths to show, outer ones first."""
    python = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    wanted = {*_SYSTEM, *extra_paths, *python, *(os.path.realpath(path) for path in python)}
    return sorted(str(Path(path).absolute()) for path in wanted if Path(path).exists())


def _build_root(visible: Sequence[str]) -> None:
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _NEW_ROOT, "tmpfs", kernel.MS_NOSUID, "mode=0755,size=1m")
    root = Path(_NEW_ROOT)
    for path in visible:
        _show(path, root)
    for folder in ("etc", "dev", "proc", "tmp"):
        (root / folder).mkdir(exist_ok=True)
    for name in _ETC:
        if Path("/etc", name).exists():
            _show(f"/etc/{name}", root)
    for name, content in _ACCOUNTS.items():
        (root / "etc" / name).write_text(content)
    for name in _DEVICES:
        (root / "dev" / name).touch()
        kernel.bind(f"/dev/{name}", str(root / "dev" / name))
    (root / "dev" / "shm").symlink_to(WORK_DIR)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        (root / "dev" / name).symlink_to(f"/proc/self/fd/{number}")
    (root / "dev" / "fd").symlink_to("/proc/self/fd")
    kernel.mount("proc", str(root / "proc"), "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    kernel.switch_root(_NEW_ROOT)
    kernel.make_read_only("/", with_submounts=False)


def _show(path: str, root: Path) -> None:
    """Make `path` visible below `root`, read-only; a symbolic link directly below / stays one."""
    source, target = Path(path), root / path.lstrip("/")
    if target.exists():  # inside a path that is already shown
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink() and source.parent == Path("/"):
        target.symlink_to(source.readlink())
        return
    if source.is_dir():
        target.mkdir()
    else:
        target.touch()
    kernel.bind(path, str(target))
    kernel.make_read_only(str(target), with_submounts=True)
