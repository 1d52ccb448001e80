"""Bytes of 64 engines, counted from the messages of each process in every bucket."""

from __future__ import annotations

from math import prod

import pytest

from benchmarks.weights_plan import wire_bytes
from penstock.weights.planner.plan import make_plan
from penstock.weights.planner.relay import relay_tree
from penstock.weights.transport.process_group.members import Members
from penstock.weights.transport.process_group.transfer import Step, steps_of
from tests.layouts import training_layout
from tests.unit.weights.models import engine_layout, tensors_of

NUM_ENGINES = 64
NUM_TRAINING = 4
ITEM_BYTES = 2


def sent_elements(steps: list[Step]) -> int:
    return sum(step.num_sent + len(step.children) * step.num_received for step in steps)


@pytest.mark.parametrize("per_node", [1, 8])
@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("name", ["llama", "qwen3", "moe"])
def test_the_trainer_sends_at_most_twice_the_model_to_64_engines(name: str, tp: int, per_node: int) -> None:
    _, tensors = tensors_of(name)
    model_elements = sum(prod(shape) for _, shape in tensors)
    source = training_layout(tensors, num_replicas=NUM_TRAINING, is_partitioned=True)
    destination = engine_layout(name, tp)
    plan = make_plan(source, destination, ITEM_BYTES, bucket_bytes=8192)
    members = Members(NUM_TRAINING, tuple(f"engine-{index}" for index in range(NUM_ENGINES)), tp)
    route = members.to_engines(relay_tree([f"node {index // per_node}" for index in range(NUM_ENGINES)]))
    egress = [sent_elements(steps_of(plan, route, rank)) for rank in range(NUM_TRAINING)]
    assert ITEM_BYTES * sum(egress) == wire_bytes(plan) <= 2 * ITEM_BYTES * model_elements
    received = 0
    for replica in range(NUM_ENGINES):
        for rank in range(tp):
            steps = steps_of(plan, route, members.engine(replica, rank))
            mine = sum(step.num_received for step in steps)
            received += mine
            assert mine == sum(copy.num_elements for copy in plan.copies if copy.dst_rank == rank)
            assert sent_elements(steps) <= (2 + per_node - 1) * mine, "two nodes, and the neighbours on its own"
    assert ITEM_BYTES * received == NUM_ENGINES * wire_bytes(plan), "every engine gets everything once"
