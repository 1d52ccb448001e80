"""From sequences and a plan to the tensors of one micro-batch.

Shape legend: T tokens of one sequence, R rows, L row length, K loss tokens of one micro-batch (flat).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from penstock.dataflow.errors import ShapeError
from penstock.trainer.batches.packing import MicroBatchPlan

_PADDING_SEGMENT = -1


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sequence as the optimizer step sees it.

    Attributes:
        token_ids: `[T] int`, prompt first.
        targets: Positions of the loss tokens in `token_ids`, ascending, each ≥ 1.
        behavior_logprobs: `[len(targets)] float32`.
        token_weight: Aggregation weight of each loss token.
        advantages: `[len(targets)]`; None: zeros.
        lags: `[len(targets)] int`, staleness of each loss token in versions; None: zeros.
        reference_logprobs: `[len(targets)] float32`; None where the loss does not need them.
        teacher_logprobs: Likewise, of a teacher.
        prompt_length: Tokens before the first sampled one, which may be computed once for several sequences; 0: none.
        preferred_to: Indices of the sequences of the batch that a pair loss prefers it to.
        unit: Sequences of one unit share a micro-batch; None: it goes anywhere.
        group: Position of its group in the batch; a mini-batch is of whole groups.
        proximal_logprobs: `[len(targets)] float32`, of a forward at the start of the batch; None: there was none.
        old_values: `[len(targets)]`, V of the critic at the start of the batch; None: there is no critic.
        returns: `[len(targets)]`, what V should be.
    """

    token_ids: NDArray[np.integer]
    targets: NDArray[np.integer]
    behavior_logprobs: NDArray[np.float32]
    token_weight: float = 0.0
    advantages: NDArray[np.floating] | None = None
    lags: NDArray[np.integer] | None = None
    reference_logprobs: NDArray[np.float32] | None = None
    preferred_to: tuple[int, ...] = ()
    unit: int | None = None
    group: int = 0
    proximal_logprobs: NDArray[np.float32] | None = None
    old_values: NDArray[np.floating] | None = None
    returns: NDArray[np.floating] | None = None
    teacher_logprobs: NDArray[np.float32] | None = None
    prompt_length: int = 0

    def __post_init__(self) -> None:
        if len(self.targets) and self.targets[0] < 1:
            raise ShapeError(
                "training sequence: its first token carries loss, but nothing precedes it to predict it from. "
                "Use a prompt of at least 1 token."
            )

    @property
    def num_inputs(self) -> int:
        """Tokens the forward needs: everything before the last loss token; 0 if there is none."""
        return int(self.targets[-1]) if len(self.targets) else 0


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Arguments of `PolicyModel.forward`.

    Attributes:
        input_ids: `[R, L] int64`.
        position_ids: `[R, L] int64`, restarting with every sequence, behind a shared prompt at its end.
        attention_mask: `[R, 1, L, L] bool`, True where attended; None if plain causal attention (or position ids) do.
        target_index: `[K] int64` into the flattened `[R·L]` hidden states.
        target_ids: `[K] int64`, the token to predict there.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    target_index: Tensor
    target_ids: Tensor

    def call(self, model: Callable[..., tuple[Tensor, Tensor]], temperature: float) -> tuple[Tensor, Tensor]:
        """Call a (wrapped) `PolicyModel` with these."""
        return model(
            input_ids=self.input_ids,
            position_ids=self.position_ids,
            attention_mask=self.attention_mask,
            target_index=self.target_index,
            target_ids=self.target_ids,
            temperature=temperature,
        )


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Model inputs and what the loss needs, each `[K]`. An empty micro-batch has one dummy token of weight 0.

    Attributes:
        reference_logprobs: 0 where the loss does not need them.
        lags: `int64`, staleness in versions.
        segments: `int64`, which of the S sequences of this micro-batch each loss token belongs to.
        pairs: `[P, 2] int64`, segments (preferred, other) of a pair loss.
        sequence_index: `[K] int64`, which sequence of the batch each loss token belongs to.
        token_index: `[K] int64`, which of its loss tokens it is.
        num_segments: S.
        num_tokens: Loss tokens that count: K, or 0 if empty.
        proximal_logprobs: None if there was no forward at the start of the batch.
        old_values: V of the critic at the start of the batch; None if there is none.
        returns: What V should be.
        teacher_logprobs: None if there is no teacher.
    """

    inputs: ModelInputs
    behavior_logprobs: Tensor
    advantages: Tensor
    token_weights: Tensor
    reference_logprobs: Tensor
    lags: Tensor
    segments: Tensor
    pairs: Tensor
    sequence_index: NDArray[np.int64]
    token_index: NDArray[np.int64]
    num_segments: int
    num_tokens: int
    proximal_logprobs: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    teacher_logprobs: Tensor | None = None


def collate(
    plan: MicroBatchPlan, sequences: Sequence[TrainingSequence], *, device: torch.device, needs_mask: bool
) -> MicroBatch:
    """Lay the planned sequences out in rows.

    Args:
        plan: Rows of indices into `sequences`.
        sequences: All sequences of the batch.
        device: Where the tensors go.
        needs_mask: Whether the attention wants a mask for rows of several sequences (sdpa), or reads the restarting
            position ids itself (flash attention).
    """
    if not plan.rows:
        return empty_micro_batch(device)
    shape = (len(plan.rows), plan.row_length)
    input_ids = np.zeros(shape, dtype=np.int64)
    # Padding continues the count: causal attention never looks at it, and a row of one sequence needs no mask.
    position_ids = np.tile(np.arange(plan.row_length, dtype=np.int64), (shape[0], 1))
    segment_ids = np.full(shape, _PADDING_SEGMENT, dtype=np.int32)
    block_ids, shown_to = segment_ids.copy(), segment_ids.copy()
    target_index = []
    order = [index for row in plan.rows for index in row]
    for row, indices in enumerate(plan.rows):
        start = block_start = block = 0
        for index, shared in zip(indices, plan.shared[row] if plan.shared else [0] * len(indices), strict=True):
            sequence = sequences[index]
            if not shared:
                block_start, block = start, index
            stop = start + sequence.num_inputs - shared
            input_ids[row, start:stop] = sequence.token_ids[shared : sequence.num_inputs]
            position_ids[row, start:] = np.arange(shared, shared + plan.row_length - start)
            segment_ids[row, start:stop] = index
            block_ids[row, start:stop] = block
            shown_to[row, block_start : block_start + shared] = block
            before = sequence.targets - 1
            places = np.where(before < shared, block_start + before, start - shared + before)
            target_index.append(row * plan.row_length + places)
            start = stop
    counts = [len(sequences[index].targets) for index in order]
    mask = None
    if needs_mask and any(len(row) > 1 for row in plan.rows):
        ids = [torch.from_numpy(one).to(device) for one in (segment_ids, block_ids, shown_to)]
        mask = block_diagonal_mask(ids[0]) if not plan.shared else shared_prompt_mask(*ids)

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    chosen = [sequences[index] for index in order]

    def per_token(arrays: Sequence[NDArray[np.generic] | None], dtype: DTypeLike) -> Tensor:
        """One after another; zeros where there is none."""
        filled = [np.zeros(count) if one is None else one for one, count in zip(arrays, counts, strict=True)]
        return tensor(np.concatenate(filled).astype(dtype))

    def if_any(arrays: Sequence[NDArray[np.floating] | None]) -> Tensor | None:
        return per_token(arrays, np.float32) if any(one is not None for one in arrays) else None

    return MicroBatch(
        inputs=ModelInputs(
            input_ids=tensor(input_ids),
            position_ids=tensor(position_ids),
            attention_mask=mask,
            target_index=tensor(np.concatenate(target_index).astype(np.int64)),
            target_ids=per_token([one.token_ids[one.targets] for one in chosen], np.int64),
        ),
        behavior_logprobs=per_token([one.behavior_logprobs for one in chosen], np.float32),
        advantages=per_token([one.advantages for one in chosen], np.float32),
        token_weights=tensor(np.repeat(np.array([one.token_weight for one in chosen], np.float32), counts)),
        reference_logprobs=per_token([one.reference_logprobs for one in chosen], np.float32),
        lags=per_token([one.lags for one in chosen], np.int64),
        segments=tensor(np.repeat(np.arange(len(order)), counts)),
        pairs=tensor(_local_pairs(order, sequences)),
        sequence_index=np.repeat(np.array(order, np.int64), counts),
        token_index=np.concatenate([np.arange(count, dtype=np.int64) for count in counts]),
        num_segments=len(order),
        num_tokens=sum(counts),
        proximal_logprobs=if_any([one.proximal_logprobs for one in chosen]),
        old_values=if_any([one.old_values for one in chosen]),
        returns=if_any([one.returns for one in chosen]),
        teacher_logprobs=if_any([one.teacher_logprobs for one in chosen]),
    )


def _local_pairs(order: Sequence[int], sequences: Sequence[TrainingSequence]) -> NDArray[np.int64]:
    """`[P, 2]` positions in `order` of (preferred, other). Both are there: they are one unit of the plan."""
    place = {index: position for position, index in enumerate(order)}
    pairs = [(place[better], place[worse]) for better in order for worse in sequences[better].preferred_to]
    return np.array(pairs, np.int64).reshape(-1, 2)


def place_by_sequence(
    values: NDArray[np.floating], micro_batch: MicroBatch, starts: NDArray[np.int64], into: NDArray[np.floating]
) -> None:
    """Put what a micro-batch found, one value per target token, where each sequence's targets are in `into`."""
    into[starts[micro_batch.sequence_index] + micro_batch.token_index] = values


def block_diagonal_mask(segment_ids: Tensor) -> Tensor:
    """Causal attention within each sequence only: `[R, L] int` segment ids -> `[R, 1, L, L] bool`, True = attend.

    Padding is a segment of its own, so every query attends to something and softmax stays finite.
    """
    return ((segment_ids[:, :, None] == segment_ids[:, None, :]) & _causal(segment_ids))[:, None]


def shared_prompt_mask(segment_ids: Tensor, block_ids: Tensor, shown_to: Tensor) -> Tensor:
    """`block_diagonal_mask`, and a query also attends to what is shown to its block: the prompt in front of it.

    Args:
        segment_ids: `[R, L] int`, which sequence.
        block_ids: `[R, L] int`, which block of sequences of one prompt.
        shown_to: `[R, L] int`, the block of a shared prompt's tokens; of others the padding's.
    """
    is_prompt = block_ids[:, :, None] == shown_to[:, None, :]
    return block_diagonal_mask(segment_ids) | (is_prompt & _causal(segment_ids))[:, None]


def _causal(row_ids: Tensor) -> Tensor:
    """`[L, L] bool` for `[R, L]`."""
    return torch.ones(2 * row_ids.shape[1:], dtype=torch.bool, device=row_ids.device).tril()


def empty_micro_batch(device: torch.device) -> MicroBatch:
    """One dummy token of weight 0: attached to the graph, so collective hooks fire on every rank."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    zeros = torch.zeros(1, dtype=torch.float32, device=device)
    grid = index[None]
    return MicroBatch(
        inputs=ModelInputs(grid, grid, None, index, index),
        behavior_logprobs=zeros,
        advantages=zeros,
        token_weights=zeros,
        reference_logprobs=zeros,
        lags=index,
        segments=index,
        pairs=torch.zeros(0, 2, dtype=torch.int64, device=device),
        sequence_index=np.zeros(0, np.int64),
        token_index=np.zeros(0, np.int64),
        num_segments=1,
        num_tokens=0,
    )
