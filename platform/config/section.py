"""What every section of the configuration has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)
