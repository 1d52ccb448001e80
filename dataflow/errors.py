"""What can go wrong, and what each kind of wrong means for the run.

Two families. A `PenstockError` stops the run: the world, the machine or the user must change
something. A `TrajectoryError` is *data*: one attempt failed, it is recorded with its kind, its
credit returns, and the run goes on. `assert` is kept for our own bugs.

Every message says: where, what is wrong (both numbers), why it matters, what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

FailureKind = Literal["env", "reward", "engine"]
_MAX_SUMMARY_CHARACTERS = 500


class PenstockError(Exception):
    """Base of every error that stops a run."""


class ConfigError(PenstockError):
    """The configuration cannot be run. Lists every violation at once.

    Args:
        violations: One, or all.

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
    """The requested roles do not fit on the machines that exist."""


class ShapeError(PenstockError):
    """Two things that must agree in shape do not."""


class StalenessError(PenstockError):
    """The staleness bound was violated or cannot be kept (invariant I1)."""


class AccountingError(PenstockError):
    """The ledger does not balance (invariants I2, I3, I5, I6)."""


class WeightSyncError(PenstockError):
    """New weights did not arrive, or not as they were sent."""


class WeightSendError(WeightSyncError):
    """The training ranks could not write or send new weights: whatever the engines do, they will not arrive."""


class TrainingError(PenstockError):
    """Training cannot go on: bad numbers, a lost rank, no signal."""


class CheckpointError(PenstockError):
    """A checkpoint could not be written or read."""


class EngineLostError(PenstockError):
    """A rollout engine died or stopped answering.

    Attributes:
        is_final: It will never answer again, so nothing more is to be sent to it.
    """

    is_final = False

    @classmethod
    def final(cls, message: str) -> EngineLostError:
        """The engine is dead."""
        error = cls(message)
        error.is_final = True
        return error


class TrajectoryError(Exception):
    """One trajectory failed. Data, not a crash: recorded, counted, retried within its budget.

    Attributes:
        kind: Which part failed: `env`, `reward` or `engine`.
        detail: What happened, with the remote traceback where there is one.
        is_final: It lies in the task itself, or an attempt costs too much: it is not retried.
    """

    def __init__(self, kind: FailureKind, detail: str, *, is_final: bool = False) -> None:
        self.kind = kind
        self.detail = detail
        self.is_final = is_final
        super().__init__(f"{kind}: {detail}")

    @property
    def summary(self) -> str:
        """Kind and last line, at most 500 characters of it: where there is a remote traceback, the exception itself."""
        lines = self.detail.strip().splitlines() or ["no detail"]
        return f"{self.kind}: {lines[-1].strip()[:_MAX_SUMMARY_CHARACTERS]}"

    def __reduce__(self) -> tuple[type[TrajectoryError], tuple[FailureKind, str], dict[str, bool]]:
        return TrajectoryError, (self.kind, self.detail), {"is_final": self.is_final}


@contextmanager
def boundary(error: type[PenstockError], what: str) -> Iterator[None]:
    """Classify foreign exceptions at the door: re-raise them as `error`, naming `what` was tried.

    Our own errors pass through unchanged.
    """
    try:
        yield
    except (PenstockError, TrajectoryError):
        raise
    except Exception as cause:
        raise error(f"{what}: {type(cause).__name__}: {cause}") from cause
