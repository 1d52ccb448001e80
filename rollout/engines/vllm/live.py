"""Where a live vLLM model holds published whole tensors, and verification of their values.

Whole tensors (`weights.transport=gather`) go through the model's own loader, which may fuse, stack, rename, transpose
and pad. A tensor whose place is known is compared on its own, with its position-sensitive checksum. All others are
compared together: the loader keeps their elements in some order, so two order-independent sums over words, Σ w and
Σ w², must equal those of the parameters that hold none of the known tensors. That verifies the values but not their
places; `weights.probe_every` verifies those, by comparing logprobs of engines and trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch

from penstock.dataflow.ports import TensorEntry, WeightManifest
from penstock.weights.checksum import tensor_checksum, unordered_sums
from penstock.weights.dtypes import TORCH_DTYPES


class LiveTensors:
    """Finds the tensors of a version in a live vLLM model.

    vLLM fuses q/k/v and gate/up by stacking rows in the order of the model's `packed_modules_mapping`,
    pads the vocabulary with rows at the end, and shares tied embeddings.

    Attributes:
        unplaced: Entries whose place in the model is not known.
        unaccounted: Parameters that hold no entry with a known place.
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
                return (
                    f"parameter {name} of this engine is not in the version and would keep old weights. Is the "
                    "version of another model?"
                )
            if parameter.dtype not in wire:
                what = f"{name} is {parameter.dtype} in the engine, but {wire} is sent"
                return _cannot_verify(self.unplaced[0], what)
        needed = sum(torch.Size(entry.shape).numel() for entry in self.unplaced)
        space = sum(parameter.numel() for parameter in self.unaccounted.values())
        if needed > space:
            what = f"{len(self.unplaced)} such tensors have {needed} elements, this engine has space for {space}"
            return _cannot_verify(self.unplaced[0], what)
        return ""

    def checksums(self, sent: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], str]:
        """Checksum of every entry as the model holds it, and an error if those without a known place differ.

        Args:
            sent: The tensors without a known place, as they were given to the loader; their checksums are of these.
        """
        found = {entry.name: self._checksum(entry) for entry in self._placed}
        found |= {entry.name: tensor_checksum(sent[entry.name]) for entry in self.unplaced}
        given = unordered_sums(sent[entry.name] for entry in self.unplaced)
        if given == unordered_sums(self.unaccounted.values()):
            return found, ""
        return found, (
            f"vLLM's loader accepted {self.unplaced[0].name} ({len(self.unplaced)} such tensors), but "
            f"{next(iter(self.unaccounted))} ({len(self.unaccounted)} such parameters) do not hold their elements: it "
            "changes them or omits some. The engine stays paused. Use weights.transport=auto, or rollout/engine=torch."
        )

    def _checksum(self, entry: TensorEntry) -> int:
        """Checksum of the live tensor; of a square one that the loader has transposed, of its transpose."""
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
        """The place, or None if shape or dtype there differ, because the loader transposes the tensor."""
        held = self._parameters[name]
        fits = tuple(held.shape[1:]) == tuple(entry.shape[1:]) and held.ndim == len(entry.shape)
        if not fits or (held.ndim and held.shape[0] < stop) or held.dtype != TORCH_DTYPES[entry.dtype]:
            return None
        return name, start, stop


def _cannot_verify(entry: TensorEntry, why: str) -> str:
    return (
        f"{entry.name} has no place in this engine's model under any known name, and the tensors without a place "
        f"cannot be compared together either: {why}. Use rollout/engine=torch for this model."
    )
