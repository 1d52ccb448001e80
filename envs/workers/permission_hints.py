"""What to say when user code fails for something that isolated code was not given (permissions.py)."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from types import TracebackType

JAILED_VARIABLE = "PENSTOCK_JAILED"
"""In the environment of a isolated process: the section of the configuration with its `isolation`, and ` network`."""

_NO_NETWORK = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ECONNREFUSED})
_MAX_CAUSES = 10


def permission_hint(error: BaseException) -> str:
    """In a isolated process: a sentence for an error that the sandbox explains, after a space; else nothing."""
    section, _, network = os.environ.get(JAILED_VARIABLE, "").partition(" ")
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
        return f"variables of the environment need {section}.isolation.variables=[{str(error.args[0])[:60]}]"
    if not isinstance(error, OSError):
        return ""
    if not has_network and (isinstance(error, socket.gaierror) or error.errno in _NO_NETWORK):
        return f"the network needs {section}.isolation.network=true"
    path = error.filename if isinstance(error.filename, str) else ""
    if error.errno == errno.EROFS or (isinstance(error, PermissionError) and path):
        return f"who writes outside of the folder for temporary files needs {section}.isolation=process"
    if isinstance(error, FileNotFoundError) and path and _is_hidden(path):
        return f"what the host has there needs {section}.isolation.read=[{os.path.abspath(path)[:200]}]"  # noqa: PTH100
    return ""


def _is_hidden(path: str) -> bool:
    """Whether it would be where the sandbox shows nothing of the host: in the file system that its root is in."""
    folder = os.path.dirname(os.path.abspath(path))  # noqa: PTH100, PTH120
    while not os.path.isdir(folder):  # noqa: PTH112
        folder = os.path.dirname(folder)  # noqa: PTH120
    return os.stat(folder).st_dev == os.stat("/").st_dev  # noqa: PTH116


def _comes_from_environment(trace: TracebackType | None) -> bool:
    """Whether `os.environ[name]` raised."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is type(os.environ).__getitem__.__code__
