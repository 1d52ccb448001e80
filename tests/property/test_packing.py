"""Packing: for any lengths, every sequence is computed exactly once, within the budget, on ranks in step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dataflow.errors import ShapeError
from penstock.trainer.batches.packing import (
    TrainingSequence,
    balance_ranks,
    plan_batch,
    plan_with_shared_prompts,
    sequence_cost,
)
from tests.tiers import examples

BUDGET = 64
LENGTHS = st.lists(st.integers(0, BUDGET), max_size=60)
PACKED = st.sampled_from(["rows", "single_row"])
LAYOUTS = st.sampled_from(["rows", "single_row", "padded"])


@given(LENGTHS, st.integers(1, 5), LAYOUTS, st.floats(0.0, 0.1))
@settings(max_examples=examples(200), deadline=None)
def test_every_sequence_is_placed_exactly_once_within_the_budget(lengths, num_ranks, layout, attention_share) -> None:
    plan = plan_batch(lengths, num_ranks, BUDGET, attention_share=attention_share, layout=layout)
    placed = [index for micro_batches in plan.ranks for one in micro_batches for row in one.rows for index in row]
    assert sorted(placed) == [index for index, length in enumerate(lengths) if length]
    for micro_batches in plan.ranks:
        for one in micro_batches:
            assert one.num_padded_tokens <= BUDGET
            fills = [sum(lengths[index] for index in row) for row in one.rows]
            assert all(0 < fill <= one.row_length for fill in fills)
            assert max(fills, default=1) == one.row_length
            assert layout != "single_row" or len(one.rows) <= 1
            assert layout != "padded" or all(len(row) == 1 for row in one.rows)


@given(LENGTHS, st.integers(1, 5), LAYOUTS)
@settings(max_examples=examples(100), deadline=None)
def test_every_rank_gets_equally_many_micro_batches_and_at_least_one(lengths, num_ranks, layout) -> None:
    plan = plan_batch(lengths, num_ranks, BUDGET, layout=layout)
    assert len(plan.ranks) == num_ranks
    counts = {len(micro_batches) for micro_batches in plan.ranks}
    assert len(counts) == 1
    assert counts.pop() >= 1
    assert 0.0 < plan.efficiency <= 1.0


UNITS = st.lists(st.tuples(st.integers(0, 20), st.one_of(st.none(), st.integers(0, 6))), max_size=40)


@given(UNITS, st.integers(1, 5), LAYOUTS)
@settings(max_examples=examples(200), deadline=None)
def test_units_stay_in_one_micro_batch_of_one_rank_or_are_refused(sequences, num_ranks, layout) -> None:
    lengths, units = [length for length, _ in sequences], [unit for _, unit in sequences]
    of_units = {unit: [n for n, theirs in sequences if theirs == unit and n] for unit in set(units) - {None}}
    totals = {
        unit: max(own, default=0) * len(own) if layout == "padded" else sum(own) for unit, own in of_units.items()
    }
    if any(total > BUDGET for total in totals.values()):
        with pytest.raises(ShapeError, match="needs all of them in one micro-batch"):
            plan_batch(lengths, num_ranks, BUDGET, units=units, layout=layout)
        return
    plan = plan_batch(lengths, num_ranks, BUDGET, units=units, layout=layout)
    assert len({len(rank) for rank in plan.ranks}) == 1
    places = {}
    for rank, micro_batches in enumerate(plan.ranks):
        for number, one in enumerate(micro_batches):
            assert one.num_padded_tokens <= BUDGET
            for row in one.rows:
                assert sum(lengths[index] for index in row) <= one.row_length
                places |= dict.fromkeys(row, (rank, number))
    assert sorted(places) == [index for index, length in enumerate(lengths) if length]
    for unit in totals:
        assert len({place for index, place in places.items() if units[index] == unit}) <= 1


@given(LENGTHS, st.integers(1, 5), LAYOUTS)
@settings(max_examples=examples(50), deadline=None)
def test_without_units_the_plan_is_that_of_single_sequences(lengths, num_ranks, layout) -> None:
    alone = plan_batch(lengths, num_ranks, BUDGET, units=[None] * len(lengths), layout=layout)
    assert alone == plan_batch(lengths, num_ranks, BUDGET, layout=layout)


@given(LENGTHS, st.integers(1, 5), LAYOUTS)
@settings(max_examples=examples(50), deadline=None)
def test_the_plan_is_a_function_of_the_lengths(lengths, num_ranks, layout) -> None:
    assert plan_batch(lengths, num_ranks, BUDGET, layout=layout) == plan_batch(
        list(lengths), num_ranks, BUDGET, layout=layout
    )


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80), st.integers(1, 6), st.floats(0.0, 0.01))
@settings(max_examples=examples(100), deadline=None)
def test_no_rank_has_more_than_the_mean_cost_plus_one_sequence(lengths, num_ranks, attention_share) -> None:
    shares = balance_ranks(lengths, num_ranks, attention_share)
    costs = [sum(sequence_cost(lengths[index], attention_share) for index in share) for share in shares]
    largest = max(sequence_cost(length, attention_share) for length in lengths)
    assert max(costs) <= sum(costs) / num_ranks + largest + 1e-6


def test_a_sequence_over_the_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(ShapeError, match=r"max_tokens_per_micro_batch=64 is below .* 65 tokens \(sequence 1\)"):
        plan_batch([3, 65, 4], 2, BUDGET)


def test_long_tailed_lengths_waste_little() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(4.5, 0.8, 512), 1, 1024).astype(int).tolist()
    assert plan_batch(lengths, 2, 8192, attention_share=1e-4).efficiency > 0.9
    assert plan_batch(lengths, 2, 8192, layout="single_row").efficiency == 1.0


@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("seed", range(8))
def test_long_tailed_lengths_fill_the_bins_of_eight_ranks_that_are_even(sigma, seed) -> None:
    budget, num_bins, share = 8192, 32, 2e-5
    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < 0.98 * num_bins * budget:
        drawn = int(np.clip(rng.lognormal(6.9 - sigma**2 / 2, sigma), 1, budget))
        lengths += [drawn] if sum(lengths) + drawn <= 0.985 * num_bins * budget else []
    plan = plan_batch(lengths, 8, budget, attention_share=share, layout="single_row")
    assert sum(map(len, plan.ranks)) == num_bins
    costs = [
        sum(sequence_cost(lengths[i], share) for one in rank for row in one.rows for i in row) for rank in plan.ranks
    ]
    assert max(costs) <= 1.05 * sum(costs) / len(costs)


def test_costly_attention_prefers_short_rows() -> None:
    lengths = [30, 20, 10] * 20
    cheap = plan_batch(lengths, 1, 1024, attention_share=0.0)
    costly = plan_batch(lengths, 1, 1024, attention_share=1.0)
    assert max(one.row_length for one in costly.ranks[0]) == 30
    assert cheap.efficiency >= costly.efficiency


ANSWERS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=30)


@given(ANSWERS, st.lists(st.integers(0, 40), min_size=4, max_size=4), st.integers(1, 5), PACKED, st.floats(0.0, 0.1))
@settings(max_examples=examples(100), deadline=None)
def test_shared_prompts_are_in_their_row_before_all_that_begin_with_them(
    answers, prompts, num_ranks, layout, attention_share
) -> None:
    """Answers `(prompt, tokens)` to four prompts of other tokens."""
    sequences = []
    for prompt, num_tokens in answers:
        ids, length = np.full(prompts[prompt] + num_tokens + 1, prompt), prompts[prompt] + 1
        targets = np.arange(length, length + num_tokens)
        sequences.append(TrainingSequence(ids, targets, np.zeros(num_tokens, np.float32), prompt_length=length))
    plan = plan_with_shared_prompts(sequences, num_ranks, BUDGET, attention_share=attention_share, layout=layout)
    assert len({len(rank) for rank in plan.ranks}) == 1
    placed = []
    for one in (one for rank in plan.ranks for one in rank):
        assert one.num_padded_tokens <= BUDGET
        for row, lengths in zip(one.rows, one.shared or [()] * len(one.rows), strict=True):
            num_tokens, contained = 0, None
            for index, shared in zip(row, lengths, strict=True):
                if shared:
                    assert answers[contained][0] == answers[index][0]
                    assert shared == sequences[index].prompt_length
                else:
                    contained = index
                num_tokens += sequences[index].num_inputs - shared
            assert num_tokens <= one.row_length
            placed += row
    assert sorted(placed) == list(range(len(answers)))
