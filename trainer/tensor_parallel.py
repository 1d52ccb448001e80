"""What DeepSpeed AutoTP is told to split, and whole tensors from their parts. No deepspeed here.

AutoTP could read the plan of transformers or guess by names. We say it ourselves, so that the split is the one that
`weights/layout/training.py` knows. Three choices of ours:
- An untied head is split by rows and never gathered: `vocabulary_parallel_scores` works on its local rows.
- A tied head stays whole with its embedding. AutoTP would split both by vocabulary and bring a loss of its own.
- Norms of single heads (q_norm, k_norm) are whole, but each rank sees its own heads only: their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from penstock.dataflow.errors import ConfigError, WeightSyncError
from penstock.weights.layout.algebra import Box, Shape, TensorSpec, extents, volume, whole
from penstock.weights.layout.training import tensor_parallel_box

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


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """Which part of every tensor this rank has.

    Attributes:
        rank: In the group, 0 ≤ rank < size.
        group: The tensor-parallel ranks.
        num_kv_heads: Of the model; attention is split in whole key/value heads.
        shapes: HF name -> full shape.
    """

    rank: int
    size: int
    group: Any
    num_kv_heads: int
    shapes: Mapping[str, Shape]

    def box(self, name: str, rank: int | None = None) -> Box:
        """What a rank, by default this one, has of a tensor."""
        tensor = TensorSpec(name, self.shapes[name])
        return tensor_parallel_box(tensor, self.rank if rank is None else rank, self.size, self.num_kv_heads)

    def is_split(self, name: str) -> bool:
        """Whether ranks have different parts of it."""
        return self.box(name) != whole(self.shapes[name])

    def check(self, shapes: Iterable[tuple[str, Shape]]) -> None:
        """Compare what DeepSpeed made, HF names and local shapes, with what we expect.

        Raises:
            ConfigError: If a tensor was split otherwise: it would be trained, but published from the wrong places.
        """
        violations = [
            f"trainer.tensor_parallel_size={self.size}: DeepSpeed gave rank {self.rank} a part {found} of {name} "
            f"{self.shapes[name]}, not {extents(self.box(name))}: this model or version of DeepSpeed splits in another "
            "way than we publish. Train it without tensor parallelism."
            for name, found in shapes
            if found != extents(self.box(name))
        ]
        if violations:
            raise ConfigError(violations)

    def gather(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor on every rank of the group, from this rank's part of it. Collective."""
        if not self.is_split(name):
            return local
        boxes = [self.box(name, rank) for rank in range(self.size)]
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
        split = [gradient for name, gradient in gradients.items() if self.is_split(name)]
        shared = [gradient for name, gradient in gradients.items() if not self.is_split(name)]
        squared = torch.nn.utils.get_total_norm(split) ** 2
        distributed.all_reduce(squared, group=self.group)
        return (squared + torch.nn.utils.get_total_norm(shared) ** 2).sqrt()


def check_splittable(shapes: Mapping[str, Shape], size: int, num_kv_heads: int) -> None:
    """Refuse a model of which it is not known how to split a tensor.

    Raises:
        ConfigError: With one sentence for the first such tensor.
    """
    for name, shape in shapes.items():
        try:
            tensor_parallel_box(TensorSpec(name, shape), 0, size, num_kv_heads)
        except WeightSyncError:
            raise ConfigError(
                [
                    f"trainer.tensor_parallel_size={size}: {name} is no tensor of a dense decoder, so it is not known "
                    "how to split it. Train this model with trainer.zero_stage=3 and tensor_parallel_size=1."
                ]
            ) from None
