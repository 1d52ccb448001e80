"""Pools, sets of equal accelerators or CPU slots, and which roles of a run are placed on which (section `cluster`)."""

from __future__ import annotations

import re
from math import inf
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from penstock.dataflow.settings import Settings
from penstock.rollout.config import EngineConfig


class PoolConfig(Settings):
    """A set of equal accelerators, or of CPU slots."""

    device: Literal["cpu", "gpu"]
    """Kind of device in the pool."""
    count: int = Field(ge=1, le=100_000)
    """Accelerators (or CPU slots) in the pool."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Memory of one accelerator, GiB; for a CPU pool what the run may take of the machine's memory, null is what the
    machine has free."""
    accelerator_type: str | None = None
    """Ray accelerator label, e.g. `H100`; None accepts any."""
    devices_per_node: int | None = Field(default=None, ge=1)
    """Accelerators of one node, which the devices of an engine never leave; None: all are on one."""

    @model_validator(mode="after")
    def _gpus_have_a_size(self) -> Self:
        if self.device == "gpu" and self.memory_gib is None:
            raise ValueError("a pool of GPUs needs memory_gib, the memory of one GPU, from which the run is planned.")
        return self

    @property
    def limit_gib(self) -> float:
        """What the run may take, GiB; infinite where only the machine limits it, which is checked there."""
        return inf if self.memory_gib is None else self.memory_gib


class ExtraRolloutConfig(Settings):
    """Further engines of the run on another pool, e.g. of older accelerators (docs/guides/unequal-pools.md)."""

    num_engines: int = Field(ge=1, le=10_000)
    """Engines on this pool."""
    engine: EngineConfig | None = None
    """Settings of these engines, all of them; None: those of `rollout.engine`."""


def _cluster_address(value: str) -> str:
    if not re.fullmatch(r"local|auto|(ray://)?[\w.-]+:\d{1,5}|(ray://)?\[[\da-fA-F:]+\]:\d{1,5}", value):
        raise ValueError("it is local, auto (the cluster of this node), HOST:PORT or ray://HOST:PORT")
    return value


class ClusterConfig(Settings):
    """Pools, and the assignment of roles to pools."""

    address: Annotated[str, AfterValidator(_cluster_address)] = "local"
    """`local` starts Ray on this machine; otherwise the address of a running cluster."""
    pools: dict[str, PoolConfig]
    """Name -> pool."""
    trainer_pool: str
    """Pool of the trainer ranks."""
    rollout_pool: str
    """Pool of the `rollout.num_engines` engines."""
    extra_rollout_pools: dict[str, ExtraRolloutConfig] = Field(default_factory=dict)
    """Name of another pool -> the engines on it, in addition to those."""
    colocated: bool = False
    """Trainer and engines share their devices and take turns (needs max_staleness 0)."""
    threads_per_process: int = Field(default=1, ge=1, le=256)
    """CPU threads of each engine and trainer process."""
