"""benchmarks/weights_plan.py reads the trainer's layout from the configuration."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks.weights_plan import plan_report
from penstock.platform.checks.load import compose_config
from penstock.weights.model_config import ModelShape

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.integration,  # vLLM is imported
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (extras cpu or cuda)"),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("zero_stage", "tp_size", "sources_of_rank_0"),
    [
        # Engine rank 0 of 2 holds the lower halves of all split tensors. By hand:
        (1, 1, {0, 1, 2, 3}),  # all ranks hold them
        (1, 2, {0, 2}),  # those with tensor rank 0; they send unsplit tensors too
        (3, 2, {0, 2}),
        (1, 4, {0, 1}),  # quarters 0 and 1
    ],
)
def test_what_an_engine_rank_needs_comes_from_the_ranks_that_hold_it(zero_stage, tp_size, sources_of_rank_0):
    overrides = [f"trainer.zero_stage={zero_stage}", f"trainer.tensor_parallel_size={tp_size}"]
    small = ["dataflow.stream_micro_batches=false", "cluster.pools.train.memory_gib=400"]
    engine = ["rollout.engine.tensor_parallel_size=2", "rollout.num_engines=1"]
    report = plan_report(compose_config(["experiment=math_qwen_8gpu", *overrides, *small, *engine]))
    assert report.wire_bytes == report.lower_bound_bytes
    total = sum(num_bytes for _, dst, num_bytes in report.links if dst == 0)
    main = {src for src, dst, num_bytes in report.links if dst == 0 and num_bytes > 0.1 * total}
    assert main <= sources_of_rank_0
    assert sum(num_bytes for src, dst, num_bytes in report.links if dst == 0 and src in main) > 0.8 * total


@pytest.mark.some(1)
@pytest.mark.parametrize(("num_copies", "sources_of_rank_0"), [(1, {0, 1}), (2, {0, 2})])
def test_rows_of_fsdp2_reach_the_engines_at_the_lower_bound(num_copies: int, sources_of_rank_0: set[int]) -> None:
    fsdp2 = ["trainer.backend=fsdp2", "trainer.zero_stage=0", f"trainer.fsdp_copies={num_copies}"]
    small = ["dataflow.stream_micro_batches=false", "cluster.pools.train.memory_gib=400"]
    engine = ["rollout.engine.tensor_parallel_size=2", "rollout.num_engines=1"]
    report = plan_report(compose_config(["experiment=math_qwen_8gpu", *fsdp2, *small, *engine]))
    assert report.wire_bytes == report.lower_bound_bytes
    total = sum(num_bytes for _, dst, num_bytes in report.links if dst == 0)
    # The upper half of the rows is that of engine rank 0, but of q, k and v, which are stacked there.
    main = {src for src, dst, num_bytes in report.links if dst == 0 and num_bytes > 0.2 * total}
    assert main == sources_of_rank_0


COLOCATED = [
    "experiment=math_qwen_8gpu",
    "cluster.colocated=true",
    "cluster.trainer_pool=generate",
    "dataflow.max_staleness=0",
    "cluster.pools.generate.memory_gib=400",
    "dataflow.stream_micro_batches=false",
    "trainer.num_ranks=4",
    "rollout.engine.tensor_parallel_size=2",
    "rollout.num_engines=2",
]


def test_colocated_ranks_that_hold_everything_send_nothing():
    report = plan_report(compose_config([*COLOCATED, "trainer.zero_stage=1"]))
    assert report.num_planned_engines == 2
    assert report.wire_bytes == report.lower_bound_bytes == report.max_egress_bytes == report.relayed_bytes == 0
    assert report.links == []
    assert report.local_bytes == pytest.approx(2 * report.model_bytes, rel=0.001), "each engine has one model"


@pytest.mark.full
def test_colocated_ranks_that_hold_a_quarter_send_the_rest():
    report = plan_report(compose_config([*COLOCATED, "trainer.zero_stage=3"]))
    assert report.wire_bytes == report.lower_bound_bytes
    assert report.local_bytes + report.wire_bytes == pytest.approx(2 * report.model_bytes, rel=0.001)
    assert 0 < report.local_bytes < 0.5 * report.wire_bytes, "of its half, a device has at most the quarter of its rank"
    through_files = plan_report(compose_config([*COLOCATED, "trainer.zero_stage=3", "weights.transport=shared_memory"]))
    assert (through_files.local_bytes, through_files.num_planned_engines) == (0, 1)
    assert through_files.wire_bytes == pytest.approx(report.model_bytes, rel=0.001)


def test_engines_on_devices_of_their_own_each_get_everything():
    report = plan_report(compose_config(["experiment=math_qwen_8gpu"]))
    assert report.num_planned_engines == 4
    assert report.local_bytes == 0
    assert report.wire_bytes == report.lower_bound_bytes == pytest.approx(4 * report.model_bytes, rel=0.001)


@pytest.mark.full
@pytest.mark.parametrize("tp_size", [1, 4])
def test_a_mixture_of_experts_is_planned_from_its_shape(tp_size):
    pools = [f"cluster.pools.{pool}.memory_gib=4000" for pool in ("train", "generate")]
    mixture = ["model=qwen3_30b_a3b", "weights.transport=shared_memory", *pools]
    engine = [f"rollout.engine.tensor_parallel_size={tp_size}", "rollout.num_engines=1"]
    config = compose_config(["experiment=math_qwen_8gpu", *mixture, *engine])
    assert config.model.shape.num_parameters == pytest.approx(30.53e9, rel=0.001), "as its model card has it"
    report = plan_report(config)
    experts = 48 * 128 * 3 * 768 * 2048 * 2
    assert report.wire_bytes == report.lower_bound_bytes >= report.model_bytes * 0.999 > experts
    assert report.wire_bytes < report.model_bytes * 1.01, "routers, norms and, at 4 ranks, no key/value head twice"


@pytest.mark.parametrize(("experts", "size", "shared"), [(4, 0, 0), (0, 16, 0), (0, 0, 16)])
def test_experts_without_a_number_or_a_size_are_refused(experts, size, shared):
    shape = {"num_experts": experts, "expert_size": size, "shared_expert_size": shared}
    dense = compose_config(["experiment=math_qwen_8gpu"]).model.shape.model_dump()
    with pytest.raises(ValidationError, match="experts need a number and a size"):
        ModelShape.model_validate(dense | shape)


@pytest.mark.full
def test_the_plan_of_a_publish_needs_no_model() -> None:
    overrides = ["experiment=math_qwen_8gpu", "rollout.engine.tensor_parallel_size=4", "rollout.num_engines=1"]
    program = [sys.executable, "benchmarks/weights_plan.py", *overrides]
    told = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "lower bound" in told
    done = subprocess.run([*program, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["wire_bytes"] == report["lower_bound_bytes"]
    assert report["wire_bytes"] == pytest.approx(report["model_bytes"], rel=0.001)  # norms are on every rank
    assert report["max_egress_bytes"] == pytest.approx(report["wire_bytes"] / 4, rel=0.01)
    assert len(report["links"]) == 16
