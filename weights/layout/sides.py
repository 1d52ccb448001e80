"""How engines hold the policy (reported by an engine), and how the training ranks do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.weights.layout.algebra import Layout, TensorSpec
from penstock.weights.layout.training import Splits, training_layout


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """How engines hold a model, as reported by one of them."""

    type: Literal["vllm", "torch"]
    """Of the engine."""
    layout: Layout
    """Of one engine: its ranks are tensor-parallel."""

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks of an engine."""
        return self.layout.num_ranks

    @property
    def description(self) -> str:
        """For error messages."""
        return f"{self.type}, tensor-parallel over {self.tp_size}"


@dataclass(frozen=True, slots=True)
class TrainingSharding:
    """How the training ranks shard a model."""

    tensors: tuple[TensorSpec, ...]
    """Names and full shapes, tied ones once."""
    num_replicas: int = 1
    """Ranks that hold the same part of each tensor, or partition it among themselves."""
    is_partitioned: bool = False
    """Each part is partitioned over them (ZeRO-3, FSDP2); otherwise every rank holds all of it."""
    tp_size: int = 1
    """Tensor-parallel ranks, which hold different parts (AutoTP). Rank = replica · tp_size + tensor rank."""
    splits: Splits = field(default_factory=dict)
    """The part of each tensor that a tensor-parallel rank holds."""
    by_rows: bool = False
    """Partitions are whole rows (FSDP2), not stretches of elements (ZeRO-3)."""
    num_copies: int = 1
    """So many times the ranks hold all of a partitioned model, one copy after the other (HSDP)."""

    @property
    def description(self) -> str:
        """For error messages."""
        kind = "FSDP2" if self.by_rows else "ZeRO-3"
        held = f"partitioned ({kind})" if self.is_partitioned else "replicated (ZeRO 0 to 2)"
        split = f"AutoTP over {self.tp_size}, " if self.tp_size > 1 else ""
        copies = f" in {self.num_copies} copies" if self.num_copies > 1 else ""
        return f"{split}{held} over {self.num_replicas} ranks{copies}"

    def layout(self) -> Layout:
        """Where the ranks hold the model."""
        return training_layout(
            self.tensors,
            num_replicas=self.num_replicas,
            tp_size=self.tp_size,
            is_partitioned=self.is_partitioned,
            by_rows=self.by_rows,
            num_copies=self.num_copies,
            splits=self.splits,
        )
