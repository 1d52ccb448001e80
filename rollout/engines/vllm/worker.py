"""What Penstock adds inside every vLLM worker process; vLLM imports it through `worker_extension_cls`.

Importing this module registers Penstock's weight-transfer engine at vLLM's plug-in point, before the worker builds it.
On CPU it also replaces what vLLM's CPU build computes otherwise than an update needs (cpu_build.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.kernels.portable.products import use_onednn
from penstock.rollout.engines.vllm.channel import Address, serve
from penstock.rollout.engines.vllm.cpu_build import keep_parameters_live
from penstock.rollout.engines.vllm.layout import check_is_tied, check_live, form_of, trace_rank
from penstock.rollout.engines.vllm.live import LiveTensors
from penstock.rollout.engines.vllm.routes import StepRoutes, layers_with_experts
from penstock.weights.checksum import tensor_checksum
from penstock.weights.copies import copy_values
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.layout.algebra import TensorSpec
from penstock.weights.layout.checkpoint_names import checkpoint_tensors
from penstock.weights.model_config import DType
from penstock.weights.transport.adapters import BaseWeights
from penstock.weights.transport.device_memory import VersionBuffer, version_buffer_for
from penstock.weights.transport.in_place import IN_PLACE, ShardChunks
from penstock.weights.transport.process_group.endpoints import DeviceReceiver, TransferGroupSpec
from penstock.weights.transport.shards import forget_mappings
from penstock.weights.transport.shared_memory import read_version
from penstock.weights.transport.staging import Staged, stage

BACKEND = "penstock_shared_memory"


@dataclass(eq=False)
class PendingUpdate:
    """A version that this worker is about to apply."""

    manifest: WeightManifest
    staged: Staged | None = None
    """The fetched version."""
    broken: str = ""
    """Why it was applied only in part; empty if it was not."""


@dataclass(eq=False)
class ModelState:
    """State of this worker's model between calls."""

    base: BaseWeights
    """The weights the model was loaded with, for versions of adapters."""
    device_receiver: DeviceReceiver
    """Receives versions from other processes."""
    has_joined: bool = False
    """It has started to join a transfer group."""
    version_buffer: VersionBuffer | None = None
    """Holds a version in device memory, if versions are written or received there."""
    update: PendingUpdate | None = None
    """The newest one."""


_states: WeakKeyDictionary[torch.nn.Module, ModelState] = WeakKeyDictionary()
"""vLLM creates our transfer engine and our worker extension separately; they share only the model."""


if current_platform.is_cpu():
    use_onednn()
    keep_parameters_live()


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Empty, since nothing is connected: the manifest of each update has the location of the bytes."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """The version that `penstock_stage` was called with."""

    version: int


class SharedMemoryTransfer(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Applies a published version. Shards in the engine's layout are copied parameter by parameter; whole tensors go
    through the model's own loaders, which fuse, slice and pad.
    """

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        update = _states[self.model].update
        assert update is not None, "penstock_stage comes first"
        assert update.manifest.version == update_info.version, f"{update.manifest.version} was staged"
        if update.manifest.location == IN_PLACE:
            return  # it was received into the parameters (penstock_receive_in_place)
        assert update.staged is not None, "penstock_stage comes first"
        values = update.staged.values
        if isinstance(values, ShardChunks):
            try:
                values.apply(flat_parameters(self.model))
            except WeightSyncError as error:  # raising here would leave answers of other workers unread
                update.broken = str(error)
        elif update.manifest.num_shards:
            with torch.no_grad():
                live = flat_parameters(self.model)
                for name, shard in values.items():
                    copy_values(live[name], shard)
        else:
            given = checkpoint_tensors(self.vllm_config.model_config.hf_config, values)
            self.model.load_weights(iter(given.items()))
        update.staged = None

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)


def update_refusal(model: torch.nn.Module, manifest: WeightManifest, rank: int) -> str:
    """Why a version cannot be applied to the live parameters; empty if it can."""
    live = {name: (parameter.numel(), parameter.dtype) for name, parameter in model.named_parameters()}
    if not manifest.num_shards:
        return LiveTensors(model, manifest).refusal()
    mine = [entry for entry in manifest.entries if entry.rank == rank]
    planned = {entry.name: (entry.shape[0], TORCH_DTYPES[entry.dtype]) for entry in mine}
    may_widen = manifest.location != IN_PLACE and len({dtype for _, dtype in planned.values()}) == 1
    for name in sorted(live.keys() | planned.keys()):
        if not _fits(live.get(name), planned.get(name), may_widen=may_widen):
            return (
                f"{name} is {_describe(live.get(name))} in rank {rank} of this engine and "
                f"{_describe(planned.get(name))} in the plan: vLLM's layout of this model differs from the traced one. "
                "Set weights.transport=gather."
            )
    return ""


def _fits(live: tuple[int, torch.dtype] | None, sent: tuple[int, torch.dtype] | None, *, may_widen: bool) -> bool:
    """Whether a parameter can hold what is sent. Recurrent layers have some parameters in float32, which holds every
    bfloat16 exactly; what is received in place is not cast.
    """
    if live is None or sent is None or live == sent or not may_widen:
        return live == sent
    return live[0] == sent[0] and torch.promote_types(live[1], sent[1]) == live[1]


def _describe(held: tuple[int, torch.dtype] | None) -> str:
    return "absent" if held is None else f"{held[0]} elements of {held[1]}"


def flat_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name -> live parameter, flat."""
    return {name: parameter.detach().view(-1) for name, parameter in model.named_parameters()}


class WorkerExtension:
    """Mixed into vLLM's worker; its methods are called through `collective_rpc`, between steps of the engine, except
    those of `penstock_serve`, which are called during steps, in a thread.
    """

    model_runner: Any
    device: torch.device

    def penstock_serve(self) -> tuple[int, Address]:
        """Take calls that do not wait for the engine's step; returns this worker's rank and where it listens."""
        self.penstock_state  # noqa: B018 - made here, before there are two threads
        calls = (self.penstock_join, self.penstock_receive, self.penstock_receive_in_place, self.penstock_stage)
        return get_tensor_model_parallel_rank(), serve({one.__name__: one for one in calls})

    def penstock_record_routes(self) -> list[int]:
        """Record which experts tokens go to, on a CPU (a GPU's runner does it); returns the layers with experts.

        All ranks choose alike, and the engine reads the output of the first.
        """
        layers = list(layers_with_experts(self.model_runner.get_model()))
        if layers and current_platform.is_cpu():
            StepRoutes(self.model_runner)
        return layers

    def penstock_layout(self, tensors: Sequence[tuple[str, Sequence[int]]], dtype: DType) -> tuple[int, str, bytes]:
        """This worker's rank, why its layout is not known, and where it holds each tensor (pickled `RankLayout`)."""
        rank = get_tensor_model_parallel_rank()
        specs = [TensorSpec(name, tuple(shape)) for name, shape in tensors]
        vllm_config = self.model_runner.vllm_config
        live = form_of(dict(self.model_runner.get_model().named_parameters()))
        try:
            traced = trace_rank(vllm_config, specs, dtype, rank)
            check_is_tied(vllm_config.model_config, traced.form, live)
            check_live(traced.form, live, rank)
        except WeightSyncError as refusal:
            return rank, str(refusal), b""
        return rank, "", pickle.dumps(traced)

    @property
    def penstock_state(self) -> ModelState:
        """State of this worker's model."""
        model = self.model_runner.get_model()
        if model not in _states:
            rank = get_tensor_model_parallel_rank()
            receiver = DeviceReceiver(rank, self.device)
            _states[model] = ModelState(BaseWeights(rank), receiver)
        return _states[model]

    def penstock_make_version_buffer(
        self, buffers: Sequence[Mapping[str, int]], dtype: DType, num_writers: int
    ) -> tuple[int, str, list[tuple[str, bytes, int]]]:
        """Allocate a version buffer on this worker's device; returns its rank, why it cannot, or a handle per writer.

        vLLM's sleep does not free it: that frees only weights and KV cache, which are in memory pools.
        """
        state, rank = self.penstock_state, get_tensor_model_parallel_rank()
        try:
            buffer = version_buffer_for(state.version_buffer, buffers[rank], TORCH_DTYPES[dtype], self.device)
        except WeightSyncError as refusal:
            return rank, str(refusal), []
        state.version_buffer = buffer
        handles = buffer.handles(num_writers)
        return rank, "", [(handle.device, handle.rebuild, handle.checksum) for handle in handles]

    def penstock_join(self, group_spec: TransferGroupSpec, replica: int) -> None:
        """Join a transfer group."""
        state = self.penstock_state
        state.has_joined = True
        known = state.version_buffer
        state.version_buffer = state.device_receiver.join(group_spec, replica, known) or known

    def penstock_receive(self, version: int) -> None:
        """Receive a version."""
        self.penstock_state.device_receiver.receive(version)

    def penstock_receive_in_place(self) -> None:
        """Receive the version of `penstock_stage` into the live parameters; generation is paused."""
        state = self.penstock_state
        assert state.update is not None, "penstock_stage comes first"
        manifest, live = state.update.manifest, flat_parameters(self.model_runner.get_model())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels on another stream may still read them
        state.device_receiver.receive_in_place(manifest.version, manifest.bucket_sums, live)

    def penstock_stage(self, manifest: WeightManifest, bucket_bytes: int | None) -> tuple[TensorEntry, ...]:
        """Fetch and verify this worker's shard of a version; returns the expected parameters.

        Args:
            manifest: Of the version.
            bucket_bytes: As in `stage`.

        Raises:
            WeightSyncError: If this worker cannot take it, or received other bytes than were sent.
        """
        state, model, rank = self.penstock_state, self.model_runner.get_model(), get_tensor_model_parallel_rank()
        update = state.update = PendingUpdate(manifest)
        if wrong := update_refusal(model, manifest, rank):
            raise WeightSyncError(wrong)
        if manifest.location == IN_PLACE:
            if not state.has_joined:
                raise WeightSyncError(f"it is sent in place, but rank {rank} has joined no transfer group.")
            return ()
        # A second model would not fit on the device: the loader copies whole tensors one by one, and adapters are
        # merged in main memory if no more than a bucket may be staged.
        in_main_memory = not manifest.num_shards or (manifest.adapters is not None and bucket_bytes is not None)
        device = torch.device("cpu") if in_main_memory else self.device
        live, buffer = dict(model.named_parameters()), state.version_buffer
        update.staged = stage(manifest, rank, device, state.base, live, buffer, bucket_bytes)
        return update.staged.entries

    def penstock_forget_versions(self) -> None:
        """Free what was kept of the versions of a trainer that is gone."""
        forget_mappings()

    def penstock_live_checksums(self) -> tuple[bytes, str]:
        """Read live parameters back: pickled (rank, name) -> checksum of this worker's entries, and an error or ""."""
        update, rank = self.penstock_state.update, get_tensor_model_parallel_rank()
        assert update is not None, "penstock_stage comes first"
        manifest, model, wrong = update.manifest, self.model_runner.get_model(), update.broken
        if wrong:
            found = {}
        elif manifest.num_shards:
            live = dict(model.named_parameters())
            mine = [(one.name, TORCH_DTYPES[one.dtype]) for one in manifest.entries if one.rank == rank]
            found = {name: tensor_checksum(live[name].detach().to(dtype)) for name, dtype in mine}
        else:
            loaded = LiveTensors(model, manifest)
            unplaced = {entry.name for entry in loaded.unplaced}
            found, wrong = loaded.checksums({name: one for name, one in read_version(manifest) if name in unplaced})
        return pickle.dumps({(rank, name): checksum for name, checksum in found.items()}), wrong
