"""The port of the sandbox: it runs a program within limits and returns a result.

Anything that the program does is a `SandboxResult`; an exception means that the sandbox itself failed.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field, ValidationError

from penstock.dataflow.errors import PenstockError
from penstock.dataflow.settings import Settings

Outcome = Literal["exited", "killed", "wall_clock", "cpu_time", "memory", "processes", "output"]
"""`exited`: it ended by itself. `killed`: by a signal that our limits did not send. The others: the limit it hit."""

MAX_SUMMARY_CHARACTERS = 300


class SandboxUnavailableError(PenstockError):
    """The sandbox itself failed, so there is no result of the program."""


class Limits(Settings):
    """Limits of one program, over all its processes unless noted otherwise."""

    wall_s: float = Field(default=10.0, gt=0)
    """Wall-clock time, seconds."""
    cpu_s: float = Field(default=10.0, gt=0)
    """Processor time, seconds."""
    memory_mib: int = Field(default=512, ge=16)
    """Resident memory, MiB; each process may also reserve no more than this."""
    max_processes: int = Field(default=32, ge=1)
    """Processes and threads at a time."""
    max_file_mib: int = Field(default=16, ge=1)
    """Largest single file, MiB."""
    max_disk_mib: int = Field(default=64, ge=1)
    """Size of the working directory, where the sandbox is isolated, MiB; it is main memory."""
    max_files: int = Field(default=4096, ge=1)
    """Files and folders in the working directory, where the sandbox is isolated."""
    max_output_kib: int = Field(default=64, ge=1)
    """Standard output and standard error, KiB; the program is ended if it writes more."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program: Python source or a command, never both.

    Raises:
        ValueError: If it is both or neither, or a file would lie outside the working directory.
    """

    code: str | None = None
    """Python source, run as `__main__` in an interpreter that was started ahead."""
    argv: tuple[str, ...] = ()
    """A command and its arguments; the command is looked up on the sandbox's PATH."""
    stdin: bytes = b""
    """Content of its standard input."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Relative path -> content, written into the working directory first."""

    def __post_init__(self) -> None:
        if (self.code is None) == (not self.argv):
            raise ValueError("a sandbox program is either Python source (code) or a command (argv), and not both")
        for name in self.files:
            if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"sandbox file {name!r} is not below the working directory. Use a relative path.")


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The result of a program."""

    outcome: Outcome
    exit_code: int | None
    """Set if `outcome` is `exited`, else None."""
    stdout: str
    """At most `max_output_kib`, as UTF-8 with replacement characters."""
    stderr: str
    """As `stdout`."""
    wall_s: float
    """How long it ran, seconds."""
    detail: str = ""
    """The signal, or the limit with its value; empty if it exited."""

    @property
    def is_ok(self) -> bool:
        return self.outcome == "exited" and self.exit_code == 0

    @property
    def hit_a_limit(self) -> bool:
        """Whether it was ended by a limit, as opposed to by itself or by a signal."""
        return self.outcome not in ("exited", "killed")

    @property
    def summary(self) -> str:
        """One short line: how it ended, and the last line of its standard error."""
        ended = f"exit code {self.exit_code}" if self.outcome == "exited" else f"{self.outcome}: {self.detail}"
        last = next(reversed(self.stderr.strip().splitlines()), "")
        return (f"{ended}; {last}" if last else ended)[:MAX_SUMMARY_CHARACTERS]


class Sandbox(Protocol):
    """Runs untrusted programs."""

    async def run(self, program: Program, limits: Limits) -> SandboxResult:
        """Run one program until it ends or hits a limit.

        Raises:
            SandboxUnavailableError: If the sandbox itself failed.
        """
        ...

    async def run_in_turn(self, programs: Sequence[Program], limits: Limits) -> list[SandboxResult]:
        """Run the programs of one answer one after the other. They are not isolated from each other.

        The rest is skipped after a program that hits a limit; `limits` apply to each program.

        Raises:
            SandboxUnavailableError: If the sandbox itself failed.
        """
        ...

    async def close(self) -> None: ...


def encode_job(program: Program, limits: Limits) -> dict[str, Any]:
    """Encode a job as a JSON object for a remote service."""
    return {
        "code": program.code,
        "argv": list(program.argv),
        "stdin": _to_text(program.stdin),
        "files": {name: _to_text(content) for name, content in program.files.items()},
        "limits": limits.model_dump(),
    }


def decode_job(job: Mapping[str, Any]) -> tuple[Program, Limits]:
    """The inverse of `encode_job`.

    Raises:
        KeyError, TypeError, ValueError: If it is not a valid job.
    """
    files = {str(name): base64.b64decode(content) for name, content in job["files"].items()}
    program = Program(job["code"], tuple(job["argv"]), base64.b64decode(job["stdin"]), files)
    try:
        return program, Limits.model_validate(job["limits"], strict=True)
    except ValidationError as error:
        wrong = [f"limits.{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg']}" for one in error.errors()]
        raise ValueError("; ".join(wrong)) from error


def _to_text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
