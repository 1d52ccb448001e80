"""Tries the imports of the user's modules in a child process, because code at their top level may end or block one.

The driver imports them afterwards, and reports names that do not resolve and exceptions (envs/import_path.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.envs.import_path import load_object
from penstock.envs.workers import process_tree
from penstock.envs.workers.supervisor import how_it_ended
from penstock.platform.config.import_paths import import_paths, module_of

if TYPE_CHECKING:  # the child imports this module, and should import little
    from penstock.platform.config.findings import Finding
    from penstock.platform.config.schema import RunConfig

IMPORT_TIMEOUT_S = 30.0
"""Longest time for the imports of all modules, seconds. Importing torch and vLLM takes up to 20 s on two cores."""


def check_imports(config: RunConfig) -> Iterator[Finding]:
    """Check that importing the user's modules neither ends nor blocks a process."""
    from penstock.platform.config.findings import error

    trackers = {f"tracker.{name}.factory": own.factory for name, own in config.tracker.own.items()}
    named = import_paths(config) | trackers
    left = {key: path for key, path in named.items() if not _is_harmless(module_of(path))}
    while left:
        key, outcome = _try_imports(left)
        if outcome is None:
            return
        module = module_of(left[key])
        yield error(
            f"{key}={left[key]!r}: {module} cannot be imported: a process that tried {outcome}. Every process of a run "
            "imports it, so the run would end without a message. Let the top level of the module only define things, "
            "and move the rest into a function, or below `if __name__ == '__main__':`.",
            key,
        )
        keys = list(left)
        left = {one: left[one] for one in keys[keys.index(key) + 1 :] if module_of(left[one]) != module}


def _is_harmless(module: str) -> bool:
    package = module.partition(".")[0]
    return package == "penstock" or package in sys.stdlib_module_names or module in sys.modules


def _try_imports(paths: Mapping[str, str]) -> tuple[str, str | None]:
    """Import in a child; returns the key that it tried last, and how that ended (None: all imports have ended well)."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock.platform.checks.imports", json.dumps(dict(paths))],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    outcome: str | None = None
    try:
        child.wait(IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        outcome = f"did not end within {IMPORT_TIMEOUT_S:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it has started
    report = child.communicate()[0].splitlines()
    tried = [line for line in report if line in paths]
    if report and report[-1] not in paths:
        outcome = f"raised {report[-1]}"
    elif outcome is None and child.returncode:
        outcome = how_it_ended(child.returncode)
    return (tried[-1] if tried else next(iter(paths))), outcome


def import_in_child() -> None:
    """Import what the first argument names, a JSON object of key -> import path; print each key before its import."""
    process_tree.end_with_parent()
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")  # not inherited by what the user's modules start
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    for key, path in json.loads(sys.argv[1]).items():
        print(key, file=report, flush=True)
        try:
            load_object(path, key)
        except Exception:  # noqa: BLE001, S110 - the driver's own import reports it
            pass
        except BaseException as error:  # noqa: BLE001 - SystemExit, KeyboardInterrupt
            print(type(error).__name__, *str(error).split(), file=report, flush=True)
            os._exit(1)
    os._exit(0)  # threads that a module has started may not end


if __name__ == "__main__":
    import_in_child()
