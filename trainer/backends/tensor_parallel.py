"""The split plan for DeepSpeed AutoTP, and gathering of whole tensors. Imports no deepspeed.

AutoTP could read the plan of transformers or guess by names. We pass an explicit plan and read the resulting splits
from the live model. Three choices:
- An untied head is split by rows and never gathered: `linear_logprobs` works on its local rows.
- A tied head stays whole with its embedding. AutoTP would split both by vocabulary and use its own loss.
- Norms of single heads (q_norm, k_norm) are whole, but each rank sees its own heads only: their gradients are summed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, distributed

from penstock.dataflow.errors import ConfigError
from penstock.weights.layout.algebra import Box, Shape, cut, extents, volume, whole

_COLUMN = r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight$"
_ROW = r".*\.(o_proj|down_proj)\.weight$"
_NORM_OF_HEADS = r".*\.(q_norm|k_norm)\.weight$"
_HEAD = r".*lm_head\.weight$"


def autotp_settings(size: int, *, is_tied: bool) -> dict[str, Any]:
    """The `tensor_parallel` section of a DeepSpeed configuration."""
    return {
        "autotp_size": size,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [_COLUMN], "partition_type": "column"},
                {"patterns": [_ROW], "partition_type": "row"},
                {"patterns": [_NORM_OF_HEADS], "partition_type": "skip", "grad_allreduce": True},
                {"patterns": [_HEAD], "partition_type": "skip" if is_tied else "column"},
            ],
        },
    }


def axis_of(name: str) -> int | None:
    """The axis along which AutoTP splits a tensor by this plan; None: it stays whole."""
    of_weight = name.removesuffix(".bias") + ".weight" if name.endswith(".bias") else name
    if re.match(_COLUMN, of_weight) or re.match(_HEAD, name):
        return 0
    return 1 if re.match(_ROW, name) else None


def splits_of(shapes: Mapping[str, Shape], held: Sequence[Mapping[str, Shape]]) -> dict[str, tuple[Box, ...]]:
    """The splits that AutoTP has made: every tensor is whole on all ranks, or split along one axis in their order.

    Args:
        shapes: HF name -> full shape.
        held: By rank: HF name -> shape of its part.

    Raises:
        ConfigError: If the parts of a tensor do not make a whole; the wrong elements would be published.
    """
    splits, violations = {}, []
    for name, shape in shapes.items():
        parts = [rank[name] for rank in held]
        if all(part == shape for part in parts):
            continue
        differing = {axis for part in parts for axis, count in enumerate(part) if count != shape[axis]}
        axis = min(differing)
        widths = [part[axis] for part in parts]
        if len(differing) == 1 and sum(widths) == shape[axis]:
            splits[name] = _in_order(shape, axis, widths)
        else:
            violations.append(
                f"trainer.tensor_parallel_size={len(held)}: DeepSpeed gave the ranks parts {parts} of {name} {shape}, "
                "which do not make a whole: this model or version of DeepSpeed splits in a way that we cannot publish. "
                "Train it without tensor parallelism."
            )
    if violations:
        raise ConfigError(violations)
    return splits


def _in_order(shape: Shape, axis: int, widths: Sequence[int]) -> tuple[Box, ...]:
    ends = list(accumulate(widths))
    return tuple(cut(whole(shape), axis, end - width, end) for end, width in zip(ends, widths, strict=True))


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """Which part of every tensor the ranks of a tensor-parallel group have."""

    rank: int
    """This one, in the group."""
    size: int
    group: Any
    """The tensor-parallel ranks."""
    shapes: Mapping[str, Shape]
    """HF name -> full shape."""
    splits: Mapping[str, Sequence[Box]]
    """HF name -> the part of each rank; a tensor without an entry is whole on all."""

    def box(self, name: str) -> Box:
        """This rank's part of a tensor."""
        return self.splits[name][self.rank] if name in self.splits else whole(self.shapes[name])

    def gather(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor on every rank of the group, from this rank's part of it. Collective."""
        if name not in self.splits:
            return local
        boxes = self.splits[name]
        padded = local.new_zeros(max(volume(box) for box in boxes))
        padded[: local.numel()] = local.flatten()
        parts = [torch.empty_like(padded) for _ in boxes]
        distributed.all_gather(parts, padded, group=self.group)
        full = local.new_empty(self.shapes[name])
        for box, part in zip(boxes, parts, strict=True):
            full[tuple(slice(start, stop) for start, stop in box)] = part[: volume(box)].view(extents(box))
        return full

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """2-norm of a gradient, of which this rank has its parts, by HF name: whole tensors count once. Collective."""
        split = [gradient for name, gradient in gradients.items() if name in self.splits]
        shared = [gradient for name, gradient in gradients.items() if name not in self.splits]
        squared = torch.nn.utils.get_total_norm(split) ** 2
        distributed.all_reduce(squared, group=self.group)
        return (squared + torch.nn.utils.get_total_norm(shared) ** 2).sqrt()


def check_splittable(shapes: Mapping[str, Shape], size: int) -> None:
    """Refuse a model with a matrix outside the plan: its shape would not match the matrices that are split.

    Raises:
        ConfigError: With one sentence for the first such tensor.
    """
    for name, shape in shapes.items():
        if len(shape) > 1 and axis_of(name) is None and not name.endswith("embed_tokens.weight"):
            raise ConfigError(
                [
                    f"trainer.tensor_parallel_size={size}: {name} is no tensor of a dense decoder, so it is not known "
                    "how to split it. Train this model with trainer.zero_stage=3 and tensor_parallel_size=1."
                ]
            )
