"""A reward that says where it runs."""

from __future__ import annotations

import os
from typing import Any, Self

from penstock.dataflow.trajectory import Trajectory
from penstock.envs.contract import RewardContext


class Where:
    """Reward 1 on a GPU and 0 on none; part `gpu`: the number of the only one that it sees."""

    def __init__(self, context: RewardContext) -> None:
        self._device = context.device

    @classmethod
    def build(cls, context: RewardContext) -> Self:
        return cls(context)

    def __call__(self, trajectory: Trajectory, **fields: Any) -> dict[str, float]:
        del trajectory, fields
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return {"reward": float(self._device == "cuda"), "gpu": float(seen or -1)}
