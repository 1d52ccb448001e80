"""Layouts of engines that are frozen as files in tests/data/layouts: which part of which tensor each rank holds, where.

One file per model, small shapes with odd sizes, for every number of tensor-parallel ranks that divides them. They were
written by hand-made rules for each family of models, which tests compared with what vLLM's own loaders write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from penstock.weights.layout.algebra import Layout, Shape, Shard, TensorSpec, View
from penstock.weights.layout.sides import EngineLayout, TrainingSharding

FOLDER = Path(__file__).parent / "data" / "layouts"
NAMES = tuple(sorted(file.stem for file in FOLDER.glob("*.json")))


class Frozen(NamedTuple):
    """A model and where engines hold it.

    Attributes:
        layouts: By number of tensor-parallel ranks.
    """

    tensors: list[TensorSpec]
    layouts: dict[int, Layout]


def read(name: str) -> Frozen:
    """One file."""
    written = json.loads((FOLDER / f"{name}.json").read_text())
    tensors = [TensorSpec(tensor, tuple(shape)) for tensor, shape in written["tensors"].items()]
    layouts = {}
    for tp, layout in written["layouts"].items():
        shards = {tensor: tuple(map(_shard, rows)) for tensor, rows in layout["shards"].items()}
        layouts[int(tp)] = Layout(shards, tuple(layout["buffers"]))
    return Frozen(tensors, layouts)


def training_layout(tensors: Iterable[TensorSpec], **sharding: Any) -> Layout:
    """How training ranks hold these tensors; whole by default."""
    return TrainingSharding(tuple(tensors), **sharding).layout()


def torch_layout(tensors: Iterable[TensorSpec] | None = None) -> EngineLayout:
    """How a torch engine holds these tensors, by default those of the tiny policy."""
    return EngineLayout("torch", training_layout(read("tiny").tensors if tensors is None else tensors))


def write(name: str, frozen: Frozen) -> None:
    """One file, a tensor of a layout on a line."""
    shapes = _object({tensor: list(shape) for tensor, shape in frozen.tensors})
    layouts = {
        str(tp): f'{{"buffers": {_array(layout.buffers)},\n"shards": {_object(layout.shards)}}}'
        for tp, layout in frozen.layouts.items()
    }
    written = ",\n".join(f'"{tp}": {layout}' for tp, layout in layouts.items())
    (FOLDER / f"{name}.json").write_text(f'{{"tensors": {shapes},\n"layouts": {{{written}}}}}\n')


def _shard(row: tuple[int, list[list[int]], tuple[str, int, list[int]]]) -> Shard:
    rank, box, (buffer, offset, strides) = row
    return Shard(rank, tuple((start, stop) for start, stop in box), View(buffer, offset, _shape(strides)))


def _shape(sizes: list[int]) -> Shape:
    return tuple(sizes)


def _object(entries: dict[str, object]) -> str:
    lines = (f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in entries.items())
    return "{\n" + ",\n".join(lines) + "}"


def _array(entries: tuple[object, ...]) -> str:
    return "[\n" + ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries) + "]"
