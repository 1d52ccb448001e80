"""Every training layout into every vLLM layout and back: bit-exact, each element once, at the lower bound of bytes."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.weights_plan import bytes_per_link, egress, expected_splits, lower_bound_bytes, relay_depth, wire_bytes
from penstock.dataflow.errors import WeightSyncError
from penstock.weights.layout.algebra import (
    Layout,
    Shard,
    TensorSpec,
    View,
    flat_boxes,
    intersect,
    subtract,
    volume,
    whole_tensors,
)
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.planner.plan import Plan, make_plan
from penstock.weights.planner.relay import relay_tree
from penstock.weights.transport.shards import ShardTransfer
from tests.layouts import training_layout
from tests.tiers import each_of
from tests.unit.weights.models import PADDING, buffers_of, engine_layout, numbered, strided, tensors_of, vllm_rank

Sources = Callable[[list[TensorSpec], int, int], Layout | None]


def _autotp(tensors: list[TensorSpec], ranks: int, kv_heads: int, *, is_partitioned: bool) -> Layout | None:
    if ranks % 2 or any("experts" in tensor.name for tensor in tensors):
        return None
    splits = expected_splits(tensors, 2, kv_heads)
    return training_layout(tensors, num_replicas=ranks // 2, tp_size=2, is_partitioned=is_partitioned, splits=splits)


def _fsdp2(tensors: list[TensorSpec], ranks: int, num_copies: int = 1) -> Layout:
    return training_layout(tensors, num_replicas=ranks, is_partitioned=True, by_rows=True, num_copies=num_copies)


SOURCES: dict[str, Sources] = {
    "replicated": lambda tensors, ranks, _: training_layout(tensors, num_replicas=ranks),
    "zero3": lambda tensors, ranks, _: training_layout(tensors, num_replicas=ranks, is_partitioned=True),
    "fsdp2": lambda tensors, ranks, _: _fsdp2(tensors, ranks),
    "hsdp": lambda tensors, ranks, _: None if ranks % 2 else _fsdp2(tensors, ranks, num_copies=2),
    "autotp": lambda tensors, ranks, kv: _autotp(tensors, ranks, kv, is_partitioned=False),
    "autotp_zero3": lambda tensors, ranks, kv: _autotp(tensors, ranks, kv, is_partitioned=True),
    "autotp_wide": lambda tensors, ranks, kv: (
        None
        if any("experts" in tensor.name for tensor in tensors)
        else training_layout(tensors, tp_size=ranks, splits=expected_splits(tensors, ranks, kv))
    ),
}
MODELS = ("qwen2", "qwen3", "llama", "gemma", "moe")


def carried_out(
    plan: Plan, source: Layout, destination: Layout, full: dict[str, np.ndarray]
) -> list[dict[str, np.ndarray]]:
    """The destination's buffers after the transfer; fails if an element is written twice."""
    sent, received = buffers_of(source, full), buffers_of(destination)
    for copy in plan.copies:
        into = strided(received[copy.dst_rank][copy.destination.buffer], copy.shape, copy.destination)
        assert (into == PADDING).all(), f"{copy} writes what was written"
        into[...] = strided(sent[copy.src_rank][copy.source.buffer], copy.shape, copy.source)
    return received


def least_egress(source: Layout, destination: Layout, item_bytes: int) -> float:
    """Least possible maximum over source ranks: for each set of ranks, the elements only they own, shared evenly."""
    by_owners: dict[frozenset[int], int] = defaultdict(int)
    for tensor, wanted in destination.shards.items():
        owners: dict[tuple, set[int]] = defaultdict(set)
        for shard in source.shards[tensor]:
            owners[shard.box].add(shard.rank)
        for shard in wanted:
            for box, ranks in owners.items():
                if (common := intersect(shard.box, box)) is not None:
                    by_owners[frozenset(ranks)] += volume(common) * item_bytes
    sets = {frozenset().union(*some) for n in (1, 2) for some in itertools.combinations(by_owners, n)}
    sets.add(frozenset(range(source.num_ranks)))
    return max(sum(size for owners, size in by_owners.items() if owners <= ranks) / len(ranks) for ranks in sets)


ODD_HEADS = (
    ("seven_heads", 1),
    ("seven_heads", 7),
    ("fourteen_heads", 1),
    ("fourteen_heads", 2),
    ("fourteen_heads", 14),
)
PAIRS = [*itertools.product(MODELS, (1, 2, 4, 8)), *ODD_HEADS]


@pytest.mark.parametrize(("pair", "kind"), each_of(PAIRS, SOURCES))
def test_every_training_layout_reaches_every_engine_layout_at_the_lower_bound(pair: tuple[str, int], kind: str) -> None:
    name, tp = pair
    model, tensors = tensors_of(name)
    full = numbered(tensors)
    destination = engine_layout(name, tp)
    references = [vllm_rank(full, model, tp, rank) for rank in range(tp)]
    needed = sum(volume(shard.box) for shards in destination.shards.values() for shard in shards)
    for ranks in range(1, 9):
        source = SOURCES[kind](tensors, ranks, model.num_kv_heads)
        if source is None:
            continue
        plan = make_plan(source, destination, 4, bucket_bytes=4096)
        received = carried_out(plan, source, destination, full)
        for rank, reference in enumerate(references):
            assert received[rank].keys() == reference.keys()
            for buffer, values in reference.items():
                np.testing.assert_array_equal(
                    received[rank][buffer], values.ravel(), err_msg=f"{ranks} {rank} {buffer}"
                )
        assert wire_bytes(plan) == 4 * needed
        assert max(egress(plan).values()) <= 1.1 * least_egress(source, destination, 4)
        for bucket in plan.buckets:
            for end in ("src_rank", "dst_rank"):
                filled: dict[int, int] = defaultdict(int)
                for copy in bucket:
                    filled[getattr(copy, end)] += 4 * copy.num_elements
                assert max(filled.values()) <= 4096


@pytest.mark.parametrize(("pair", "kind"), each_of(PAIRS, SOURCES))
def test_every_engine_layout_reaches_every_training_layout(pair: tuple[str, int], kind: str) -> None:
    name, tp = pair
    model, tensors = tensors_of(name)
    full = numbered(tensors)
    source = engine_layout(name, tp)
    for ranks in (1, 2, 3, 4, 8):
        destination = SOURCES[kind](tensors, ranks, model.num_kv_heads)
        if destination is None:
            continue
        plan = make_plan(source, destination, 4)
        received = carried_out(plan, source, destination, full)
        for rank, expected in enumerate(buffers_of(destination, full)):
            assert received[rank].keys() == expected.keys()
            for buffer, values in expected.items():
                np.testing.assert_array_equal(received[rank][buffer], values, err_msg=f"{ranks} {rank} {buffer}")
        assert wire_bytes(plan) == 4 * sum(volume(shard.box) for held in destination.shards.values() for shard in held)


@pytest.mark.parametrize("name", MODELS)
def test_on_the_same_devices_only_missing_elements_are_sent(name: str) -> None:
    _, tensors = tensors_of(name)
    destination = engine_layout(name, 4)
    whole_everywhere = training_layout(tensors, num_replicas=4)
    here = {rank: rank for rank in range(4)}
    assert wire_bytes(make_plan(whole_everywhere, destination, 2, resident=here)) == 0
    partitioned = training_layout(tensors, num_replicas=4, is_partitioned=True)
    plan = make_plan(partitioned, destination, 2, resident=here)
    missing = 0
    for tensor, wanted in destination.shards.items():
        for shard in wanted:
            own = [other.box for other in partitioned.shards[tensor] if other.rank == shard.rank]
            missing += volume(shard.box) - sum(volume(c) for box in own if (c := intersect(shard.box, box)) is not None)
    assert wire_bytes(plan) == 2 * missing == lower_bound_bytes(partitioned, destination, 2, here)
    carried_out(plan, partitioned, destination, numbered(tensors))


def test_among_owners_those_on_the_same_node_send() -> None:
    _, tensors = tensors_of("llama")
    plan = make_plan(
        training_layout(tensors, num_replicas=4),
        engine_layout("llama", 2),
        2,
        source_nodes={0: "a", 1: "a", 2: "b", 3: "b"},
        destination_nodes={0: "b", 1: "c"},
    )
    assert {src for src, dst in bytes_per_link(plan) if dst == 0} == {2, 3}
    assert {src for src, dst in bytes_per_link(plan) if dst == 1} == {0, 1}  # they have nothing else to send
    assert max(egress(plan).values()) <= 1.1 * wire_bytes(plan) / 4


def test_a_tensor_that_the_training_ranks_lack_is_named() -> None:
    _, tensors = tensors_of("qwen2")
    destination = engine_layout("qwen2", 2)
    with pytest.raises(WeightSyncError, match=r"training ranks have no model\.norm\.weight"):
        make_plan(training_layout([t for t in tensors if t.name != "model.norm.weight"]), destination, 4)
    shorter = [t._replace(shape=(7,)) if t.name == "model.norm.weight" else t for t in tensors]
    with pytest.raises(WeightSyncError, match=r"model.norm.weight: no training rank holds 17 elements .* rank 0"):
        make_plan(training_layout(shorter), destination, 4)


@pytest.mark.parametrize(
    ("training", "told"),
    [
        ({}, r"replicated \(ZeRO 0 to 2\) over 1 ranks\. Engine layout: vllm, tensor-parallel over 2"),
        ({"num_replicas": 2, "is_partitioned": True}, r"partitioned \(ZeRO-3\) over 2 ranks\. Eng.* over 2"),
        (
            {"num_replicas": 4, "is_partitioned": True, "by_rows": True, "num_copies": 2},
            r"partitioned \(FSDP2\) over 4 ranks in 2 copies\. Eng.* over 2",
        ),
        ({"tp_size": 2}, r"AutoTP over 2, replicated .* over 1 ranks.* over 2"),
    ],
)
def test_an_impossible_plan_names_the_tensor_and_both_layouts(training: dict[str, Any], told: str) -> None:
    _, tensors = tensors_of("qwen2")
    side = TrainingSharding(tuple(tensors[:-1]), **training)
    with pytest.raises(
        WeightSyncError, match=rf"no {tensors[-1].name}, which the engine needs.*Training layout: {told}"
    ):
        ShardTransfer.between(side, EngineLayout("vllm", engine_layout("qwen2", 2)), "float32", None)


@pytest.mark.parametrize("shape", [(7,), (4, 3), (3, 4, 5)])
def test_flat_intervals_are_boxes_in_order(shape: tuple[int, ...]) -> None:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    for start, stop in itertools.combinations(range(numbers.size + 1), 2):
        boxes = flat_boxes(shape, start, stop)
        values = np.concatenate([numbers[tuple(slice(*range_) for range_ in box)].ravel() for box in boxes])
        np.testing.assert_array_equal(values, np.arange(start, stop))
        assert len(boxes) <= 2 * len(shape) - 1


def test_subtraction_leaves_the_rest_once() -> None:
    box, hole = ((0, 5), (2, 9)), ((1, 3), (0, 4))
    counts = np.zeros((5, 9), int)
    for part in [*subtract(box, hole), ((1, 3), (2, 4))]:
        counts[tuple(slice(*range_) for range_ in part)] += 1
    assert (counts[:, 2:] == 1).all()
    assert not counts[:, :2].any()


@pytest.mark.parametrize("per_node", [1, 4, 8])
def test_relays_reach_every_replica_once_and_the_root_sends_to_few(per_node: int) -> None:
    hops = relay_tree([f"node{replica // per_node}" for replica in range(64)])
    assert sorted(hop.child for hop in hops) == list(range(1, 64))
    nodes_sent_to = [hop for hop in hops if hop.parent // per_node != hop.child // per_node]
    assert max(sum(hop.parent == parent for hop in nodes_sent_to) for parent in range(64)) <= 2
    assert relay_depth(hops) <= 7


def test_copies_of_a_part_do_not_fill_the_gap_of_another() -> None:
    """Two ranks have the halves, two others the same halves."""
    shards = tuple(
        Shard(rank, ((half * 2, half * 2 + 2),), View("w", 0, (1,))) for rank, half in enumerate((0, 1, 0, 1))
    )
    layout = Layout({"w": shards}, ({"w": 2},) * 4)
    first, second = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])}
    assert whole_tensors(layout, [first, second, {}, {}])["w"].tolist() == [1, 2, 3, 4]
    with pytest.raises(AssertionError, match="w: a part is missing"):
        whole_tensors(layout, [first, {}, first, {}])
