"""The trainer ranks as Ray actors.

Every rank receives the same handles and takes its own share by a pure function; collectives run
between the ranks themselves (gloo or NCCL), never through Ray.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import ray
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock.actors.devices import seen_devices
from penstock.actors.trainer.meeting import MEETING_S, interface_of, meet
from penstock.actors.worker_log import keep_output
from penstock.dataflow.errors import CheckpointError, TrainingError, WeightSyncError
from penstock.dataflow.ids import POLICY, EngineId
from penstock.dataflow.ports import StepReport, WeightManifest, WrittenFile
from penstock.dataflow.trajectory import GroupPayload, GroupRef
from penstock.kernels.portable.products import use_onednn
from penstock.trainer.build import build_trainer, save_policy
from penstock.trainer.checkpoint import TrainerSnapshot, write_snapshot
from penstock.trainer.flops import product_tflops
from penstock.trainer.policy_trainer import HeldWeights, PolicyTrainer, beside_the_step, on_cpu
from penstock.trainer.spec import TrainerSpec, free_port
from penstock.trainer.step_profile import profiled
from penstock.weights.checksum import PartialSum
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.layout.sides import TrainingSharding
from penstock.weights.model_config import DType
from penstock.weights.transport.device_memory import (
    OpenedVersionBuffers,
    VersionBufferHandle,
    device_identity,
    without_peer_access,
)
from penstock.weights.transport.process_group.endpoints import (
    BucketChecksums,
    SendReport,
    TransferGroupSpec,
    WeightSender,
)
from penstock.weights.transport.process_group.group import serve_store
from penstock.weights.transport.shards import ShardFiles, ShardTransfer, ShardWriter, copies_of, shard_sums
from penstock.weights.transport.shared_memory import private_directory, write_version

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")
_Call = Callable[Concatenate["TrainerRank", _Arguments], _Answer]


def gives_memory_back(call: _Call[_Arguments, _Answer]) -> _Call[_Arguments, _Answer]:
    """A call after which torch returns its cached memory to the device, if engines share it."""

    @wraps(call)
    def called(rank: TrainerRank, /, *arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Answer:
        try:
            return call(rank, *arguments, **options)
        finally:
            if rank.shares_devices:
                torch.cuda.empty_cache()

    return called


class TrainerRank:
    """One rank in its own process."""

    def __init__(self, spec: TrainerSpec, rank: int) -> None:
        self._spec = spec
        self.shares_devices = spec.shares_devices
        self._rank = rank
        partner = "" if spec.policy_id == POLICY else f"{spec.policy_id}-"
        self._role = f"{partner}trainer-{rank}"
        self._num_parts = 0
        self._trainer: PolicyTrainer | None = None
        self._outbound: Path | None = None
        self._writer: ShardWriter | None = None
        self._writers_of: dict[EngineId, ShardWriter] = {}
        self._sender = WeightSender(rank, torch.device(spec.device))
        self._snapshot: TrainerSnapshot | None = None
        self._store: TCPStore | None = None

    def rendezvous(self) -> tuple[str, int, int]:
        """Where the ranks meet: the address that Ray knows this node by, the port of a store, and a free port.

        Every rank is asked, so that the driver knows that each has a process; the answer of rank 0 is used.
        """
        address = ray.util.get_node_ip_address()
        if self._rank == 0 and self._spec.trainer.num_ranks > 1:
            self._store = serve_store(address)
        return address, 0 if self._store is None else self._store.port, free_port()

    @gives_memory_back
    def start(self, host: str, store_port: int, port: int) -> tuple[str, int]:
        """Join the other ranks and load the policy, or continue from a checkpoint (`TrainerSpec.restore_from`).

        Returns:
            The node that this rank runs on, and the policy version: 0, or that of the checkpoint.

        Raises:
            TrainingError: If a rank does not reach rank 0.
        """
        keep_output(self._role)
        if (num_ranks := self._spec.trainer.num_ranks) > 1:
            limit_s = min(MEETING_S, self._spec.trainer.start_timeout_s)
            own = ray.util.get_node_ip_address()
            addresses = meet((host, store_port), self._store, self._rank, num_ranks, own, limit_s)
            if len(set(addresses)) > 1 and (interface := interface_of(own)) is not None:
                # gloo would use what the host's name resolves to, on many systems 127.0.1.1.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if self._spec.device == "cpu":
            use_onednn()
        self._trainer = build_trainer(self._spec, self._rank, master_addr=host, master_port=port)
        if self._rank == 0:
            self._outbound = private_directory(self._spec.publish_in)
        restore_from = self._spec.restore_from
        version = 0 if restore_from is None else self._trainer.restore(restore_from)
        return ray.get_runtime_context().get_node_id(), version

    @gives_memory_back
    def step(self, groups: Sequence[GroupRef], version: int) -> StepReport:
        """Train a batch, or the last part of a batch that was sent in parts."""
        self._num_parts = 0
        with self._profile(version + 1, ""):
            report = self._running().step(payloads_of(groups), version)
        return replace(report, metrics={**report.metrics, **self._measured(report.busy_s)})

    def set_learning_rate(self, settings: Mapping[str, Any]) -> None:
        """Take the rate of further steps from these settings of `OptimizerConfig`."""
        self._running().set_learning_rate(settings)

    def _measured(self, busy_s: float) -> dict[str, float]:
        """What this process knows of its own device, as metrics of this rank."""
        device = torch.device(self._spec.device)
        metrics = {f"rank/busy_s/{self._rank}": busy_s, f"rank/product_tflops/{self._rank}": product_tflops(device)}
        if device.type == "cuda":
            metrics[f"rank/peak_device_gib/{self._rank}"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        return metrics

    def accumulate(self, groups: Sequence[GroupRef], version: int) -> None:
        """Add the gradient of a part of a batch whose rest is still being generated."""
        self._num_parts += 1
        with self._profile(version + 1, f"-part-{self._num_parts}"):
            self._running().accumulate(payloads_of(groups), version)

    def _profile(self, step: int, part: str) -> AbstractContextManager[None]:
        """Writes a profile if one of this step is wanted."""
        if step not in self._spec.trainer.profile_steps:
            return nullcontext()
        return profiled(Path(self._spec.profile_in) / f"{self._role}-step-{step}{part}.json.gz")

    def early_logprobs(self, groups: Sequence[GroupRef], version: int) -> None:
        """Compute logprobs of groups of a batch that is not complete yet. Collective."""
        self._running().early_logprobs(payloads_of(groups), version)

    @gives_memory_back
    def learn(self, method: str, *arguments: Any) -> Any:
        """Call a method of `PolicyTrainer` for given answers: supervised steps, preferences, measurements."""
        return getattr(self._running(), method)(*arguments)

    @gives_memory_back
    def export(self, version: int) -> WeightManifest | None:
        """Write this version for the engines and remove the previous one. Collective; rank 0 returns the manifest."""
        return self._write_file(self._running().export_weights(), version, self._spec.model.dtype)

    @gives_memory_back
    def export_adapters(self, version: int) -> WeightManifest | None:
        """Write the adapters, which engines add to the weights they were loaded with; otherwise as `export`."""
        return self._write_file(self._running().export_adapters(), version, "float32")

    def _write_file(self, tensors: Iterator[tuple[str, Tensor]], version: int, dtype: DType) -> WeightManifest | None:
        if self._outbound is None:
            for _ in tensors:
                pass
            return None
        for old in self._outbound.iterdir():
            old.unlink()
        return write_version(tensors, version, dtype, self._outbound)

    def base_sums(self, transfer: ShardTransfer) -> list[PartialSum]:
        """This rank's contributions to the checksums of the base weights, as engines hold them."""
        return shard_sums(copies_of(transfer, self._rank), TORCH_DTYPES[transfer.dtype], self._running().base_weights())

    def training_sharding(self) -> tuple[TrainingSharding, str]:
        """How the ranks shard the model, and a folder in shared memory for published versions (rank 0 only)."""
        return self._running().training_sharding(), str(self._outbound)

    def share_weights(self, transfer: ShardTransfer) -> None:
        """Publish by this plan from now on."""
        self._writer = ShardWriter(transfer, self._rank, ShardFiles(transfer))

    @gives_memory_back
    def write_shards(self, version: int) -> list[PartialSum]:
        """Write this rank's part of a version into shared memory, in the engines' layout."""
        assert self._writer is not None, "share_weights comes first"
        tensors = self._running().local_weights()
        self._writer.write(version, tensors)
        return self._writer.sums(tensors)

    @ray.method(concurrency_group="weight_io")
    def writing(self) -> str:
        """This rank's progress in writing a version; answers while it writes."""
        writers = {engine_id: writer.progress for engine_id, writer in self._writers_of.items()}
        if self._writer is not None:
            return self._writer.progress
        return "; ".join(f"{engine_id}: {progress}" for engine_id, progress in writers.items()) or "not begun"

    @ray.method(concurrency_group="health")
    def is_alive(self) -> bool:
        """Answers during any other call."""
        return True

    def device(self) -> str:
        """Identity of the device that this rank computes on."""
        return device_identity(torch.device(self._spec.device))

    def seen_devices(self) -> list[str]:
        """The GPU of this rank, by its name on the node."""
        return seen_devices()

    def without_peer_access(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Pairs of devices of this node between which memory cannot be mapped."""
        return without_peer_access(pairs)

    def open_version_buffers(
        self, engine_id: EngineId, transfer: ShardTransfer, handles: Sequence[Sequence[VersionBufferHandle]]
    ) -> str:
        """Open an engine's version buffers, to publish into them by this plan from now on; returns why it cannot."""
        mine = [of_ranks[self._rank] for of_ranks in handles]
        needed = {copy.dst_rank for copy in copies_of(transfer, self._rank)}
        try:
            opened = OpenedVersionBuffers(mine, transfer.buffers, needed)
        except WeightSyncError as error:
            return f"trainer rank {self._rank}: {error}"
        self._writers_of[engine_id] = ShardWriter(transfer, self._rank, opened)
        return ""

    @gives_memory_back
    def write_version_buffers(self, version: int, engine_ids: Sequence[EngineId]) -> list[PartialSum]:
        """Write this rank's part of a version into these engines' version buffers, and release those of all others."""
        self._writers_of = {engine_id: self._writers_of[engine_id] for engine_id in engine_ids}
        tensors = self._running().local_weights()
        for writer in self._writers_of.values():
            writer.write(version, tensors)
        return self._writers_of[engine_ids[0]].sums(tensors)

    def snapshot_weights(self, copies: bool) -> None:  # noqa: FBT001 - Ray passes arguments by position
        """Hold the current weights for `send_weights`; with `copies` training may change them before that."""
        self._sender.snapshot(self._running().local_weights(), copies=copies)

    @ray.method(concurrency_group="weight_io")
    def join_transfer_group(self, group_spec: TransferGroupSpec) -> None:
        """Join the transfer group of the receivers; the previous group is left."""
        self._sender.join(group_spec)

    @ray.method(concurrency_group="weight_io")
    def bucket_checksums(self) -> BucketChecksums:
        """Checksums of the buckets that `send_weights` will send."""
        return self._sender.bucket_checksums()

    @ray.method(concurrency_group="weight_io")
    def send_weights(self, version: int) -> SendReport:
        """Send the snapshot, concurrently with training."""
        return self._sender.send(version)

    def read_back(self, manifest: WeightManifest) -> np.ndarray:
        """The version's file as bytes, for engines on other nodes (through the object store)."""
        return np.fromfile(manifest.location, dtype=np.uint8)

    # Its own group: a policy can be saved while a step runs, which `stop_step` keeps from changing it.
    @ray.method(concurrency_group="saving")
    def stop_step(self) -> bool:
        """End the running step, and all later ones, before they change the weights; returns whether this rank can."""
        return self._running().stop.request()

    @ray.method(concurrency_group="saving")
    def held_weights(self, version: int) -> HeldWeights:
        """This rank's parts of a version, for `save_hf` of rank 0."""
        running = self._running()
        return on_cpu(running.held_weights(version), running.backend.device)

    @ray.method(concurrency_group="saving")
    def save_hf(self, path: str, version: int, *held: HeldWeights) -> None:
        """Write the policy and its tokenizer in Hugging Face form. On rank 0; `held` is of the other ranks."""
        running = self._running()
        # A GPU has no space for the whole model.
        own = on_cpu(running.held_weights(version), running.backend.device, copies=False)
        try:
            save_policy(running, path, self._spec.model_path, [own, *held])
        finally:  # not `gives_memory_back`: Ray would run a wrapped method behind the step, in no group
            if self.shares_devices:
                torch.cuda.empty_cache()

    def snapshot(self, version: int) -> None:
        """Begin to copy this rank's state to host memory for `write_checkpoint`. It is ordered with the steps."""
        self._snapshot = self._running().snapshot(version)

    @ray.method(concurrency_group="saving")
    def snapshot_now(self, version: int) -> None:
        """`snapshot` during a step that `stop_step` has ended."""
        with beside_the_step(self._running().backend.device):
            self.snapshot(version)

    # Its own group, so that training and publishing continue while the disk is written.
    @ray.method(concurrency_group="checkpoint")
    def write_checkpoint(self, folder: str) -> WrittenFile:
        """Write the last snapshot to a folder and release its memory.

        Raises:
            CheckpointError: If there is no snapshot, or if the disk is full or cannot be written.
        """
        snapshot = self._snapshot
        if snapshot is None:
            raise CheckpointError(
                f"trainer rank {self._rank}: no snapshot was taken since the last checkpoint was written, so there is "
                f"nothing to write to {folder}. Call snapshot first."
            )
        written = write_snapshot(snapshot, folder, self._rank)
        if self._snapshot is snapshot:  # the next one may have been taken meanwhile
            self._snapshot = None
        return written

    def shutdown(self) -> None:
        """Leave the process group and free the shared memory."""
        if self._trainer is not None:
            self._trainer.close()
        if self._outbound is not None:
            shutil.rmtree(self._outbound, ignore_errors=True)

    def _running(self) -> PolicyTrainer:
        if self._trainer is None:
            raise TrainingError(f"trainer rank {self._rank}: not started")
        return self._trainer


def payloads_of(groups: Sequence[GroupRef]) -> list[GroupPayload]:
    """The groups, with the reference and teacher logprobs of their tokens."""
    handles = [one for group in groups for one in (group.handle, group.reference, group.teacher) if one is not None]
    found = dict(zip(handles, ray.get(handles), strict=True))
    return [
        replace(
            found[group.handle],
            min_version=group.min_version,
            reference=found.get(group.reference),
            teacher=found.get(group.teacher),
        )
        for group in groups
    ]
