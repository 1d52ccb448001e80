"""`make chaos`: train while processes are killed at random moments, and check that nothing was lost.

    start `penstock train … checkpoint.every_steps=1`, then until the kills are used up:
      wait a random time → choose a kind of process that is alive → kill -9 it, or stop it as if it hung
      the driver was killed → `penstock resume`

With several nodes, Ray runs as that many raylets on this machine, and there is one more kind: a whole node, its raylet
and all processes below it; a new node joins then.

A run that ends must have completed with its policy. Its ledger must balance, and the ledger on disk must have trained
each group once in the lineage that survives. Kinds, moments and signals follow from the seed; what
they hit does not, since the run is asynchronous.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
from ray.cluster_utils import Cluster
from rich.console import Console

from penstock.actors.cluster import RAY_ENVIRONMENT
from penstock.dataflow.errors import PenstockError
from penstock.dataflow.ledger import GroupState, LedgerEvent
from penstock.platform.checks.load import load_config
from penstock.platform.cli.main import plain_console, print_error, unwinding
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.run_files import POLICY_FOLDER, SUMMARY_FILE
from penstock.platform.metrics.trackers.jsonl import read_metrics
from penstock.platform.run.checkpoint import CheckpointFolder
from tests.ledger_logs import surviving

# A dead process is found at once, one that hangs only after these limits, so they are short.
OVERRIDES = (
    "checkpoint.every_steps=1",
    "rollout.request_timeout_s=30",
    "rollout.max_engine_restarts_per_hour=1000",
    "trainer.step_timeout_s=60",
    "overwrite=true",
)
KINDS: dict[str, Callable[[psutil.Process], bool]] = {
    "trainer rank": lambda process: _title(process).startswith("ray::TrainerRank"),
    "engine": lambda process: _title(process).startswith("ray::EngineActor"),
    "engine core": lambda process: "EngineCore" in _title(process),
    "reward worker": lambda process: _title(process).startswith("ray::RewardActor"),
    "reward process": lambda process: _runs_user_code(process) and _is_below_rewards(process),
    "environment host": lambda process: _runs_user_code(process) and not _is_below_rewards(process),
}
"""Kind of process -> whether a process below the driver is one. The driver itself is another kind."""
DRIVER, NODE = "driver", "node"
NODE_CPUS = 2
NODE_STORE_BYTES = 256 << 20
STOPPED_SHARE = 0.15
"""Share of the kills that stop a process (SIGSTOP) instead of ending it; a driver goes on after `STOPPED_S`."""
STOPPED_S = 8.0
RUN_LIMIT_S = 1800.0
_PROGRAM = "from penstock.platform.cli.main import main; main()"


@dataclass(slots=True)
class Outcome:
    """What was done to a run, and what became of it.

    Attributes:
        kills: Number of kills by kind and signal.
        resumes: How often the driver was started again.
        problems: One sentence per violated promise.
    """

    kills: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    problems: list[str] = field(default_factory=list)


def run_chaos(
    overrides: Sequence[str], num_kills: int, seed: int, num_nodes: int, longest_pause_s: float, console: Console
) -> int:
    """Run it, print what happened and return the exit code: 1 if a promise was broken."""
    with _nodes(num_nodes) as nodes:
        if nodes is not None:
            overrides = [*overrides, f"cluster.address={nodes.address}"]
        config = load_config("train", [*overrides, *OVERRIDES]).config
        outcome = Outcome()
        log_path = Path(f"{config.run_dir}.chaos.log")
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            _drive(config, overrides, num_kills, random.Random(seed), longest_pause_s, outcome, log, console, nodes)
    if not outcome.problems:
        outcome.problems += broken_promises(Path(config.run_dir), config)
    told = ", ".join(f"{count} x {what}" for what, count in sorted(outcome.kills.items()))
    console.print(f"{outcome.kills.total()} kills ({told}), {outcome.resumes} resumes; output of the run: {log_path}")
    for problem in outcome.problems:
        console.print(f"broken: {problem}")
    if not outcome.problems:
        summary = json.loads((Path(config.run_dir) / SUMMARY_FILE).read_text())
        console.print(
            f"completed: {summary['steps']} steps, {summary['trained_groups']} groups trained, each once"
            + (f"; accuracy {summary['eval_before']} -> {summary['eval_after']}" if summary["evaluated_on"] else "")
        )
    return 1 if outcome.problems else 0


def _drive(
    config: RunConfig,
    overrides: Sequence[str],
    num_kills: int,
    rng: random.Random,
    longest_pause_s: float,
    outcome: Outcome,
    log: IO[bytes],
    console: Console,
    nodes: Cluster | None,
) -> None:
    """Train to the end through all kills."""
    kinds = [DRIVER, *KINDS] if nodes is None else [DRIVER, NODE, *KINDS]
    run_dir, deadline = Path(config.run_dir), time.monotonic() + RUN_LIMIT_S
    driver, started = _start(["train", *overrides, *OVERRIDES], log), time.time()
    try:
        while True:
            pause_s = rng.uniform(0.0, longest_pause_s)
            kind, stops = rng.choice(kinds), rng.random() < STOPPED_SHARE
            # Not while it starts: what fails then ends a run, and is started again by who started it.
            has_ended = _wait(driver, lambda: _has_stepped(run_dir, started), deadline) or (  # noqa: B023 - called at once
                outcome.kills.total() < num_kills and _sleep(driver, pause_s)
            )
            if not has_ended and outcome.kills.total() >= num_kills:
                has_ended = _wait(driver, lambda: False, deadline)
            if has_ended:
                if driver.returncode != 0:
                    outcome.problems.append(f"the run ended with exit code {driver.returncode}; see its output")
                return
            if time.monotonic() > deadline:
                outcome.problems.append(f"the run has not ended after {RUN_LIMIT_S:.0f} s")
                return
            if kind == NODE:
                assert nodes is not None
                outcome.kills["node killed"] += 1
                console.print(f"{outcome.kills.total():>3}/{num_kills}  node killed")
                nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
                nodes.add_node(num_cpus=NODE_CPUS, object_store_memory=NODE_STORE_BYTES)
                continue
            victim = _victim(driver, kind, rng)
            if victim is None:
                continue
            what = f"{kind} {'stopped' if stops else 'killed'}"
            outcome.kills[what] += 1
            console.print(f"{outcome.kills.total():>3}/{num_kills}  {what}, process {victim.pid}")
            if kind == DRIVER and stops:
                victim.send_signal(signal.SIGSTOP)
                time.sleep(STOPPED_S)
                victim.send_signal(signal.SIGCONT)
            elif kind == DRIVER:
                below = victim.children(recursive=True)
                victim.kill()
                driver.wait()
                _, left = psutil.wait_procs(below, timeout=30.0)
                for process in left:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                outcome.resumes += 1
                driver, started = _start(["resume", str(run_dir)], log), time.time()
            else:
                with suppress(psutil.NoSuchProcess):
                    victim.send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
    finally:
        if driver.poll() is None:
            for process in [*psutil.Process(driver.pid).children(recursive=True), psutil.Process(driver.pid)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            driver.wait()


def broken_promises(run_dir: Path, config: RunConfig) -> list[str]:
    """One sentence for each promise that a completed run has broken."""
    problems: list[str] = []
    summary = json.loads((run_dir / SUMMARY_FILE).read_text())
    ledger, expected = summary["ledger"], config.total_steps * config.dataflow.batch_groups
    if summary["status"] != "completed" or ledger["trained"] != expected:
        problems.append(f"the run is {summary['status']} with {ledger['trained']} of {expected} groups trained")
    ended = sum(ledger[end] for end in ("trained", "dropped", "filtered", "failed"))
    if ledger["admitted"] != ended:
        problems.append(f"the ledger does not balance: {ledger['admitted']} admitted, {ended} ended")
    if not any((run_dir / POLICY_FOLDER).glob("*.safetensors")):
        problems.append("there is no policy")
    trained = Counter(
        event.group_id
        for event in surviving(run_dir)
        if isinstance(event, LedgerEvent) and event.state is GroupState.TRAINED
    )
    twice = [group_id for group_id, count in trained.items() if count > 1]
    if twice or len(trained) != expected:
        problems.append(f"{len(trained)} of {expected} groups are trained in the ledger, {len(twice)} of them twice")
    steps = [record.step for record in read_metrics(run_dir) if "reward/mean" in record.metrics]
    if steps != list(range(1, config.total_steps + 1)):
        problems.append(f"the metrics have {len(steps)} steps, {config.total_steps} were trained")
    if summary["max_staleness_seen"] > config.dataflow.max_staleness:
        problems.append(f"staleness {summary['max_staleness_seen']} above {config.dataflow.max_staleness}")
    return problems


def _start(arguments: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL
    )


def _has_stepped(run_dir: Path, started: float) -> bool:
    """Whether the driver that was started then has completed a step, and there is a checkpoint to go back to."""
    if not CheckpointFolder(run_dir).versions():
        return False
    return any("reward/mean" in record.metrics and record.time_s > started for record in read_metrics(run_dir))


def _wait(driver: subprocess.Popen[bytes], is_so: Callable[[], bool], deadline: float) -> bool:
    """Wait until something is so, the deadline, or the end of the driver; returns whether it has ended."""
    while driver.poll() is None and not is_so() and time.monotonic() < deadline:
        time.sleep(0.2)
    return driver.poll() is not None


def _sleep(driver: subprocess.Popen[bytes], seconds: float) -> bool:
    """Sleep unless the driver ends; returns whether it has."""
    with suppress(subprocess.TimeoutExpired):
        driver.wait(seconds)
    return driver.poll() is not None


def _victim(driver: subprocess.Popen[bytes], kind: str, rng: random.Random) -> psutil.Process | None:
    """A process of this kind; None if there is none."""
    try:
        if kind == DRIVER:
            return psutil.Process(driver.pid)
        # Workers are below the driver, which has started Ray, or below the raylets that this process has started.
        found = [process for process in psutil.Process().children(recursive=True) if KINDS[kind](process)]
    except psutil.Error:
        return None
    return rng.choice(found) if found else None


@contextmanager
def _nodes(num_nodes: int) -> Iterator[Cluster | None]:
    """Several raylets on this machine; None for one, which the run starts itself."""
    if num_nodes == 1:
        yield None
        return
    os.environ.update(RAY_ENVIRONMENT)
    node = {"num_cpus": NODE_CPUS, "object_store_memory": NODE_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(**node)
        yield cluster
    finally:
        cluster.shutdown()


def _runs_user_code(process: psutil.Process) -> bool:
    """Whether it is a process of envs/workers/supervisor.py, or the one that this watches."""
    return "penstock.envs.workers.supervisor" in _title(process)


def _is_below_rewards(process: psutil.Process) -> bool:
    return any(_title(parent).startswith("ray::RewardActor") for parent in process.parents())


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""


def main() -> int:
    """Parse the command line and run it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="As of penstock train.")
    parser.add_argument("--kills", type=int, default=5, help="Number of processes to kill.")
    parser.add_argument("--seed", type=int, default=0, help="Decides which kinds of process are killed, and when.")
    parser.add_argument("--nodes", type=int, default=1, help="Ray nodes here; all but the first are killed, too.")
    parser.add_argument("--longest-pause-s", type=float, default=12.0, help="Between two kills.")
    arguments = parser.parse_intermixed_args()
    try:
        with unwinding():
            return run_chaos(
                arguments.overrides,
                arguments.kills,
                arguments.seed,
                arguments.nodes,
                arguments.longest_pause_s,
                plain_console(),
            )
    except PenstockError as error:
        print_error(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
