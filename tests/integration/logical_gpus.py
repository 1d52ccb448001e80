"""A local Ray that counts GPUs which are not there: who would get which of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import ray

from penstock.actors.cluster import RAY_ENVIRONMENT
from penstock.actors.processes import end_processes, ray_processes


@asynccontextmanager
async def ray_with_gpus(num_gpus: int) -> AsyncIterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        ray.init(num_cpus=2, num_gpus=num_gpus, include_dashboard=False, log_to_driver=False)
        try:
            yield
        finally:
            processes = ray_processes()
            ray.shutdown()
            end_processes(processes)
