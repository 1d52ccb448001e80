"""The script of `penstock launch slurm` with a real Ray on two machines (namespaces of this one).

Only SLURM is a stand-in: its `srun` leaves a request, and the test starts the command on each node.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.platform.cli.launch import prepare_launch
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from tests.cluster.nodes import Machines, Node, can_make_nodes, machines
from tests.command_line import read_summary
from tests.small_run import small_run_overrides

pytestmark = [
    pytest.mark.integration,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_nodes(), reason="needs root, network namespaces and TUN devices"),
]
TWO_NODES = ["experiment=math_qwen_8gpu", "launch.gpus_per_node=4"]
SRUN = """
import json, os, pathlib, signal, sys, time
request = pathlib.Path(os.environ["REQUESTS"]) / str(os.getpid())
options = [word for word in sys.argv[1:] if word.startswith("--")]
(nodes,) = [int(word.partition("=")[2]) for word in options if word.startswith("--nodes=")]
written = {"nodes": nodes, "command": sys.argv[1 + len(options):], "environment": dict(os.environ)}
request.with_suffix(".new").write_text(json.dumps(written))
request.with_suffix(".new").rename(request.with_suffix(".json"))
signal.signal(signal.SIGTERM, lambda *_: request.with_suffix(".cancelled").touch())
while not request.with_suffix(".code").exists():
    time.sleep(0.1)
sys.exit(int(request.with_suffix(".code").read_text()))
"""
SCONTROL = """
import os, pathlib, sys
with (pathlib.Path(os.environ["REQUESTS"]) / "scontrol").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + chr(10))
print("JobId=7 JobState=RUNNING")
"""


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path / "nodes", 2) as made:
        for node in made.nodes:
            node.run("ip", "route", "add", "default", "dev", "tun0")  # by which Ray finds the address of its node
        yield made


def serve_step(nodes: list[Node], request: Path) -> None:
    """Run the command of one `srun` on the first nodes until all have ended or it is cancelled."""
    asked = json.loads(request.read_text())
    tasks = [
        node.start(
            asked["command"],
            environment=asked["environment"] | {"SLURMD_NODENAME": node.address},
            output=request.with_name(f"{request.stem}-{node.index}.txt"),
        )
        for node in nodes[: asked["nodes"]]
    ]
    is_cancelled = False
    while any(task.poll() is None for task in tasks):
        if request.with_suffix(".cancelled").exists() and not is_cancelled:
            is_cancelled = True
            for node in nodes:
                node.run("pkill", "-TERM", "-f", "ray start")
        time.sleep(0.1)
    request.with_suffix(".code").write_text(str(max(abs(task.returncode) for task in tasks)))


@contextmanager
def slurm(nodes: list[Node], requests: Path) -> Iterator[None]:
    """Serve every `srun` that leaves a request in this folder."""
    is_over = threading.Event()

    def serve() -> None:
        served: list[threading.Thread] = []
        seen: set[Path] = set()
        while not is_over.wait(0.1):
            for request in set(requests.glob("*.json")) - seen:
                seen.add(request)
                served.append(threading.Thread(target=serve_step, args=(nodes, request)))
                served[-1].start()
        for one in served:
            one.join(60)

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield
    finally:
        is_over.set()
        server.join(120)


def start_script(nodes: list[Node], requests: Path, overrides: list[str]) -> subprocess.Popen[str]:
    """The script for two nodes, with a run that needs no GPU in place of its own."""
    programs = requests / "bin"
    programs.mkdir(parents=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(f"#!{sys.executable} -IS\n{text}")
        (programs / name).chmod(0o755)
    script = prepare_launch("slurm", [*TWO_NODES, f"launch.shared_dir={requests}"], None).text
    before, train, after = script.partition("start penstock train ")
    command, *rest = after.splitlines(keepends=True)
    assert "cluster.address=auto" in command
    assert train
    script = f"{before}{train}{' '.join(overrides)} cluster.address=auto resume=auto\n{''.join(rest)}"
    (requests / "job.sh").write_text(script)
    return nodes[0].start(
        ["env", f"PATH={programs}:/usr/bin:/bin", "bash", str(requests / "job.sh")],
        environment={
            "REQUESTS": str(requests),
            "SLURM_JOB_ID": "7",
            "SLURMD_NODENAME": nodes[0].address,
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
        },
        output=requests / "output.txt",
    )


def small(folder: Path, total_steps: int) -> list[str]:
    return small_run_overrides(
        folder,
        "across",
        character_tokenizer(),
        f"run_dir={folder}/runs/across",
        f"model.path={folder}/policy",
        "rollout.num_engines=2",
        "cluster.pools.cpu.memory_gib=64",
        f"total_steps={total_steps}",
    )


def test_the_script_starts_ray_on_both_nodes_trains_and_ends_ray(two_nodes: Machines, tmp_path: Path) -> None:
    nodes, requests = two_nodes.nodes, tmp_path / "job"
    requests.mkdir()
    with slurm(nodes, requests):
        script = start_script(nodes, requests, small(tmp_path, 20))
        deadline, places = time.monotonic() + 300, 0
        while script.poll() is None:
            assert time.monotonic() < deadline, (requests / "output.txt").read_text()[-3000:]
            places = max(places, sum(bool(node.actors()) for node in nodes))
            time.sleep(0.5)
        printed = (requests / "output.txt").read_text()
    assert script.returncode == 0, printed[-3000:]
    assert places == 2, "both nodes had a part of the run"
    summary = read_summary(tmp_path / "runs/across")
    assert summary["status"] == "completed"
    assert summary["ledger"]["failed"] == 0
    assert not (requests / "scontrol").exists(), "it is not queued again"
    assert not any("raylet" in node.run("ps", "-e", "-o", "args") for node in nodes), "Ray has ended"


def test_the_job_is_queued_again_with_a_checkpoint_before_its_time_limit(two_nodes: Machines, tmp_path: Path) -> None:
    nodes, requests = two_nodes.nodes, tmp_path / "job"
    requests.mkdir()
    metrics = tmp_path / "runs/across/metrics.jsonl"
    with slurm(nodes, requests):
        script = start_script(nodes, requests, small(tmp_path, 100_000))
        deadline = time.monotonic() + 240
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert script.poll() is None, (requests / "output.txt").read_text()[-3000:]
            assert time.monotonic() < deadline, (requests / "output.txt").read_text()[-3000:]
            time.sleep(0.2)
        nodes[0].run("pkill", "-TERM", "-f", "bash .*job.sh")  # what `--signal=B:TERM@600` does
        code = script.wait(timeout=120)
    printed = (requests / "output.txt").read_text()
    assert code == 143, printed[-3000:]
    assert list((tmp_path / "runs/across/checkpoints").iterdir()), printed[-3000:]
    assert "requeue 7" in (requests / "scontrol").read_text()
