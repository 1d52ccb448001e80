"""The layout of an engine, by its type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.weights.layout.algebra import Layout, TensorSpec
from penstock.weights.layout.training import training_layout
from penstock.weights.layout.vllm import vllm_layout
from penstock.weights.model_config import ModelShape


@dataclass(frozen=True, slots=True)
class EngineSide:
    """What decides how engines hold a model. The torch engine holds it whole, under its Hugging Face names."""

    type: Literal["vllm", "torch"]
    model: ModelShape
    tp_size: int = 1

    @property
    def words(self) -> str:
        """For messages."""
        return f"vllm, tensor-parallel over {self.tp_size}" if self.type == "vllm" else "torch, whole"

    def layout(self, tensors: Sequence[TensorSpec]) -> Layout:
        """Where one engine's workers hold `tensors`."""
        return vllm_layout(tensors, self.model, self.tp_size) if self.type == "vllm" else training_layout(tensors)


@dataclass(frozen=True, slots=True)
class TrainingSide:
    """What decides how training ranks hold a model.

    Attributes:
        tensors: Names and full shapes, tied ones once.
        num_replicas: Ranks that hold the same part of each tensor, or partition it among themselves.
        is_partitioned: Each part is partitioned over them (ZeRO-3); otherwise every one has all of it.
        tp_size: Tensor-parallel ranks, which hold different parts (AutoTP). Rank = replica · tp_size + tensor rank.
        num_kv_heads: Of the model; needed with `tp_size` > 1.
    """

    tensors: tuple[TensorSpec, ...]
    num_replicas: int = 1
    is_partitioned: bool = False
    tp_size: int = 1
    num_kv_heads: int | None = None

    @property
    def words(self) -> str:
        """For messages."""
        held = "partitioned (ZeRO-3)" if self.is_partitioned else "replicated (ZeRO 0 to 2)"
        split = f"AutoTP over {self.tp_size}, " if self.tp_size > 1 else ""
        return f"{split}{held} over {self.num_replicas} ranks"

    def layout(self) -> Layout:
        """Where the ranks hold the model."""
        return training_layout(
            self.tensors,
            num_replicas=self.num_replicas,
            tp_size=self.tp_size,
            is_partitioned=self.is_partitioned,
            num_kv_heads=self.num_kv_heads,
        )
