"""Which files contained user code sees: the machine's, read-only, without the places where others keep their things.

Hidden are the user's home and the folders for what is temporary or running. Shown again in them is what Python needs,
and what was granted. Nothing is done here: containment.py does it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TEMPORARY = "/tmp"  # noqa: S108  of contained code: its own folder
SHARED_MEMORY = "/dev/shm"  # noqa: S108  likewise
_OTHERS = ("/home", "/root", TEMPORARY, "/var/tmp", "/run", SHARED_MEMORY)  # noqa: S108
_OF_THE_SYSTEM = ("/run/current-system", "/run/opengl-driver")  # NixOS: programs, and drivers of GPUs
_NAMES_OF_HOSTS = "/etc/resolv.conf"  # often a link into /run
_MODULES = (".py", ".so")


@dataclass(frozen=True, slots=True)
class View:
    """What to do to the mounts.

    Attributes:
        hidden: Folders to hide; none is inside another.
        shown: What is shown again, inside of them, outer ones first.
        links: Symbolic link inside of them -> where it leads.
    """

    hidden: tuple[str, ...]
    shown: tuple[str, ...]
    links: dict[str, str]


def plan_view(granted: Sequence[str], temporary: str, *, has_network: bool) -> View:
    """The view of a process that has imported nothing of the user yet.

    Args:
        granted: Paths of the host that it may read; a place that is hidden for others is not, if it is granted.
        temporary: Its own folder for temporary files, among those of others.
        has_network: Whether it needs the addresses of name servers.
    """
    folder = str(Path(os.path.realpath(temporary)).parent)
    places = hidden_places(folder)
    real_grants = {os.path.realpath(path) for path in granted}
    own = {os.path.realpath(place) for place in (TEMPORARY, SHARED_MEMORY)}
    hidden = [place for place in places if place in own or not any(_is_within(place, grant) for grant in real_grants)]
    hidden = [place for place in hidden if not any(_is_within(place, other) for other in hidden if other != place)]
    names = [*_of_python(), *_OF_THE_SYSTEM, *([_NAMES_OF_HOSTS] if has_network else [])]
    shown: set[str] = set()
    links: dict[str, str] = {}
    for path in [*granted, *(narrow for name in names for narrow in _narrowed(name, places))]:
        if not os.path.exists(path):  # noqa: PTH110  Path.exists raises where one may not look
            continue
        named, real = os.path.abspath(path), os.path.realpath(path)  # noqa: PTH100  Path.absolute keeps `..`
        if _is_in_one(real, hidden):
            shown.add(real)
        if named != real and _is_in_one(named, hidden):
            links[named] = real
    return View(tuple(sorted(hidden)), tuple(sorted(shown)), links)


def hidden_places(*more: str) -> list[str]:
    """Folders that hold others' things, by their real paths, and `more` of them."""
    homes = [os.environ.get("HOME", "")]
    with contextlib.suppress(KeyError):  # a user without an account
        homes.append(pwd.getpwuid(os.getuid()).pw_dir)
    real = {os.path.realpath(place) for place in (*_OTHERS, *homes, *more) if place and Path(place).is_dir()}
    return sorted(real - {"/"})


def is_hidden(path: str) -> bool:
    """Whether a contained process does not see what the host has at `path`."""
    return _is_in_one(os.path.abspath(path), hidden_places())  # noqa: PTH100


def _of_python() -> Iterator[str]:
    """What has to be there for imports: this Python, the import path, the folder it was started in."""
    yield from (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    yield from sys.path
    with contextlib.suppress(FileNotFoundError):
        yield str(Path.cwd())
    package = importlib.util.find_spec("penstock")
    for folder in (package.submodule_search_locations or ()) if package else ():
        yield from (os.path.realpath(path) for path in Path(folder).iterdir() if path.is_symlink())
    for name, module in list(sys.modules.items()):
        if name.startswith("__editable__"):  # setuptools: packages that are installed where they are written
            yield from getattr(module, "MAPPING", {}).values()


def _narrowed(path: str, places: Iterable[str]) -> Iterator[str]:
    """Of a folder that is hidden as a whole, or holds such places: its modules and packages only."""
    real = os.path.realpath(path)
    if not any(_is_within(place, real) for place in places):
        yield path
        return
    if not _is_in_one(real, places):
        return
    for name in os.listdir(real):  # noqa: PTH208
        found = f"{real}/{name}"
        if name.endswith(_MODULES) or os.path.isfile(f"{found}/__init__.py"):  # noqa: PTH113
            yield found


def _is_in_one(path: str, places: Iterable[str]) -> bool:
    return any(_is_within(path, place) for place in places)


def _is_within(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place.rstrip('/')}/")
