"""Swapping a published version into a live torch model, and proof that it arrived.

Two checks, at different times: `stage` compares the bytes that arrived with the manifest while the old weights still
serve, so a damaged version harms nothing; `swap` reads the live parameters back after copying, so an update that went
elsewhere (a copy, an untied head) cannot pass for one that worked. What is still on its way then is compared bucket by
bucket in `swap` (weights/streaming.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import WeightManifest
from penstock.weights.adapters import BaseWeights, entries_of
from penstock.weights.checksum import combine_checksums, entry_key, tensor_checksum
from penstock.weights.copies import copy_values
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.streaming import ON_THE_WAY, Incoming, Pieces
from penstock.weights.transport.crossing import Arrival
from penstock.weights.transport.device_memory import DeviceSlot
from penstock.weights.transport.shards import read_shard
from penstock.weights.transport.shared_memory import read_version

StagedTensors = dict[str, torch.Tensor]


class Sources(NamedTuple):
    """Where an engine gets versions from, beside the files of a node.

    Attributes:
        base: What adapters are added to.
        slot: In memory of its device, if it has one.
        arrival: Its end of a crossing, if it is one.
        bucket_bytes: Most that may be staged of a shard; None: all of it.
    """

    base: BaseWeights
    slot: DeviceSlot | None = None
    arrival: Arrival | None = None
    bucket_bytes: int | None = None


class OnTheWay:
    """A version that is received under the freeze."""

    def __init__(self, manifest: WeightManifest, arrival: Arrival) -> None:
        self._manifest = manifest
        self._arrival = arrival

    def apply(self, live: Mapping[str, torch.Tensor]) -> None:
        """See `Incoming`."""
        self._arrival.stream(self._manifest.version, self._manifest.bucket_sums, live)


def stage(
    model: nn.Module, manifest: WeightManifest, engine_id: EngineId, sources: Sources
) -> tuple[StagedTensors | Incoming, WeightManifest]:
    """Read a version and check names, shapes and bytes. The model is not touched.

    Returns:
        HF name -> tensor in the wire dtype, in its slot or on the CPU, or what streams into the parameters; and what
        these must be afterwards.

    Raises:
        WeightSyncError: If a tensor is unknown, absent, of another shape, or not the bytes of the manifest.
    """
    where = f"publish v{manifest.version} on {engine_id}"
    live = _parameters(model)
    if manifest.adapters is not None:
        merged = sources.base.merge(manifest, live, torch.device("cpu"))
        entries = entries_of(manifest, 0, merged)
        checksum = combine_checksums((entry_key(entry.rank, entry.name), entry.checksum) for entry in entries)
        sums = replace(manifest, entries=entries, checksum=checksum)
        return {name: values.view(live[name].shape) for name, values in merged.items()}, sums
    _check_entries(live, manifest, where)
    names = {entry.name for entry in manifest.entries}
    unknown = sorted(names - live.keys())
    if unknown:
        raise WeightSyncError(f"{where}: the policy has no parameter {unknown[0]} ({len(unknown)} such). Other model?")
    covered = {id(live[name]) for name in names}
    absent = [name for name, parameter in live.items() if id(parameter) not in covered]
    if absent:
        raise WeightSyncError(
            f"{where}: {len(absent)} of {len(live)} parameters are not in the manifest, first {absent[0]}. "
            "They would keep old weights. Publish whole versions."
        )
    if manifest.location == ON_THE_WAY:
        if sources.arrival is None:
            raise WeightSyncError(f"{where}: it is streamed, and this engine has joined no crossing.")
        return OnTheWay(manifest, sources.arrival), manifest
    staged = dict(read_shard(manifest, 0, sources.slot) if manifest.num_shards else read_version(manifest))
    if sources.bucket_bytes is not None and manifest.num_shards:
        device = next(iter(live.values())).device
        return Pieces(staged, manifest.entries, manifest.version, sources.bucket_bytes, device), manifest
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
def swap(model: nn.Module, staged: StagedTensors | Incoming, manifest: WeightManifest, engine_id: EngineId) -> int:
    """Copy staged tensors into the live parameters, or let a version stream into them, and read them back.

    Returns:
        The combined checksum of the live parameters.

    Raises:
        WeightSyncError: If a live parameter differs from the manifest, or a bucket is damaged or does not come. The
            model then holds weights of no version.
    """
    live = _parameters(model)
    if isinstance(staged, dict):
        for name, tensor in staged.items():
            copy_values(live[name], tensor)
    else:
        staged.apply({entry.name: live[entry.name].view(-1) for entry in manifest.entries})
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
