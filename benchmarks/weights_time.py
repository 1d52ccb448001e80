"""`python benchmarks/weights.py time`: duration of a publish through shared memory, compared with gather and broadcast.

A synthetic decoder of 1 GiB in float32, partitioned as ZeRO-3 over 2 processes, into 2 processes that hold vLLM's
layout at tensor parallelism 2. Rounds alternate between the three, so that a slow minute affects all:

- memcpy: one process copies 1 GiB within memory with libc's memcpy, once. A publish takes at least two such copies.
- Penstock: the training ranks write (`ShardWriter.write`, concurrently), then the engine ranks swap (concurrently).
  Checksums are timed separately; except for the read-back they are computed during generation. The version buffers are
  pre-faulted by two earlier publishes, and mapped by staging.
- Whole publish: the same phases in the order of a run, from the end of an optimizer step to engines that may decode:
  the ranks write and sum, the engines stage and compare, swap, read back and compare. The decode step itself is left
  out, and so is vLLM's pause (in_flight.py).
- Gather and broadcast: rank 1 sends its partitions to rank 0 (gloo), or both gather them all, as ZeRO-3 does; rank 0
  puts whole tensors into Ray's object store, and each engine rank maps them and copies its slices: no more than what
  vLLM's own loader does. With equal checks: the ranks sum their partitions, each engine rank compares every tensor that
  it has received, and compares its parameters with the slices after loading.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
import torch.distributed as dist
from weights_plan import config_of_shape, plain_layout

from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.trainer.spec import free_port
from penstock.weights.checksum import strided_sum, tensor_checksum
from penstock.weights.copies import copy_environment, copy_values
from penstock.weights.layout.algebra import Box, Layout, TensorSpec, extents, volume
from penstock.weights.layout.checkpoint_names import module_tensors
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.model_config import ModelShape
from penstock.weights.transport.adapters import BaseWeights
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, ShardWriter
from penstock.weights.transport.shared_memory import default_directory, private_directory
from penstock.weights.transport.staging import stage

MODEL = ModelShape(
    vocab_size=32_000,
    hidden_size=1536,
    intermediate_size=6144,
    num_layers=5,
    num_heads=24,
    num_kv_heads=4,
    head_dim=64,
    qk_norm=True,
)
NUM_RANKS = TP = 2
ROUNDS = 9
TIMEOUT_S = 120.0


def layouts() -> tuple[TrainingSharding, EngineLayout]:
    """ZeRO-3 ranks, and a vLLM engine over `TP` devices."""
    os.environ.update(vllm_environment("cpu", threads=1))
    config = config_of_shape(MODEL)
    tensors = tuple(module_tensors(config))
    layout = plain_layout(config, tensors, "float32", TP)
    return TrainingSharding(tensors, NUM_RANKS, is_partitioned=True), EngineLayout("vllm", layout)


class TrainingProcess:
    """One ZeRO-3 rank."""

    def __init__(self, rank: int, port: int) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=NUM_RANKS)
        generator = torch.Generator().manual_seed(rank)
        sizes = {spec.name: -(-volume_of(spec) // NUM_RANKS) for spec in module_tensors(config_of_shape(MODEL))}
        self._parts = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
        self._whole = {name: torch.empty(size * NUM_RANKS) for name, size in sizes.items()}
        self._writer: ShardWriter | None = None

    def share(self, transfer: ShardTransfer) -> None:
        self._writer = ShardWriter(transfer, self._rank, ShardFiles(transfer))

    def write(self, version: int) -> None:
        assert self._writer is not None
        self._writer.write(version, self._parts)

    def sums(self) -> list[Any]:
        assert self._writer is not None
        return self._writer.sums(self._parts)

    def write_and_sum(self, version: int) -> list[Any]:
        """One call, as in a run."""
        self.write(version)
        return self.sums()

    def partition_sums(self) -> dict[str, int]:
        """Contribution of this rank's partition to the checksum of each whole tensor."""
        return {name: strided_sum(part, self._rank * len(part), (1,)) for name, part in self._parts.items()}

    def gather(self, *, to_all: bool) -> Any:
        """Whole tensors on rank 0 (or on every rank, as ZeRO-3 gathers), and from there in the object store."""
        for name, part in self._parts.items():
            if to_all:
                dist.all_gather_into_tensor(self._whole[name], part)
            elif self._rank:
                dist.send(part, 0)
            else:
                self._whole[name][: len(part)].copy_(part)
                dist.recv(self._whole[name][len(part) :], 1)
        return None if self._rank else [ray.put({name: whole.numpy() for name, whole in self._whole.items()})]

    def memcpy_s(self, num_bytes: int) -> float:
        """Seconds of one plain copy of `num_bytes`; source and target were touched before."""
        source, target = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
        started = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return time.perf_counter() - started


class EngineProcess:
    """One tensor-parallel rank with live parameters."""

    def __init__(self, rank: int, transfer: ShardTransfer, layout: Layout) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        self._live = {name: torch.zeros(size) for name, size in transfer.buffers[rank].items()}
        num_elements = sum(map(len, self._live.values()))
        self._plain = torch.ones(num_elements), torch.full((num_elements,), 2.0)
        shapes = dict(module_tensors(config_of_shape(MODEL)))
        self._slices = [
            (name, shapes[name], shard) for name, some in layout.shards.items() for shard in some if shard.rank == rank
        ]

    def stage(self, manifest: Any) -> float:
        """Seconds to map and verify the shard."""
        started = time.perf_counter()
        self._staged = stage(manifest, self._rank, torch.device("cpu"), BaseWeights(self._rank), self._live, None)
        return time.perf_counter() - started

    def swap(self) -> float:
        """Seconds to copy the shard into the live parameters."""
        shard = self._staged.values
        assert isinstance(shard, dict)
        started = time.perf_counter()
        assert isinstance(shard, dict)
        for name, values in shard.items():
            copy_values(self._live[name], values)
        return time.perf_counter() - started

    def check(self, manifest: Any) -> float:
        """Seconds to read the live parameters back."""
        started = time.perf_counter()
        for entry in manifest.entries:
            if entry.rank == self._rank:
                assert tensor_checksum(self._live[entry.name]) == entry.checksum, entry.name
        return time.perf_counter() - started

    def memcpy_s(self) -> float:
        """Seconds of one plain copy of the shard's size."""
        source, target = self._plain  # allocated before, so that both engines copy at the same time
        started = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return time.perf_counter() - started

    def load(self, handle: list[Any], sums: dict[str, int] | None = None) -> None:
        """Map whole tensors and copy this rank's slices; with their `sums`, compare before and after."""
        whole = {name: torch.from_numpy(values) for name, values in ray.get(handle[0]).items()}
        for name, checksum in (sums or {}).items():
            assert tensor_checksum(whole[name]) == checksum, name
        expected: dict[str, int] = defaultdict(int)
        for name, shape, shard in self._slices:
            tensor = whole[name][: volume_of(TensorSpec(name, shape))].view(shape)
            part, view = tensor[tuple(slice(*range_) for range_ in shard.box)], shard.view
            torch.as_strided(self._live[view.buffer], extents(shard.box), view.strides, view.offset).copy_(part)
            if sums is not None:
                expected[view.buffer] += strided_sum(part, view.offset, view.strides)
        for name, checksum in expected.items():
            assert tensor_checksum(self._live[name]) == checksum % 2**64, name


def volume_of(spec: TensorSpec) -> int:
    return volume(_whole(spec))


def _whole(spec: TensorSpec) -> Box:
    return tuple((0, extent) for extent in spec.shape)


def time_publish() -> dict[str, Any]:
    """Seconds of each method, by round."""
    directory = private_directory()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=3 << 30, address="local")
    try:
        return _measured(directory)
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def _measured(directory: Path) -> dict[str, Any]:
    training, engine = layouts()
    transfer = ShardTransfer.between(training, engine, "float32", str(directory))
    num_bytes = transfer.manifest(0, []).num_bytes
    port = free_port()
    as_shipped = {"runtime_env": {"env_vars": copy_environment()}}
    ranks = [ray.remote(TrainingProcess).options(**as_shipped).remote(rank, port) for rank in range(NUM_RANKS)]
    engines = [
        ray.remote(EngineProcess).options(**as_shipped).remote(rank, transfer, engine.layout) for rank in range(TP)
    ]
    _all(rank.share.remote(transfer) for rank in ranks)
    seconds: dict[str, list[float]] = defaultdict(list)
    for version in range(-2, ROUNDS):
        index = version % 2
        took: dict[str, float] = {"memcpy": _all([ranks[0].memcpy_s.remote(num_bytes)])[0]}
        took["write"], _ = _timed(rank.write.remote(index) for rank in ranks)
        took["sums"], parts = _timed(rank.sums.remote() for rank in ranks)
        manifest = transfer.manifest(index, [part for some in parts for part in some])
        took["stage: map and check"], _ = _timed(engine.stage.remote(manifest) for engine in engines)
        took["memcpy of a shard, both at once"] = max(_all(engine.memcpy_s.remote() for engine in engines))
        called_s, swaps = _timed(engine.swap.remote() for engine in engines)
        took |= {"swap": max(swaps), "publish": took["write"] + called_s}
        took["read back"], _ = _timed(engine.check.remote(manifest) for engine in engines)
        whole_s, parts = _timed(rank.write_and_sum.remote(1 - index) for rank in ranks)
        manifest = transfer.manifest(1 - index, [part for some in parts for part in some])
        for phase in ("stage", "swap", "check"):
            on_engines = [getattr(engine, phase) for engine in engines]
            arguments = () if phase == "swap" else (manifest,)
            whole_s += _timed(call.remote(*arguments) for call in on_engines)[0]
        took["whole publish, with all checks"] = whole_s
        for way, to_all in (("gather", False), ("all-gather", True)):
            gather_s, handles = _timed(rank.gather.remote(to_all=to_all) for rank in ranks)
            load_s, _ = _timed(engine.load.remote(handles[0]) for engine in engines)
            took |= {f"{way} and put": gather_s, f"{way}, put and load": gather_s + load_s}
            sum_s, sums = _timed(rank.partition_sums.remote() for rank in ranks)
            totals = {name: sum(of_rank[name] for of_rank in sums) % 2**64 for name in sums[0]}
            checked_s, _ = _timed(engine.load.remote(handles[0], totals) for engine in engines)
            took[f"{way}, put and load, with equal checks"] = gather_s + sum_s + checked_s
            _all(engine.check.remote(manifest) for engine in engines)  # every method gives the same parameters
        for name, value in took.items() if version >= 0 else ():
            seconds[name].append(value)
    return {"num_bytes": num_bytes, "rounds": ROUNDS, "seconds": seconds, "directory": str(default_directory())}


def _timed(calls: Iterable[Any]) -> tuple[float, list[Any]]:
    started = time.perf_counter()
    answers = _all(calls)
    return time.perf_counter() - started, answers


def _all(calls: Any) -> list[Any]:
    return list(ray.get(list(calls), timeout=TIMEOUT_S))


def time_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and notes of the report."""
    seconds = results["seconds"]
    middle = {name: median(values) for name, values in seconds.items()}
    ratios = {
        "publish ÷ memcpy (at least 2)": _ratio(seconds["publish"], seconds["memcpy"]),
        "whole publish ÷ memcpy": _ratio(seconds["whole publish, with all checks"], seconds["memcpy"]),
        "swap − memcpy of a shard, ms": [
            1e3 * (a - b) for a, b in zip(seconds["swap"], seconds["memcpy of a shard, both at once"], strict=True)
        ],
        "gather to rank 0 and broadcast ÷ publish": _ratio(seconds["gather, put and load"], seconds["publish"]),
        "all-gather and broadcast ÷ publish": _ratio(seconds["all-gather, put and load"], seconds["publish"]),
    }
    for way in ("gather", "all-gather"):
        checked = seconds[f"{way}, put and load, with equal checks"]
        ratios[f"{way}, with equal checks ÷ whole publish"] = _ratio(checked, seconds["whole publish, with all checks"])
    rows = [[name, f"{1e3 * middle[name]:.0f} ms", _spread([1e3 * v for v in seconds[name]])] for name in seconds]
    rows += [[name, f"{median(values):.2f}", _spread(values)] for name, values in ratios.items()]
    notes = [
        f"{results['num_bytes'] / 2**30:.2f} GiB in float32, 2 partitioned ranks to tensor parallelism 2, "
        f"{results['rounds']} rounds; one thread per process",
        "publish = write + swap, calls included; checksums apart: sums (training ranks), stage and read back (engines)",
        "whole publish = write and sums in one call, stage, swap, read back, one after another",
        "all engine parameters were equal after every method, by their checksums",
    ]
    return ["", "median", "least … greatest"], rows, notes


def _ratio(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _spread(values: list[float]) -> str:
    return f"{min(values):.2f} … {max(values):.2f}"
