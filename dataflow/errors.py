"""The exception hierarchy, and what each error means for the run.

There are two families. A `PenstockError` stops the run: the configuration, the machine or the code must change. A
`TrajectoryError` is *data*: one attempt failed, the failure is recorded with its kind, the credit is returned, and the
run continues. `assert` is reserved for bugs of Penstock itself.

Every message states where the error occurred, what is wrong (with both numbers), why it matters, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

FailureKind = Literal["env", "long_prompt", "reward", "engine"]
_MAX_SUMMARY_CHARACTERS = 500
_OF_CALL = re.compile(r"^(?:.* on \S+ \(\S+\)|(?:open|reset|step|step_all|run) of \S+): ")
"""The call that failed, before what happened: `my.reward on 3/0 (t/7): `, `reset of t/7: `."""


class PenstockError(Exception):
    """Base class of all errors that stop a run."""


class ConfigError(PenstockError):
    """The configuration is invalid. The message lists all violations at once.

    Args:
        violations: One violation or a list of them.

    Attributes:
        violations: One sentence per violation, each beginning with the key path.
    """

    def __init__(self, violations: str | list[str]) -> None:
        self.violations = [violations] if isinstance(violations, str) else violations
        noun = "problem" if len(self.violations) == 1 else "problems"
        super().__init__(
            f"{len(self.violations)} {noun} in the configuration:\n"
            + "\n".join(f"  - {violation}" for violation in self.violations)
        )

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return ConfigError, (self.violations,)


class PlacementError(PenstockError):
    """The requested roles do not fit on the available machines."""


class ShapeError(PenstockError):
    """The shapes or dtypes of two tensors do not match."""


class StalenessError(PenstockError):
    """The staleness bound was violated or cannot be kept (invariant I1)."""


class AccountingError(PenstockError):
    """The ledger does not balance (invariants I2, I3, I5, I6)."""


class WeightSyncError(PenstockError):
    """New weights did not arrive at an engine, or arrived corrupted."""


class WeightSendError(WeightSyncError):
    """The training ranks could not write or send new weights, so retrying on the engines cannot succeed."""


class TrainingError(PenstockError):
    """Training cannot continue: non-finite values, a lost rank, or no learning signal."""


class StepEndedError(TrainingError):
    """A step was ended before it changed the weights, because the run ends."""


class CheckpointError(PenstockError):
    """A checkpoint could not be written or read."""


class EngineLostError(PenstockError):
    """A rollout engine died or stopped answering.

    Attributes:
        is_final: Whether the engine is dead, so that no further request may be sent to it.
    """

    is_final = False

    @classmethod
    def final(cls, message: str) -> EngineLostError:
        """Create the error for a dead engine."""
        error = cls(message)
        error.is_final = True
        return error


class TrajectoryError(Exception):
    """One attempt at a trajectory failed. The failure is data: recorded, counted and retried up to a limit.

    Attributes:
        kind: The component that failed: `env`, `reward` or `engine`; or `long_prompt`: the prompt of the task, with the
            tools of its environment, leaves no space for an answer.
        detail: Description of the failure, with the remote traceback if there is one.
        is_final: Whether a retry is pointless (the task itself is at fault) or too expensive.
    """

    def __init__(self, kind: FailureKind, detail: str, *, is_final: bool = False) -> None:
        self.kind = kind
        self.detail = detail
        self.is_final = is_final
        super().__init__(f"{kind}: {detail}")

    @property
    def summary(self) -> str:
        """Kind and last line of the detail, at most 500 characters. Of a remote traceback this is the exception."""
        lines = self.detail.strip().splitlines() or ["no detail"]
        return f"{self.kind}: {lines[-1].strip()[:_MAX_SUMMARY_CHARACTERS]}"

    @property
    def cause(self) -> str:
        """What failed, in one line: of a remote traceback the exception, and the line of code that raised it."""
        lines = _OF_CALL.sub("", self.detail).strip().splitlines() or ["no detail"]
        frames = [index for index, line in enumerate(lines) if re.match(r'\s+File "', line)]
        if not frames:
            return lines[-1].strip()[:_MAX_SUMMARY_CHARACTERS].rstrip(".")
        place = re.match(r'\s+File "(?:.*/)?(?P<file>[^"]+)", line (?P<line>\d+)', lines[frames[-1]])
        raised = next((line for line in lines[frames[-1] :] if not line.startswith(" ")), lines[-1])
        where = f" ({place['file']}, line {place['line']})" if place else ""
        return f"it raised {raised[:_MAX_SUMMARY_CHARACTERS].rstrip('.')}{where}"

    def __reduce__(self) -> tuple[type[TrajectoryError], tuple[FailureKind, str], dict[str, bool]]:
        return TrajectoryError, (self.kind, self.detail), {"is_final": self.is_final}


@contextmanager
def boundary(error: type[PenstockError], what: str) -> Iterator[None]:
    """Re-raise foreign exceptions as `error`, with `what` naming the operation that failed.

    Penstock's own errors pass through unchanged.
    """
    try:
        yield
    except (PenstockError, TrajectoryError):
        raise
    except Exception as cause:
        raise error(f"{what}: {type(cause).__name__}: {cause}") from cause
