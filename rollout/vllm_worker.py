"""What Penstock adds inside every vLLM worker process; vLLM imports it through `worker_extension_cls`.

Importing this module registers our weight-transfer engine at vLLM's own plug-in point, before the
worker builds it. On CPU it also keeps Linear weights as live parameters: the CPU build packs them
away after loading, and a later reload would silently leave a tied lm_head with the old weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import vllm.model_executor.layers.utils as linear_dispatch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.platforms import current_platform

from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.weights.checksum import tensor_checksum
from penstock.weights.transport.shared_memory import read_version

BACKEND = "penstock_shared_memory"


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
    entries: list[tuple[str, str, list[int], str]]


class SharedMemoryTransfer(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Maps the published file and loads HF-named tensors through the model's own (fusing, padding) loaders."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        manifest = WeightManifest(update_info.version, update_info.location, decode(update_info.entries), 0, 0)
        self.model.load_weights(read_version(manifest, self.device))

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)


def encode(entries: Sequence[TensorEntry]) -> list[tuple[str, str, list[int], str]]:
    """Entries in types that survive vLLM's message packing; checksums as hex, since they use all 64 bits."""
    return [(entry.name, entry.dtype, list(entry.shape), f"{entry.checksum:x}") for entry in entries]


def decode(rows: Sequence[Any]) -> tuple[TensorEntry, ...]:
    """Inverse of `encode`."""
    return tuple(TensorEntry(name, dtype, tuple(shape), int(checksum, 16)) for name, dtype, shape, checksum in rows)


class WorkerExtension:
    """Mixed into vLLM's worker; its methods are reachable through `collective_rpc`."""

    model_runner: Any

    def penstock_live_checksums(self, rows: Sequence[Any]) -> list[tuple[str, str]]:
        """Read every live parameter back and return (HF name, checksum in hex) for the manifest's entries."""
        model = self.model_runner.get_model()
        entries = decode(rows)
        live = LiveTensors(model, entries)
        return [(entry.name, f"{tensor_checksum(live.find(entry)):x}") for entry in entries]


class LiveTensors:
    """Finds the slice of a live vLLM parameter that holds an HF-named tensor (one tensor-parallel rank).

    vLLM fuses q/k/v and gate/up by stacking rows in the order of the model's `packed_modules_mapping`,
    pads the vocabulary with rows at the end, and shares tied embeddings.
    """

    def __init__(self, model: torch.nn.Module, entries: Sequence[TensorEntry]) -> None:
        self._parameters = dict(model.named_parameters())
        self._rows = {entry.name: entry.shape[0] for entry in entries}
        packed = cast("Mapping[str, Sequence[str]]", model.packed_modules_mapping)
        self._fused = {part: (fused, parts) for fused, parts in packed.items() for part in parts}

    def find(self, entry: TensorEntry) -> torch.Tensor:
        """The live tensor, in the shape of `entry`.

        Raises:
            KeyError: If the model has no such parameter, fused or not.
        """
        if entry.name in self._parameters:
            return self._parameters[entry.name][: entry.shape[0]]
        if entry.name == "lm_head.weight":
            return self._parameters["model.embed_tokens.weight"][: entry.shape[0]]
        owner, part, leaf = entry.name.rsplit(".", 2)
        fused, parts = self._fused[part]
        before = parts[: list(parts).index(part)]
        start = sum(self._rows[f"{owner}.{other}.{leaf}"] for other in before)
        return self._parameters[f"{owner}.{fused}.{leaf}"][start : start + entry.shape[0]]
