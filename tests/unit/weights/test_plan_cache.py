"""A plan is made once per model and layouts, and what is on a device already stays there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.weights.layout.engine import EngineSide, TrainingSide
from penstock.weights.planner import cache
from penstock.weights.planner.cache import Meeting, PlanCache
from penstock.weights.planner.plan import Plan, lower_bound_bytes
from penstock.weights.transport.shards import ShardTransfer
from tests.unit.weights.models import tensors_of

MODEL, TENSORS = tensors_of("llama")
WHOLE = TrainingSide(tuple(TENSORS), num_replicas=4)
ZERO3 = TrainingSide(tuple(TENSORS), num_replicas=4, is_partitioned=True)
ENGINE = EngineSide("vllm", MODEL, 2)
DEVICES = ("a", "b", "c", "d")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """What every plan that is really made has as `resident`."""
    seen: list[dict[int, int]] = []
    really = cache.make_plan

    def counted(*arguments: object, resident: dict[int, int], **more: object) -> Plan:
        seen.append(resident)
        return really(*arguments, resident=resident, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "make_plan", counted)
    return seen


def on_devices(plans: PlanCache, *engine_at: str, training: TrainingSide = WHOLE) -> ShardTransfer:
    return ShardTransfer.between(training, ENGINE, "bfloat16", None, DEVICES, engine_at, plans)


def test_engines_that_lie_to_the_trainer_in_the_same_way_share_a_plan(made: list[dict[int, int]]) -> None:
    plans = PlanCache()
    first, second = on_devices(plans, "x", "y"), on_devices(plans, "z", "w")
    assert first.plan is second.plan, "no device of either is one of the trainer's"
    colocated, restarted = on_devices(plans, "a", "b"), on_devices(plans, "a", "b")
    assert colocated.plan is restarted.plan
    assert colocated.plan is not on_devices(plans, "c", "d").plan
    assert made == [{}, {0: 0, 1: 1}, {0: 2, 1: 3}]


@pytest.mark.parametrize(
    "other",
    [
        {"training": ZERO3},
        {"engine": EngineSide("vllm", MODEL, 4)},
        {"engine": EngineSide("torch", MODEL, 1)},
        {"item_bytes": 4},
        {"training": TrainingSide(tuple(TENSORS[:-1]), num_replicas=4)},
        {"engine_at": ("b", "a")},
        {"are_devices": False},
    ],
    ids=str,
)
def test_the_fingerprint_is_of_the_model_and_both_layouts(other: dict[str, object]) -> None:
    known = {
        "training": WHOLE,
        "engine": ENGINE,
        "item_bytes": 2,
        "training_at": DEVICES,
        "engine_at": ("a", "b"),
        "are_devices": True,
    }
    renamed = known | {"training_at": tuple("wxyz"), "engine_at": tuple("wx")}
    assert Meeting.of(**known).fingerprint == Meeting.of(**renamed).fingerprint, "names of places do not matter"
    assert Meeting.of(**known).fingerprint != Meeting.of(**known | other).fingerprint


def test_the_oldest_plan_is_forgotten(made: list[dict[int, int]]) -> None:
    plans = PlanCache(max_plans=2)
    for engine_at in (("a", "b"), ("b", "c"), ("a", "b"), ("c", "d"), ("a", "b"), ("b", "c")):
        on_devices(plans, *engine_at)
    assert made == [{0: 0, 1: 1}, {0: 1, 1: 2}, {0: 2, 1: 3}, {0: 1, 1: 2}], "(b, c) was used least recently"


def test_threads_that_ask_for_the_same_plan_get_one(made: list[dict[int, int]]) -> None:
    plans = PlanCache()
    with ThreadPoolExecutor(4) as threads:
        transfers = list(threads.map(lambda _: on_devices(plans, "x", "y"), range(8)))
    assert len(made) == 1
    assert all(transfer.plan is transfers[0].plan for transfer in transfers)


def test_what_the_only_rank_on_an_engines_device_has_stays_there() -> None:
    assert on_devices(PlanCache(), "b", "c").plan.wire_bytes == 0, "every rank has everything"
    plan = on_devices(PlanCache(), "b", "c", training=ZERO3).plan
    bound = lower_bound_bytes(ZERO3.layout(), ENGINE.layout(TENSORS), 2, {0: 1, 1: 2})
    assert plan.wire_bytes == bound < lower_bound_bytes(ZERO3.layout(), ENGINE.layout(TENSORS), 2)


def test_ranks_that_share_a_device_share_the_work() -> None:
    """As on a CPU pool, where nobody is alone on a device: then what several have is sent by all of them."""
    transfer = ShardTransfer.between(WHOLE, ENGINE, "bfloat16", None, ("cpu",) * 4, ("cpu", "cpu"))
    egress = transfer.plan.egress
    assert transfer.plan.resident == {}
    assert sorted(egress) == [0, 1, 2, 3]
    assert max(egress.values()) <= 1.1 * transfer.plan.wire_bytes / 4


def test_files_of_one_node_keep_nothing_on_a_device() -> None:
    transfer = ShardTransfer.between(WHOLE, ENGINE, "bfloat16", "/unused", ("n1", "n2", "n2", "n2"), ("n1", "n1"))
    assert transfer.plan.resident == {}
    assert {src for src, _ in transfer.plan.bytes_per_link} == {0}, (
        "a node is near, and everything is sent all the same"
    )
