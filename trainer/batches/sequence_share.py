"""Sequence parallelism: each rank of a group computes one stretch of every row of a micro-batch.

A row of L tokens is padded to a multiple of the group's size n and cut into n stretches of L/n. Attention sees the
whole row (DeepSpeed Ulysses exchanges stretches for heads); everything else, and the loss, sees the stretch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.trainer.batches.collate import MicroBatch, ModelInputs, empty_micro_batch


def sequence_share(micro_batch: MicroBatch, rank: int, size: int) -> MicroBatch:
    """The stretch of rank 0 ≤ `rank` < `size`, with the loss tokens that it predicts.

    A stretch without loss tokens has one dummy token of weight 0, so that it has a graph for the collectives of others.

    Args:
        micro_batch: One row, without an attention mask: positions alone say where sequences begin.
        rank: Which stretch.
        size: Number of stretches.
    """
    inputs = micro_batch.inputs
    assert inputs.attention_mask is None, "a mask would have to be cut for whole rows"
    assert micro_batch.returns is None, "a critic is refused with sequence parallelism"
    assert inputs.input_ids.shape[0] == 1, "Ulysses is registered for one row"
    length = -(-inputs.input_ids.shape[1] // size)
    start = rank * length
    is_mine = (inputs.target_index >= start) & (inputs.target_index < start + length)
    input_ids = _stretch(inputs.input_ids, start, length, size)
    position_ids = _stretch(_continued(inputs.position_ids, length * size), start, length, size)
    if not micro_batch.num_tokens or not is_mine.any():
        return _without_targets(input_ids, position_ids)
    return replace(
        micro_batch,
        inputs=ModelInputs(
            input_ids, position_ids, None, inputs.target_index[is_mine] - start, inputs.target_ids[is_mine]
        ),
        behavior_logprobs=micro_batch.behavior_logprobs[is_mine],
        advantages=micro_batch.advantages[is_mine],
        token_weights=micro_batch.token_weights[is_mine],
        reference_logprobs=micro_batch.reference_logprobs[is_mine],
        lags=micro_batch.lags[is_mine],
        segments=micro_batch.segments[is_mine],
        sequence_index=micro_batch.sequence_index[is_mine.cpu().numpy()],
        token_index=micro_batch.token_index[is_mine.cpu().numpy()],
        num_tokens=int(is_mine.sum()),
        proximal_logprobs=None if micro_batch.proximal_logprobs is None else micro_batch.proximal_logprobs[is_mine],
        teacher_logprobs=None if micro_batch.teacher_logprobs is None else micro_batch.teacher_logprobs[is_mine],
    )


def _without_targets(input_ids: Tensor, position_ids: Tensor) -> MicroBatch:
    empty = empty_micro_batch(input_ids.device)
    inputs = ModelInputs(input_ids, position_ids, None, empty.inputs.target_index, empty.inputs.target_ids)
    return replace(empty, inputs=inputs)


def _stretch(row: Tensor, start: int, length: int, size: int) -> Tensor:
    """`[1, L]` -> `[1, length]`, padded with 0."""
    return F.pad(row, (0, length * size - row.shape[1]))[:, start : start + length].contiguous()


def _continued(position_ids: Tensor, length: int) -> Tensor:
    """Positions that go on counting: padding is no new sequence."""
    missing = length - position_ids.shape[1]
    further = position_ids[:, -1:] + torch.arange(1, missing + 1, device=position_ids.device)
    return torch.cat([position_ids, further], dim=1)
