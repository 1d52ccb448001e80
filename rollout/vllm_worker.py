"""What Penstock adds inside every vLLM worker process; vLLM imports it through `worker_extension_cls`.

Importing this module registers our weight-transfer engine at vLLM's own plug-in point, before the
worker builds it. On CPU it also keeps Linear weights as live parameters: the CPU build packs them
away after loading, and a later reload would silently leave a tied lm_head with the old weights.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import vllm.model_executor.layers.utils as linear_dispatch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import AdaptedBox, AdapterManifest, BucketSum, TensorEntry, WeightManifest
from penstock.rollout.vllm_layout import check_live, form_of, trace_rank
from penstock.rollout.vllm_live import LiveTensors
from penstock.weights.adapters import BaseWeights
from penstock.weights.copies import copy_values
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.model_config import DType
from penstock.weights.staging import Staging
from penstock.weights.streaming import ON_THE_WAY, Pieces
from penstock.weights.transport.crossing import Arrival, Beside, Crossing
from penstock.weights.transport.device_memory import DeviceSlot, slot_for
from penstock.weights.transport.shared_memory import read_version

BACKEND = "penstock_shared_memory"
EntryRow = tuple[str, str, list[int], str, int]

_staging: dict[int, Staging] = {}
"""The version that this worker is about to take."""
_base: WeakKeyDictionary[torch.nn.Module, BaseWeights] = WeakKeyDictionary()
"""What a model was loaded with, where versions come as adapters."""
_slot: WeakKeyDictionary[torch.nn.Module, DeviceSlot] = WeakKeyDictionary()
"""Where a model's versions are written, or arrive, if that is in device memory."""
_broken: dict[int, str] = {}
"""Why a version has come into this worker's parameters in part only."""
_arrival: WeakKeyDictionary[torch.nn.Module, tuple[Arrival, Beside]] = WeakKeyDictionary()
"""Where they arrive from other nodes, and what runs for that."""


def _keep_live_parameter(layer: torch.nn.Module, remove_weight: bool) -> None:  # noqa: ARG001, FBT001 - vLLM's signature
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]  # what vLLM's own dispatch does


if current_platform.is_cpu():
    linear_dispatch.dispatch_cpu_unquantized_gemm = _keep_live_parameter


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Nothing to connect: the manifest of each update says where the bytes are."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """One whole version."""

    version: int
    location: str
    entries: list[EntryRow]
    num_shards: int
    adapter_entries: list[EntryRow] = field(default_factory=list)
    adapter_boxes: list[Any] = field(default_factory=list)


class SharedMemoryTransfer(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Takes what was published. In the engine's layout it is copied parameter by parameter; whole tensors go through
    the model's own loaders, which fuse, slice and pad.
    """

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        manifest = decode(update_info)
        _broken.clear()
        if manifest.location == ON_THE_WAY:
            return  # it has arrived in the parameters themselves (penstock_stream)
        staged = _staging.pop(manifest.version).take()
        if isinstance(staged, Pieces):
            try:
                staged.apply(flat_parameters(self.model))
            except WeightSyncError as error:  # an error out of here would leave answers of other workers unread
                _broken[manifest.version] = str(error)
        elif manifest.num_shards:
            swap_shard(self.model, staged)
        else:
            self.model.load_weights(iter(staged.items()))

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)


def encode(manifest: WeightManifest) -> dict[str, Any]:
    """A manifest in types that survive vLLM's message packing; checksums as hex, since they use all 64 bits."""
    adapters = manifest.adapters
    return {
        "version": manifest.version,
        "location": manifest.location,
        "entries": _rows(manifest.entries),
        "num_shards": manifest.num_shards,
        "adapter_entries": _rows(adapters.entries) if adapters else [],
        "adapter_boxes": [tuple(box) for box in adapters.boxes] if adapters else [],
    }


def _rows(entries: Sequence[TensorEntry]) -> list[EntryRow]:
    return [(entry.name, entry.dtype, list(entry.shape), f"{entry.checksum:x}", entry.rank) for entry in entries]


def decode(update: SharedMemoryUpdate) -> WeightManifest:
    """Inverse of `encode`; sizes and checksums over all entries stay with the engine."""
    adapters = None
    if update.adapter_boxes:
        boxes = tuple(AdaptedBox(*row) for row in update.adapter_boxes)
        adapters = AdapterManifest(decode_entries(update.adapter_entries), boxes)
    return WeightManifest(
        update.version, update.location, decode_entries(update.entries), 0, 0, update.num_shards, adapters
    )


def decode_entries(rows: Sequence[EntryRow]) -> tuple[TensorEntry, ...]:
    """Inverse of `_rows`."""
    return tuple(
        TensorEntry(name, dtype, tuple(shape), int(checksum, 16), rank) for name, dtype, shape, checksum, rank in rows
    )


def what_is_wrong(model: torch.nn.Module, manifest: WeightManifest, rank: int) -> str:
    """Why a version cannot get into the live parameters; empty if it can."""
    live = {name: (parameter.numel(), parameter.dtype) for name, parameter in model.named_parameters()}
    if current_platform.is_cpu() and any(".routed_experts." in name for name in live):
        return (
            "vLLM's CPU build keeps a packed copy of expert weights, which an update would not reach, and the old "
            "experts would go on serving. Use rollout/engine=torch, or a GPU."
        )
    if not manifest.num_shards:
        return LiveTensors(model, manifest).refusal()
    mine = [entry for entry in manifest.entries if entry.rank == rank]
    planned = {entry.name: (entry.shape[0], TORCH_DTYPES[entry.dtype]) for entry in mine}
    for name in sorted(live.keys() | planned.keys()):
        if live.get(name) != planned.get(name):
            return (
                f"{name} is {_words(live.get(name))} in rank {rank} of this engine and {_words(planned.get(name))} in "
                "the plan: vLLM lays this model out otherwise than we know. Set weights.transport=gather."
            )
    return ""


def _words(held: tuple[int, torch.dtype] | None) -> str:
    return "absent" if held is None else f"{held[0]} elements of {held[1]}"


@torch.no_grad()
def swap_shard(model: torch.nn.Module, shard: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's shard into the live parameters."""
    live = flat_parameters(model)
    for name, values in shard.items():
        copy_values(live[name], values)


def flat_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name -> live parameter, flat."""
    return {name: parameter.detach().view(-1) for name, parameter in model.named_parameters()}


class WorkerExtension:
    """Mixed into vLLM's worker; its methods are reachable through `collective_rpc`."""

    model_runner: Any
    device: torch.device

    def penstock_layout(self, tensors: Sequence[tuple[str, Sequence[int]]], dtype: DType) -> tuple[int, str, bytes]:
        """This worker's rank, why its layout cannot be told, and where it holds each tensor (pickled `RankLayout`)."""
        rank = get_tensor_model_parallel_rank()
        specs = [TensorSpec(name, tuple(shape)) for name, shape in tensors]
        try:
            traced = trace_rank(self.model_runner.vllm_config, specs, dtype, rank)
            check_live(traced.form, form_of(dict(self.model_runner.get_model().named_parameters())), rank)
        except WeightSyncError as refusal:
            return rank, str(refusal), b""
        return rank, "", pickle.dumps(traced)

    def penstock_make_slot(
        self, buffers: Sequence[Mapping[str, int]], dtype: DType, num_writers: int
    ) -> tuple[int, str, list[tuple[str, bytes, int]]]:
        """Take memory of this worker's device for versions; its rank, why it cannot, or a handle for each writer.

        It is none of the memory that vLLM gives back when it sleeps: that is what is loaded and cached, in a pool.
        """
        model, rank = self.model_runner.get_model(), get_tensor_model_parallel_rank()
        try:
            _slot[model] = slot_for(_slot.get(model), buffers[rank], TORCH_DTYPES[dtype], self.device)
        except WeightSyncError as refusal:
            return rank, str(refusal), []
        handles = _slot[model].handles(num_writers)
        return rank, "", [(handle.device, handle.rebuild, handle.checksum) for handle in handles]

    def penstock_join(self, crossing: bytes, replica: int) -> None:
        """Begin to meet everyone of a crossing (pickled), beside decoding."""
        model, rank = self.model_runner.get_model(), get_tensor_model_parallel_rank()
        if model not in _arrival:
            _arrival[model] = Arrival(rank, self.device), Beside()
        arrival, beside = _arrival[model]

        def join() -> None:
            met: Crossing = pickle.loads(crossing)  # noqa: S301 - from the driver of this run
            slot = arrival.join(met, replica, _slot.get(model))
            if slot is not None:
                _slot[model] = slot

        beside.begin(f"rank {rank} joins", join)

    def penstock_receive(self, version: int) -> None:
        """Begin to receive a version, beside decoding."""
        arrival, beside = _arrival[self.model_runner.get_model()]
        beside.begin(f"receive v{version}", partial(arrival.receive, version))

    def penstock_stream(self, version: int, sums: Sequence[tuple[int, int, str, str]]) -> None:
        """Begin to receive a version into the live parameters; generation is paused."""
        model = self.model_runner.get_model()
        arrival, beside = _arrival[model]
        expected = [BucketSum(bucket, rank, buffer, int(checksum, 16)) for bucket, rank, buffer, checksum in sums]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what still reads them was started on another stream
        beside.begin(f"stream v{version}", partial(arrival.stream, version, expected, flat_parameters(model)))

    def penstock_beside(self) -> tuple[bool, str]:
        """Whether that has ended, and why it failed, if it has."""
        _, beside = _arrival[self.model_runner.get_model()]
        return beside.is_done, beside.error()

    def penstock_stage(self, update: Mapping[str, Any], bucket_bytes: int | None) -> str:
        """Begin to fetch and check this worker's shard of a version, beside decoding; says why it cannot."""
        manifest, rank = decode(SharedMemoryUpdate(**update)), get_tensor_model_parallel_rank()
        _staging.clear()  # one that was given up
        model = self.model_runner.get_model()
        wrong = what_is_wrong(model, manifest, rank)
        if not wrong and manifest.location == ON_THE_WAY:
            return "" if model in _arrival else f"it is streamed, and rank {rank} has joined no crossing."
        if not wrong:
            # A second model would not fit on the device: the loader copies whole tensors one by one, and adapters are
            # added up elsewhere where no more than a bucket may be staged.
            in_main_memory = not manifest.num_shards or (manifest.adapters is not None and bucket_bytes is not None)
            device = torch.device("cpu") if in_main_memory else self.device
            base = _base.setdefault(model, BaseWeights(rank))
            live = dict(model.named_parameters())
            slot = _slot.get(model)
            _staging[manifest.version] = Staging(manifest, rank, device, base, live, slot, bucket_bytes)
        return wrong

    def penstock_staged(self, version: int) -> tuple[bool, str, list[EntryRow]]:
        """Whether that has ended, what is wrong with the version, if anything, and what its parameters must be."""
        staging = _staging[version]
        if not staging.is_done:
            return False, "", []
        return True, staging.error(), _rows(staging.entries)

    def penstock_live_checksums(self, update: Mapping[str, Any]) -> tuple[list[tuple[int, str, str]], str]:
        """Read live parameters back: (rank, name, checksum in hex) of this worker's entries, and what is wrong."""
        manifest, rank = decode(SharedMemoryUpdate(**update)), get_tensor_model_parallel_rank()
        if manifest.version in _broken:
            return [], _broken[manifest.version]
        mine = replace(manifest, entries=tuple(entry for entry in manifest.entries if entry.rank == rank))
        live = LiveTensors(self.model_runner.get_model(), mine)
        unplaced = {entry.name for entry in live.unplaced}
        sent = {name: tensor for name, tensor in read_version(manifest) if name in unplaced} if unplaced else {}
        found, wrong = live.checksums(sent)
        return [(rank, name, f"{checksum:x}") for name, checksum in found.items()], wrong
