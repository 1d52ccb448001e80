"""CPU time of a whole publish through shared memory, all checks included, in plain copies of the same bytes.

    python benchmarks/publish_path.py [--layers 5]       (1 min, 9 GiB of memory; writes results/publish_path.md, .json)

From the end of an optimizer step to engines that may decode: 2 ZeRO-3 ranks write and sum, 2 tensor-parallel ranks
stage and compare, swap, read back and compare. The shipped code of every phase runs, in this one process and on one
thread, the ranks one after another; CPU time hardly depends on what else the machine does. What it leaves out is
measured by `weights.py time` (wall time of processes side by side) and `in_flight.py pause` (vLLM's pause).

Gathering has the checks that give the same guarantee: the ranks sum their partitions, whole tensors are put together
on rank 0 and copied into the object store, each engine rank compares every tensor that it has received, copies its
slices, and compares its parameters with the slices. Sockets, Ray and vLLM's loader cost nothing here, so its figure is
a lower bound.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from statistics import median

import torch
import weights_time
from provenance import provenance
from vs_trl_report import RESULTS
from weights_plan import config_of_shape

from penstock.weights.checksum import strided_sum, tensor_checksum
from penstock.weights.copies import copy_environment, copy_values
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.checkpoint_names import module_tensors
from penstock.weights.transport import shards
from penstock.weights.transport.adapters import BaseWeights
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, ShardWriter
from penstock.weights.transport.shared_memory import private_directory
from penstock.weights.transport.staging import stage

RANKS = range(2)
CPU = torch.device("cpu")
PUBLISH = ("write", "sum", "stage and compare", "swap", "read back and compare")
GATHER = ("gather", "sum partitions", "put", "compare whole tensors", "load slices", "compare slices and parameters")


class Phases:
    """CPU seconds of each phase, by round."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self.seconds[name].append(time.process_time() - started)


def measure(rounds: int, folder: str) -> tuple[int, dict[str, list[float]]]:
    """Bytes of a version, and CPU seconds of each phase by round. Two rounds before are left out: memory is touched."""
    # The ranks of an engine have a process each, which keeps its own mappings; here all are in one.
    shards._kept_mapping = lru_cache(4)(shards._kept_mapping.__wrapped__)  # noqa: SLF001
    training, engine = weights_time.layouts()
    transfer = ShardTransfer.between(training, engine, "float32", folder)
    specs = tuple(module_tensors(config_of_shape(weights_time.MODEL)))
    sizes = {spec.name: -(-weights_time.volume_of(spec) // 2) for spec in specs}
    parts = [{name: torch.randn(size) for name, size in sizes.items()} for _ in RANKS]
    writers = [ShardWriter(transfer, rank, ShardFiles(transfer)) for rank in RANKS]
    live = [{name: torch.zeros(size) for name, size in transfer.buffers[rank].items()} for rank in RANKS]
    whole = {name: torch.empty(2 * size) for name, size in sizes.items()}
    stored = {name: torch.empty(2 * size) for name, size in sizes.items()}
    num_bytes = transfer.manifest(0, []).num_bytes
    source, target = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
    phases = Phases()
    for version in range(rounds + 2):
        with phases.phase("memcpy"):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        with phases.phase("write"):
            for rank in RANKS:
                writers[rank].write(version, parts[rank])
        with phases.phase("sum"):
            sums = [one for rank in RANKS for one in writers[rank].sums(parts[rank])]
        manifest = transfer.manifest(version, sums)
        with phases.phase("stage and compare"):
            staged = [stage(manifest, rank, CPU, BaseWeights(rank), live[rank], None).values for rank in RANKS]
        with phases.phase("swap"):
            for rank in RANKS:
                shard = staged[rank]
                assert isinstance(shard, dict)
                for name, values in shard.items():
                    copy_values(live[rank][name], values)
        with phases.phase("read back and compare"):
            for entry in manifest.entries:
                assert tensor_checksum(live[entry.rank][entry.name]) == entry.checksum, entry.name

        with phases.phase("gather"):
            for name, size in sizes.items():
                for rank in RANKS:
                    copy_values(whole[name][rank * size : (rank + 1) * size], parts[rank][name])
        with phases.phase("sum partitions"):
            expected = {
                name: sum(strided_sum(parts[rank][name], rank * size, (1,)) for rank in RANKS) % 2**64
                for name, size in sizes.items()
            }
        with phases.phase("put"):
            for name, values in whole.items():
                copy_values(stored[name], values)
        with phases.phase("compare whole tensors"):
            for _ in RANKS:
                assert all(tensor_checksum(stored[name]) == checksum for name, checksum in expected.items())
        slices = [
            (shard.rank, shard.view, stored[name][: weights_time.volume_of(TensorSpec(name, shape))].view(shape)[box])
            for name, shape in specs
            for shard in engine.layout.shards.get(name, ())
            for box in [tuple(slice(*range_) for range_ in shard.box)]
        ]
        with phases.phase("load slices"):
            for rank, view, part in slices:
                at = torch.as_strided(live[rank][view.buffer], tuple(part.shape), view.strides, view.offset)
                copy_values(at, part)
        with phases.phase("compare slices and parameters"):
            totals: dict[tuple[int, str], int] = defaultdict(int)
            for rank, view, part in slices:
                totals[rank, view.buffer] += strided_sum(part, view.offset, view.strides)
            for (rank, name), checksum in totals.items():
                assert tensor_checksum(live[rank][name]) == checksum % 2**64, name
    return num_bytes, {name: values[2:] for name, values in phases.seconds.items()}


def report(num_bytes: int, seconds: dict[str, list[float]], command: str) -> str:
    """The table, as Markdown."""
    copy_s = median(seconds["memcpy"])
    header = ["phase", "CPU ms, median", "least … greatest", "plain copies"]
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header))]

    def line(name: str, values: list[float]) -> str:
        low, high = 1e3 * min(values), 1e3 * max(values)
        return f"| {name} | {1e3 * median(values):.1f} | {low:.1f} … {high:.1f} | {median(values) / copy_s:.2f} |"

    lines.append(line("memcpy", seconds["memcpy"]))
    for title, names in (("**whole publish**", PUBLISH), ("**gather and load, equal checks**", GATHER)):
        lines += [line(name, seconds[name]) for name in names]
        lines.append(line(title, [sum(one) for one in zip(*(seconds[name] for name in names), strict=True)]))
    notes = [
        f"{num_bytes / 2**30:.2f} GiB in float32, 2 ZeRO-3 ranks to tensor parallelism 2; one process, one thread, "
        f"n = {len(seconds['memcpy'])}",
        "all parameters were equal after both, by their checksums",
        *provenance(),
        f"torch {torch.__version__}",
        f"by: {command}",
    ]
    return "\n".join(["# CPU time of a whole publish with all checks", "", *lines, "", *(f"- {one}" for one in notes)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=5, help="of the model; 5 are 1 GiB")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if missing := copy_environment():  # as every process of a run that copies weights; read when the process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | missing)
    torch.set_num_threads(1)
    weights_time.MODEL = weights_time.MODEL.model_copy(update={"num_layers": arguments.layers})
    folder = private_directory()
    try:
        num_bytes, seconds = measure(arguments.rounds, str(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    command = f"python benchmarks/publish_path.py --layers {arguments.layers} --rounds {arguments.rounds}"
    text = report(num_bytes, seconds, command)
    print(text)
    (RESULTS / "publish_path.md").write_text(text + "\n")
    results = {"num_bytes": num_bytes, "seconds": seconds, "from": provenance(), "command": command}
    (RESULTS / "publish_path.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
