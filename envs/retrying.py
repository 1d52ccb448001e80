"""When to retry a request to a service."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from pydantic import Field

from penstock.dataflow.settings import Settings

_BACKOFF_FACTOR, _MAX_BACKOFF_S = 2.0, 30.0


class RetryConfig(Settings):
    """How requests to a service that fails are retried."""

    max_attempts: int = Field(default=4, ge=1)
    """Attempts of one request, including the first."""
    backoff_s: float = Field(default=0.5, ge=0)
    """Wait before the second attempt, seconds; doubled each time, with jitter."""

    def wait_s(self, attempt: int) -> float:
        """Wait before the next attempt, after `attempt` >= 1 attempts, seconds: exponential, with jitter."""
        longest = min(self.backoff_s * _BACKOFF_FACTOR ** (attempt - 1), _MAX_BACKOFF_S)
        return longest * random.uniform(0.5, 1.0)


def parse_retry_after(header: str | None) -> float:
    """Seconds to wait by a `Retry-After` header, a number or a date; 0 without one, or if it is neither."""
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    try:
        date = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return max((date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)
