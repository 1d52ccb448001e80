"""Where each sequence goes: ranks, micro-batches and rows. Pure, deterministic, no torch.

A *row* holds one or more sequences end to end. A micro-batch is up to `max_tokens // L` rows, padded to L, the fullest
of them. Symbols: N sequences, R rows, L row length in tokens.

    cost(n) = n · (1 + a · n)     a = attention share: 2 · layers · heads · head_dim / (weights outside embeddings)

Every rank computes the whole plan from the same lengths, so nothing is communicated, and every rank gets the same
number of micro-batches: with ZeRO-2/3 each forward and backward is collective, so an unequal count would hang.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.dataflow.errors import ShapeError

RowLayout = Literal["rows", "single_row", "single_sequence"]
"""`rows`: several padded rows under a block-diagonal mask (sdpa). `single_row`: one row (variable-length attention).
`single_sequence`: one row of one sequence (sdpa without a mask, under sequence parallelism)."""

_ROW_MULTIPLES = (1, 2, 3, 4)
_WIDE_ROW_TOKENS = 256
MAX_IMBALANCE = 1.05
"""Most loaded rank over the mean, up to which fewer micro-batches are worth it."""


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """One forward-backward on one rank.

    Attributes:
        rows: Sequence indices of each row, in order. No rows: an empty micro-batch that only keeps ranks in step.
        row_length: L, tokens; every row is padded to it.
        shared: Like `rows`: how many first tokens of each sequence are those of the last one before it with a 0 here,
            and are not laid out again; empty: none are.
    """

    rows: tuple[tuple[int, ...], ...]
    row_length: int
    shared: tuple[tuple[int, ...], ...] = ()

    @property
    def num_padded_tokens(self) -> int:
        """R · L: what the forward computes on, tokens."""
        return len(self.rows) * self.row_length


EMPTY_MICRO_BATCH = MicroBatchPlan(rows=(), row_length=1)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Who computes what in one optimizer step.

    Attributes:
        ranks: For each rank its micro-batches; equally many on every rank.
        efficiency: Useful tokens / padded tokens over all ranks, 0..1.
    """

    ranks: tuple[tuple[MicroBatchPlan, ...], ...]
    efficiency: float

    @property
    def shared_lengths(self) -> list[int]:
        """Of every prompt that is not computed because another sequence has brought it, tokens."""
        rows = [row for rank in self.ranks for micro_batch in rank for row in micro_batch.shared]
        return [length for row in rows for length in row if length]


def plan_batch(
    lengths: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    *,
    attention_share: float = 0.0,
    layout: RowLayout = "rows",
) -> BatchPlan:
    """Place every sequence of length ≥ 1 in exactly one row of one micro-batch of one rank.

    Args:
        lengths: Input tokens of each sequence. A sequence of length 0 has nothing to compute and is left out.
        num_ranks: Data-parallel ranks.
        max_tokens: Padded tokens of one micro-batch, at most.
        attention_share: a of the cost model, per token.
        layout: How rows are formed.

    Raises:
        ShapeError: If a sequence is longer than `max_tokens`.
    """
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ShapeError(
            f"trainer.max_tokens_per_micro_batch={max_tokens} is below the longest sequence of this batch, {longest} "
            f"tokens (sequence {lengths.index(longest)}). A sequence is never split, so it would not fit. "
            f"Use at least {longest}, or lower rollout.sampling.max_new_tokens."
        )
    shares = balance_ranks(lengths, num_ranks, attention_share)
    plans = [_plan_rank(lengths, share, max_tokens, attention_share, layout) for share in shares]
    count = max(len(plan) for plan in plans)
    if layout == "single_row" and count > 1:
        most = max(sum(sequence_cost(lengths[index], attention_share) for index in share) for share in shares)
        rows = fill_rows(lengths, range(len(lengths)), max_tokens)
        shared_out = _share_rows(lengths, rows, num_ranks, attention_share, most)
        if shared_out is not None and (fewest := max(map(len, shared_out))) < count:
            plans, count = [[_micro_batch(lengths, [row]) for row in own] for own in shared_out], fewest
    padded = sum(micro_batch.num_padded_tokens for plan in plans for micro_batch in plan)
    return BatchPlan(
        ranks=tuple((*plan, *[EMPTY_MICRO_BATCH] * (count - len(plan))) for plan in plans),
        efficiency=sum(lengths) / padded if padded else 1.0,
    )


def balance_ranks(lengths: Sequence[int], num_ranks: int, attention_share: float) -> list[list[int]]:
    """Give each sequence to a rank, costliest first, each to the rank with the least so far (LPT; Graham 1969).

    Returns:
        For each rank, indices of its sequences (those of length ≥ 1), longest first.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for index in _longest_first(lengths, range(len(lengths))):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + sequence_cost(lengths[index], attention_share), rank))
    return shares


def _share_rows(
    lengths: Sequence[int], rows: Sequence[tuple[int, ...]], num_ranks: int, attention_share: float, most_cost: float
) -> list[list[tuple[int, ...]]] | None:
    """Give each rank equally many rows, costliest first, each to the rank with the least so far that has room.

    Ranks that are balanced before rows are filled may each need a row more than they should.

    Returns:
        For each rank its rows; None if a rank would cost more than `most_cost` and than `MAX_IMBALANCE` of the mean.
    """
    costs = {row: sum(sequence_cost(lengths[index], attention_share) for index in row) for row in rows}
    max_rows = -(-len(rows) // num_ranks)
    shares: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for row in sorted(rows, key=lambda row: (-costs[row], row)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(row)
        if len(shares[rank]) < max_rows:
            heapq.heappush(loads, (load + costs[row], rank))
    totals = [sum(costs[row] for row in share) for share in shares]
    allowed = max(MAX_IMBALANCE * sum(totals) / num_ranks, most_cost)
    return shares if max(totals) <= allowed else None


def sequence_cost(length: int, attention_share: float) -> float:
    """Forward-backward cost of one sequence in units of one token's matrix products."""
    return length * (1.0 + attention_share * length)


def fill_rows(lengths: Sequence[int], indices: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Pack sequences into rows of at most `capacity` tokens: best-fit decreasing, O(n log n) searches.

    Returns:
        Rows, fullest first.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []
    for index in _longest_first(lengths, indices):
        length = lengths[index]
        place = bisect_left(free, (length, -1))
        if place == len(free):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room, row = free.pop(place)
        rows[row].append(index)
        insort(free, (room - length, row))
    return [tuple(rows[row]) for _, row in free]


def _plan_rank(
    lengths: Sequence[int], share: Sequence[int], max_tokens: int, attention_share: float, layout: RowLayout
) -> list[MicroBatchPlan]:
    """Try a few row lengths and keep the cheapest: short rows waste no attention, long rows waste no padding."""
    if not share:
        return [EMPTY_MICRO_BATCH]
    if layout == "single_sequence":
        return [_micro_batch(lengths, [(index,)]) for index in share]
    if layout == "single_row":
        return [_micro_batch(lengths, [row]) for row in fill_rows(lengths, share, max_tokens)]
    longest = max(lengths[index] for index in share)
    capacities = {min(longest * multiple, max_tokens) for multiple in _ROW_MULTIPLES}
    capacities.add(min(max(longest, _WIDE_ROW_TOKENS), max_tokens))
    candidates = [
        _group_rows(lengths, fill_rows(lengths, share, capacity), max_tokens) for capacity in sorted(capacities)
    ]
    return min(candidates, key=lambda plan: sum(_dense_cost(micro_batch, attention_share) for micro_batch in plan))


def _group_rows(lengths: Sequence[int], rows: Sequence[tuple[int, ...]], max_tokens: int) -> list[MicroBatchPlan]:
    """Cut rows, fullest first, into micro-batches of at most `max_tokens` padded tokens."""
    plans: list[MicroBatchPlan] = []
    start = 0
    while start < len(rows):
        row_length = sum(lengths[index] for index in rows[start])
        stop = start + max(1, max_tokens // row_length)
        plans.append(_micro_batch(lengths, rows[start:stop]))
        start = stop
    return plans


def _micro_batch(lengths: Sequence[int], rows: Sequence[tuple[int, ...]]) -> MicroBatchPlan:
    return MicroBatchPlan(tuple(rows), max(sum(lengths[index] for index in row) for row in rows))


def _dense_cost(micro_batch: MicroBatchPlan, attention_share: float) -> float:
    """Masked attention computes every pair of a row, also those the mask removes."""
    return len(micro_batch.rows) * sequence_cost(micro_batch.row_length, attention_share)


def _longest_first(lengths: Sequence[int], indices: Sequence[int]) -> list[int]:
    return sorted((index for index in indices if lengths[index] > 0), key=lambda index: (-lengths[index], index))
