"""TransferQueue's side of `dataflow.py`; runs in its own environment.

Its metadata interface, as in its single-controller recipe: the driver hands a `BatchMeta` from stage to stage, each
worker fetches the fields it reads and puts the fields it writes under the same metadata. Cheaper than its other two
interfaces: no key look-up per call (KV interface), no polling of the controller (StreamingDataLoader). Trajectories are
of one length, so fields are regular tensors, which is its fast case.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ |= {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TQ_LOGGING_LEVEL": "ERROR",
    "TQ_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}

import numpy as np
import ray
import torch
import transfer_queue as tq
from dataflow_side import measured, run_side
from dataflow_work import FIELDS, Work, checksum, generate, logprobs, rewards
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import BatchMeta

PARTITION = "train"


class Worker:
    """A process with a client of its own."""

    def __init__(self) -> None:
        tq.init()
        self._client = tq.get_client()

    def generate(self, work: Work, group_ids: list[int]) -> BatchMeta:
        num_rows = len(group_ids) * work.group_size
        return self._client.put(rows(generate(work, group_ids), num_rows), partition_id=PARTITION)

    def score(self, meta: BatchMeta) -> tuple[BatchMeta, list[float]]:
        token_ids, token_starts = self._token_ids(meta)
        scores = rewards(token_ids, token_starts)
        return self._client.put(rows({"reward": scores}, meta.size), metadata=meta), scores.tolist()

    def logprobs(self, meta: BatchMeta, name: str) -> BatchMeta:
        token_ids, _ = self._token_ids(meta)
        return self._client.put(rows({name: logprobs(token_ids, name)}, meta.size), metadata=meta)

    def step(self, meta: BatchMeta) -> int:
        data = self._client.get_data(meta)
        return checksum({name: flat(data[name]) for name in FIELDS})

    def _token_ids(self, meta: BatchMeta) -> tuple[np.ndarray, np.ndarray]:
        """Packed ids, and where each trajectory begins."""
        token_ids = flat(self._client.get_data(meta)["token_ids"])
        return token_ids, np.arange(meta.size + 1) * (len(token_ids) // meta.size)


def rows(columns: dict[str, np.ndarray], num_rows: int) -> TensorDict:
    """The columns as TransferQueue takes them, one row per trajectory; views."""
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    fields = {
        name: column if len(column) == num_rows else column.view(num_rows, -1) for name, column in tensors.items()
    }
    return TensorDict(fields, batch_size=num_rows)


def flat(tensor: torch.Tensor) -> np.ndarray:
    """The values one after another; a view."""
    return (tensor.values() if tensor.is_nested else tensor).reshape(-1).numpy()


class Round:
    """Trains `num_groups` groups once, under the same admission window and batches as our side."""

    def __init__(self, work: Work, workers: dict[str, list[Any]], num_groups: int) -> None:
        self._work = work
        self._workers = workers
        self._next_generator = itertools.cycle(workers["generation"])
        self._num_groups = num_groups
        self._admitted = 0
        self._trained = 0
        self._ready: list[BatchMeta] = []
        self._changed = asyncio.Event()

    async def run(self) -> int:
        """Returns the checksum over everything that the trainer ranks read."""
        total, stepped = 0, 0
        calls_per_batch = self._work.batch_groups // self._work.call_groups
        async with asyncio.TaskGroup() as calls:
            while stepped < self._num_groups:
                self._admit(calls)
                self._changed.clear()
                if len(self._ready) < calls_per_batch:
                    await self._changed.wait()
                    continue
                batch, self._ready = self._ready[:calls_per_batch], self._ready[calls_per_batch:]
                total += await self._train(batch)
                stepped += self._work.batch_groups
                calls.create_task(self._clear(batch))
        return total

    def _admit(self, calls: asyncio.TaskGroup) -> None:
        work = self._work
        while self._admitted < min(self._num_groups, self._trained + work.window):
            group_ids = list(range(self._admitted, self._admitted + work.call_groups))
            self._admitted += work.call_groups
            calls.create_task(self._make(group_ids))

    async def _make(self, group_ids: list[int]) -> None:
        """One call's groups, from generation to ready."""
        written = await next(self._next_generator).generate.remote(self._work, group_ids)
        ids = written.select_fields(["token_ids"])
        (scored, _), *later = await asyncio.gather(
            self._workers["scoring"][0].score.remote(ids),
            self._workers["proximal"][0].logprobs.remote(ids, "proximal_logprobs"),
            self._workers["reference"][0].logprobs.remote(ids, "reference_logprobs"),
        )
        schema = dict(written.field_schema)
        for other in (scored, *later):
            schema |= other.field_schema
        self._ready.append(BatchMeta(written.global_indexes, written.partition_ids, schema, written.production_status))
        self._changed.set()

    async def _train(self, batch: list[BatchMeta]) -> int:
        """One step on both ranks, half of the batch each."""
        half = len(batch) // 2
        shares = (BatchMeta.concat(batch[:half]), BatchMeta.concat(batch[half:]))
        steps = [rank.step.remote(share) for rank, share in zip(self._workers["trainer"], shares, strict=True)]
        return sum(await asyncio.gather(*steps))

    async def _clear(self, batch: list[BatchMeta]) -> None:
        await tq.get_client().async_clear_samples(BatchMeta.concat(batch))
        self._trained += self._work.batch_groups
        self._changed.set()


@contextmanager
def session(num_storage_units: int) -> Iterator[dict[str, list[Any]]]:
    """Ray, TransferQueue's controller and storage, and the same workers as on our side."""
    num_cpus = num_storage_units + 1  # what its own actors reserve; Ray starts as many processes ahead
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    storage = {"SimpleStorage": {"num_data_storage_units": num_storage_units}}
    tq.init(OmegaConf.create({"backend": {"storage_backend": "SimpleStorage", **storage}}))
    roles = {"generation": 2, "scoring": 1, "proximal": 1, "reference": 1, "trainer": 2}
    try:
        actor = ray.remote(Worker).options(num_cpus=0)
        workers = {role: [actor.remote() for _ in range(count)] for role, count in roles.items()}
        ray.get([worker.__ray_ready__.remote() for of_role in workers.values() for worker in of_role])
        yield workers
    finally:
        tq.close()
        ray.shutdown()


async def main(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure what the spec asks for."""
    with session(spec["num_storage_units"]) as workers:
        return await measured(spec, lambda work, num_groups: Round(work, workers, num_groups).run())


if __name__ == "__main__":
    run_side(main, packages=("TransferQueue", "ray", "numpy", "torch", "tensordict", "pyzmq"))
