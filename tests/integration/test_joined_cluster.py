"""A cluster that someone else has started, in other folders and with other variables, behaves as this machine does.

Its nodes are Ray nodes on this machine, with logical GPUs. So they share its files, clock and ports.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
from ray._raylet import Config
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.actors import node_probe
from penstock.actors.bundles import Bundle
from penstock.actors.cluster import JobNeeds, ray_session
from penstock.actors.devices import BundlePlace, reserve_devices
from penstock.actors.node_probe import ProbeRequest, probe_nodes
from penstock.dataflow.errors import PlacementError
from penstock.platform.cluster.preflight import NodeNeeds, node_findings
from penstock.platform.cluster.session import cluster_session
from penstock.platform.config.compose import compose_all
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.command_line import read_summary, run_cli
from tests.small_run import small_run_overrides

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(600)]

NODE = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 << 20}
REWARD = """
import random
from pathlib import Path

import my_tools


def score(trajectory, **task):
    return float(Path("points.txt").read_text()) * my_tools.ONE + random.random() / 10
"""
"""Of the user: it imports a module beside it, and opens a file by a relative path."""


UNPROTECTED = """
import os, subprocess, sys

os.environ["RAY_AUTH_MODE"] = "disabled"
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
del os.environ["RAY_AUTH_MODE"]
try:
    sys.exit(subprocess.run([sys.argv[1], "doctor", "--cluster", cluster.address], timeout=200).returncode)
finally:
    cluster.shutdown()
"""
"""A cluster as Ray started it before it had tokens, and a command that joins it."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes, started in another folder, without our variables and with Ray's own niceness of 15.

    They demand the token that the first local run on a machine makes, as `ray start --head` does.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        Config.initialize("")  # reads the variable
        ensure_token_if_auth_enabled(create_token_if_missing=True)
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        for name in ("RAY_worker_niceness", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG"):
            patch.delenv(name, raising=False)
        kinds = [{"accelerator_type:H100": 1.0}, {"accelerator_type:L4": 1.0}]
        head = {**NODE, "include_dashboard": False, "resources": kinds[0]}
        started = Cluster(initialize_head=True, head_node_args=head)
        try:
            started.add_node(**NODE, resources=kinds[1])
            yield started
        finally:
            started.shutdown()


def test_a_cluster_that_demands_no_token_is_joined_by_one_who_has_one(
    tmp_path: Path,
) -> None:
    """A driver that demands the token itself could not be called by the cluster, and all its actors would die."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text("0" * 64)
    started = subprocess.run(  # Ray reads the mode once in a process
        [sys.executable, "-c", UNPROTECTED, f"{Path(sys.executable).parent}/penstock"],
        env={**os.environ, "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert started.returncode == 0, started.stdout + started.stderr
    assert "silent" not in started.stdout + started.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's working directory, with the user's modules."""
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "my_tools.py").write_text("ONE = 1")
    (tmp_path / "points.txt").write_text("0.5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def on_each_node(options: dict[str, Any], function: Any) -> list[Any]:
    """The answer of a task with these options on each node."""
    calls = [
        ray.remote(function)
        .options(**options, num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote()
        for node in ray.nodes()
        if node["Alive"]
    ]
    return ray.get(calls, timeout=120)


async def test_workers_have_the_variables_modules_and_files_of_the_driver_and_normal_priority(
    cluster: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    (folder / "runs" / "x").mkdir(parents=True)
    (folder / "policy").mkdir()
    config = compose_all(
        [
            "experiment=arithmetic",
            "reward.fn=my_reward:score",
            "model.path=policy",
            "run_dir=runs/x",
            f"cluster.address={cluster.address}",
        ]
    ).config
    assert config is not None

    def look() -> tuple[str | None, str | None, str, int, float]:
        import my_reward

        variable, threads = os.environ.get("NCCL_DEBUG"), os.environ.get("OMP_NUM_THREADS")
        return variable, threads, str(Path.cwd()), os.getpriority(os.PRIO_PROCESS, 0), my_reward.score(None)

    async with cluster_session(config, "train", Path(config.run_dir) / "logs") as at_nodes:
        assert (at_nodes.run_dir, at_nodes.model.path) == (str(folder / "runs" / "x"), str(folder / "policy"))
        for options in ({}, {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "3"}}}):
            for variable, threads, where, niceness, points in on_each_node(options, look):
                assert (variable, niceness) == ("WARN", os.getpriority(os.PRIO_PROCESS, 0)), (
                    "an actor's own variables are added to these"
                )
                assert 0.5 <= points < 0.6
                assert threads == "3" or not options
                assert where != str(folder), "a copy"
    assert not list((folder / "runs" / "x").glob(".preflight-*"))
    assert not list(folder.glob("penstock-modules-*"))


async def test_the_preflight_asks_every_node_and_names_what_is_wrong(cluster: Cluster, folder: Path) -> None:
    request = ProbeRequest(
        folder, ("/no/such/model",), {"reward.fn": "my_reward:score", "env.curriculum": "my_reward.no"}
    )
    async with ray_session(cluster.address, needs=JobNeeds(modules=("my_reward",))):
        here, nodes = await probe_nodes(request)
    assert len(nodes) == 2
    for node in nodes:
        assert node.silence == ""
        assert (node.python, node.code, node.packages) == (here.python, here.code, here.packages)
        assert len(node.code) == 12
        assert (node.ray_gpus, node.folder_problem, node.unreachable) == (2, "", ())
        assert node.niceness == here.niceness, "not 15 more"
        assert abs(node.clock_offset_s) <= node.clock_error_s + 0.5
        assert list(node.import_errors) == ["env.curriculum"]
    assert {node.accelerator_types for node in nodes} == {("H100",), ("L4",)}
    needs = NodeNeeds((Bundle(4), Bundle(2, "L4")), packages=("torch",))
    messages = [finding.message for finding in node_findings(here, nodes, needs) if finding.severity == "error"]
    words = ("CPU build", "4 GPUs are needed in one node", "/no/such/model does not exist on", "no attribute 'no'")
    assert [any(word in message for message in messages) for word in words] == [True] * 4, messages
    assert all(nodes[0].name in message and nodes[1].name in message for message in messages)
    assert not list(folder.glob(".preflight-*"))


async def test_a_node_that_does_not_answer_is_named_within_the_limit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_probe, "START_TIMEOUT_S", 8.0)
    frozen = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    raylet = frozen.all_processes["raylet"][0].process.pid
    try:
        async with ray_session(cluster.address, needs=JobNeeds()):
            os.kill(raylet, signal.SIGSTOP)
            here, nodes = await asyncio.wait_for(probe_nodes(ProbeRequest()), 100)
    finally:
        os.kill(raylet, signal.SIGCONT)
        cluster.remove_node(frozen)
    silent = [node.name for node in nodes if node.silence]
    assert [name for name in silent if frozen.node_id[:8] in name] == silent
    assert len(silent) == 1
    (message,) = [finding.message for finding in node_findings(here, nodes, NodeNeeds()) if "silent" in finding.message]
    assert silent[0] in message


async def test_gpus_are_reserved_on_nodes_with_their_label_and_groups_on_one_node(cluster: Cluster) -> None:
    async with ray_session(cluster.address, needs=JobNeeds()):
        kinds = {
            node["NodeID"]: kind
            for node in ray.nodes()
            if node["Alive"]
            for kind in node["Resources"]
            if kind.startswith("acc")
        }
        bundles = [Bundle(2, "L4", ("a", "b")), Bundle(1, "H100", ("c",))]
        devices = await reserve_devices(bundles, timeout_s=60)

        def where() -> tuple[str, list[str]]:
            return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"].split(",")

        places = [devices.place(process) for process in ("a", "b", "c")]
        calls = [ray.remote(where).options(num_cpus=0, **place.options(1)).remote() for place in places if place]
        (a, on_a), (b, on_b), (c, _) = ray.get(calls, timeout=120)
        assert a == b != c
        assert len({*on_a, *on_b}) == 2
        assert "L4" in kinds[a]
        assert "H100" in kinds[c]
        with pytest.raises(PlacementError, match=r"3 GPUs \(1 x 1 H100, 1 x 2 L4 of one node\) .* free are "):
            await reserve_devices([Bundle(1, "H100", ("a",)), Bundle(2, "L4", ("b",))], timeout_s=2)
        assert isinstance(places[0], BundlePlace)


def test_a_run_with_relative_paths_and_its_own_reward_trains_on_it(cluster: Cluster, folder: Path) -> None:
    overrides = small_run_overrides(folder, "joined", character_tokenizer())
    joined = (f"cluster.address={cluster.address}", "reward.fn=my_reward:score", "total_steps=2")
    done = run_cli("train", *overrides, *joined, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = folder / "runs" / "joined"
    assert read_summary(run_dir)["ledger"]["failed"] == 0
    assert 0.5 <= read_summary(run_dir)["reward_last"] < 0.6
    assert (run_dir / "policy" / "model.safetensors").exists()
    assert (run_dir / "logs" / "trainer-0.log").exists()
    assert "nodes" in done.stderr, "the table"


def test_the_doctor_checks_all_nodes_and_a_run_that_does_not_fit_starts_nothing(cluster: Cluster, folder: Path) -> None:
    healthy = run_cli("doctor", "--cluster", cluster.address, cwd=folder)
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert "2 nodes are ready" in healthy.stdout
    overrides = small_run_overrides(folder, "refused", character_tokenizer())
    (folder / "my_reward.py").write_text("import os\nassert os.path.exists('.hidden')\n" + REWARD)
    (folder / ".hidden").write_text("")
    refused = run_cli(
        "train", *overrides, f"cluster.address={cluster.address}", "reward.fn=my_reward:score", cwd=folder
    )
    assert refused.returncode == 1
    assert "your code cannot be imported on" in refused.stderr
    assert "so nothing was started" in refused.stderr
