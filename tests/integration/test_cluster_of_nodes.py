"""A run on four machines (namespaces of this one) with delay and loss between them, while some are cut off or die.

The machines share the disk and nothing else (tests/cluster/nodes.py).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.cluster.nodes import BIN, RAY_PORT, Machines, Node, can_make_nodes, machines, start_ray_on, wait_for_nodes
from tests.command_line import read_metric, read_summary
from tests.small_run import small_run_overrides

pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_nodes(), reason="needs root, network namespaces and TUN devices"),
]
NUM_NODES, DELAY_S, LOSS = 4, 0.02, 0.001
STEP_GROUPS = 8
RESERVE = """
import asyncio, sys, time
from pathlib import Path

import ray

from penstock.actors.bundles import Bundle
from penstock.actors.devices import reserve_devices
from penstock.dataflow.errors import PlacementError

ray.init(address=sys.argv[1], log_to_driver=False)
name, folder = sys.argv[2], Path(sys.argv[3])
(folder / f"{name}.ready").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
try:
    asyncio.run(reserve_devices([Bundle(1, processes=(index,)) for index in range(3)], timeout_s=float(sys.argv[4])))
except PlacementError as error:
    print("refused:", error)
else:
    (folder / f"{name}.has").touch()
    print("has all")
    while not (folder / "end").exists():
        time.sleep(0.05)
"""
"""A job that reserves three GPUs on nodes with one each, and keeps them until it is told to end."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Four nodes; each has one GPU in Ray's eyes. The last test ends one of them."""
    with machines(tmp_path_factory.mktemp("nodes"), NUM_NODES, delay_s=DELAY_S, loss=LOSS) as made:
        start_ray_on(made.nodes, "--num-gpus=1")
        yield made


def training(cluster: Machines, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start a run of two ZeRO-3 ranks and two engines from the first node, in a folder that is not its raylet's."""
    head = cluster.nodes[0]
    settings = small_run_overrides(
        folder,
        "across",
        character_tokenizer(),
        f"cluster.address={head.address}:{RAY_PORT}",
        f"run_dir={folder}/runs/across",
        f"model.path={folder}/policy",
        "trainer.backend=deepspeed",
        "trainer.num_ranks=2",
        "trainer.zero_stage=3",
        "rollout.num_engines=2",
        "cluster.pools.cpu.memory_gib=64",
        f"dataflow.batch_groups={STEP_GROUPS}",
        *overrides,
    )
    return head.start(
        [f"{BIN}/penstock", "train", *settings],
        environment={"OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        output=folder / "output.txt",
    )


def demo(cluster: Machines, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start the demo, warm start and vLLM included, with two ZeRO-3 ranks and two engines instead of one each."""
    head, environment = cluster.nodes[0], {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    warm_start = head.start(
        [f"{BIN}/penstock", "sft", "experiment=arithmetic_sft", f"run_dir={folder}/runs/warm"],
        environment=environment,
        output=folder / "output.txt",
    )
    finish(warm_start, folder)
    return head.start(
        [
            f"{BIN}/penstock",
            "train",
            "experiment=arithmetic",
            f"cluster.address={head.address}:{RAY_PORT}",
            f"run_dir={folder}/runs/across",
            f"model.path={folder}/runs/warm/policy",
            "trainer.num_ranks=2",
            "trainer.zero_stage=3",
            "rollout.num_engines=2",
            "cluster.pools.cpu.memory_gib=64",
            *overrides,
        ],
        environment=environment,
        output=folder / "output.txt",
    )


def wait_until(is_so: Callable[[], object], what: str, folder: Path, timeout_s: float = 240) -> None:
    """Wait until something is so, and fail with the end of the run's output if it takes too long."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        printed = (folder / "output.txt").read_text()[-3000:]
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}. {printed}"
        time.sleep(0.2)


def finish(process: subprocess.Popen[str], folder: Path, timeout_s: float = 300) -> str:
    """Wait for its end; what it printed."""
    wait_until(lambda: process.poll() is not None, "the end of the run", folder, timeout_s)
    return (folder / "output.txt").read_text()


def versions(folder: Path) -> list[float]:
    """The version after each step so far."""
    run_dir = folder / "runs/across"
    return read_metric(run_dir, "trainer/version") if (run_dir / "metrics.jsonl").exists() else []


def workers_with(cluster: Machines, actor: str) -> list[Node]:
    """Nodes with such an actor; not the first, which has Ray's records and the driver."""
    return [node for node in cluster.nodes[1:] if node.first.poll() is None and actor in node.actors()]


def test_what_is_wrong_with_a_node_is_named_before_anything_is_loaded(cluster: Machines, tmp_path: Path) -> None:
    """A port that is closed between two nodes, a folder and code that another does not see, and another version."""
    _, blocked, blind, other = cluster.nodes
    package = next(Path(BIN).parent.glob("lib/python*/site-packages/transformers-*.dist-info"))
    (tmp_path / "METADATA").write_text((package / "METADATA").read_text().replace("Version: 5.", "Version: 4.", 1))
    (tmp_path / "runs").mkdir()
    changes = [
        (blocked, ["ip", "route", "add", "blackhole", f"{other.address}/32"], ["ip", "route", "del", other.address]),
        (blind, ["mount", "-t", "tmpfs", "tmpfs", f"{tmp_path}/runs"], ["umount", f"{tmp_path}/runs"]),
        (
            other,
            ["mount", "--bind", f"{tmp_path}/METADATA", f"{package}/METADATA"],
            ["umount", f"{package}/METADATA"],
        ),
    ]
    try:
        for node, change, _ in changes:
            node.run(*change)
        process = training(cluster, tmp_path, "total_steps=1")
        printed = " ".join(finish(process, tmp_path).split())
    finally:
        for node, _, undo in changes:
            node.run(*undo)
    assert process.returncode == 1, printed
    assert "so nothing was started" in printed
    assert "EngineActor" not in cluster.nodes[0].actors()
    for words in (
        "TCP ports are closed",
        f"{blocked.address} -> {other.address}",
        f"does not exist there on {blind.address}",
        "transformers is",
    ):
        assert words in printed, printed


def test_of_two_jobs_that_ask_at_once_one_has_all_its_gpus_and_the_other_none(
    cluster: Machines, tmp_path: Path
) -> None:
    """Each asks for three of four. If each were given two, both would wait for ever."""
    head = cluster.nodes[0]
    arguments = [f"{BIN}/python", "-c", RESERVE, f"{head.address}:{RAY_PORT}"]
    jobs = {
        name: cluster.nodes[index].start([*arguments, name, str(tmp_path), "10"]) for index, name in enumerate("ab")
    }
    try:
        (tmp_path / "output.txt").touch()
        wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == len(jobs), "both jobs joined", tmp_path)
        (tmp_path / "go").touch()
        wait_until(lambda: any(job.poll() is not None for job in jobs.values()), "one is refused", tmp_path)
        winners = [name for name in jobs if (tmp_path / f"{name}.has").exists()]
        (tmp_path / "end").touch()
        printed = {name: job.communicate(timeout=60)[0] for name, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.kill()
    assert len(winners) == 1, printed
    (loser,) = set(jobs) - set(winners)
    assert "has all" in printed[winners[0]]
    assert "3 GPUs" in printed[loser]
    assert "could not be reserved within 10 s" in printed[loser]


def test_a_run_trains_across_nodes_under_delay_and_loss_and_a_short_cut(cluster: Machines, tmp_path: Path) -> None:
    process = training(cluster, tmp_path, "total_steps=10")
    wait_until(lambda: len(versions(tmp_path)) >= 2, "two steps", tmp_path)
    assert all(node.actors() for node in cluster.nodes), "every node has a part of the run"
    of_a_rank = workers_with(cluster, "TrainerRank")[-1]
    cluster.network.cut(of_a_rank.index)
    time.sleep(4)  # Ray gives a node up after three checks of 2 to 4 s
    cluster.network.heal(of_a_rank.index)
    printed = finish(process, tmp_path)
    assert process.returncode == 0, printed[-3000:]
    ledger = read_summary(tmp_path / "runs/across")["ledger"]
    assert ledger["trained"] == 10 * STEP_GROUPS
    assert ledger["failed"] == 0
    assert versions(tmp_path) == list(range(1, 11)), "no step was lost"
    assert cluster.network.lost["chance"] > 0
    assert cluster.network.lost["cut"] > 0


def test_the_demo_learns_across_nodes_under_delay_and_loss(cluster: Machines, tmp_path: Path) -> None:
    """Its trainer shards the policy over two nodes, its two engines are those of vLLM, versions go by gloo."""
    process = demo(cluster, tmp_path, "total_steps=40")
    wait_until(lambda: len(versions(tmp_path)) >= 2, "two steps", tmp_path)
    assert all(node.actors() for node in cluster.nodes), "every node has a part of the run"
    assert len([node for node in cluster.nodes if "TrainerRank" in node.actors()]) == 2
    assert len([node for node in cluster.nodes if "EngineActor" in node.actors()]) == 2
    printed = finish(process, tmp_path, timeout_s=600)
    assert process.returncode == 0, printed[-3000:]
    summary = read_summary(tmp_path / "runs/across")
    # 0.54 -> 0.98 after 30 steps and after 100 (seed 0, n = 1)
    assert summary["eval_after"] > summary["eval_before"] + 0.2
    assert summary["ledger"]["trained"] == 40 * 32
    assert summary["ledger"]["failed"] == 0
    assert summary["max_staleness_seen"] <= 1
    assert versions(tmp_path) == list(range(1, 41))
    assert cluster.network.lost["chance"] > 0


def test_a_run_survives_a_node_that_is_lost_and_returns_and_one_that_dies(cluster: Machines, tmp_path: Path) -> None:
    """The first has an engine, the second a trainer rank."""
    process = training(cluster, tmp_path, "total_steps=60", "checkpoint.every_steps=1", "trainer.step_timeout_s=60")
    run_dir = tmp_path / "runs/across"
    wait_until(lambda: len(versions(tmp_path)) >= 2, "two steps", tmp_path)
    lost = next(node for node in workers_with(cluster, "EngineActor") if "TrainerRank" not in node.actors())
    cluster.network.cut(lost.index)
    wait_until(lambda: max(read_metric(run_dir, "flow/engine_restarts")) >= 1, "its engine is elsewhere", tmp_path)
    cluster.network.heal(lost.index)
    wait_until(lambda: not lost.actors(), "the node that was given up has no process of the run", tmp_path)
    lost.start_ray("--num-gpus=1")
    wait_for_nodes(cluster.nodes[0], NUM_NODES)

    dies = workers_with(cluster, "TrainerRank")[0]
    steps = len(versions(tmp_path))
    dies.kill()
    wait_until(lambda: len(versions(tmp_path)) >= steps + 3, "three more steps after a rank's node died", tmp_path)
    printed = finish(process, tmp_path)
    assert process.returncode == 0, printed[-3000:]
    summary = read_summary(run_dir)
    assert summary["status"] == "completed"
    assert summary["ledger"]["trained"] == 60 * STEP_GROUPS
    assert versions(tmp_path) == list(range(1, 61))
