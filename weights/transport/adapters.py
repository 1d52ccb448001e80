"""Versions as adapters: engines keep the weights they were loaded with, the base, and add received adapters to them.

    live = base + B·A, in float32, rounded once to the parameter's dtype

Every version is computed from the base: nothing is subtracted, so nothing drifts, and a missed version does no harm.
B includes the scale (alpha / rank). A tensor-parallel rank multiplies only its rows of B and its columns of A.

Checksums verify the result in three steps: the base against the trainer's base weights, the adapters against the
manifest, and the live parameters, read back, against the sums computed here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from penstock.dataflow.errors import WeightSyncError
from penstock.dataflow.ports import AdaptedBox, AdapterManifest, TensorEntry, WeightManifest
from penstock.weights.checksum import check_received, combine_checksums, entry_key, tensor_checksum
from penstock.weights.dtypes import TORCH_DTYPES
from penstock.weights.layout.algebra import Box, Layout, View, strided_box
from penstock.weights.transport.shared_memory import read_version

_DOWN, _UP = ".lora_A", ".lora_B"


def adapter_tensors(name: str, down: torch.Tensor, up: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The published tensors of one adapted weight: A `[rank, in]`, and B `[out, rank]` with its scale, by name; of a
    weight of experts those of every expert.
    """
    if down.dim() == 3:
        of_experts = zip(down, up, strict=True)
        return [one for index, (a, b) in enumerate(of_experts) for one in adapter_tensors(f"{name}[{index}]", a, b)]
    return [(f"{name}{_DOWN}", down), (f"{name}{_UP}", up)]


def adapter_manifest(
    sent: WeightManifest, base: tuple[TensorEntry, ...], layout: Layout, num_shards: int
) -> WeightManifest:
    """The manifest of a version of adapters.

    Args:
        sent: Manifest of the file with the adapters.
        base: The engines' parameters, with the checksums of the trainer's weights without adapters.
        layout: Where the engines hold the weights.
        num_shards: Tensor-parallel ranks of an engine.
    """
    names = [entry.name.removesuffix(_UP) for entry in sent.entries if entry.name.endswith(_UP)]
    boxes = tuple(box for name in names for box in _boxes(name, layout))
    checksum = combine_checksums((entry_key(one.rank, one.name), one.checksum) for one in (*base, *sent.entries))
    adapters = AdapterManifest(sent.entries, boxes)
    return replace(sent, entries=base, checksum=checksum, num_shards=num_shards, adapters=adapters)


def _boxes(name: str, layout: Layout) -> Iterator[AdaptedBox]:
    """Where the engines hold a weight, or the matrix of one expert: `NAME[EXPERT]`."""
    weight, _, index = name.removesuffix("]").partition("[")
    for rank, box, view in layout.shards[weight]:
        *experts, rows, columns = box
        inner: Box = (rows, columns)
        if experts:
            (start, stop), expert = experts[0], int(index)
            if not start <= expert < stop:
                continue
            inner = ((expert, expert + 1), rows, columns)
        found = view.at(box, inner)
        yield AdaptedBox(rank, name, rows, columns, found.buffer, found.offset, (found.strides[-2], found.strides[-1]))


class BaseWeights:
    """The weights that one engine rank was loaded with, of the parameters that have adapters; a copy in main memory."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def merge(
        self, manifest: WeightManifest, live: Mapping[str, torch.Tensor], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Compute a version.

        Args:
            manifest: With adapters.
            live: Parameters by name; before the first version they are the base. Not changed.
            device: Device of the computation and of the results.

        Returns:
            Flat values of every parameter that has an adapter.

        Raises:
            WeightSyncError: If the engine was loaded with other weights than the trainer, or the adapters are damaged.
        """
        assert manifest.adapters is not None, "a version without adapters needs no base"
        boxes: dict[str, list[AdaptedBox]] = defaultdict(list)
        for box in manifest.adapters.boxes:
            if box.rank == self._rank:
                boxes[box.parameter].append(box)
        if not self._kept:
            self._check_base(manifest, live)
            self._kept = {name: live[name].detach().to("cpu", copy=True).view(-1) for name in boxes}
        sent = manifest.adapters.entries
        adapters = dict(read_version(replace(manifest, entries=sent)))
        check_received(adapters, sent, manifest.version)
        return {name: _sum(self._kept[name], boxes[name], adapters, device) for name in boxes}

    def _check_base(self, manifest: WeightManifest, live: Mapping[str, torch.Tensor]) -> None:
        for entry in manifest.entries:
            if entry.rank != self._rank:
                continue
            if tensor_checksum(live[entry.name].detach().to(TORCH_DTYPES[entry.dtype])) != entry.checksum:
                raise WeightSyncError(
                    f"publish v{manifest.version}: {entry.name} of rank {self._rank} was loaded with other values than "
                    "the trainer's base weights, so the adapters do not apply to it. Start trainer and engines from "
                    "the same model.path and model.dtype, or use weights.transport=gather."
                )


def entries_of(manifest: WeightManifest, rank: int, merged: Mapping[str, torch.Tensor]) -> tuple[TensorEntry, ...]:
    """Expected entries of a rank's live parameters after `merged` is applied."""
    return tuple(
        replace(entry, checksum=tensor_checksum(merged[entry.name])) if entry.name in merged else entry
        for entry in manifest.entries
        if entry.rank == rank
    )


def _sum(
    base: torch.Tensor, boxes: list[AdaptedBox], adapters: Mapping[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    """`base + B·A` of one parameter, flat."""
    total = base.to(device, torch.float32, copy=True)
    for box in boxes:
        up = adapters[f"{box.tensor}{_UP}"][slice(*box.rows)].to(device)
        down = adapters[f"{box.tensor}{_DOWN}"][:, slice(*box.columns)].to(device)
        shape = (up.shape[0], down.shape[1])
        strided_box(total, shape, View(box.parameter, box.offset, box.strides)).add_(up @ down)
    return total.to(base.dtype)
