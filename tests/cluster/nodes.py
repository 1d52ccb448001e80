"""Several machines on this one: namespaces of processes, mounts, network and host name for each, with Ray in them.

A node has its own process numbers, /dev/shm, HOME, working directory, host name and two network interfaces: `tun0`
reaches the other nodes (network.py), `lan0` leads nowhere, as the management network of many clusters does. The disk is
shared. When the first process of a node ends, Linux ends all others of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.network import MTU, Network, address

BIN = Path(sys.executable).parent
RAY_PORT = 6379
SHM_GIB = 3
# A node that does not answer for 10 s is lost; Ray's default takes half a minute.
RAY_SETTINGS = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "4000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "disabled",
}
# Adopts and buries what its children leave behind, as the first process of a machine does.
_FIRST_PROCESS = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('up', flush=True); signal.pause()"
_FIRST_PROCESS = _FIRST_PROCESS.replace("signal.pause()", "exec('while True: signal.pause()')")


def can_make_nodes() -> bool:
    """Whether this machine lets us make namespaces with TUN devices."""
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "ip", "tuntap", "add", "tun0", "mode", "tun"],
        capture_output=True,
        timeout=30,
        check=False,
    )
    return tried.returncode == 0


@dataclass(frozen=True)
class Node:
    """One machine of the cluster.

    Attributes:
        home: Its HOME and working directory.
        first: The process that holds its namespaces; `pid` is that of its first process as this machine sees it.
    """

    index: int
    home: Path
    first: subprocess.Popen[str]
    pid: int

    @property
    def address(self) -> str:
        return address(self.index)

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, output: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a program on this node."""
        target = subprocess.PIPE if output is None else output.open("w")
        try:
            return subprocess.Popen(
                [
                    "nsenter",
                    f"--target={self.pid}",
                    "--net",
                    "--mount",
                    "--pid",
                    "--uts",
                    f"--wd={self.home}",
                    *command,
                ],
                env=self._environment() | dict(environment or {}),
                stdout=target,
                stderr=subprocess.STDOUT,
                text=True,
            )
        finally:
            if output is not None:
                target.close()  # type: ignore[union-attr]

    def run(self, *command: str, timeout_s: float = 60) -> str:
        """Run a program on this node and return what it printed.

        Raises:
            RuntimeError: If it fails.
        """
        process = self.start(command)
        try:
            printed, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        if process.returncode != 0:
            raise RuntimeError(f"node {self.index}: {' '.join(command)} exited with {process.returncode}: {printed}")
        return printed

    def start_ray(self, *arguments: str) -> None:
        """Start Ray; on the first node the head. Later nodes join it."""
        head = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        where = head if self.index == 0 else [f"--address={address(0)}:{RAY_PORT}"]
        self.run(
            f"{BIN}/ray",
            "start",
            *where,
            f"--node-ip-address={self.address}",
            "--disable-usage-stats",
            "--object-store-memory=200000000",
            *([] if any(one.startswith("--num-cpus") for one in arguments) else ["--num-cpus=2"]),
            *arguments,
            timeout_s=120,
        )

    def actors(self) -> list[str]:
        """The classes of Ray actors whose processes are on this node."""
        found = self.start(["pgrep", "--list-full", "^ray::"])
        printed, _ = found.communicate(timeout=30)
        titles = (line.partition("ray::")[2] for line in printed.splitlines())
        return [
            title.partition(".")[0] for title in titles if not title.startswith(("IDLE", "Dashboard", "RuntimeEnv"))
        ]

    def kill(self) -> None:
        """Cut the power: every process of the node ends at once."""
        os.kill(self.pid, signal.SIGKILL)
        self.first.wait(timeout=30)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PENSTOCK_"))}
        return kept | RAY_SETTINGS | {"HOME": str(self.home), "PATH": f"{BIN}:{os.environ['PATH']}"}


@dataclass(frozen=True)
class Machines:
    """The nodes and the network between them."""

    nodes: list[Node]
    network: Network


@contextmanager
def machines(
    folder: Path, num_nodes: int, *, delay_s: float = 0.0, loss: float = 0.0, seed: int = 0
) -> Iterator[Machines]:
    """Nodes for the duration of a test; every process on them is ended with it.

    Args:
        folder: Where their HOME folders are made.
        num_nodes: How many.
        delay_s: One-way delay between two of them, seconds.
        loss: Share of packets lost between them.
        seed: Decides which packets are lost.
    """
    nodes: list[Node] = []
    network: Network | None = None
    try:
        nodes.extend(_start_node(folder, index) for index in range(num_nodes))
        network = Network([node.pid for node in nodes], delay_s=delay_s, loss=loss, seed=seed)
        for node in nodes:
            node.run("ip", "addr", "add", f"{node.address}/24", "dev", "tun0")
            node.run("ip", "link", "set", "tun0", "mtu", str(MTU), "up")
        yield Machines(nodes, network)
    finally:
        for node in nodes:
            if node.first.poll() is None:
                node.kill()
        if network is not None:
            network.close()


def _start_node(folder: Path, index: int) -> Node:
    home = folder / f"node{index}"
    home.mkdir(parents=True)
    Path("/tmp/ray").mkdir(exist_ok=True)  # where Ray keeps a session; each node mounts its own over it
    setup = " && ".join(
        [
            "mount --make-rprivate /",
            "ip link set lo up",
            "ip link add lan0 type veth peer name lan1",
            "ip addr add 192.168.77.1/24 dev lan0",
            "ip link set lan0 up",
            f"hostname penstock-node{index}",
            f"mount -t tmpfs -o size={SHM_GIB}g tmpfs /dev/shm",
            "mount -t tmpfs tmpfs /tmp/ray",
            f'exec {sys.executable} -S -c "{_FIRST_PROCESS}"',
        ]
    )
    first = subprocess.Popen(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc", "sh", "-c", setup],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    if first.stdout.readline() != "up\n":
        _, said = first.communicate(timeout=10)
        raise RuntimeError(f"node {index}: its namespaces could not be made: {said}")
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    return Node(index, home, first, int(children[0]))


def start_ray_on(nodes: Sequence[Node], *arguments: str) -> None:
    """Start Ray on all nodes, the first of which is the head."""
    nodes[0].start_ray(*arguments)
    with ThreadPoolExecutor(len(nodes)) as threads:
        for joined in [threads.submit(node.start_ray, *arguments) for node in nodes[1:]]:
            joined.result()
    wait_for_nodes(nodes[0], len(nodes))


def wait_for_nodes(head: Node, num_nodes: int, timeout_s: float = 60) -> None:
    """Wait until so many nodes are alive in Ray's eyes."""
    program = (
        f"import ray; ray.init(address='{head.address}:{RAY_PORT}', log_to_driver=False); "
        "print('alive', sum(node['Alive'] for node in ray.nodes()))"
    )
    deadline = time.monotonic() + timeout_s
    while True:
        printed = head.run(f"{BIN}/python", "-c", program)
        if f"alive {num_nodes}" in printed:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"cluster: not {num_nodes} nodes alive within {timeout_s:.0f} s: {printed[-300:]}")
        time.sleep(1)
