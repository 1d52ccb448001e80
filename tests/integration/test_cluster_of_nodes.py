"""A run on four machines (namespaces of this one): delay and loss between them, a node that is cut off, one that dies.

The machines share the disk and nothing else (tests/cluster/nodes.py).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.cluster.nodes import BIN, RAY_PORT, Machines, can_make_nodes, machines, wait_for_nodes
from tests.command_line import read_metric, read_summary
from tests.small_run import small_run_overrides

pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.skipif(not can_make_nodes(), reason="needs root, network namespaces and TUN devices"),
]
NUM_NODES, DELAY_S, LOSS = 4, 0.02, 0.001


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path / "nodes", NUM_NODES, delay_s=DELAY_S, loss=LOSS) as made:
        for node in made.nodes:
            node.start_ray()
        wait_for_nodes(made.nodes[0], NUM_NODES)
        yield made


def training(cluster: Machines, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start a run from the first node, whose working directory is not that of its raylet."""
    head = cluster.nodes[0]
    settings = small_run_overrides(
        folder,
        "across",
        character_tokenizer(),
        f"cluster.address={head.address}:{RAY_PORT}",
        f"run_dir={folder}/runs/across",
        f"model.path={folder}/policy",
        "weights.transport=process_group",
        "rollout.num_engines=2",
        "cluster.pools.cpu.memory_gib=64",
        "dataflow.batch_groups=8",
        *overrides,
    )
    return head.start(
        [f"{BIN}/penstock", "train", *settings],
        environment={"OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        output=folder / "output.txt",
    )


def finish(process: subprocess.Popen[str], folder: Path, timeout_s: float = 300) -> str:
    """Wait for its end; what it printed."""
    try:
        process.wait(timeout=timeout_s)
    finally:
        process.kill()
    return (folder / "output.txt").read_text()


def wait_for_steps(process: subprocess.Popen[str], folder: Path, num_steps: int, timeout_s: float = 180) -> None:
    metrics, deadline = folder / "runs/across/metrics.jsonl", time.monotonic() + timeout_s
    while not metrics.exists() or len(read_metric(metrics.parent, "trainer/version")) < num_steps:
        assert process.poll() is None, (folder / "output.txt").read_text()[-3000:]
        assert time.monotonic() < deadline, (folder / "output.txt").read_text()[-3000:]
        time.sleep(0.2)


def test_a_run_trains_across_nodes_under_delay_and_loss(cluster: Machines, tmp_path: Path) -> None:
    process = training(cluster, tmp_path, "total_steps=6")
    printed = finish(process, tmp_path)
    assert process.returncode == 0, printed[-3000:]
    ledger = read_summary(tmp_path / "runs/across")["ledger"]
    assert ledger["trained"] == 6 * 8
    assert ledger["failed"] == 0
    assert cluster.network.num_delivered > 1000
    assert cluster.network.lost["chance"] > 0
