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

    def layout(self, tensors: Sequence[TensorSpec]) -> Layout:
        """Where one engine's workers hold `tensors`."""
        return vllm_layout(tensors, self.model, self.tp_size) if self.type == "vllm" else training_layout(tensors)


@dataclass(frozen=True, slots=True)
class TrainingSide:
    """What decides how training ranks hold a model.

    Attributes:
        tensors: Names and full shapes, tied ones once.
        num_ranks: Data-parallel ranks.
        is_partitioned: Each tensor is partitioned over them (ZeRO-3); otherwise every rank has all of it.
    """

    tensors: tuple[TensorSpec, ...]
    num_ranks: int = 1
    is_partitioned: bool = False

    def layout(self) -> Layout:
        """Where the ranks hold the model."""
        return training_layout(self.tensors, num_replicas=self.num_ranks, is_partitioned=self.is_partitioned)
