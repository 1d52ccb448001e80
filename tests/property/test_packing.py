"""Packing: for any lengths, every sequence is computed exactly once, within the budget, on ranks in step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dataflow.errors import ShapeError
from penstock.trainer.batches.collate import collate
from penstock.trainer.batches.packing import (
    TrainingSequence,
    balance_ranks,
    plan_batch,
    plan_with_shared_prefixes,
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


FORKS = st.lists(
    st.tuples(
        st.integers(0, 30), st.integers(0, 40), st.lists(st.integers(0, 2), max_size=12), st.integers(1, 9),
        st.integers(0, 3),
    ),
    max_size=25,
)  # fmt: skip
"""Which earlier sequence one forks, how many tokens it keeps, its own, how many of all carry loss, who routed it."""


def forked(forks: list[tuple[int, int, list[int], int, int]]) -> list[TrainingSequence]:
    """Tokens are few, so that sequences also begin alike by chance; router 0 records nothing."""
    found: list[TrainingSequence] = []
    for parent, kept, own, num_targets, router in forks:
        begin = found[parent % len(found)].token_ids[:kept] if found else np.zeros(0, np.int64)
        ids = np.concatenate([begin, own]).astype(np.int64)[: BUDGET + 1]
        targets = np.arange(max(1, len(ids) - num_targets), len(ids))
        place = np.arange(len(ids))  # from some token on, two routers choose otherwise
        routes = np.stack([place % 3, place >= 4 * router], axis=1).astype(np.uint8)[:, :, None] if router else None
        found.append(TrainingSequence(ids, targets, np.zeros(len(targets), np.float32), routes=routes))
    return found


def inputs_of(one: TrainingSequence) -> list[tuple[int, bytes | None]]:
    """Its tokens before the last target, each with its experts."""
    return [
        (int(one.token_ids[n]), None if one.routes is None else one.routes[n].tobytes()) for n in range(one.num_inputs)
    ]


@given(FORKS, st.integers(1, 5), PACKED, st.floats(0.0, 0.1))
@settings(max_examples=examples(200), deadline=None)
def test_the_context_of_every_sequence_is_in_its_row_and_shared_tokens_once(
    forks, num_ranks, layout, attention_share
) -> None:
    sequences = forked(forks)
    plan = plan_with_shared_prefixes(sequences, num_ranks, BUDGET, attention_share=attention_share, layout=layout)
    assert len({len(rank) for rank in plan.ranks}) == 1
    placed, num_computed, num_padded = [], 0, 0
    for one in (one for rank in plan.ranks for one in rank if one.rows):
        assert one.num_padded_tokens <= BUDGET
        num_padded += one.num_padded_tokens
        for row in one.in_order():
            trees: list[set[tuple[object, ...]]] = []
            path: list[tuple[int, bytes | None]] = []
            fill = 0
            for index, shared in row:
                context = inputs_of(sequences[index])
                assert path[:shared] == context[:shared]
                trees += [] if shared else [set()]
                trees[-1].update(tuple(context[:n]) for n in range(1, len(context) + 1))
                path, fill = context, fill + len(context) - shared
                placed.append(index)
            assert fill == sum(map(len, trees)) <= one.row_length
            num_computed += fill
    assert sorted(placed) == [index for index, one in enumerate(sequences) if one.num_inputs]
    assert plan.efficiency == (pytest.approx(num_computed / num_padded) if num_padded else 1.0)
    unshared = sum(one.num_inputs for one in sequences)
    assert num_computed == unshared - sum(plan.shared_lengths)


@given(FORKS, PACKED)
@settings(max_examples=examples(100), deadline=None)
def test_every_loss_token_is_predicted_once_from_exactly_the_tokens_before_it(forks, layout) -> None:
    """From the tensors: ids, positions and experts of all tokens that attention shows where it is predicted."""
    sequences, seen = forked(forks), []
    for planned in plan_with_shared_prefixes(sequences, 1, BUDGET, layout=layout).ranks[0]:
        batch = collate(planned, sequences, device=torch.device("cpu"), needs_mask=layout == "rows")
        inputs, boundaries = batch.inputs, batch.inputs.boundaries
        for k in range(batch.num_tokens):
            one, token = sequences[batch.sequence_index[k]], int(batch.token_index[k])
            seen.append((int(batch.sequence_index[k]), token))
            place, target = int(inputs.target_index[k]), int(one.targets[token])
            begin = place - place % planned.row_length
            shown = torch.arange(begin, place + 1)
            if boundaries is not None:
                at = int(torch.searchsorted(boundaries.cumulative, place, right=True)) - 1
                keys = torch.arange(inputs.input_ids.numel()) if boundaries.keys is None else boundaries.keys
                stop = int(boundaries.cumulative_keys[at + 1]) - int(boundaries.cumulative[at + 1]) + place + 1
                shown = keys[int(boundaries.cumulative_keys[at]) : stop]
            elif inputs.attention_mask is not None:
                mask = inputs.attention_mask[begin // planned.row_length, 0, place - begin]
                shown = begin + mask.nonzero()[:, 0]
            assert inputs.input_ids.flatten()[shown].tolist() == one.token_ids[:target].tolist()
            assert inputs.position_ids.flatten()[shown].tolist() == list(range(target))
            assert int(inputs.target_ids[k]) == one.token_ids[target]
            if inputs.routes is not None:
                expected = -1 if one.routes is None else one.routes[:target].tolist()
                assert (inputs.routes[shown].numpy() == expected).all()
    assert sorted(seen) == [(n, token) for n, one in enumerate(sequences) for token in range(len(one.targets))]
