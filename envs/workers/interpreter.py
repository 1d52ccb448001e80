"""The interpreter that `env.python` names, with the packages that it has and ours lacks.

Its processes import our source and what is installed there, never what is installed here: its packages may need other
versions than ours. Of our dependencies, our part of these processes imports only numpy and pydantic.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import penstock
from penstock.dataflow.errors import ConfigError

_OLDEST = (3, 11)
_NEEDED = "numpy 'pydantic>=2.7'"
_ASK = f"""
import importlib, json, os, sys
paths = [path for path in sys.path if path]
paths += [sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
problem = ""
if sys.version_info >= {_OLDEST}:
    sys.path.insert(0, sys.argv[1])
    try:
        for name in "task_child", "episode_child", "supervisor":
            importlib.import_module("penstock.envs.workers." + name)
    except Exception as error:
        problem = type(error).__name__ + ": " + str(error)
paths = [sys.prefix] + paths
print(json.dumps([sys.version_info[:3], paths + [os.path.realpath(path) for path in paths], problem]))
"""
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter that can run our processes."""

    path: str
    """Its absolute path."""
    folders: tuple[str, ...]
    """Folders of its standard library and its packages, also with symbolic links resolved; the first is its prefix."""

    def variables(self) -> dict[str, str]:
        """Variables with which its programs find each other, as after `source bin/activate`."""
        searched = os.pathsep.join([str(Path(self.path).parent), os.environ.get("PATH", os.defpath)])
        return {"VIRTUAL_ENV": self.folders[0], "PATH": searched}


@functools.cache
def find_interpreter(python: str) -> Interpreter:
    """Ask an interpreter what it is.

    Args:
        python: `env.python`: a path, or the name of a program on PATH.

    Raises:
        ConfigError: If there is none, or it cannot run our processes.
    """
    key, named = f"env.python={python}", os.path.expanduser(python)  # noqa: PTH111
    path = shutil.which(named)
    if path is None:
        raise ConfigError(f"{key}: {_why_not(named)}. {_HOW_TO_MAKE}")
    path = os.path.abspath(path)  # noqa: PTH100  a symbolic link stays one: it is what makes an environment
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    said = ""
    with tempfile.TemporaryDirectory(prefix="penstock-source-") as temporary:
        link_source(source := f"{temporary}/source")
        try:
            asked = subprocess.run(
                [path, "-c", _ASK, source],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
                env=variables,
            )
            said = f"asked for its version, it ended with exit code {asked.returncode}: {asked.stderr.strip()[-500:]}"
            version, folders, problem = json.loads(asked.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            said = said or f"{type(error).__name__}: {error}"
            raise ConfigError(f"{key} is no Python that runs: {said}. {_HOW_TO_MAKE}") from error
    if tuple(version) < _OLDEST:
        has, oldest = ".".join(map(str, version)), ".".join(map(str, _OLDEST))
        raise ConfigError(f"{key} is Python {has}; our part of its processes needs {oldest} or newer. {_HOW_TO_MAKE}")
    if problem:
        raise ConfigError(
            f"{key}: our part of its processes cannot be imported there ({problem}). It needs two packages: "
            f"{path} -m pip install {_NEEDED}"
        )
    return Interpreter(path, tuple(dict.fromkeys(folders)))


_HOW_TO_MAKE = "`make verifiers-env` makes .venv-verifiers/bin/python; null is the interpreter of the run."


def _why_not(path: str) -> str:
    if os.path.isdir(path):  # noqa: PTH112
        return f"it is a folder; name the program in it, {os.path.join(path, 'bin', 'python')}"  # noqa: PTH118
    if os.path.exists(path):  # noqa: PTH110
        return "it is not executable"
    return "there is no such file" if os.sep in path else "there is no such program on PATH"


def link_source(folder: str) -> None:
    """Make `folder`, in which our package is all that can be imported: it may be installed among others."""
    os.makedirs(folder)  # noqa: PTH103
    os.symlink(Path(penstock.__file__).parent, os.path.join(folder, "penstock"))  # noqa: PTH118, PTH211


def users_import_path() -> list[str]:
    """The folders of our import path without our standard library and our installed packages."""
    ours = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    ours += [*site.getsitepackages(), site.getusersitepackages()]
    folders = [Path(path or Path.cwd()) for path in sys.path]
    return [str(path) for path in folders if path.is_dir() and not any(path.is_relative_to(one) for one in ours)]
