"""`penstock scale` on a run by command: engines join and leave while it trains, and nothing is lost."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors.cluster import draining_nodes
from penstock.actors.ray_errors import answer_of
from penstock.dataflow.errors import EngineLostError
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import ENVIRONMENT, PENSTOCK, read_metric, read_summary, run_cli
from tests.small_run import small_run_overrides

pytestmark = pytest.mark.integration

SETTINGS = (
    "rollout.engine.max_num_seqs=8",
    "rollout.engine.journal_interval_tokens=1",
    "rollout.sampling.max_new_tokens=400",
    "dataflow.batch_groups=16",
    "trainer.max_tokens_per_micro_batch=2048",
    "weights.drain_timeout_s=0.5",  # most requests of a leaving engine are moved
    "cluster.pools.cpu.memory_gib=64",
    "checkpoint.every_minutes=0",
    "total_steps=100000",
)


def scale(run_dir: Path, num_engines: int) -> subprocess.CompletedProcess[str]:
    return run_cli("scale", str(run_dir), "--engines", str(num_engines), cwd=run_dir.parent)


def training(folder: Path, name: str, *more: str) -> subprocess.Popen[bytes]:
    """Start a run that lasts until it is stopped, and wait for its second step. Its output goes into a file."""
    overrides = small_run_overrides(folder, name, character_tokenizer(), *SETTINGS, *more)
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [PENSTOCK, "train", *overrides],
            cwd=folder,
            env=ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for_steps(process, folder / "runs" / name, 2)
    except BaseException:
        end(process)
        raise
    return process


def wait_for_steps(process: subprocess.Popen[bytes], run_dir: Path, more: int) -> None:
    """Wait until it has trained so many more steps."""
    deadline, goal = time.monotonic() + 120, num_steps(run_dir) + more
    while num_steps(run_dir) < goal:
        assert process.poll() is None, output_of(run_dir)
        assert time.monotonic() < deadline, output_of(run_dir)
        time.sleep(0.1)


def num_steps(run_dir: Path) -> int:
    return len(read_metric(run_dir, "trainer/version")) if (run_dir / "metrics.jsonl").exists() else 0


def output_of(run_dir: Path) -> str:
    return (run_dir.parents[1] / "output.txt").read_text()[-5000:]


def stop(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Stop it in order: no group has failed, nothing was retried, the policy is saved, and the socket is gone."""
    process.terminate()
    assert process.wait(timeout=120) == 128 + signal.SIGTERM, output_of(run_dir)
    assert "Traceback" not in output_of(run_dir)
    summary = read_summary(run_dir)
    ledger = summary["ledger"]
    assert ledger["failed"] == 0
    assert ledger["admitted"] == sum(ledger[end] for end in ("trained", "dropped", "filtered", "failed", "live"))
    assert summary["policy_version"] == summary["steps"] > 0
    assert summary["max_staleness_seen"] <= summary["max_staleness_configured"]
    assert read_metric(run_dir, "flow/retries")[-1] == 0
    assert read_metric(run_dir, "flow/engine_restarts")[-1] == 0
    assert not (run_dir / "control.sock").exists()


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


@pytest.mark.full
def test_a_run_is_scaled_from_one_engine_to_two_and_back_while_it_trains(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "scaled"
    process = training(tmp_path, "scaled")
    try:
        refused = scale(run_dir, 0)
        assert (refused.returncode, "at least 1 engine" in refused.stderr) == (1, True), refused
        joined = scale(run_dir, 2)
        assert joined.returncode == 0, joined.stderr
        assert "engine-1 has joined and serves at v" in joined.stdout
        assert "1 -> 2 engines are in service" in joined.stdout
        wait_for_steps(process, run_dir, 3)
        left = scale(run_dir, 1)
        assert left.returncode == 0, left.stderr
        assert "has left" in left.stdout
        assert "2 -> 1 engines are in service" in left.stdout
        wait_for_steps(process, run_dir, 3)
        stop(process, run_dir)
    finally:
        end(process)
    engines = read_metric(run_dir, "flow/engines")
    assert (engines[0], max(engines), engines[-1]) == (1, 2, 1)
    assert "is not running" in scale(run_dir, 2).stderr


class Busy:
    def answer(self) -> bool:
        return True


@pytest.mark.full
async def test_the_nodes_that_ray_drains_are_known_to_the_driver() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    try:
        node = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        ray.init(address=cluster.address, log_to_driver=False)
        assert await draining_nodes() == set()
        on_node = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        busy = ray.remote(Busy).options(num_cpus=0, scheduling_strategy=on_node).remote()  # an idle node would end
        assert await answer_of(busy.answer.remote(), 60, EngineLostError, "start")
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int(time.time() * 1000) + 60_000
        address = ray.get_runtime_context().gcs_address
        assert GcsClient(address).drain_node(node.node_id, reason, "planted", deadline_ms)[0]
        async with asyncio.timeout(30):
            while await draining_nodes() != {node.node_id}:  # noqa: ASYNC110 - Ray has no event for it
                await asyncio.sleep(0.2)
        assert await answer_of(busy.answer.remote(), 60, EngineLostError, "it still serves")
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_engines_join_and_leave_every_20_s_for_3_minutes(tmp_path: Path) -> None:
    run_dir, num_engines, num_changes = tmp_path / "runs" / "soak", 1, 0
    process = training(tmp_path, "soak")
    try:
        stop_at = time.monotonic() + 180
        while time.monotonic() < stop_at:
            num_engines = 3 - num_engines
            changed = scale(run_dir, num_engines)
            assert changed.returncode == 0, (changed.stdout, changed.stderr)
            num_changes += 1
            time.sleep(20)
        stop(process, run_dir)
    finally:
        end(process)
    assert set(read_metric(run_dir, "flow/engines")) == {1, 2}
    assert num_changes >= 5
    moved = read_metric(run_dir, "flow/resumed_trajectories")[-1]
    print(f"{num_changes} changes, {num_steps(run_dir)} steps, {moved:g} trajectories moved")
    print(tokens_per_engine_s(run_dir))


def tokens_per_engine_s(run_dir: Path) -> str:
    """Of the steps with one and with two engines. They share the machine's cores, so it is told and not asserted.

    Where the cores are no bottleneck it is: tests/unit/platform/test_fleet.py.
    """
    tokens, seconds = Counter(), Counter()
    names = ("flow/engines", "throughput/generated_tokens_per_s", "throughput/step_s")
    for num_engines, rate, step_s in zip(*(read_metric(run_dir, name) for name in names), strict=True):
        tokens[int(num_engines)] += rate * step_s
        seconds[int(num_engines)] += num_engines * step_s
    return ", ".join(f"{tokens[num] / seconds[num]:.0f} tokens per engine-second of {num}" for num in sorted(tokens))
