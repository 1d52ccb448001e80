"""Assigns the sequences of a step to ranks, micro-batches and rows. Pure and deterministic, without torch.

A *row* holds one or more sequences end to end. A micro-batch is up to `max_tokens // L` rows, padded to L, the fullest
of them. Symbols: N sequences, R rows, L row length in tokens.

    cost(n) = n · (1 + a · n)     a = attention share: 2 · layers · heads · head_dim / (weights outside embeddings)

Every rank computes the whole plan from the same lengths, so nothing is communicated, and every rank gets the same
number of micro-batches: with ZeRO-2/3 each forward and backward is collective, so an unequal count would hang.

Sequences of one *unit* are compared with each other by their loss, so they lie end to end in one row, which is in one
micro-batch of one rank, whatever the number of ranks. Sequences that begin alike may share one copy of that beginning,
the prompt of a group or a turn before a fork. They are a tree, whose branches lie in a row depth first:

    sequences   p p p p a a a,  p p p p a a b b,  p p p p c c c      each shares tokens with the one before it: 0, 6, 4
    tokens      p p p p a a a  b b  c c c                            a token attends to its ancestors and to itself
    positions   0 1 2 3 4 5 6  6 7  4 5 6                            a branch continues where it leaves the other one

The first token of a branch is predicted at the last position of what it shares, as that of the other branch.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.dataflow.errors import ShapeError
from penstock.dataflow.ids import TrajectoryId
from penstock.dataflow.trajectory import Routes
from penstock.weights.model_config import ModelConfig

RowLayout = Literal["rows", "single_row", "padded"]
"""`rows`: several rows of several sequences under a block-diagonal mask (sdpa). `single_row`: one row of several
(variable-length attention). `padded`: several rows of one sequence each, padded on the right."""

PLACEHOLDER_ID = 0
"""Token id of a position after the last token, whose logits are a target; the model never sees it."""
_ROW_MULTIPLES = (1, 2, 3, 4)
_WIDE_ROW_TOKENS = 256
MAX_IMBALANCE = 1.05
"""Largest load of a rank relative to the mean that is accepted in exchange for fewer micro-batches."""
_BLOCKS_PER_RANK = (1, 2, 4, 8)
"""For how many blocks per rank the sequences that begin alike are tried."""
_LEAST_SAVING = 1 / 32
"""Share of a block that another one must contain for them to be one: larger blocks fill the budget less well."""
_Key = tuple[bool, int, int, bytes]


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sequence as the optimizer step sees it."""

    token_ids: NDArray[np.integer]
    """`[T] int`, prompt first."""
    targets: NDArray[np.integer]
    """Positions of the loss tokens in `token_ids`, ascending, each ≥ 1."""
    behavior_logprobs: NDArray[np.float32]
    """`[len(targets)] float32`."""
    token_weight: float = 0.0
    """Aggregation weight of each loss token."""
    advantages: NDArray[np.floating] | None = None
    """`[len(targets)]`; None: zeros."""
    staleness: NDArray[np.integer] | None = None
    """`[len(targets)] int`, staleness of each loss token in versions; None: zeros."""
    reference_logprobs: NDArray[np.float32] | None = None
    """`[len(targets)] float32`; None where the loss does not need them."""
    preferred_to: tuple[int, ...] = ()
    """Indices of the sequences of the batch that a pair loss prefers it to."""
    unit: int | None = None
    """Sequences of one unit share a micro-batch; None: it may be in any."""
    group: int = 0
    """Position of its group in the batch; mini-batches contain whole groups."""
    proximal_logprobs: NDArray[np.float32] | None = None
    """`[len(targets)] float32`, of a forward at the start of the batch; None without one."""
    old_values: NDArray[np.floating] | None = None
    """`[len(targets)]`, V of the critic at the start of the batch; None: there is no critic."""
    returns: NDArray[np.floating] | None = None
    """`[len(targets)]`, targets of the critic."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """Likewise, of a teacher."""
    alternatives: NDArray[np.integer] | None = None
    """`[len(targets), A] int`, the other ids that each loss token was sampled from, then −1; None: they were sampled
    from the whole vocabulary."""
    routes: Routes | None = None
    """`[T, layers, k]`, as in `Trajectory`; None: the routers choose."""
    selected: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    """Name of a loss or correction of the whole batch -> `[len(targets)] bool`, which of the loss tokens it selects
    (`Algorithm.select`)."""
    recorded_as: tuple[TrajectoryId, int, int] | None = None
    """Trajectory, the sequence's first position in its arrays, and their length T; None for those that are not
    recorded."""
    is_imitated: bool = False
    """Whether its −logprob is in the loss of `nll_coefficient`. Not used by losses of pairs."""
    nll_factor: float = 0.0
    """What the −logprob of each of its loss tokens is multiplied by, beside `nll_coefficient` and the token weight: its
    average is not that of the policy loss."""

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
class MicroBatchPlan:
    """One forward-backward on one rank."""

    rows: tuple[tuple[int, ...], ...]
    """Sequence indices of each row, in order. No rows: an empty micro-batch that keeps the ranks in step."""
    row_length: int
    """L, tokens; every row is padded to it."""
    shared: tuple[tuple[int, ...], ...] = ()
    """Like `rows`: the number of first tokens that a sequence shares with the one before it in the row, which may share
    some of these with the one before that. They are computed once. Empty: nothing is shared."""

    @property
    def num_padded_tokens(self) -> int:
        """R · L: what the forward computes on, tokens."""
        return len(self.rows) * self.row_length

    def in_order(self) -> list[list[tuple[int, int]]]:
        """Of each row the sequences, each with its number of shared tokens."""
        shared = self.shared or [(0,) * len(row) for row in self.rows]
        return [list(zip(row, counts, strict=True)) for row, counts in zip(self.rows, shared, strict=True)]


EMPTY_MICRO_BATCH = MicroBatchPlan(rows=(), row_length=1)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Assignment of sequences to ranks and micro-batches in one optimizer step."""

    ranks: tuple[tuple[MicroBatchPlan, ...], ...]
    """For each rank its micro-batches; equally many on every rank."""
    efficiency: float
    """Useful tokens / padded tokens over all ranks, 0..1."""

    @property
    def shared_lengths(self) -> list[int]:
        """Length of every beginning that is not computed because another sequence contains it, tokens."""
        rows = [row for rank in self.ranks for micro_batch in rank for row in micro_batch.shared]
        return [length for row in rows for length in row if length]

    def slowest(self, attention_share: float) -> float:
        """Cost of the costliest rank, by `sequence_cost` of its rows."""
        return max(
            sum(len(one.rows) * sequence_cost(one.row_length, attention_share) for one in micro_batches)
            for micro_batches in self.ranks
        )

    def unpacked(self, bundles: Sequence[Sequence[int]], shared: Sequence[Sequence[int]] | None = None) -> BatchPlan:
        """Turn a plan of bundles into a plan of their sequences; `shared` as in `MicroBatchPlan`, per bundle."""

        def in_rows(micro_batch: MicroBatchPlan, of_bundle: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(one for bundle in row for one in of_bundle[bundle]) for row in micro_batch.rows)

        def micro_batch_of(plan: MicroBatchPlan) -> MicroBatchPlan:
            return MicroBatchPlan(in_rows(plan, bundles), plan.row_length, in_rows(plan, shared) if shared else ())

        return BatchPlan(tuple(tuple(map(micro_batch_of, rank)) for rank in self.ranks), self.efficiency)


def row_layout(model: ModelConfig) -> RowLayout:
    """How the rows of a model are formed."""
    if model.rows == "padded":
        return "padded"
    return "single_row" if model.attention == "varlen" else "rows"


def plan_rows(
    sequences: Sequence[TrainingSequence],
    num_ranks: int,
    max_tokens: int,
    attention_share: float,
    layout: RowLayout,
    *,
    share_prompts: bool,
) -> BatchPlan:
    """Plan a batch; padded rows share nothing.

    Raises:
        ShapeError: As in `plan_batch`.
    """
    if share_prompts and layout != "padded":
        return plan_with_shared_prefixes(
            sequences, num_ranks, max_tokens, attention_share=attention_share, layout=layout
        )
    return plan_batch(
        [one.num_inputs for one in sequences],
        num_ranks,
        max_tokens,
        units=[one.unit for one in sequences],
        attention_share=attention_share,
        layout=layout,
    )


def plan_batch(
    lengths: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    *,
    units: Sequence[int | None] | None = None,
    attention_share: float = 0.0,
    layout: RowLayout = "rows",
) -> BatchPlan:
    """Place every sequence of length ≥ 1 in exactly one row of one micro-batch of one rank.

    Args:
        lengths: Input tokens of each sequence. A sequence of length 0 needs no computation and is left out.
        num_ranks: Data-parallel ranks.
        max_tokens: Padded tokens of one micro-batch, at most.
        units: Per sequence, the unit that stays together; None: it may be anywhere.
        attention_share: a of the cost model, per token.
        layout: How rows are formed.

    Raises:
        ShapeError: If a sequence or a unit is longer than `max_tokens`.
    """
    if layout == "padded":
        return _plan_padded(lengths, num_ranks, max_tokens, units or [None] * len(lengths), attention_share)
    bundles = [] if units is None else _bundles(lengths, units)
    if any(len(bundle) > 1 for bundle in bundles):  # each is packed like one long sequence
        totals = [sum(lengths[index] for index in bundle) for bundle in bundles]
        for bundle, total in zip(bundles, totals, strict=True):
            _check_unit(lengths, bundle, total, max_tokens)
        plan = plan_batch(totals, num_ranks, max_tokens, attention_share=attention_share, layout=layout)
        return plan.unpacked(bundles)
    _check_longest(lengths, max_tokens)
    shares = balance_ranks(lengths, num_ranks, attention_share)
    plans = [_plan_rank(lengths, share, max_tokens, attention_share, layout) for share in shares]
    count = max(len(plan) for plan in plans)
    if layout == "single_row" and count > 1:
        # Balancing sequences before rows are filled may give every rank one row more than necessary.
        most = max(sum(sequence_cost(lengths[index], attention_share) for index in share) for share in shares)
        rows = fill_rows(lengths, range(len(lengths)), max_tokens)
        shared_out = _share_rows(lengths, rows, num_ranks, attention_share, most)
        if shared_out is not None and max(map(len, shared_out)) < count:
            plans = [[_micro_batch(lengths, [row]) for row in own] for own in shared_out]
    return _of_equal_length(plans, lengths)


def _of_equal_length(plans: Sequence[Sequence[MicroBatchPlan]], lengths: Sequence[int]) -> BatchPlan:
    """Equally many micro-batches on each rank, at least one: ranks with fewer get empty ones."""
    count = max(1, *map(len, plans))
    padded = sum(micro_batch.num_padded_tokens for plan in plans for micro_batch in plan)
    return BatchPlan(
        ranks=tuple((*plan, *[EMPTY_MICRO_BATCH] * (count - len(plan))) for plan in plans),
        efficiency=sum(lengths) / padded if padded else 1.0,
    )


def _plan_padded(
    lengths: Sequence[int],
    num_ranks: int,
    max_tokens: int,
    units: Sequence[int | None],
    attention_share: float,
) -> BatchPlan:
    """One sequence per row. Sequences of similar length share a micro-batch, and those of a unit do in any case."""
    _check_longest(lengths, max_tokens)
    bundles = [bundle for bundle in _bundles(lengths, units) if lengths[bundle[0]]]
    widths = [max(lengths[one] for one in bundle) for bundle in bundles]
    for bundle, width in zip(bundles, widths, strict=True):
        _check_unit(lengths, bundle, width * len(bundle), max_tokens)
    costs = [len(bundle) * sequence_cost(width, attention_share) for bundle, width in zip(bundles, widths, strict=True)]
    shares = _deal(costs, num_ranks, max_each=len(costs))
    plans: list[list[MicroBatchPlan]] = []
    for share in shares:
        plan: list[MicroBatchPlan] = []
        for index in sorted(share, key=lambda index: (-widths[index], index)):
            rows = tuple((one,) for one in bundles[index])
            if plan and plan[-1].row_length * (len(plan[-1].rows) + len(rows)) <= max_tokens:
                plan[-1] = MicroBatchPlan((*plan[-1].rows, *rows), plan[-1].row_length)
            else:
                plan.append(MicroBatchPlan(rows, widths[index]))
        plans.append(plan)
    return _of_equal_length(plans, lengths)


def _check_unit(lengths: Sequence[int], unit: Sequence[int], num_tokens: int, max_tokens: int) -> None:
    if num_tokens > max_tokens and len(unit) > 1:
        raise ShapeError(
            f"trainer.max_tokens_per_micro_batch={max_tokens} is below {num_tokens} tokens: answers of a group, in "
            f"parts of {', '.join(str(lengths[one]) for one in unit)} tokens, are compared with each other: "
            f"their loss needs all of them in one micro-batch. Use at least {num_tokens} or "
            "algorithm.loss.pairs=best_worst."
        )


def _check_longest(lengths: Sequence[int], max_tokens: int) -> None:
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ShapeError(
            f"trainer.max_tokens_per_micro_batch={max_tokens} is below the longest sequence of this batch, {longest} "
            f"tokens (sequence {lengths.index(longest)}). A sequence is never split, so it would not fit. "
            f"Use at least {longest}, or lower rollout.sampling.max_new_tokens."
        )


def balance_ranks(lengths: Sequence[int], num_ranks: int, attention_share: float) -> list[list[int]]:
    """Assign sequences to ranks by cost.

    Returns:
        For each rank, indices of its sequences (those of length ≥ 1), longest first.
    """
    costs = [sequence_cost(length, attention_share) for length in lengths]
    shares = _deal(costs, num_ranks, max_each=len(costs))
    return [[index for index in share if lengths[index]] for share in shares]


def _share_rows(
    lengths: Sequence[int], rows: Sequence[tuple[int, ...]], num_ranks: int, attention_share: float, most_cost: float
) -> list[list[tuple[int, ...]]] | None:
    """Assign equally many rows to each rank by cost.

    Returns:
        For each rank its rows; None if a rank would cost more than `most_cost` and than `MAX_IMBALANCE` of the mean.
    """
    costs = [sum(sequence_cost(lengths[index], attention_share) for index in row) for row in rows]
    shares = _deal(costs, num_ranks, max_each=-(-len(rows) // num_ranks))
    totals = [sum(costs[index] for index in share) for share in shares]
    allowed = max(MAX_IMBALANCE * sum(totals) / num_ranks, most_cost)
    return [[rows[index] for index in share] for share in shares] if max(totals) <= allowed else None


def _deal(costs: Sequence[float], num_ranks: int, *, max_each: int) -> list[list[int]]:
    """Indices for each rank: costliest first, each to the rank with the lowest cost so far that is not full (LPT;
    Graham 1969).
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        if len(shares[rank]) < max_each:
            heapq.heappush(loads, (load + costs[index], rank))
    return shares


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
    longest_first = sorted((one for one in indices if lengths[one] > 0), key=lambda one: (-lengths[one], one))
    for index in longest_first:
        length = lengths[index]
        position = bisect_left(free, (length, -1))
        if position == len(free):
            free_tokens, row = capacity, len(rows)
            rows.append([])
        else:
            free_tokens, row = free.pop(position)
        rows[row].append(index)
        insort(free, (free_tokens - length, row))
    return [tuple(rows[row]) for _, row in free]


def _plan_rank(
    lengths: Sequence[int], share: Sequence[int], max_tokens: int, attention_share: float, layout: RowLayout
) -> list[MicroBatchPlan]:
    """Plan the micro-batches of one rank's sequences.

    For rows under a mask, a few lengths are tried and the cheapest is kept. Short rows waste less attention (which
    computes every pair of a row, also those that the mask removes), long rows waste less padding.
    """
    if not share:
        return [EMPTY_MICRO_BATCH]
    if layout == "single_row":
        return [_micro_batch(lengths, [row]) for row in fill_rows(lengths, share, max_tokens)]
    longest = max(lengths[index] for index in share)
    capacities = {min(longest * multiple, max_tokens) for multiple in _ROW_MULTIPLES}
    capacities.add(min(max(longest, _WIDE_ROW_TOKENS), max_tokens))
    candidates: list[list[MicroBatchPlan]] = []
    for capacity in sorted(capacities):
        rows = fill_rows(lengths, share, capacity)
        plans: list[MicroBatchPlan] = []
        start = 0
        # The first row of a micro-batch is its fullest; the others are padded to its length.
        while start < len(rows):
            stop = start + max(1, max_tokens // sum(lengths[index] for index in rows[start]))
            plans.append(_micro_batch(lengths, rows[start:stop]))
            start = stop
        candidates.append(plans)
    return min(
        candidates,
        key=lambda plans: sum(len(one.rows) * sequence_cost(one.row_length, attention_share) for one in plans),
    )


def _micro_batch(lengths: Sequence[int], rows: Sequence[tuple[int, ...]]) -> MicroBatchPlan:
    return MicroBatchPlan(tuple(rows), max(sum(lengths[index] for index in row) for row in rows))


def _bundles(lengths: Sequence[int], units: Sequence[int | None]) -> list[list[int]]:
    """Indices that stay together, ordered by their first one; those of length 0 are alone."""
    bundles: list[list[int]] = []
    of_unit: dict[int, list[int]] = {}
    for index, (length, unit) in enumerate(zip(lengths, units, strict=True)):
        if unit is None or not length or unit not in of_unit:
            bundles.append([index])
            if unit is not None and length:
                of_unit[unit] = bundles[-1]
        else:
            of_unit[unit].append(index)
    return bundles


def plan_with_shared_prefixes(
    sequences: Sequence[TrainingSequence],
    num_ranks: int,
    max_tokens: int,
    *,
    attention_share: float = 0.0,
    layout: RowLayout = "rows",
) -> BatchPlan:
    """`plan_batch`, where sequences of one unit that begin with the same tokens share one copy of these.

    A tree that would not fit the budget, or whose attention under a mask would cost more than the copies, is cut into
    blocks, each with its own copy of what they share. So is one that would be too much for one of several ranks: of a
    few sizes, the one with the lowest cost of the costliest rank is chosen.

    Args:
        sequences: Those of the batch. One without loss needs no computation and is left out.
        num_ranks: Data-parallel ranks.
        max_tokens: Padded tokens of one micro-batch, at most.
        attention_share: As in `plan_batch`.
        layout: As in `plan_batch`.

    Raises:
        ShapeError: If a sequence or a unit is longer than `max_tokens`.
    """
    lengths = [one.num_inputs for one in sequences]
    _check_longest(lengths, max_tokens)
    between_members = attention_share if layout == "rows" else 0.0  # only a mask computes what it removes
    even = [sum(lengths) // (num_ranks * count) for count in _BLOCKS_PER_RANK] if num_ranks > 1 else []
    order, shared = _depth_first(sequences)
    ordered = [sequences[index] for index in order]
    plans = []
    for block_tokens in dict.fromkeys(min(size, max_tokens) for size in (max_tokens, *even)):
        blocks = _blocks(ordered, shared, max_tokens, block_tokens, between_members)
        plan = plan_batch(
            [num_tokens for _, num_tokens in blocks],
            num_ranks,
            max_tokens,
            units=[ordered[places[0]].unit for places, _ in blocks],
            attention_share=attention_share,
            layout=layout,
        )
        members = [[order[place] for place in places] for places, _ in blocks]
        plans.append(plan.unpacked(members, [[0, *(shared[place] for place in places[1:])] for places, _ in blocks]))
    return min(plans, key=lambda plan: plan.slowest(between_members))


def _depth_first(sequences: Sequence[TrainingSequence]) -> tuple[list[int], list[int]]:
    """Sort the sequences by their inputs, as words in a dictionary.

    Then no earlier one has more first tokens in common with a sequence than the one right before it.

    Returns:
        Indices of the sequences that need computation, and how many first tokens each shares with the one before it.
    """
    keys = {index: _key(one, one.num_inputs) for index, one in enumerate(sequences) if one.num_inputs}
    order, shared = _sorted(keys)
    if any(sequences[index].routes is not None for index in order):
        # One copy of a token is sent to one choice of experts. Routes are long: only those of common tokens are needed.
        common = zip(order, map(max, shared, [*shared[1:], 0]), strict=True)
        keys = {index: _key(sequences[index], max(count, 1), with_routes=True) for index, count in sorted(common)}
        order, shared = _sorted(keys)
    return order, shared


def _key(one: TrainingSequence, num_tokens: int, *, with_routes: bool = False) -> _Key:
    """By which its first tokens are compared: the unit, the bytes of a token, and these for each token."""
    tokens = one.token_ids[:num_tokens].astype(np.int32, copy=False)
    width, content = 4, tokens.tobytes()
    if with_routes and one.routes is not None:
        routes = np.ascontiguousarray(one.routes[:num_tokens]).reshape(num_tokens, -1).view(np.uint8)
        joined = np.concatenate([tokens[:, None].view(np.uint8), routes], axis=1)
        width, content = joined.shape[1], joined.tobytes()
    return one.unit is not None, one.unit or 0, width, content


def _sorted(keys: Mapping[int, _Key]) -> tuple[list[int], list[int]]:
    order = sorted(keys, key=keys.__getitem__)
    return order, [0, *(_num_common(keys[before], keys[index]) for before, index in pairwise(order))]


def _num_common(one: _Key, other: _Key) -> int:
    """First tokens in common; none if the units differ, or the experts of only one are known."""
    if one[:3] != other[:3]:
        return 0
    num_bytes, kind = min(len(one[3]), len(other[3])), np.dtype(np.uint8 if one[2] % 4 else np.int32)
    mine, theirs = (np.frombuffer(key[3], kind, num_bytes // kind.itemsize) for key in (one, other))
    differs = mine != theirs
    first = int(differs.argmax())
    return (first * kind.itemsize if differs[first] else num_bytes) // one[2]


def _blocks(
    ordered: Sequence[TrainingSequence],
    shared: Sequence[int],
    max_tokens: int,
    block_tokens: int,
    attention_share: float,
) -> list[tuple[range, int]]:
    """Cut sorted sequences into blocks of at most `block_tokens` if they have several; of a unit, of `max_tokens`.

    Neighbours are joined in the order of what they share, the longest first, so a tree is cut near its root. With l and
    r tokens in two blocks and s of them shared, by `sequence_cost` l + r − s in one row cost no more than two rows.

    Returns:
        Places of the members of each block, and its tokens.
    """
    first, last = list(range(len(ordered))), list(range(len(ordered)))  # of the block that ends, that begins there
    num_tokens = [one.num_inputs for one in ordered]  # of the block that begins there
    for place in sorted((place for place, common in enumerate(shared) if common), key=lambda place: -shared[place]):
        begin, is_free = first[place - 1], ordered[place].unit is None
        left, right, common = num_tokens[begin], num_tokens[place], shared[place]
        joined = left + right - common
        apart = sequence_cost(left, attention_share) + sequence_cost(right, attention_share)
        saves = common >= _LEAST_SAVING * min(left, right) and sequence_cost(joined, attention_share) <= apart
        if joined <= (block_tokens if is_free else max_tokens) and (saves or not is_free):
            num_tokens[begin] = joined
            first[last[place]], last[begin] = begin, last[place]
    begins = [place for place in range(len(ordered)) if first[last[place]] == place]
    return [(range(place, last[place] + 1), num_tokens[place]) for place in begins]
