"""The SLURM script is run, with programs that do what srun, scontrol, ray and penstock would do to it.

srun starts its command once for each node. A node of Ray is a process that lives until it is killed; the head listens
on its port, and the others need it. `penstock launch wait` counts them, and `penstock train` does what the case says.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.platform.cli.launch import prepare_launch
from tests.unit.platform.test_launchers import EIGHT, TWO_TYPES

LIMIT_S = 60.0
PROGRAMS = {
    "srun": """
import os, re, subprocess, sys, time
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1 + len(options):]
group = next((word[-1] for word in options if word.startswith("--het-group=")), "0")
(nodes,) = [int(word.partition("=")[2]) for word in options if word.startswith("--nodes=")]
names = ["localhost" if (group, n) == ("0", 0) else f"g{group}n{n}" for n in range(nodes)]
tasks = [subprocess.Popen(command, env=os.environ | {"SLURMD_NODENAME": name}) for name in names]
import signal
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
codes = [task.wait() for task in tasks]
time.sleep(0.5)  # the run knows before srun ends
sys.exit(max(map(abs, codes)))
""",
    "ray": """
import os, pathlib, signal, socket, sys
state = pathlib.Path(os.environ["STATE"])
assert sys.argv[1] == "start", sys.argv
options = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[2:])
assert "block" in options
assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 32
name = os.environ["SLURMD_NODENAME"]
if name in os.environ.get("BROKEN", "").split():
    sys.exit(1)
signal.signal(signal.SIGTERM, lambda *_: ((state / f"ended-{name}").touch(), os._exit(0)))
if "head" in options:
    server = socket.create_server(("127.0.0.1", int(options["port"])))
else:
    host, port = options["address"].split(":")
    socket.create_connection((host, int(port)), timeout=5).close()
(state / f"node-{name}").write_text(f"{os.getpid()} {os.environ['RAY_AUTH_TOKEN']} {' '.join(sys.argv[2:])}")
while True:
    signal.pause()
""",
    "penstock": """
import os, pathlib, signal, sys, time
state = pathlib.Path(os.environ["STATE"])
if sys.argv[1:3] == ["launch", "wait"]:
    if "NEVER" in os.environ:
        signal.pause()
    while not list(state.glob("node-*")):  # the limit of a case is short, and counts from the first node
        time.sleep(0.05)
    until = time.monotonic() + float(os.environ.get("WAIT_S", "30"))
    while len(list(state.glob("node-*"))) < int(sys.argv[3]):
        if time.monotonic() > until:
            sys.exit("too few nodes")
        time.sleep(0.05)
    sys.exit(0)
def stop(*_):
    (state / "checkpoint").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
(state / "train").write_text(chr(10).join([os.environ["RAY_ADDRESS"], str(os.getpid()), *sys.argv[1:]]))
case = os.environ["CASE"]
while case in ("until stopped", "until a node is lost"):
    if case == "until a node is lost" and list(state.glob("ended-*")):
        sys.exit(1)
    time.sleep(0.05)
sys.exit(int(case))
""",
    "scontrol": """
import os, pathlib, sys
state = pathlib.Path(os.environ["STATE"])
with (state / "scontrol").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + chr(10))
if sys.argv[1] == "show":
    print("JobId=4711 JobName=x\\n   JobState=" + os.environ["JOB_STATE"] + " Reason=None")
""",
}


class Job:
    """The script under fakes.

    Attributes:
        state: Folder in which the programs leave what they did.
    """

    def __init__(self, state: Path, words: list[str], **variables: str) -> None:
        self.state = state
        programs = state / "bin"
        programs.mkdir()
        for name, text in PROGRAMS.items():
            (programs / name).write_text(f"#!{sys.executable} -IS\n{text}")
            (programs / name).chmod(0o755)
        script = prepare_launch("slurm", [*words, f"launch.shared_dir={state}"], None).text
        # The real programs are beside Python; the fakes take their place.
        script = script.replace(
            f"export PATH={shlex.quote(str(Path(sys.executable).parent))}", f"export PATH={programs}"
        )
        assert str(programs) in script
        port_block = str(os.getpid() % 20)  # SLURM_JOB_ID chooses the ports; two tests at a time have different ones
        slurm = {"SLURM_JOB_ID": port_block, "SLURMD_NODENAME": "localhost", "JOB_STATE": "RUNNING"}
        self.process = subprocess.Popen(
            ["bash", "-c", script],
            env={"PATH": f"{programs}:/usr/bin:/bin", "STATE": str(state), **slurm, **variables},
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, *names: str) -> None:
        """Wait until files exist."""
        limit = time.monotonic() + LIMIT_S
        while not all((self.state / name).exists() for name in names):
            assert time.monotonic() < limit, f"{names}: {sorted(path.name for path in self.state.iterdir())}"
            time.sleep(0.02)

    def end(self) -> tuple[int, str]:
        """Exit code and errors of the script."""
        _, errors = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, errors

    def asked(self) -> list[str]:
        """What scontrol was asked."""
        path = self.state / "scontrol"
        return path.read_text().splitlines() if path.exists() else []

    def nodes(self) -> dict[str, list[str]]:
        """Words of `ray start` by node, after process id and token."""
        return {path.name.removeprefix("node-"): path.read_text().split() for path in self.state.glob("node-*")}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[type[Job]]:
    started: list[Job] = []

    class Kept(Job):
        def __init__(self, words: list[str], **variables: str) -> None:
            super().__init__(tmp_path, words, **variables)
            started.append(self)

    yield Kept
    for one in started:
        for process in psutil.Process(one.process.pid).children(recursive=True) if one.process.poll() is None else []:
            process.kill()
        one.process.kill()
        one.process.wait(LIMIT_S)


TWO_NODES = [*EIGHT, "launch.gpus_per_node=4"]


def test_a_run_starts_when_all_nodes_are_there_and_ray_ends_with_it(job: type[Job]) -> None:
    started = job(TWO_NODES, CASE="0")
    assert started.end()[0] == 0
    address, _, *command = (started.state / "train").read_text().splitlines()
    own = [f"run_dir={started.state}/runs/math_qwen_8gpu", "cluster.address=auto", "resume=auto"]
    own.append("stop_grace_s=570")  # 30 s before the job is killed
    assert command == ["train", *EIGHT, *own]
    nodes = started.nodes()
    assert nodes.keys() == {"localhost", "g0n1"}
    (_, head_token, *head), (_, token, *worker) = nodes["localhost"], nodes["g0n1"]
    assert head_token == token
    assert address == f"localhost:{dict(w.lstrip('-').partition('=')[::2] for w in head)['port']}"
    assert f"--address={address}" in worker
    ports = {word for word in worker if "port=" in word}
    assert ports <= set(head), "the same ports on every node"
    started.until("ended-localhost", "ended-g0n1")
    assert started.asked() == []


def test_groups_of_different_gpus_join_one_ray(job: type[Job]) -> None:
    started = job(TWO_TYPES, CASE="0")
    assert started.end()[0] == 0
    assert started.nodes().keys() == {"localhost", "g0n1", "g1n0"}


@pytest.mark.parametrize("state", ["RUNNING", "CANCELLED"])
def test_a_signal_lets_the_run_take_a_checkpoint_and_queues_the_job_unless_it_was_cancelled(
    job: type[Job], state: str
) -> None:
    started = job(TWO_NODES, CASE="until stopped", JOB_STATE=state)
    started.until("train")
    started.process.send_signal(signal.SIGTERM)
    code, errors = started.end()
    assert code == 143
    assert (started.state / "checkpoint").exists()
    identity = str(os.getpid() % 20)
    requeued = [f"requeue {identity}"] if state == "RUNNING" else []
    assert started.asked() == [f"show job {identity}", *requeued]
    assert ("queued again" in errors) == (state == "RUNNING")
    started.until("ended-localhost", "ended-g0n1")


def test_a_signal_before_the_run_queues_the_job(job: type[Job]) -> None:
    started = job(TWO_NODES, CASE="0", BROKEN="g0n1")
    started.until("node-localhost")
    started.process.send_signal(signal.SIGTERM)
    assert started.end()[0] == 143
    assert not (started.state / "train").exists()
    assert started.asked()[-1] == f"requeue {os.getpid() % 20}"


@pytest.mark.full
def test_a_failed_run_is_not_repeated(job: type[Job]) -> None:
    started = job(TWO_NODES, CASE="2")
    assert started.end()[0] == 2
    assert started.asked() == []


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("restarts", "requeues"), [("", True), pytest.param("9", True, marks=pytest.mark.full), ("10", False)]
)
def test_a_lost_node_queues_the_job_ten_times_at_most(job: type[Job], restarts: str, requeues: bool) -> None:
    started = job([*TWO_TYPES], CASE="until a node is lost", SLURM_RESTART_COUNT=restarts)
    started.until("train", "node-g1n0")
    os.kill(int(started.nodes()["g1n0"][0]), signal.SIGTERM)
    assert started.end()[0] == 1
    assert any(line.startswith("requeue") for line in started.asked()) == requeues
    started.until("ended-localhost", "ended-g0n1")


def test_the_job_is_queued_at_once_if_ray_starts_nowhere(job: type[Job]) -> None:
    started = job(EIGHT, CASE="0", NEVER="", BROKEN="localhost")
    code, errors = started.end()
    assert code == 143
    assert "Ray has ended before all nodes were in it" in errors
    assert not (started.state / "train").exists()
    assert started.asked()[-1] == f"requeue {os.getpid() % 20}"


@pytest.mark.full
def test_nodes_that_do_not_come_end_the_job_at_a_limit(job: type[Job]) -> None:
    started = job([*TWO_NODES], CASE="0", WAIT_S="0.5", BROKEN="g0n1")
    code, errors = started.end()
    assert code == 1
    assert "too few nodes" in errors
    assert not (started.state / "train").exists()
    started.until("ended-localhost")
