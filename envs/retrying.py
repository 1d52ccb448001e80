"""When to ask a service again, and when to leave it alone."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from pydantic import BaseModel, ConfigDict, Field

_BACKOFF_FACTOR, _MAX_BACKOFF_S = 2.0, 30.0


class RetryConfig(BaseModel):
    """How a service that fails is asked again.

    Attributes:
        connect_timeout_s: Longest wait for a connection, seconds.
        max_attempts: Tries of one request, the first included.
        backoff_s: Wait before the second try, seconds; doubled each time, with jitter.
        failures_to_open: Failed tries in a row after which nothing is sent for a while.
        open_s: That while, seconds; then one request tries.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    connect_timeout_s: float = Field(default=5.0, gt=0)
    max_attempts: int = Field(default=4, ge=1)
    backoff_s: float = Field(default=0.5, ge=0)
    failures_to_open: int = Field(default=8, ge=1)
    open_s: float = Field(default=15.0, gt=0)

    def wait_s(self, attempt: int) -> float:
        """Before the next try, after `attempt` >= 1 tries, seconds: exponential, with jitter."""
        longest = min(self.backoff_s * _BACKOFF_FACTOR ** (attempt - 1), _MAX_BACKOFF_S)
        return longest * random.uniform(0.5, 1.0)


class CircuitBreaker:
    """Counts failures in a row. Invariant: while it is open nothing passes, but one trial per `open_s`.

    Args:
        failures_to_open: Failures in a row that open it.
        open_s: How long it stays open before a trial, seconds.
    """

    def __init__(self, failures_to_open: int, open_s: float) -> None:
        self._failures_to_open = failures_to_open
        self._open_s = open_s
        self._failures = 0
        self._next_trial = 0.0

    def admit(self, now: float) -> bool:
        """May something be sent at `now`, seconds? A trial pushes the next one back."""
        if self._failures < self._failures_to_open:
            return True
        if now < self._next_trial:
            return False
        self._next_trial = now + self._open_s
        return True

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._failures >= self._failures_to_open:
            self._next_trial = now + self._open_s


def parse_retry_after(header: str | None) -> float:
    """Seconds that a `Retry-After` header asks for, as a number or a date; 0 without one, or if it is neither."""
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max((date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
