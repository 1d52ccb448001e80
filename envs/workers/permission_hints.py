"""Hints for errors of isolated user code whose cause is a missing permission (permissions.py)."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from types import TracebackType

ISOLATION_VARIABLE = "PENSTOCK_ISOLATION"
"""Variable in the environment of an isolated process: its configuration section, with ` network` appended if it has the
network."""

_NO_NETWORK = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ECONNREFUSED})
_MAX_CAUSES = 10


def permission_hint(error: BaseException) -> str:
    """A hint, after a space, if the sandbox of an isolated process explains the error; else empty."""
    section, _, network = os.environ.get(ISOLATION_VARIABLE, "").partition(" ")
    if not section:
        return ""
    explained = (_explain(cause, section, has_network=bool(network)) for cause in _causes(error))
    found = next(filter(None, explained), None)
    return f" [isolation is strict: {found}; docs/guides/sandbox.md]" if found else ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _explain(error: BaseException, section: str, *, has_network: bool) -> str:
    if isinstance(error, KeyError) and _comes_from_environment(error.__traceback__):
        return f"to read this environment variable, set {section}.isolation.variables=[{str(error.args[0])[:60]}]"
    if not isinstance(error, OSError):
        return ""
    if not has_network and (isinstance(error, socket.gaierror) or error.errno in _NO_NETWORK):
        return f"to use the network, set {section}.isolation.network=true"
    path = error.filename if isinstance(error.filename, str) else ""
    if error.errno == errno.EROFS or (isinstance(error, PermissionError) and path):
        return f"to write outside the folder for temporary files, set {section}.isolation=process"
    if isinstance(error, FileNotFoundError) and path and _is_hidden(path):
        return f"to read this path of the host, set {section}.isolation.read=[{os.path.abspath(path)[:200]}]"  # noqa: PTH100
    return ""


def _is_hidden(path: str) -> bool:
    """Whether the path is outside all mounts of the sandbox, in its root file system."""
    folder = os.path.dirname(os.path.abspath(path))  # noqa: PTH100, PTH120
    while not os.path.isdir(folder):  # noqa: PTH112
        folder = os.path.dirname(folder)  # noqa: PTH120
    return os.stat(folder).st_dev == os.stat("/").st_dev  # noqa: PTH116


def _comes_from_environment(trace: TracebackType | None) -> bool:
    """Whether `os.environ[name]` raised."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is type(os.environ).__getitem__.__code__
