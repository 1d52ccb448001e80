"""The Linux system calls that the sandbox needs and Python does not have. Nothing is decided here."""

from __future__ import annotations

import ctypes
import errno
import os

NEW_MOUNTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
"""Flags of `unshare`: which kinds of things the caller no longer shares with the rest of the machine."""

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000
_SYS_MOUNT_SETATTR = 442  # the same on every architecture; Linux >= 5.12
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT = 428, 429  # likewise; Linux >= 5.2
_OPEN_TREE_CLONE, _MOVE_MOUNT_FROM_FD = 0x1, 0x4
_AT_FDCWD, _AT_RECURSIVE, _AT_EMPTY_PATH = -100, 0x8000, 0x1000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_IDMAP = 0x1, 0x2, 0x4, 0x00100000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave shared namespaces. A new pid namespace begins with the next fork."""
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mount a file system, or change the propagation of one that is mounted (`kind` None)."""
    fs_type = None if kind is None else kind.encode()
    result = _libc.mount(source.encode(), target.encode(), fs_type, ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {kind or source} on {target}")


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def make_read_only(target: str, *, with_submounts: bool) -> None:
    """Forbid writing, devices and set-uid programs."""
    attributes = _ATTR_RDONLY | _ATTR_NOSUID | (_ATTR_NODEV if with_submounts else 0)
    _set_attributes(_AT_FDCWD, target, attributes, _AT_RECURSIVE if with_submounts else 0)


def make_everything_read_only() -> None:
    """Forbid writing and set-uid programs in all that is mounted; devices stay."""
    _set_attributes(_AT_FDCWD, "/", _ATTR_RDONLY | _ATTR_NOSUID, _AT_RECURSIVE)


def _set_attributes(fd: int, target: str, attributes: int, flags: int, owners: int = 0) -> None:
    wanted = _MountAttributes(attributes, 0, 0, owners)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    result = _libc.syscall(_SYS_MOUNT_SETATTR, fd, target.encode(), ctypes.c_uint(flags), ctypes.byref(wanted), size)
    _check(result, f"mount_setattr {target}")


def take_tree(path: str) -> int:
    """A descriptor of a copy of the mounts at `path`, which stays reachable when something is mounted over it."""
    fd: int = _libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, path.encode(), ctypes.c_uint(_OPEN_TREE_CLONE | _AT_RECURSIVE))
    _check(min(fd, 0), f"open_tree {path}")
    return fd


def give_tree_to(fd: int, owners: int) -> bool:
    """Show the files of a taken tree as others' (`users.roots_files_for_nobody`); whether its file system can."""
    try:
        _set_attributes(fd, "", _ATTR_IDMAP, _AT_RECURSIVE | _AT_EMPTY_PATH, owners)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP):
            return False
        raise
    return True


def mount_tree(fd: int, target: str) -> None:
    """Mount a taken tree at `target`."""
    _check(
        _libc.syscall(_SYS_MOVE_MOUNT, fd, b"", _AT_FDCWD, target.encode(), ctypes.c_uint(_MOVE_MOUNT_FROM_FD)),
        f"move_mount to {target}",
    )


def _prctl(option: int, value: int, what: str) -> None:
    zeros = [ctypes.c_ulong(0)] * 3
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), *zeros), what)


def signal_when_parent_dies(signum: int) -> None:
    """Ask the kernel for a signal when the parent's thread ends. Cleared by a change of user: call it after that."""
    _prctl(_PR_SET_PDEATHSIG, signum, "PR_SET_PDEATHSIG")


def set_dumpable(value: int) -> None:
    """0: no process of the same user may look into this one; 1: it may, and owns its /proc entries again."""
    _prctl(_PR_SET_DUMPABLE, value, "PR_SET_DUMPABLE")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, whatever session it is in."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def drop_privileges() -> None:
    """Give up all capabilities, and the right to gain any by starting a program."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")
    header, nothing = _CapabilityHeader(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")
