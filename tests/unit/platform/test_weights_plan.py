"""`penstock weights plan` reads the trainer's layout from the configuration."""

from __future__ import annotations

import pytest

from penstock.platform.cli_weights import plan_report
from penstock.platform.config.compose import compose_config


@pytest.mark.parametrize(
    ("zero_stage", "tp_size", "sources_of_rank_0"),
    [
        # Engine rank 0 of 2 holds the lower halves of all that is split. By hand:
        (1, 1, {0, 1, 2, 3}),  # anyone has them
        (1, 2, {0, 2}),  # those with tensor rank 0 do; what is whole comes from them too, as they are on the way
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
