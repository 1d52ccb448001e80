"""From sequences and a plan to the tensors of one micro-batch.

Shape legend: T tokens of one sequence, R rows, L row length, K loss tokens of one micro-batch (flat), A alternatives of
a token at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from penstock.dataflow.trajectory import signed_routes
from penstock.trainer.batches.packing import MicroBatchPlan, TrainingSequence
from penstock.trainer.models.varlen_attention import SequenceBoundaries


class ModelInputs(NamedTuple):
    """Arguments of `PolicyModel.forward`."""

    input_ids: Tensor
    """`[R, L] int64`."""
    position_ids: Tensor
    """`[R, L] int64`, restarting with every sequence, at the end of what it shares with others."""
    attention_mask: Tensor | None
    """`[R, 1, L, L] bool`, True where attended; None: causal, within `boundaries` if given."""
    target_index: Tensor
    """`[K] int64` into the flattened `[R·L]` hidden states."""
    target_ids: Tensor
    """`[K] int64`, the token to predict there."""
    boundaries: SequenceBoundaries | None = None
    """Of the sequences, for attention without a mask (varlen); None for sdpa."""
    alternatives: Tensor | None = None
    """`[K, A] int64`, the other ids that each target was sampled from, then −1; None: sampled from the whole
    vocabulary."""
    routes: Tensor | None = None
    """`[R·L, layers, k] int16`, the experts of each token, −1 where they are not known; None: of no token."""

    def call(self, model: Callable[..., tuple[Tensor, Tensor]], temperature: float) -> tuple[Tensor, Tensor]:
        """Call a (wrapped) `PolicyModel` with these."""
        return model(**self._asdict(), temperature=temperature)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Model inputs and the inputs of the loss, `[K]` each. An empty micro-batch has one dummy token of weight 0."""

    inputs: ModelInputs
    behavior_logprobs: Tensor
    advantages: Tensor
    token_weights: Tensor
    reference_logprobs: Tensor
    """0 where the loss does not need them."""
    staleness: Tensor
    """`int64`, in versions."""
    segments: Tensor
    """`int64`, index of the loss token's sequence among the S sequences of this micro-batch."""
    pairs: Tensor
    """`[P, 2] int64`, segments (preferred, other) of a pair loss."""
    sequence_index: NDArray[np.int64]
    """`[K] int64`, index of the loss token's sequence in the batch."""
    token_index: NDArray[np.int64]
    """`[K] int64`, index among the loss tokens of its sequence."""
    num_segments: int
    """S."""
    num_tokens: int
    """Number of real loss tokens: K, or 0 if empty."""
    proximal_logprobs: Tensor | None = None
    """None if there was no forward pass at the start of the batch."""
    old_values: Tensor | None = None
    """V of the critic at the start of the batch; None if there is no critic."""
    returns: Tensor | None = None
    """Targets of the critic."""
    teacher_logprobs: Tensor | None = None
    """None if there is no teacher."""
    selected: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> `bool`, as in `TrainingSequence`."""
    nll_factors: Tensor | None = None
    """As in `TrainingSequence`; None: 0."""


_PER_TOKEN = (
    "behavior_logprobs",
    "advantages",
    "token_weights",
    "reference_logprobs",
    "staleness",
    "segments",
    "proximal_logprobs",
    "teacher_logprobs",
    "nll_factors",
)
"""Columns of a micro-batch that sequence parallelism splits."""


def collate(
    plan: MicroBatchPlan, sequences: Sequence[TrainingSequence], *, device: torch.device, needs_mask: bool
) -> MicroBatch:
    """Arrange the planned sequences in rows.

    Args:
        plan: Rows of indices into `sequences`.
        sequences: All sequences of the batch.
        device: Where the tensors go.
        needs_mask: Whether the attention separates the sequences of a row by a mask (sdpa) or by their boundaries
            (varlen).
    """
    if not plan.rows:
        return empty_micro_batch(device, needs_mask=needs_mask)
    shape, has_mask = (len(plan.rows), plan.row_length), needs_mask and any(len(row) > 1 for row in plan.rows)
    input_ids = np.zeros(shape, dtype=np.int64)
    # Padding continues the count: causal attention never looks at it, and a row of one sequence needs no mask.
    position_ids = np.tile(np.arange(plan.row_length, dtype=np.int64), (shape[0], 1))
    routes = routes_of(plan, sequences)
    seen_until = np.full(shape, plan.row_length)  # [R, L], the first token behind it that does not continue it
    target_index = []
    order = [index for row in plan.rows for index in row]
    for row, members in enumerate(plan.in_order()):
        start, path = 0, np.zeros(0, np.int64)  # where the tokens of the newest sequence are
        for index, shared in members:
            sequence = sequences[index]
            stop = start + sequence.num_inputs - shared
            seen_until[row, path[shared:]] = start
            path = np.concatenate([path[:shared], np.arange(start, stop)])
            input_ids[row, start:stop] = sequence.token_ids[shared : sequence.num_inputs]
            position_ids[row, start:] = np.arange(shared, shared + plan.row_length - start)
            target_index.append(row * plan.row_length + path[sequence.targets - 1])
            start = stop
        seen_until[row, path] = start
        if has_mask:
            # LongRoPE has other factors for the whole micro-batch if any position is beyond a limit, and a row of
            # several sequences is longer than the context.
            position_ids[row, start:] = 0
    counts = [len(sequences[index].targets) for index in order]
    chosen = [sequences[index] for index in order]
    # Both members of a pair are in this micro-batch, because they are one unit of the plan.
    place = {index: position for position, index in enumerate(order)}
    pairs = [(place[better], place[worse]) for better in order for worse in sequences[better].preferred_to]

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(device)

    mask = None
    if has_mask:
        # A token attends to itself and to those before it that see it. Padding sees padding, so every query attends to
        # something and softmax stays finite.
        columns = torch.arange(plan.row_length, device=device)
        mask = (columns[:, None] < tensor(seen_until)[:, None]).tril()[:, None]

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
            boundaries=None if needs_mask else boundaries_of(plan, sequences, device),
            alternatives=None if (found := joined_alternatives(chosen)) is None else tensor(found),
            routes=None if routes is None else tensor(routes),
        ),
        behavior_logprobs=per_token([one.behavior_logprobs for one in chosen], np.float32),
        advantages=per_token([one.advantages for one in chosen], np.float32),
        token_weights=tensor(np.repeat(np.array([one.token_weight for one in chosen], np.float32), counts)),
        reference_logprobs=per_token([one.reference_logprobs for one in chosen], np.float32),
        staleness=per_token([one.staleness for one in chosen], np.int64),
        segments=tensor(np.repeat(np.arange(len(order)), counts)),
        pairs=tensor(np.array(pairs, np.int64).reshape(-1, 2)),
        sequence_index=np.repeat(np.array(order, np.int64), counts),
        token_index=np.concatenate([np.arange(count, dtype=np.int64) for count in counts]),
        num_segments=len(order),
        num_tokens=sum(counts),
        proximal_logprobs=if_any([one.proximal_logprobs for one in chosen]),
        old_values=if_any([one.old_values for one in chosen]),
        returns=if_any([one.returns for one in chosen]),
        teacher_logprobs=if_any([one.teacher_logprobs for one in chosen]),
        selected={
            name: per_token([one.selected.get(name) for one in chosen], np.bool_)
            for name in sorted({name for one in chosen for name in one.selected})
        },
        nll_factors=tensor(np.repeat(np.array([one.nll_factor for one in chosen], np.float32), counts)),
    )


def joined_alternatives(sequences: Sequence[TrainingSequence]) -> NDArray[np.int64] | None:
    """`[K, A]`: the alternatives of all sequences, padded to the widest; None if they have none."""
    recorded = [one.alternatives for one in sequences if one.alternatives is not None]
    if not recorded:
        return None
    assert len(recorded) == len(sequences), "all answers of a run are sampled alike (platform/run/resume.py)"
    width = max(one.shape[1] for one in recorded)
    return np.concatenate(
        [np.pad(one, ((0, 0), (0, width - one.shape[1])), constant_values=-1) for one in recorded]
    ).astype(np.int64)


def routes_of(plan: MicroBatchPlan, sequences: Sequence[TrainingSequence]) -> NDArray[np.int16] | None:
    """`[R·L, layers, k]`: the experts of all tokens, −1 where they are not known; None if they are known of none."""
    recorded = [found for row in plan.rows for index in row if (found := sequences[index].routes) is not None]
    if not recorded:
        return None
    routes = np.full((len(plan.rows), plan.row_length, *recorded[0].shape[1:]), -1, np.int16)
    for row, members in enumerate(plan.in_order()):
        start = 0
        for index, shared in members:
            one = sequences[index]
            stop = start + one.num_inputs - shared
            if one.routes is not None:
                routes[row, start:stop] = signed_routes(one.routes[shared : one.num_inputs])
            start = stop
    return routes.reshape(-1, *routes.shape[2:])


def boundaries_of(
    plan: MicroBatchPlan, sequences: Sequence[TrainingSequence], device: torch.device
) -> SequenceBoundaries:
    """Where the planned sequences and what they share lie; padding belongs to the sequence before it."""
    lengths: list[int] = []
    shared: list[int] = []
    for number, row in enumerate(plan.in_order()):
        own = [(sequences[index].num_inputs - common, common) for index, common in row]
        # One that is equal to another has no token of its own.
        lengths += [length for length, _ in own if length]
        shared += [common for length, common in own if length]
        lengths[-1] += (number + 1) * plan.row_length - sum(lengths)
    return SequenceBoundaries.of(lengths, device, shared)


def empty_micro_batch(device: torch.device, *, needs_mask: bool) -> MicroBatch:
    """Create one dummy token of weight 0, which is part of the graph, so that collective hooks run on every rank."""
    index = torch.zeros(1, dtype=torch.int64, device=device)
    zeros = torch.zeros(1, dtype=torch.float32, device=device)
    grid = index[None]
    return MicroBatch(
        inputs=ModelInputs(grid, grid, None, index, index, None if needs_mask else SequenceBoundaries.of([1], device)),
        behavior_logprobs=zeros,
        advantages=zeros,
        token_weights=zeros,
        reference_logprobs=zeros,
        staleness=index,
        segments=index,
        pairs=torch.zeros(0, 2, dtype=torch.int64, device=device),
        sequence_index=np.zeros(0, np.int64),
        token_index=np.zeros(0, np.int64),
        num_segments=1,
        num_tokens=0,
    )


def sequence_share(micro_batch: MicroBatch, rank: int, size: int, group: ProcessGroup | None = None) -> MicroBatch:
    """Sequence parallelism: the slice of rank 0 ≤ `rank` < `size`, with the loss tokens that it predicts.

    A row of L tokens is padded to a multiple of the group's size n and split into n slices of L/n. Attention sees the
    whole row: Ulysses exchanges slices for heads, context parallelism gathers keys and values. All other layers and the
    loss use the slice. A slice without loss tokens has a dummy token of weight 0, so that its rank takes part in all
    collectives.

    Args:
        micro_batch: One row, without an attention mask: boundaries say where sequences begin, for the whole row.
        rank: Index of the slice.
        size: Number of slices.
        group: Whose keys and values attention gathers; None: it gets the whole row otherwise.
    """
    inputs = micro_batch.inputs
    assert inputs.boundaries is not None, "there is no mask of a slice"
    assert micro_batch.returns is None, "a critic is refused with sequence parallelism"
    assert inputs.input_ids.shape[0] == 1, "a slice is one of a row"
    length = -(-inputs.input_ids.shape[1] // size)
    stretch = slice(rank * length, (rank + 1) * length)
    missing = length * size - inputs.input_ids.shape[1]
    input_ids = F.pad(inputs.input_ids, (0, missing))[:, stretch].contiguous()
    boundaries = inputs.boundaries.padded(missing)
    if group is not None:
        boundaries = boundaries.stretch(stretch.start, stretch.stop, group)
    # Positions continue, because padding is not a new sequence.
    further = inputs.position_ids[:, -1:] + torch.arange(1, missing + 1, device=inputs.position_ids.device)
    position_ids = torch.cat([inputs.position_ids, further], dim=1)[:, stretch].contiguous()
    routes = inputs.routes
    if routes is not None:
        routes = F.pad(routes, (0, 0, 0, 0, 0, missing), value=-1)[stretch].contiguous()
    is_mine = (inputs.target_index >= stretch.start) & (inputs.target_index < stretch.stop)
    if not micro_batch.num_tokens or not is_mine.any():
        empty = empty_micro_batch(input_ids.device, needs_mask=False)
        given = empty.inputs._replace(
            input_ids=input_ids, position_ids=position_ids, boundaries=boundaries, routes=routes
        )
        return replace(empty, inputs=given)
    places, target_ids = inputs.target_index[is_mine] - stretch.start, inputs.target_ids[is_mine]
    alternatives = None if inputs.alternatives is None else inputs.alternatives[is_mine]
    columns = {name: getattr(micro_batch, name) for name in _PER_TOKEN}
    mine: dict[str, Any] = {name: one[is_mine] for name, one in columns.items() if one is not None}
    is_mine_there = is_mine.cpu().numpy()
    return replace(
        micro_batch,
        inputs=ModelInputs(input_ids, position_ids, None, places, target_ids, boundaries, alternatives, routes),
        sequence_index=micro_batch.sequence_index[is_mine_there],
        token_index=micro_batch.token_index[is_mine_there],
        num_tokens=len(places),
        selected={name: one[is_mine] for name, one in micro_batch.selected.items()},
        **mine,
    )
