"""Attempts of a hostile reward, environment or tool to reach resources outside its process, and those resources.

Each attempt raises the error of the refused access, or `AssertionError: LEAK` if it succeeds.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from penstock.envs.sandbox.bubblewrap import why_no_namespaces

KNOWN = "KNOWN_TO_THE_HOST"
"""A variable of the host's environment; `lay_trap` sets it."""
_NEW_USER_AND_MOUNTS, _DETACH = 0x10020000, 2
_TEST_NET = ("192.0.2.1", 80)


@contextmanager
def lay_outside() -> Iterator[dict[str, Any]]:
    """Set up resources of the host that acts try to reach: a file in home, two listening sockets, paths to write.

    Raises:
        AssertionError: If something was written or connected.
    """
    name = f"penstock-trap-{secrets.token_hex(8)}"
    folders = [str(Path.home()), "/var/tmp", "/tmp", "/dev/shm", str(Path.cwd())]
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{name}")
        abstract.listen()
        file = Path.home() / f".{name}"
        file.write_text("secret")
        stack.callback(file.unlink)
        targets = [f"{folder}/{name}" for folder in folders]
        yield {"pid": os.getpid(), "file": str(file), "port": server.getsockname()[1], "name": name, "targets": targets}
        assert [path for path in targets if Path(path).exists()] == []
        assert file.read_text() == "secret"
        for listener in (server, abstract):
            listener.setblocking(False)
            try:
                listener.accept()
            except BlockingIOError:
                continue
            raise AssertionError(f"a process connected to {listener}")


def reads_the_environment(host: dict[str, Any]) -> None:
    assert f"{KNOWN}=".encode() not in Path("/proc/self/environ").read_bytes(), "LEAK"
    print(os.environ[KNOWN])


def reads_environments_of_others(host: dict[str, Any]) -> None:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found = (folder / "environ").read_bytes()
        except OSError:  # the environment of the namespace's first process
            continue
        assert f"{KNOWN}=".encode() not in found, "LEAK"
    Path(f"/proc/{host['pid']}/environ").read_bytes()


def reads_home(host: dict[str, Any]) -> None:
    assert not Path(host["file"]).read_text(), "LEAK"


def connects_to_the_host(host: dict[str, Any]) -> None:
    socket.create_connection(("127.0.0.1", host["port"]), timeout=1)
    raise AssertionError("LEAK")


def connects_to_an_abstract_socket(host: dict[str, Any]) -> None:
    socket.socket(socket.AF_UNIX).connect(f"\0{host['name']}")
    raise AssertionError("LEAK")


def connects_to_the_outside(host: dict[str, Any]) -> None:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(_TEST_NET)
    raise AssertionError("LEAK")


def writes_outside(host: dict[str, Any]) -> None:
    """Writing to private folders with the same names is harmless; `lay_outside` checks those of the host."""
    refused: OSError | None = None
    for path in [*host["targets"], host["file"]]:
        try:
            Path(path).write_text("x")
        except OSError as error:
            refused = error
    if refused is not None:
        raise refused


def changes_the_kernel(host: dict[str, Any]) -> None:
    path = Path("/proc/sys/kernel/core_pattern")
    path.write_text(path.read_text())
    raise AssertionError("LEAK")


def signals_the_run(host: dict[str, Any]) -> None:
    os.kill(host["pid"], 0)
    raise AssertionError("LEAK")


def kills_its_parent(host: dict[str, Any]) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def kills_all_it_sees(host: dict[str, Any]) -> None:
    seen = len(list(Path("/proc").glob("[0-9]*")))
    # Checked first, because otherwise this would kill the tests.
    assert os.getppid() == 1, "LEAK: it is in the process namespace of its starter"
    assert seen < 10, "LEAK: it sees others' processes"
    os.kill(-1, signal.SIGKILL)


def unmounts_its_mounts(host: dict[str, Any]) -> None:
    """Try it as the current user and, in a child, as root of a new user namespace."""
    libc = ctypes.CDLL(None)
    child = os.fork()
    if child == 0:
        libc.unshare(_NEW_USER_AND_MOUNTS)
    is_freed = [libc.umount2(place.encode(), _DETACH) == 0 for place in (str(Path.home()), "/tmp", "/proc", "/")]
    if child == 0:
        os._exit(any(is_freed))
    assert not any(is_freed), "LEAK"
    assert os.waitpid(child, 0)[1] == 0, "LEAK"
    reads_home(host)


def is_possible(act: str) -> bool:
    """Whether it can be tried: without a sandbox it would succeed and do harm."""
    return act not in REACHES or not why_no_namespaces()


REACHES: dict[str, Callable[[dict[str, Any]], None]] = {
    "reads the host's environment": reads_the_environment,
    "reads others' environments": reads_environments_of_others,
    "reads home": reads_home,
    "connects to the host": connects_to_the_host,
    "connects to an abstract socket": connects_to_an_abstract_socket,
    "connects to the outside": connects_to_the_outside,
    "writes outside": writes_outside,
    "changes the kernel": changes_the_kernel,
    "signals the run": signals_the_run,
    "kills its parent": kills_its_parent,
    "kills all it sees": kills_all_it_sees,
    "unmounts its mounts": unmounts_its_mounts,
}
