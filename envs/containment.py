"""How user code is contained: processes of its own, a view of the files of its own, no network, no user's rights.

The keeper stays outside. It opens a process namespace (`open_processes`), whose first process does nothing but reap
orphans; when that one ends, and it ends with the keeper, the kernel ends all others in it. The keeper then forks the
process of the user's code into it, which takes its view (`enter`) before it imports anything of the user.

Works as root with CAP_SYS_ADMIN, or as a user whom the kernel lets make namespaces. Whether it does is found out by
trying, once per process (`why_not_contained`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from penstock.envs.sandbox import kernel_calls as kernel
from penstock.envs.sandbox.users import NOBODY_ID, become_nobody, is_real_root, map_ids, roots_files_for_nobody
from penstock.envs.view import SHARED_MEMORY, TEMPORARY, View, plan_view

_SHARED_MEMORY_MIB = 64
_TRIAL_TIMEOUT_S = 60.0
_OF_THE_KERNEL = "/proc/sys/kernel/core_pattern"
_PRIVATE = kernel.MS_NOSUID | kernel.MS_NODEV


@dataclass(frozen=True, slots=True)
class Processes:
    """A process namespace, into which the caller's next children are born.

    Attributes:
        init: Its first process.
        owners: As `roots_files_for_nobody`.
    """

    init: int
    owners: int | None


def open_processes() -> Processes:
    """Open one; the caller stays outside, and has to end `init`.

    Raises:
        OSError: If the host does not allow it.
    """
    owners = roots_files_for_nobody()
    user = os.geteuid(), os.getegid()
    try:
        kernel.unshare(kernel.NEW_PIDS)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        if is_real_root():  # in a user namespace it would still own /proc/sys
            raise OSError(errno.EPERM, "root without CAP_SYS_ADMIN may not make namespaces") from error
        kernel.unshare(kernel.NEW_PIDS | kernel.NEW_USER)
        map_ids(inside=user, outside=user)
    keeper = os.pidfd_open(os.getpid())
    init = os.fork()
    if init == 0:
        _reap(keeper)
    os.close(keeper)
    return Processes(init, owners)


def _reap(keeper: int) -> NoReturn:
    """Be the first process: orphans come here, and are reaped by the kernel."""
    try:
        kernel.signal_when_parent_dies(signal.SIGKILL)
        if has_ended(keeper):
            os._exit(0)
        kernel.set_dumpable(0)  # nobody may look into it
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for name in [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]:
            signal.signal(name, signal.SIG_IGN)
        os.closerange(0, 1024)
        while True:
            signal.pause()
    finally:
        os._exit(1)


def has_ended(pidfd: int) -> bool:
    """Whether the process has."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def enter(granted: Sequence[str], temporary: str, owners: int | None, *, has_network: bool) -> None:
    """Be contained, for good. The caller is in a process namespace of its own, and has one thread.

    Afterwards `/tmp` is its folder for temporary files.

    Args:
        granted: Paths that stay readable.
        temporary: Folder of the host that becomes `/tmp`.
        owners: As in `Processes`.
        has_network: Whether it keeps the host's.

    Raises:
        OSError: If the host does not allow it, with the step that failed.
    """
    view = plan_view(granted, temporary, has_network=has_network)
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:
        folder = "/"
    kernel.unshare(kernel.NEW_MOUNTS | kernel.NEW_IPC | (0 if has_network else kernel.NEW_NETWORK))
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    own = kernel.take_tree(temporary)
    kernel.make_everything_read_only()
    _take(view, own, owners)
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    os.chdir("/")  # the old folder may be below what is hidden
    if is_real_root():
        os.chown(TEMPORARY, NOBODY_ID, NOBODY_ID)
    become_nobody()
    kernel.drop_privileges()
    kernel.set_dumpable(1)
    if os.access(_OF_THE_KERNEL, os.W_OK):
        raise OSError(errno.EPERM, f"this user stays root for {_OF_THE_KERNEL}")
    with contextlib.suppress(OSError):  # it is hidden
        os.chdir(folder)


def _take(view: View, own: int, owners: int | None) -> None:
    """Hide and show; `own` is writable."""
    trees = {path: kernel.take_tree(path) for path in view.shown}
    before = os.umask(0o022)
    for place in view.hidden:
        if place == os.path.realpath(TEMPORARY):
            kernel.mount_tree(own, place)
        elif place == os.path.realpath(SHARED_MEMORY):
            kernel.mount("tmpfs", place, "tmpfs", _PRIVATE, f"size={_SHARED_MEMORY_MIB}m,mode=1777")
        else:
            kernel.mount("tmpfs", place, "tmpfs", _PRIVATE, "size=4m,mode=0755")
    for path, tree in trees.items():
        target = Path(path)
        if not target.exists():  # else it is inside another that is shown
            if owners is not None:
                kernel.give_tree_to(tree, owners)
            _make_mountpoint(target, tree)
            kernel.mount_tree(tree, path)
        os.close(tree)
    for link, leads_to in view.links.items():
        if not os.path.lexists(link):
            Path(link).parent.mkdir(parents=True, exist_ok=True)
            Path(link).symlink_to(leads_to)
    for place in view.hidden:
        if place not in (os.path.realpath(TEMPORARY), os.path.realpath(SHARED_MEMORY)):
            kernel.make_read_only(place, with_submounts=False)
    os.umask(before)
    os.close(own)
    if owners is not None:
        os.close(owners)


def _make_mountpoint(target: Path, tree: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(f"/proc/self/fd/{tree}"):  # noqa: PTH112
        target.mkdir()
    else:
        target.touch()


@functools.cache
def why_not_contained() -> str:
    """What keeps this host from containing user code; empty if nothing. The first call tries it, in a process."""
    environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "HOME") if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    command = [sys.executable, "-P", "-m", __name__]
    try:
        tried = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_TRIAL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if tried.returncode == 0:
        return ""
    return next(reversed(tried.stderr.strip().splitlines()), f"exit code {tried.returncode}")


def _try() -> int:
    """Contain a process that does nothing; the exit code."""
    temporary = tempfile.mkdtemp(prefix="penstock-trial-")
    try:
        processes = open_processes()
        child = os.fork()
        if child == 0:
            try:
                enter([], temporary, processes.owners, has_network=False)
            except OSError as error:
                os.write(2, f"{error}\n".encode())
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        os.kill(processes.init, signal.SIGKILL)
        os.waitpid(processes.init, 0)
    except OSError as error:
        os.write(2, f"{error}\n".encode())
        return 1
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(_try())
