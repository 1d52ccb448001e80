"""What the sections of the configuration share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MAX_TIMEOUT_S = 30 * 24 * 3600.0
"""Longest time-out, seconds. One of 30 days never ends a hang, and system calls refuse numbers of 10 digits."""
MIN_CALL_TIMEOUT_S = 0.001
"""Shortest time-out of one call, seconds. No answer of another process arrives sooner."""


class Settings(BaseModel):
    """Base of every section: unknown keys are errors, numbers are finite, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)
