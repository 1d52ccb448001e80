"""What to say when user code fails for a right that contained code has not (rights.py)."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from types import TracebackType

from penstock.envs.view import is_hidden

SECTION_VARIABLE = "PENSTOCK_CONTAINED"
"""In the environment of a contained process: the section of the configuration with its `rights`."""

_NO_NETWORK = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN})
_MAX_CAUSES = 10


def missing_right(error: BaseException) -> str:
    """In a contained process: a sentence for an error that containment explains, after a space; else nothing."""
    section = os.environ.get(SECTION_VARIABLE)
    if not section:
        return ""
    found = next(filter(None, (_explain(cause, section) for cause in _causes(error))), None)
    return f" [it runs contained: {found}; docs/guides/sandbox.md]" if found else ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _explain(error: BaseException, section: str) -> str:
    if isinstance(error, KeyError) and _comes_from_environment(error.__traceback__):
        return f"variables of the environment need {section}.rights.variables=[{str(error.args[0])[:60]}]"
    if not isinstance(error, OSError):
        return ""
    if isinstance(error, socket.gaierror) or error.errno in _NO_NETWORK:
        return f"the network needs {section}.rights.network=true"
    path = error.filename if isinstance(error.filename, str) else ""
    if error.errno == errno.EROFS or (isinstance(error, PermissionError) and path):
        return f"who writes outside of the folder for temporary files needs {section}.rights=user"
    if isinstance(error, FileNotFoundError) and path and is_hidden(path):
        return f"what the host has there needs {section}.rights.read=[{os.path.abspath(path)[:200]}]"  # noqa: PTH100
    return ""


def _comes_from_environment(trace: TracebackType | None) -> bool:
    """Whether `os.environ[name]` raised."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is type(os.environ).__getitem__.__code__
