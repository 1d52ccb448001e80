"""From ready groups in the driver to their arrays in a trainer rank: as shipped, and through TransferQueue.

    python benchmarks/data_plane.py [--rounds 7]     (2 minutes; writes benchmarks/results/data_plane.md)

One Ray session, a driver and one reader in a process of its own. As shipped: the driver puts each group into Ray's
object store when it is ready (`ObjectStore.put`), and a step gives the reader the handles, which it resolves
(`payloads_of`). TransferQueue 0.1.11, with its default storage (SimpleStorage, two units): `kv_batch_put` of the same
arrays as jagged tensors, and `kv_batch_get` of all of them in the reader; once with a put for each group, and once with
a single put of the whole batch, which is its best but needs the whole batch at once. It is installed beside the
project's packages, in .bench/transferqueue.

Both readers add up all arrays, so every byte arrives; the sums are compared. The three take turns. Measured is the wall
time of the puts (in the driver) and of the read (in the reader), without the call that starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from alone import BENCH
from provenance import provenance

TRANSFER_QUEUE = BENCH / "transferqueue"
PACKAGES = (
    "TransferQueue==0.1.11",
    "tensordict==0.10.0",
    "pyvers==0.1.0",
    "orjson==3.11.4",
    "importlib_metadata==8.7.0",
)
RESULT = Path(__file__).parent / "results" / "data_plane.md"
GROUP_SIZE = 8
CASES = {
    "the demo: 32 groups × 8, 16 to 40 tokens": (32, 16, 40),
    "64 groups × 8, 256 to 4096 tokens": (64, 256, 4096),
    "64 groups × 8, 2048 to 16384 tokens": (64, 2048, 16384),
}
WAYS = ("as shipped", "TransferQueue, a put for each group", "TransferQueue, one put")
Sums = tuple[float, float, float]


def install() -> None:
    """Install TransferQueue without what it shares with the project; `PIP_ARGS` is passed on to pip."""
    if not (TRANSFER_QUEUE / "transfer_queue").exists():
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(TRANSFER_QUEUE)]
        subprocess.run([*pip, *os.environ.get("PIP_ARGS", "").split(), *PACKAGES], check=True)


def make_groups(num_groups: int, shortest: int, longest: int) -> list[Any]:
    """Groups of one batch, as they are when they become ready."""
    from penstock.dataflow.ids import GroupId, TaskId, TrajectoryId
    from penstock.dataflow.trajectory import GroupPayload, Trajectory
    from penstock.dataflow.versions import Span

    rng = np.random.default_rng(0)

    def trajectory(name: str) -> Trajectory:
        length = int(rng.integers(shortest, longest + 1))
        return Trajectory(
            trajectory_id=TrajectoryId(name),
            task_id=TaskId(name),
            token_ids=rng.integers(0, 150_000, length).astype(np.int32),
            loss_mask=np.arange(length) > 0,
            behavior_logprobs=-rng.random(length).astype(np.float32),
            spans=(Span(0, length - 1),),
            prompt="?",
            response="x" * length,
            finish_reason="stop",
        )

    return [
        GroupPayload(GroupId(group), tuple(trajectory(f"{group}/{index}") for index in range(GROUP_SIZE)))
        for group in range(num_groups)
    ]


def fields_of(groups: Sequence[Any]) -> Any:
    """The same arrays as a TensorDict."""
    import torch
    from tensordict import TensorDict

    members = [member for group in groups for member in group.trajectories]

    def jagged(name: str) -> Any:
        return torch.nested.as_nested_tensor(
            [torch.from_numpy(getattr(member, name)) for member in members], layout=torch.jagged
        )

    names = ("token_ids", "loss_mask", "behavior_logprobs")
    return TensorDict({name: jagged(name) for name in names}, batch_size=len(members))


def keys_of(groups: Sequence[Any]) -> list[str]:
    return [str(member.trajectory_id) for group in groups for member in group.trajectories]


class Reader:
    """In a process of its own, as a trainer rank is."""

    def __init__(self) -> None:
        import transfer_queue

        self._queue = transfer_queue
        transfer_queue.init()

    def from_store(self, refs: Sequence[Any]) -> tuple[float, Sums]:
        from penstock.actors.trainer.actor import payloads_of

        begun = time.perf_counter()
        members = [member for payload in payloads_of(refs) for member in payload.trajectories]
        sums = tuple(
            float(sum(getattr(member, name).sum(dtype=np.float64) for member in members))
            for name in ("token_ids", "loss_mask", "behavior_logprobs")
        )
        return time.perf_counter() - begun, sums  # type: ignore[return-value]

    def from_queue(self, keys: list[str]) -> tuple[float, Sums]:
        begun = time.perf_counter()
        found = self._queue.kv_batch_get(keys=keys, partition_id="batch")
        sums = tuple(
            float(sum(one.numpy().sum(dtype=np.float64) for one in found[name].unbind()))
            for name in ("token_ids", "loss_mask", "behavior_logprobs")
        )
        return time.perf_counter() - begun, sums  # type: ignore[return-value]


def measure(way: str, groups: Sequence[Any], reader: Any, queue: Any) -> tuple[float, float, Sums]:
    """Seconds of the puts and of the read, and the sums that the reader found."""
    import ray

    from penstock.actors.cluster import ObjectStore
    from penstock.dataflow.trajectory import GroupRef

    keys = keys_of(groups)
    if way == "as shipped":
        store = ObjectStore()

        async def put_all() -> list[Any]:
            return [await store.put(group) for group in groups]

        begun = time.perf_counter()
        handles = asyncio.run(put_all())
        put_s = time.perf_counter() - begun
        refs = [
            GroupRef(one.group_id, one.trajectories[0].task_id, handle, tuple(m.spans for m in one.trajectories), (), 0)
            for one, handle in zip(groups, handles, strict=True)
        ]
        read_s, sums = ray.get(reader.from_store.remote(refs))
        return put_s, read_s, sums
    parts = [groups] if way.endswith("one put") else [[group] for group in groups]
    made = [(keys_of(part), fields_of(part)) for part in parts]  # is not measured
    begun = time.perf_counter()
    for names, fields in made:
        queue.kv_batch_put(keys=names, partition_id="batch", fields=fields)
    put_s = time.perf_counter() - begun
    read_s, sums = ray.get(reader.from_queue.remote(keys))
    queue.kv_clear(keys=keys, partition_id="batch")
    return put_s, read_s, sums


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    install()
    sys.path.insert(0, str(TRANSFER_QUEUE))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TRANSFER_QUEUE), os.environ.get("PYTHONPATH", "")])

    from penstock.actors.cluster import RAY_ENVIRONMENT

    os.environ.update(RAY_ENVIRONMENT)
    import ray
    import transfer_queue as queue

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    queue.init()
    reader = ray.remote(Reader).options(num_cpus=0).remote()
    lines = ["# Data plane: from ready groups to arrays in a trainer rank", ""]
    lines += ["| batch | MiB | way | puts, ms | read, ms | both | ÷ as shipped |", "|" + " --- |" * 7]
    for case, shape in CASES.items():
        groups = make_groups(*shape)
        size = sum(9 * len(member.token_ids) for group in groups for member in group.trajectories) / 2**20
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for index in range(rounds + 1):
            sums = set()
            for way in WAYS:
                put_s, read_s, of_way = measure(way, groups, reader, queue)
                sums.add(tuple(round(one, 3) for one in of_way))
                if index:  # the first one starts threads and connections
                    found[way].append((put_s, read_s))
            assert len(sums) == 1, sums
        base = median(put_s + read_s for put_s, read_s in found[WAYS[0]])
        for way, times in found.items():
            total = [put_s + read_s for put_s, read_s in times]
            cells = [
                f"{1e3 * median(of):.1f} ({1e3 * min(of):.1f} … {1e3 * max(of):.1f})"
                for of in (*zip(*times, strict=True), total)
            ]
            lines.append(f"| {case} | {size:.1f} | {way} | {' | '.join(cells)} | {median(total) / base:.1f} |")
            print(lines[-1], flush=True)
    notes = [*provenance(), f"n = {rounds}, median and range", "by: python benchmarks/data_plane.py"]
    lines += ["", *(f"- {note}" for note in notes)]
    RESULT.write_text("\n".join(lines) + "\n")
    queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
