"""Prompts that several sequences begin with, computed once: one row holds the prompt, then what follows it in each.

    tokens      p p p p  a a a  b b  c c c c      an answer attends to the prompt and to itself
    positions   0 1 2 3  4 5 6  4 5  4 5 6 7      every answer begins where the prompt ends

The first token of every answer is predicted at the prompt's last position, which they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.trainer.batches.collate import TrainingSequence
from penstock.trainer.batches.packing import BatchPlan, MicroBatchPlan
from penstock.trainer.batches.units import plan_units


@dataclass(slots=True)
class _Block:
    """Sequences that lie behind one copy of their prompt.

    Attributes:
        unit: Of all of them.
        prompt_length: Tokens.
        num_tokens: Of the prompt and of what follows it in each.
    """

    unit: int | None
    prompt_length: int
    num_tokens: int
    members: list[int] = field(default_factory=list)

    @property
    def shared(self) -> list[int]:
        """For each member, how many of its first tokens an earlier one has brought."""
        return [0, *[self.prompt_length] * (len(self.members) - 1)]


def plan_with_shared_prompts(
    sequences: Sequence[TrainingSequence], num_ranks: int, max_tokens: int, *, attention_share: float = 0.0
) -> BatchPlan:
    """`plan_units` in masked rows, with sequences of equal prompt (and equal unit) behind one copy of it.

    A block that would not fit the budget, or whose attention would cost more than the prompt, is several blocks, each
    with its own copy.

    Args:
        sequences: Of the batch. One without loss has nothing to compute and is left out.
        num_ranks: Data-parallel ranks.
        max_tokens: Padded tokens of one micro-batch, at most.
        attention_share: As in `plan_batch`.

    Raises:
        ShapeError: If a sequence or a unit is longer than `max_tokens`.
    """
    blocks = _blocks(sequences, max_tokens, attention_share)
    plan = plan_units(
        [block.num_tokens for block in blocks],
        [block.unit for block in blocks],
        num_ranks,
        max_tokens,
        attention_share=attention_share,
    )
    return BatchPlan(
        tuple(tuple(_of_sequences(micro_batch, blocks) for micro_batch in rank) for rank in plan.ranks),
        plan.efficiency,
    )


def _blocks(sequences: Sequence[TrainingSequence], max_tokens: int, attention_share: float) -> list[_Block]:
    blocks: list[_Block] = []
    newest: dict[tuple[int | None, tuple[int, ...]], _Block] = {}
    for index, one in enumerate(sequences):
        if not one.num_inputs:
            continue
        prompt = (one.unit, tuple(one.token_ids[: one.prompt_length].tolist()))
        block = newest.get(prompt)
        if block is None or not one.prompt_length or not _gains(block, one, max_tokens, attention_share):
            block = newest[prompt] = _Block(one.unit, one.prompt_length, one.prompt_length)
            blocks.append(block)
        block.members.append(index)
        block.num_tokens += one.num_inputs - one.prompt_length
    return blocks


def _gains(block: _Block, one: TrainingSequence, max_tokens: int, attention_share: float) -> bool:
    """Whether one more member fits, and saves more than its attention to the others costs, which the mask removes.

    With t tokens in the block, n in the sequence and r of them behind the prompt: by `sequence_cost`, t + r in one row
    cost no more than t and n in two.
    """
    rest = one.num_inputs - block.prompt_length
    if block.num_tokens + rest > max_tokens:
        return False
    more_attention = 2 * block.num_tokens * rest + rest**2 - one.num_inputs**2
    return one.unit is not None or attention_share * more_attention <= block.prompt_length


def _of_sequences(micro_batch: MicroBatchPlan, blocks: Sequence[_Block]) -> MicroBatchPlan:
    rows = tuple(tuple(index for block in row for index in blocks[block].members) for row in micro_batch.rows)
    shared = tuple(tuple(count for block in row for count in blocks[block].shared) for row in micro_batch.rows)
    return MicroBatchPlan(rows, micro_batch.row_length, shared)
