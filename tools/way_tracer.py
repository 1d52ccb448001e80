"""Records which functions of a tree of source files run, and when, in the process that imports it.

`tools/way.py` writes it as `sitecustomize.py` into a folder on the import path, so every Python process imports it at
its start. A record is a line of a file of the process: time on the clock that all processes of a machine share, event,
file, function.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

TREE, RECORDS = "@tree@", "@records@"
RETURNS = ("publish",)
"""Functions whose returns are recorded, too."""
_REPEATED_AFTER_NS = 200_000
"""A function that runs again within so short a time is not recorded again."""
_names: dict[CodeType, str | None] = {}
_recorded: dict[tuple[CodeType, str], int] = {}


def name_of(code: CodeType) -> str | None:
    """`file function` of code in the tree, else None."""
    if code not in _names:
        path = os.path.realpath(code.co_filename)
        inside = path.startswith(TREE) and "/.venv/" not in path
        _names[code] = f"{path[len(TREE) :]} {code.co_qualname}" if inside else None
    return _names[code]


def record(frame: FrameType, event: str, _argument: Any) -> None:
    """The profile function: called at each call and return of a Python function."""
    code = frame.f_code
    if event not in ("call", "return") or (name := name_of(code)) is None:
        return
    if event == "return" and code.co_name not in RETURNS:
        return
    now = time.monotonic_ns()
    if event == "call" and now - _recorded.get((code, event), 0) < _REPEATED_AFTER_NS:
        return
    _recorded[code, event] = now
    # Opened each time: a process may fork, or close all its files.
    file = os.open(f"{RECORDS}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, f"{now} {event} {name}\n".encode())
    os.close(file)


def record_threads_of_ray() -> None:
    """Ray runs the methods of an actor's concurrency groups in threads that Python has not started."""
    from ray._private.function_manager import FunctionActorManager

    make = FunctionActorManager._make_actor_method_executor  # noqa: SLF001

    def make_recorded(self: Any, method_name: str, method: Any) -> Any:
        executor = make(self, method_name, method)

        @functools.wraps(executor)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            sys.setprofile(record)
            return executor(*args, **kwargs)

        return recorded

    FunctionActorManager._make_actor_method_executor = make_recorded  # noqa: SLF001


class _OnImport:
    """Patches Ray when a module of the package is imported after it: in an actor, before its methods are set up."""

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> None:
        if name.startswith("penstock.") and hasattr(sys.modules.get("ray"), "remote"):
            sys.meta_path.remove(self)
            record_threads_of_ray()


threading.setprofile(record)
sys.setprofile(record)
sys.meta_path.insert(0, _OnImport())
