"""Assigns the sequences of a step to ranks, micro-batches and rows. Pure and deterministic, without torch.

A *row* holds one or more sequences end to end. A micro-batch is up to `max_tokens // L` rows, padded to L, the fullest
of them. Symbols: N sequences, R rows, L row length in tokens.

    cost(n) = n · (1 + a · n)     a = attention share: 2 · layers · heads · head_dim / (weights outside embeddings)

Every rank computes the whole plan from the same lengths, so nothing is communicated, and every rank gets the same
number of micro-batches: with ZeRO-2/3 each forward and backward is collective, so an unequal count would hang.

Sequences of one *unit* are compared with each other by their loss, so they lie end to end in one row, which is in one
micro-batch of one rank, whatever the number of ranks. Sequences that begin with the same prompt may share one copy:

    tokens      p p p p  a a a  b b  c c c c      an answer attends to the prompt and to itself
    positions   0 1 2 3  4 5 6  4 5  4 5 6 7      every answer begins where the prompt ends

The first token of every answer is predicted at the prompt's last position, which they share.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
"""For how many blocks per rank the sequences of equal prompts are tried."""


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sequence as the optimizer step sees it.

    Attributes:
        token_ids: `[T] int`, prompt first.
        targets: Positions of the loss tokens in `token_ids`, ascending, each ≥ 1.
        behavior_logprobs: `[len(targets)] float32`.
        token_weight: Aggregation weight of each loss token.
        is_imitated: Whether its −logprob is in the loss of `nll_coefficient`. Not used by losses of pairs.
        nll_factor: What the −logprob of each of its loss tokens is multiplied by, beside `nll_coefficient` and the
            token weight: its average is not that of the policy loss.
        advantages: `[len(targets)]`; None: zeros.
        staleness: `[len(targets)] int`, staleness of each loss token in versions; None: zeros.
        reference_logprobs: `[len(targets)] float32`; None where the loss does not need them.
        teacher_logprobs: Likewise, of a teacher.
        prompt_length: Tokens before the first sampled one, which several sequences may share; 0: none.
        preferred_to: Indices of the sequences of the batch that a pair loss prefers it to.
        unit: Sequences of one unit share a micro-batch; None: it may be in any.
        group: Position of its group in the batch; mini-batches contain whole groups.
        proximal_logprobs: `[len(targets)] float32`, of a forward at the start of the batch; None without one.
        old_values: `[len(targets)]`, V of the critic at the start of the batch; None: there is no critic.
        returns: `[len(targets)]`, targets of the critic.
        alternatives: `[len(targets), A] int`, the other ids that each loss token was sampled from, then −1; None: they
            were sampled from the whole vocabulary.
        routes: `[T, layers, k]`, as in `Trajectory`; None: the routers choose.
        selected: Name of a loss or correction of the whole batch -> `[len(targets)] bool`, which of the loss tokens it
            selects (`Algorithm.select`).
        recorded_as: Trajectory, the sequence's first position in its arrays, and their length T; None for those that
            are not recorded.
    """

    token_ids: NDArray[np.integer]
    targets: NDArray[np.integer]
    behavior_logprobs: NDArray[np.float32]
    token_weight: float = 0.0
    advantages: NDArray[np.floating] | None = None
    staleness: NDArray[np.integer] | None = None
    reference_logprobs: NDArray[np.float32] | None = None
    preferred_to: tuple[int, ...] = ()
    unit: int | None = None
    group: int = 0
    proximal_logprobs: NDArray[np.float32] | None = None
    old_values: NDArray[np.floating] | None = None
    returns: NDArray[np.floating] | None = None
    teacher_logprobs: NDArray[np.float32] | None = None
    prompt_length: int = 0
    alternatives: NDArray[np.integer] | None = None
    routes: Routes | None = None
    selected: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    recorded_as: tuple[TrajectoryId, int, int] | None = None
    is_imitated: bool = False
    nll_factor: float = 0.0

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
    """One forward-backward on one rank.

    Attributes:
        rows: Sequence indices of each row, in order. No rows: an empty micro-batch that keeps the ranks in step.
        row_length: L, tokens; every row is padded to it.
        shared: Like `rows`: the number of first tokens that a sequence shares with the nearest sequence before it that
            has 0 here. They are computed with that one only. Empty: nothing is shared.
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
    """Assignment of sequences to ranks and micro-batches in one optimizer step.

    Attributes:
        ranks: For each rank its micro-batches; equally many on every rank.
        efficiency: Useful tokens / padded tokens over all ranks, 0..1.
    """

    ranks: tuple[tuple[MicroBatchPlan, ...], ...]
    efficiency: float

    @property
    def shared_lengths(self) -> list[int]:
        """Length of every prompt that is not computed because another sequence contains it, tokens."""
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
    """Plan a batch; padded rows each have their own prompt.

    Raises:
        ShapeError: As in `plan_batch`.
    """
    if share_prompts and layout != "padded":
        return plan_with_shared_prompts(
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
        if shared_out is not None and (fewest := max(map(len, shared_out))) < count:
            plans, count = [[_micro_batch(lengths, [row]) for row in own] for own in shared_out], fewest
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
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(bundles)), key=lambda index: (-costs[index], index)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + costs[index], rank))
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
    count = max(1, *map(len, plans))
    padded = sum(one.num_padded_tokens for plan in plans for one in plan)
    return BatchPlan(
        ranks=tuple((*plan, *[EMPTY_MICRO_BATCH] * (count - len(plan))) for plan in plans),
        efficiency=sum(lengths) / padded if padded else 1.0,
    )


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
    """Assign sequences to ranks, costliest first, each to the rank with the lowest cost so far (LPT; Graham 1969).

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
    """Assign equally many rows to each rank: the costliest first, to the rank with the lowest cost that is not full.

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


def _longest_first(lengths: Sequence[int], indices: Sequence[int]) -> list[int]:
    return sorted((index for index in indices if lengths[index] > 0), key=lambda index: (-lengths[index], index))


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


@dataclass(slots=True)
class _Block:
    """Sequences that share one copy of their prompt.

    Attributes:
        unit: The unit of all of them.
        prompt_length: Tokens.
        num_tokens: Tokens of the prompt and of everything after it in each sequence.
    """

    unit: int | None
    prompt_length: int
    num_tokens: int
    members: list[int] = field(default_factory=list)

    def saves(self, one: TrainingSequence, attention_share: float) -> bool:
        """Whether one more member saves more than the attention costs that is computed between members.

        With t tokens in the block, n in the sequence and r of them after the prompt: by `sequence_cost`, t + r in one
        row cost no more than t and n in two rows.
        """
        rest = one.num_inputs - self.prompt_length
        more_attention = 2 * self.num_tokens * rest + rest**2 - one.num_inputs**2
        return attention_share * more_attention <= self.prompt_length


def plan_with_shared_prompts(
    sequences: Sequence[TrainingSequence],
    num_ranks: int,
    max_tokens: int,
    *,
    attention_share: float = 0.0,
    layout: RowLayout = "rows",
) -> BatchPlan:
    """`plan_batch`, where sequences of equal prompt (and equal unit) share one copy of it: they are a block.

    A block that would not fit the budget, or whose attention under a mask would cost more than the prompt, becomes
    several blocks, each with its own copy. So does a block that would be too much for one of several ranks: of a few
    sizes, the one with the lowest cost of the costliest rank is chosen.

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
    plans = []
    for block_tokens in dict.fromkeys(min(size, max_tokens) for size in (max_tokens, *even)):
        blocks = _blocks(sequences, max_tokens, block_tokens, between_members)
        plan = plan_batch(
            [block.num_tokens for block in blocks],
            num_ranks,
            max_tokens,
            units=[block.unit for block in blocks],
            attention_share=attention_share,
            layout=layout,
        )
        # The first member of a block contains the prompt for the others.
        shared = [[0, *[block.prompt_length] * (len(block.members) - 1)] for block in blocks]
        plans.append(plan.unpacked([block.members for block in blocks], shared))
    return min(plans, key=lambda plan: plan.slowest(between_members))


def _blocks(
    sequences: Sequence[TrainingSequence], max_tokens: int, block_tokens: int, attention_share: float
) -> list[_Block]:
    """Blocks of at most `block_tokens` if they have several sequences; of a unit, of `max_tokens`."""
    blocks: list[_Block] = []
    newest: dict[tuple[int | None, bytes], _Block] = {}
    for index, one in enumerate(sequences):
        if not one.num_inputs:
            continue
        prompt = (one.unit, one.token_ids[: one.prompt_length].astype(np.int64).tobytes())
        if one.routes is not None:  # one copy of a prompt is sent to one choice of experts
            prompt = (one.unit, prompt[1] + one.routes[: one.prompt_length].tobytes())
        block, rest = newest.get(prompt), one.num_inputs - one.prompt_length
        most = block_tokens if one.unit is None else max_tokens
        fits = block is not None and bool(one.prompt_length) and block.num_tokens + rest <= most
        if block is None or not fits or (one.unit is None and not block.saves(one, attention_share)):
            block = newest[prompt] = _Block(one.unit, one.prompt_length, one.prompt_length)
            blocks.append(block)
        block.members.append(index)
        block.num_tokens += rest
    return blocks
