"""Placing sequences of which some must share a micro-batch: a unit of them is packed like one long sequence.

Its members lie end to end in one row, so they are in one micro-batch of one rank, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataflow.errors import ShapeError
from penstock.trainer.batches.packing import BatchPlan, MicroBatchPlan, RowLayout, plan_batch


def plan_units(
    lengths: Sequence[int],
    units: Sequence[int | None],
    num_ranks: int,
    max_tokens: int,
    *,
    attention_share: float = 0.0,
    layout: RowLayout = "rows",
) -> BatchPlan:
    """`plan_batch`, with sequences of equal unit side by side.

    Args:
        lengths: Input tokens of each sequence; one of length 0 is left out.
        units: Per sequence, which others it stays with; None: it goes anywhere.
        num_ranks: Data-parallel ranks.
        max_tokens: Padded tokens of one micro-batch, at most.
        attention_share: As in `plan_batch`.
        layout: As in `plan_batch`.

    Raises:
        ShapeError: If a sequence or a unit is longer than `max_tokens`.
    """
    bundles = _bundles(lengths, units)
    totals = [sum(lengths[index] for index in bundle) for bundle in bundles]
    if all(len(bundle) == 1 for bundle in bundles):
        return plan_batch(lengths, num_ranks, max_tokens, attention_share=attention_share, layout=layout)
    for bundle, total in zip(bundles, totals, strict=True):
        if total > max_tokens and len(bundle) > 1:
            raise ShapeError(
                f"trainer.max_tokens_per_micro_batch={max_tokens} is below {total} tokens: answers of a group, "
                f"in parts of {', '.join(str(lengths[one]) for one in bundle)} tokens, are compared with each other: "
                f"their loss needs all of them in one micro-batch. Use at least {total} or algorithm.pairs=best_worst."
            )
    plan = plan_batch(totals, num_ranks, max_tokens, attention_share=attention_share, layout=layout)
    return BatchPlan(
        tuple(tuple(_unbundled(micro_batch, bundles) for micro_batch in rank) for rank in plan.ranks), plan.efficiency
    )


def _bundles(lengths: Sequence[int], units: Sequence[int | None]) -> list[list[int]]:
    """Indices that stay together, in order of their first; those of length 0 are alone."""
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


def _unbundled(micro_batch: MicroBatchPlan, bundles: Sequence[Sequence[int]]) -> MicroBatchPlan:
    rows = tuple(tuple(index for bundle in row for index in bundles[bundle]) for row in micro_batch.rows)
    return MicroBatchPlan(rows, micro_batch.row_length)
