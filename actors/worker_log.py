"""Logs of the worker processes: `runs/NAME/logs/ROLE.log`.

Ray keeps the output of its workers in folders of its own, under names that do not say which is which. A worker of a run
therefore appends what it prints, and what its children print, to a file in the run's directory. On a node that cannot
reach that directory its output stays with Ray.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

LOGS_VARIABLE = "PENSTOCK_LOGS"
"""Environment variable of the workers: the folder of the logs."""
_TAIL_BYTES = 65_536
_ERROR = re.compile(
    r"^(?:\S+ )?(?:[A-Za-z_]\w*\.)*\w*(?:Error|Exception|Interrupt|Exit)\b: ?.*|.*\b(?:out of memory|Killed)\b.*"
)
_POINTS_ELSEWHERE = re.compile(r"initialization failed|see (?:the )?(?:root cause|stack trace)", re.IGNORECASE)
"""What vLLM's other processes say after the one that failed."""
_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:(?:ERROR|CRITICAL|WARNING) [\d-]+ [\d:.,]+ \[[^\]]*\] ?)?")
"""What vLLM puts before each line: process, level, time and place."""


def keep_output(role: str) -> None:
    """Append what this process and its children print to the log of `role`, if its folder can be reached."""
    path = log_path(role)
    if path is None or not path.parent.is_dir():
        return
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:  # a full or read-only disk
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Line by line, so that the log is complete when the process dies.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    print(f"{_header(role)} {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}")


def log_path(role: str) -> Path | None:
    """The log of `role`; None if this run has no logs."""
    folder = os.environ.get(LOGS_VARIABLE)
    return Path(folder) / f"{role}.log" if folder else None


def _header(role: str) -> str:
    return f"--- {role}: process"


def last_error(role: str) -> str:
    """The last line that names an error in the log of the last process of `role`, and where the rest is; or empty."""
    path = log_path(role)
    if path is None or not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").rpartition(_header(role))[2].splitlines()
    errors = [text for line in lines if _ERROR.match(text := _PREFIX.sub("", line).strip())]
    causes = [line for line in errors if not _POINTS_ELSEWHERE.search(line)] or errors
    return f"its last error is: {causes[-1]:.500} ({path})" if causes else f"see {path}"
