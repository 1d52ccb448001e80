"""How published weights travel."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class WeightsConfig(BaseModel):
    """How published weights travel from trainer to engines.

    Attributes:
        transport: `shared_memory` needs trainer rank 0 and the engine on one node; `object_store` works across nodes.
        update_mode: `keep_kv` goes on with the old KV cache after a swap; `recompute_kv` recomputes it.
        timeout_s: Longest wait for one publish, seconds, before the slow engines are named in an error.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    transport: Literal["shared_memory", "object_store"] = "shared_memory"
    update_mode: Literal["keep_kv", "recompute_kv"] = "keep_kv"
    timeout_s: float = Field(default=120.0, gt=0)
