"""`python benchmarks/weights.py stall`: the stall of generation by a weight update, by the memory that engines have.

The decoder of `time` (1 GiB in float32, ZeRO-3 over 2 processes, into 2 that hold vLLM's layout at tensor parallelism
2) is published in four ways, one after the other in every round:

- shard, buffer: compared in shared memory during decoding; frozen for the copy and the read-back.
- bucket, buffer: compared in the same way; frozen while it is copied bucket by bucket, each compared again, and for the
  read-back. One version buffer in shared memory instead of two.
- shard, messages: received (gloo) into a version buffer of the engine during decoding; then as the first.
- bucket, messages: frozen while buckets are received, compared and applied, and for the read-back. No version buffer.

vLLM's own pause (benchmarks/in_flight.py pause) is added to each.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import Any

import ray
import torch
from weights_time import NUM_RANKS, TP, EngineProcess, TrainingProcess, _all, _timed, layouts

from penstock.dataflow.ports import BucketSum
from penstock.trainer.spec import free_port
from penstock.weights.checksum import PartialSum
from penstock.weights.copies import copy_environment
from penstock.weights.planner.plan import BUCKET_BYTES
from penstock.weights.transport.adapters import BaseWeights
from penstock.weights.transport.in_place import ShardChunks
from penstock.weights.transport.process_group.endpoints import (
    BucketChecksums,
    DeviceReceiver,
    ReceiverAddress,
    TransferGroupSpec,
    WeightSender,
)
from penstock.weights.transport.process_group.group import serve_store
from penstock.weights.transport.shards import ShardTransfer
from penstock.weights.transport.shared_memory import private_directory
from penstock.weights.transport.staging import stage

ROUNDS = 7
TIMEOUT_S = 60.0
WAYS = ("shard, buffer", "bucket, buffer", "shard, messages", "bucket, messages")
CPU = torch.device("cpu")


class SendingRank(TrainingProcess):
    """A training rank that can also send."""

    def join(self, group_spec: TransferGroupSpec) -> None:
        self._sender = WeightSender(self._rank, CPU)
        self._sender.join(group_spec)
        self._sender.snapshot(self._parts, copies=False)

    def bucket_checksums(self) -> BucketChecksums:
        return self._sender.bucket_checksums()

    def send(self, version: int) -> list[PartialSum]:
        return self._sender.send(version).sums


class ReceivingEngine(EngineProcess):
    """An engine rank that can also receive."""

    def join(self, group_spec: TransferGroupSpec) -> None:
        self._device_receiver = DeviceReceiver(self._rank, CPU)
        self._version_buffer = self._device_receiver.join(group_spec, 0, None)

    def receive(self, version: int) -> None:
        self._device_receiver.receive(version)

    def stage_own(self, manifest: Any) -> None:
        """Stage from the engine's own version buffer."""
        self._staged = stage(manifest, self._rank, CPU, BaseWeights(self._rank), self._live, self._version_buffer)

    def stage_chunks(self, manifest: Any) -> int:
        """Compare a version that is applied in place; returns the extra memory in bytes."""
        base = BaseWeights(self._rank)
        self._chunks = stage(manifest, self._rank, CPU, base, self._live, None, BUCKET_BYTES).values
        assert isinstance(self._chunks, ShardChunks)
        return self._chunks.extra_bytes

    def apply(self) -> None:
        assert isinstance(self._chunks, ShardChunks)
        self._chunks.apply(self._live)

    def receive_in_place(self, version: int, sums: list[BucketSum]) -> int:
        """Receive into the live parameters; returns the extra memory in bytes."""
        self._device_receiver.receive_in_place(version, sums, self._live)
        return self._device_receiver.extra_bytes


def time_stalls() -> dict[str, Any]:
    """Seconds of each way, by round."""
    directory = private_directory()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30, address="local")
    try:
        return _measured(str(directory))
    finally:
        ray.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def _measured(directory: str) -> dict[str, Any]:
    training, engine = layouts()
    transfer = ShardTransfer.between(training, engine, "float32", directory)
    port, store = free_port(), serve_store("127.0.0.1")
    as_shipped = {"runtime_env": {"env_vars": copy_environment()}}
    ranks = [ray.remote(SendingRank).options(**as_shipped).remote(rank, port) for rank in range(NUM_RANKS)]
    engines = [
        ray.remote(ReceivingEngine).options(**as_shipped).remote(rank, transfer, engine.layout) for rank in range(TP)
    ]
    _all(rank.share.remote(transfer) for rank in ranks)
    group_spec = TransferGroupSpec(
        transfer=replace(transfer, directory=None),
        num_training=NUM_RANKS,
        receivers=(ReceiverAddress("engine-0", "node"),),
        on_devices=True,
        store_at=("127.0.0.1", store.port),
        generation=0,
        timeout_s=TIMEOUT_S,
        codec="full",
    )
    stalls: dict[str, list[float]] = defaultdict(list)
    background: dict[str, list[float]] = defaultdict(list)
    extra: dict[str, int] = dict.fromkeys(WAYS, 0)
    for number in range(-1, ROUNDS):
        took = _buffers(ranks, engines, transfer, number, extra)
        took |= _messages(ranks, engines, group_spec, 2 * number, extra)
        for way, (background_s, stall_s) in took.items() if number >= 0 else ():
            background[way].append(background_s)
            stalls[way].append(stall_s)
    num_bytes = transfer.manifest(0, []).num_bytes
    times = {"stall_s": stalls, "background_s": background}
    return {"num_bytes": num_bytes, "rounds": ROUNDS, "extra_bytes": extra} | times


def _buffers(ranks: Any, engines: Any, transfer: ShardTransfer, number: int, extra: dict[str, int]) -> Any:
    write_s, _ = _timed(rank.write.remote(number % 2) for rank in ranks)
    sums_s, parts = _timed(rank.sums.remote() for rank in ranks)
    manifest = transfer.manifest(number % 2, [part for some in parts for part in some])
    before_s = write_s + sums_s
    stage_s, _ = _timed(engine.stage.remote(manifest) for engine in engines)
    swap_s, _ = _timed(engine.swap.remote() for engine in engines)
    check_s, _ = _timed(engine.check.remote(manifest) for engine in engines)
    took = {"shard, buffer": (before_s + stage_s, swap_s + check_s)}
    stage_s, taken = _timed(engine.stage_chunks.remote(manifest) for engine in engines)
    apply_s, _ = _timed(engine.apply.remote() for engine in engines)
    check_s, _ = _timed(engine.check.remote(manifest) for engine in engines)
    extra["bucket, buffer"] = max(taken)
    return took | {"bucket, buffer": (before_s + stage_s, apply_s + check_s)}


def _messages(ranks: Any, engines: Any, group_spec: TransferGroupSpec, version: int, extra: dict[str, int]) -> Any:
    took = {}
    for place, way in enumerate(("shard, messages", "bucket, messages")):
        spec = replace(group_spec, generation=100 + version + place, is_in_place=bool(place))
        _all([one.join.remote(spec) for one in (*ranks, *engines)])
        if place:
            checksums_s, checksums = _timed(rank.bucket_checksums.remote() for rank in ranks)
            sums = [one for of_rank in checksums for one in of_rank.sums]
            manifest = spec.transfer.manifest(version, [PartialSum(*one[1:]) for one in sums])
            transfer_s, taken = _timed(
                [
                    *(engine.receive_in_place.remote(version, sums) for engine in engines),
                    *(rank.send.remote(version) for rank in ranks),
                ]
            )
            check_s, _ = _timed(engine.check.remote(manifest) for engine in engines)
            took[way] = checksums_s, transfer_s + check_s
            extra[way] = max(taken[: len(engines)])
            continue
        receiving = [engine.receive.remote(version) for engine in engines]
        transfer_s, answers = _timed([*receiving, *(rank.send.remote(version) for rank in ranks)])
        manifest = spec.transfer.manifest(version, [part for some in answers[len(engines) :] for part in some])
        stage_s, _ = _timed(engine.stage_own.remote(manifest) for engine in engines)
        swap_s, _ = _timed(engine.swap.remote() for engine in engines)
        check_s, _ = _timed(engine.check.remote(manifest) for engine in engines)
        took[way] = transfer_s + stage_s, swap_s + check_s
        extra[way] = manifest.num_bytes // TP + BUCKET_BYTES
    return took


def stall_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and notes of the report."""
    size = results["num_bytes"]
    shared = {"shard, buffer": 2 * size, "bucket, buffer": size, "shard, messages": 0, "bucket, messages": 0}
    rows = [
        [
            way,
            _ms(results["stall_s"][way]),
            _ms(results["background_s"][way]),
            f"{results['extra_bytes'][way] / 2**20:.0f} MiB",
            f"{shared[way] / 2**30:.1f} GiB",
        ]
        for way in WAYS
    ]
    notes = [
        f"{size / 2**30:.2f} GiB in float32, 2 partitioned ranks to tensor parallelism 2, {results['rounds']} rounds; "
        "one thread per process, 4 processes; median (least … greatest), calls included",
        "stall: how long an engine is frozen, without vLLM's own pause; during decoding: checksums, writing or "
        "transfer, staging",
        "extra memory: of a version on an engine rank, in addition to its parameters (on GPUs the first row needs a "
        "shard as well); in shared memory: of the node",
        "all engine parameters were equal after every transport, by their checksums",
    ]
    return ["weights.staging, transport", "stall", "during decoding", "extra memory", "in shared memory"], rows, notes


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * median(seconds):.0f} ms ({1e3 * min(seconds):.0f} … {1e3 * max(seconds):.0f})"
