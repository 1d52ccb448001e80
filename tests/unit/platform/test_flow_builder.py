"""Keys of `dataflow` and `env` reach the limits and the task queue that they are about."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.dataflow.ledger import Ledger, Reason
from penstock.dataflow.staleness import ExpiryPolicy
from penstock.platform.checks.load import compose_config
from penstock.platform.run.flow_builder import flow_limits, make_filters, make_task_queue


@pytest.mark.parametrize(
    ("override", "attribute", "value"),
    [
        ("dataflow.batch_groups=7", "batch_groups", 7),
        ("dataflow.max_staleness=3", "max_staleness", 3),
        ("total_steps=11", "total_steps", 11),
        ("dataflow.surplus=2", "surplus", 2),
        ("dataflow.surplus=2", "adapts_surplus", False),
        ("dataflow.surplus=auto", "adapts_surplus", True),
        ("dataflow.surplus=auto dataflow.batch_groups=12", "surplus", 3),
        ("dataflow.surplus=auto dataflow.batch_groups=2", "surplus", 1),
        ("dataflow.surplus=auto dataflow.max_surplus=5", "surplus", 5),
        ("dataflow.on_expiry=drop", "on_expiry", ExpiryPolicy.DROP),
        ("dataflow.max_requeues=5", "max_requeues", 5),
    ],
)
def test_a_key_reaches_the_limit_of_its_name(override: str, attribute: str, value: object) -> None:
    assert getattr(flow_limits(compose_config(["experiment=arithmetic", *override.split()])), attribute) == value


def test_a_limit_of_memory_is_one_of_live_trajectories() -> None:
    assert flow_limits(compose_config(["experiment=arithmetic"])).max_live_trajectories is None
    few, more = (
        flow_limits(compose_config(["experiment=arithmetic", f"dataflow.max_live_gib={gib}"])).max_live_trajectories
        for gib in (0.5, 1.0)
    )
    assert few is not None
    assert more is not None
    assert 0 < few < more


def test_a_large_batch_may_filter_more_groups_until_it_closes() -> None:
    words = ["experiment=arithmetic", "dataflow.filters.zero_variance=true", "dataflow.batch_groups=512"]
    chain = make_filters(compose_config(words).dataflow)
    for _ in range(2_000):
        chain.count(Reason.ZERO_VARIANCE)
    assert chain.since_batch.total() == 2_000


def test_a_curriculum_of_the_users_changes_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_stages.py").write_text(
        "class Harder:\n"
        "    def weights(self, version, rewards):\n"
        "        return {'easy': 1.0, 'hard': float(version)}\n"
        "\n"
        "harder = Harder()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["experiment=arithmetic", "env=arithmetic_mixed", "env.curriculum=my_stages:harder"]
    queue = make_task_queue(compose_config(words))
    queue.follow_curriculum(3, Ledger())
    assert queue.weights == {"easy": 1.0, "hard": 3.0}
