"""How ranks that split every sequence see all of it in attention: `trainer.sequence_parallel`.

    ulysses    ranks exchange stretches of a row for heads before attention, and back after it (DeepSpeed)
    context    each rank computes its stretch, and gathers the keys and values of the others layer by layer
               (models/varlen_attention.py); any number of heads

s ranks, n tokens a rank, A elements of a token's query, K of its keys and values together: a rank sends, per layer,
forward and backward, 2·n·(2A + K)·(s − 1)/s elements by the former and 3·n·K·(s − 1) by the latter, which is less up to
s = 2·(2A + K) / 3K: 6 ranks if 8 queries share a key. It has 2·s·n·K elements more while one layer computes: gathered,
and by sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from penstock.trainer.config import TrainerConfig
from penstock.weights.model_config import ModelConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def sequence_parallelism(model: ModelConfig, trainer: TrainerConfig) -> Literal["ulysses", "context"] | None:
    """Which it is; None: no rank shares a sequence. Where it is not set, Ulysses, if it can run."""
    if trainer.sequence_parallel_size == 1:
        return None
    if trainer.sequence_parallel is not None:
        return trainer.sequence_parallel
    return "context" if next(ulysses_violations(model, trainer), None) else "ulysses"


def ulysses_violations(model: ModelConfig, trainer: TrainerConfig) -> Iterator[str]:
    """Why Ulysses cannot run, one sentence each."""
    size, shape = trainer.sequence_parallel_size, model.shape
    key = "trainer.sequence_parallel_size"
    if trainer.backend == "fsdp2":
        yield (
            f"{key}={size} with trainer.sequence_parallel=ulysses and trainer.backend=fsdp2: Ulysses is DeepSpeed's. "
            "Use trainer.sequence_parallel=context, or trainer.backend=deepspeed."
        )
    if shape.num_kv_heads % size:
        yield (
            f"{key}={size} does not divide model.shape.num_kv_heads={shape.num_kv_heads}: Ulysses exchanges stretches "
            "of a sequence for whole heads. Use a divisor of it, or trainer.sequence_parallel=context."
        )
    if model.dtype == "bfloat16" and trainer.zero_stage == 1:
        yield (
            f"{key}={size} with trainer.zero_stage=1 in model.dtype=bfloat16: DeepSpeed's optimizer of that kind "
            "treats the ranks of Ulysses as tensor ranks and fails at the first step. Use trainer.zero_stage=2 or 3, "
            "or trainer.sequence_parallel=context."
        )


def context_group(trainer: TrainerConfig) -> ProcessGroup:
    """The ranks that share sequences with this one. Collective over all ranks."""
    import torch

    size = trainer.sequence_parallel_size
    ranks = [list(range(first, first + size)) for first in range(0, trainer.num_ranks, size)]
    limit = timedelta(seconds=2 * trainer.step_timeout_s)  # as of all ranks, so that the driver gives up first
    group, _ = torch.distributed.new_subgroups_by_enumeration(ranks, timeout=limit)
    return group
