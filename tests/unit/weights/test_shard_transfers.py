"""Elements already on an engine's device are not sent, and ranks that hold the same elements share the work."""

from __future__ import annotations

from benchmarks.weights_plan import bytes_per_link, egress, lower_bound_bytes, wire_bytes
from penstock.weights.layout.sides import EngineLayout, TrainingSharding
from penstock.weights.transport.shards import ShardTransfer
from tests.unit.weights.models import engine_layout, tensors_of

_, TENSORS = tensors_of("llama")
WHOLE = TrainingSharding(tuple(TENSORS), num_replicas=4)
ZERO3 = TrainingSharding(tuple(TENSORS), num_replicas=4, is_partitioned=True)
ENGINE = EngineLayout("vllm", engine_layout("llama", 2))


def on_devices(*engine_at: str, training: TrainingSharding = WHOLE) -> ShardTransfer:
    return ShardTransfer.between(training, ENGINE, "bfloat16", None, ("a", "b", "c", "d"), engine_at)


def test_elements_of_the_only_rank_on_an_engines_device_are_not_sent() -> None:
    assert on_devices("b", "c").plan.resident == {0: 1, 1: 2}
    assert on_devices("x", "c").plan.resident == {1: 2}, "where no training rank is, everything comes from elsewhere"
    assert wire_bytes(on_devices("b", "c").plan) == 0, "every rank has everything"
    plan = on_devices("b", "c", training=ZERO3).plan
    bound = lower_bound_bytes(ZERO3.layout(), ENGINE.layout, 2, {0: 1, 1: 2})
    assert wire_bytes(plan) == bound < lower_bound_bytes(ZERO3.layout(), ENGINE.layout, 2)


def test_engines_on_other_devices_have_equal_plans() -> None:
    assert on_devices("x", "y").plan == on_devices("z", "w").plan, "no device of either is one of the trainer's"


def test_ranks_that_share_a_device_share_the_work() -> None:
    """As on a CPU pool, where all ranks share one device: then all owners of an element share sending it."""
    transfer = ShardTransfer.between(WHOLE, ENGINE, "bfloat16", None, ("cpu",) * 4, ("cpu", "cpu"))
    sent = egress(transfer.plan)
    assert transfer.plan.resident == {}
    assert sorted(sent) == [0, 1, 2, 3]
    assert max(sent.values()) <= 1.1 * wire_bytes(transfer.plan) / 4


def test_files_of_one_node_keep_nothing_on_a_device() -> None:
    transfer = ShardTransfer.between(WHOLE, ENGINE, "bfloat16", "/unused", ("n1", "n2", "n2", "n2"), ("n1", "n1"))
    assert transfer.plan.resident == {}
    assert {src for src, _ in bytes_per_link(transfer.plan)} == {0}, (
        "a node is near, and everything is sent all the same"
    )
