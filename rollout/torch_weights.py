"""Swapping a published version into a live torch model, and proof that it arrived.

Two checks, at different times: `stage` compares the bytes that arrived with the manifest while the old weights still
serve, so a damaged version harms nothing; `swap` reads the live parameters back after copying, so an update that went
elsewhere (a copy, an untied head) cannot pass for one that worked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import nn

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import WeightManifest
from penstock.weights.adapters import BaseWeights, entries_of
from penstock.weights.checksum import combine_checksums, entry_key, tensor_checksum
from penstock.weights.copies import copy_values
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.transport.device_memory import DeviceSlot
from penstock.weights.transport.shards import read_shard
from penstock.weights.transport.shared_memory import read_version

StagedTensors = dict[str, torch.Tensor]


def stage(
    model: nn.Module, manifest: WeightManifest, engine_id: EngineId, base: BaseWeights, slot: DeviceSlot | None
) -> tuple[StagedTensors, WeightManifest]:
    """Read a version and check names, shapes and bytes. The model is not touched.

    Returns:
        HF name -> tensor in the wire dtype, in its slot or on the CPU; and what the live parameters must be once those
        are in them.

    Raises:
        WeightSyncError: If a tensor is unknown, absent, of another shape, or not the bytes of the manifest.
    """
    where = f"publish v{manifest.version} on {engine_id}"
    live = _parameters(model)
    if manifest.adapters is not None:
        merged = base.merge(manifest, live, torch.device("cpu"))
        entries = entries_of(manifest, 0, merged)
        checksum = combine_checksums((entry_key(entry.rank, entry.name), entry.checksum) for entry in entries)
        sums = replace(manifest, entries=entries, checksum=checksum)
        return {name: values.view(live[name].shape) for name, values in merged.items()}, sums
    _check_entries(live, manifest, where)
    staged = dict(read_shard(manifest, 0, slot) if manifest.num_shards else read_version(manifest))
    unknown = sorted(staged.keys() - live.keys())
    if unknown:
        raise WeightSyncError(f"{where}: the policy has no parameter {unknown[0]} ({len(unknown)} such). Other model?")
    covered = {id(live[name]) for name in staged}
    absent = [name for name, parameter in live.items() if id(parameter) not in covered]
    if absent:
        raise WeightSyncError(
            f"{where}: {len(absent)} of {len(live)} parameters are not in the manifest, first {absent[0]}. "
            "They would keep old weights. Publish whole versions."
        )
    for name, tensor in staged.items():
        staged[name] = tensor.view(live[name].shape)
    _compare(staged, manifest, f"{where}: what arrived of")
    return staged, manifest


def _check_entries(live: Mapping[str, nn.Parameter], manifest: WeightManifest, where: str) -> None:
    """Compare what is announced with what the model has, before a byte of it is read."""
    for entry in manifest.entries:
        if entry.name not in live:
            continue  # all of those are named together
        shape, dtype = live[entry.name].shape, live[entry.name].dtype
        if prod(entry.shape) != shape.numel() or (not manifest.num_shards and entry.shape != tuple(shape)):
            raise WeightSyncError(
                f"{where}: {entry.name} has shape {entry.shape}, not {tuple(shape)}. Another model is published."
            )
        if TORCH_DTYPES[entry.dtype] != dtype:
            raise WeightSyncError(
                f"{where}: {entry.name} is published in {entry.dtype}, and the engine has it in {dtype}: the trainer "
                "and the engines have another model.dtype."
            )


@torch.no_grad()
def swap(model: nn.Module, staged: StagedTensors, manifest: WeightManifest, engine_id: EngineId) -> int:
    """Copy staged tensors into the live parameters and read them back.

    Returns:
        The combined checksum of the live parameters.

    Raises:
        WeightSyncError: If a live parameter differs from the manifest. The model then holds weights of no version.
    """
    live = _parameters(model)
    for name, tensor in staged.items():
        copy_values(live[name], tensor)
    return _compare(live, manifest, f"publish v{manifest.version} on {engine_id}: live")


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every name of every parameter: a tied `lm_head.weight` is there beside the embedding it shares."""
    return dict(model.named_parameters(remove_duplicate=False))


def _compare(tensors: StagedTensors | dict[str, nn.Parameter], manifest: WeightManifest, what: str) -> int:
    """Compare each tensor's bytes, in the wire dtype, with the manifest; return the combined checksum."""
    found: list[tuple[str, int]] = []
    for entry in manifest.entries:
        checksum = tensor_checksum(tensors[entry.name].detach().to(TORCH_DTYPES[entry.dtype]))
        if checksum != entry.checksum:
            raise WeightSyncError(
                f"{what} {entry.name} checksum differs ({checksum:x} != {entry.checksum:x} in the manifest)."
            )
        found.append((entry_key(entry.rank, entry.name), checksum))
    combined = combine_checksums(found)
    if combined != manifest.checksum:
        raise WeightSyncError(f"{what} all tensors: combined checksum differs ({combined:x} != {manifest.checksum:x}).")
    return combined
