"""Where a live vLLM model holds what was published, and proof that it holds it.

Whole tensors (`weights=gather`) go through the model's own loader, which may fuse, stack, rename, transpose and
pad. A tensor whose place is known is compared by itself, with its position-sensitive checksum. Of all others together
the loader keeps the elements, wherever it puts them: so two sums over words, Σ w and Σ w², which no order changes, must
be those of the parameters that no known tensor accounts for. That proves content; their places are the loader's word,
and `weights.probe_every` compares what both sides compute with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.weights.checksum import tensor_checksum, unordered_sums
from penstock.weights.dtypes import TORCH_DTYPES


class LiveTensors:
    """Finds what a live vLLM model holds of a version.

    vLLM fuses q/k/v and gate/up by stacking rows in the order of the model's `packed_modules_mapping`,
    pads the vocabulary with rows at the end, and shares tied embeddings.

    Attributes:
        unplaced: Entries whose place in the model is not known.
        unaccounted: Parameters that hold none of the others.
    """

    def __init__(self, model: torch.nn.Module, manifest: WeightManifest) -> None:
        self._parameters = dict(model.named_parameters())
        self._rows = {entry.name: entry.shape[0] for entry in manifest.entries if entry.shape}
        packed = cast("Mapping[str, Sequence[str]]", getattr(model, "packed_modules_mapping", {}))
        self._fused = {part: (fused, parts) for fused, parts in packed.items() for part in parts}
        places = {entry.name: self._place(entry) for entry in manifest.entries}
        self._places = {name: place for name, place in places.items() if place is not None}
        self._placed = [entry for entry in manifest.entries if entry.name in self._places]
        self.unplaced = [entry for entry in manifest.entries if entry.name not in self._places]
        placed = {parameter for parameter, _, _ in self._places.values()}
        self.unaccounted = {name: value for name, value in self._parameters.items() if name not in placed}

    def refusal(self) -> str:
        """Why the model cannot hold a version of whole tensors; empty if it can."""
        wire = {TORCH_DTYPES[entry.dtype] for entry in self.unplaced}
        for name, parameter in self.unaccounted.items():
            if not self.unplaced:
                return f"parameter {name} of this engine is not in the version and would keep old weights. Other model?"
            if parameter.dtype not in wire:
                return _not_this_way(self.unplaced[0], f"{name} is {parameter.dtype} in the engine, sent is {wire}")
        needed = sum(torch.Size(entry.shape).numel() for entry in self.unplaced)
        room = sum(parameter.numel() for parameter in self.unaccounted.values())
        if needed > room:
            what = f"{len(self.unplaced)} such tensors have {needed} elements, this engine has room for {room}"
            return _not_this_way(self.unplaced[0], what)
        return ""

    def checksums(self, sent: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], str]:
        """Checksum of every entry as the model holds it, and what is wrong with those that have no known place.

        Args:
            sent: The tensors without a known place, as they were given to the loader; their checksums are of these.
        """
        found = {entry.name: self._checksum(entry) for entry in self._placed}
        found |= {entry.name: tensor_checksum(sent[entry.name]) for entry in self.unplaced}
        given = unordered_sums(sent[entry.name] for entry in self.unplaced)
        if given == unordered_sums(self.unaccounted.values()):
            return found, ""
        return found, (
            f"vLLM's loader took {self.unplaced[0].name} ({len(self.unplaced)} such tensors), but "
            f"{next(iter(self.unaccounted))} ({len(self.unaccounted)} such parameters) do not hold their elements: it "
            "changes them or leaves some out. The engine stays paused. Use rollout/engine=torch for this model."
        )

    def _checksum(self, entry: TensorEntry) -> int:
        """Of the live tensor; of a square one as it was sent, if the loader has transposed it."""
        parameter, start, stop = self._places[entry.name]
        held = self._parameters[parameter]
        if not held.ndim:
            return tensor_checksum(held)
        rows = held[start:stop]
        checksum = tensor_checksum(rows)
        if checksum == entry.checksum or rows.ndim != 2 or rows.shape[0] != rows.shape[1]:
            return checksum
        transposed = tensor_checksum(rows.t())
        return transposed if transposed == entry.checksum else checksum

    def _place(self, entry: TensorEntry) -> tuple[str, int, int] | None:
        """Parameter and range of its rows."""
        rows = self._rows.get(entry.name, 0)
        for name in (entry.name, "model.embed_tokens.weight" if entry.name == "lm_head.weight" else ""):
            if name in self._parameters:
                return self._fitting(entry, name, 0, rows)
        owner, _, leaf = entry.name.rpartition(".")
        owner, _, part = owner.rpartition(".")
        fused, parts = self._fused.get(part, ("", ()))
        names = [f"{owner}.{other}.{leaf}" for other in parts]
        if f"{owner}.{fused}.{leaf}" not in self._parameters or not all(name in self._rows for name in names):
            return None
        start = sum(self._rows[name] for name in names[: list(parts).index(part)])
        return self._fitting(entry, f"{owner}.{fused}.{leaf}", start, start + rows)

    def _fitting(self, entry: TensorEntry, name: str, start: int, stop: int) -> tuple[str, int, int] | None:
        """The place, unless what is there has another form: the loader transposes it."""
        held = self._parameters[name]
        fits = tuple(held.shape[1:]) == tuple(entry.shape[1:]) and held.ndim == len(entry.shape)
        if not fits or (held.ndim and held.shape[0] < stop) or held.dtype != TORCH_DTYPES[entry.dtype]:
            return None
        return name, start, stop


def _not_this_way(entry: TensorEntry, why: str) -> str:
    return (
        f"{entry.name} has no place in this engine's model under any name that we know, and cannot be compared as a "
        f"whole either: {why}. Use rollout/engine=torch for this model."
    )
