"""How much a check in the sandbox and a call of a reward cost. Real processes, on this machine.

    python benchmarks/sandbox.py [--rounds 7] [--checks 300] [--trajectories 2000]

Checks per second: `--checks` programs `assert 1 + 1 == 2` through `LocalSandbox.run`, as many at a time as there are
cores, in rounds, each in a sandbox of its own, started ahead; then programs that import json, math, random and re.
Compared with a new `python -I` for each, without isolation and with the same concurrency: what one would do without a
sandbox.

Overhead per trajectory: a function that returns 1.0 and a trajectory of 512 tokens, one after the other (the latency of
one call) and all at once (the cost of one among many). Through `RewardRunner` it is the worker's path: pickle, socket,
child below its supervisor, socket, score. What Ray adds is measured by `reward_calls.py`.

Printed are the median over the rounds (or calls), the quartiles and their number.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from provenance import provenance

from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.task import Task
from penstock.dataflow.trajectory import Trajectory
from penstock.dataflow.versions import Span
from penstock.envs.config import RewardConfig
from penstock.envs.sandbox.config import SandboxConfig
from penstock.envs.sandbox.contract import Limits, Program
from penstock.envs.sandbox.local import LocalSandbox
from penstock.envs.workers.scoring import RewardRunner

CHECK = "assert 1 + 1 == 2"
IMPORTS = "import json, math, random, re"
NUM_TOKENS = 512


def one(_trajectory: Trajectory, **_: object) -> float:
    """The cheapest reward."""
    return 1.0


def pair() -> tuple[Task, Trajectory]:
    trajectory = Trajectory(
        trajectory_id=TrajectoryId("0/0"),
        task_id=TaskId("t/0"),
        token_ids=np.arange(NUM_TOKENS, dtype=np.int32),
        loss_mask=np.arange(NUM_TOKENS) > 0,
        behavior_logprobs=np.zeros(NUM_TOKENS, dtype=np.float32),
        spans=(Span(0, NUM_TOKENS - 1),),
        prompt="?" * 200,
        response="x" * 2000,
        finish_reason="stop",
    )
    return Task(TaskId("t/0"), "?", {"answer": "1"}), trajectory


async def checks_per_s(num_checks: int, run: Callable[[], Awaitable[None]]) -> float:
    started = time.perf_counter()
    await asyncio.gather(*(run() for _ in range(num_checks)))
    return num_checks / (time.perf_counter() - started)


async def measure_checks(rounds: int, num_checks: int, code: str, *, isolate: bool) -> tuple[str, list[float]]:
    sandbox = LocalSandbox(SandboxConfig(allow_unisolated=True), isolate=isolate)
    found = await sandbox.start()

    async def run() -> None:
        result = await sandbox.run(Program(code), Limits())
        assert result.is_ok, result

    await checks_per_s(20, run)
    rates = [await checks_per_s(num_checks, run) for _ in range(rounds)]
    await sandbox.close()
    return str(found), rates


async def measure_cold(rounds: int, num_checks: int) -> list[float]:
    slots = asyncio.Semaphore(os.cpu_count() or 1)

    async def run() -> None:
        async with slots:
            process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", CHECK)
            assert await process.wait() == 0

    return [await checks_per_s(num_checks, run) for _ in range(rounds)]


async def measure_rewards(rounds: int, num_trajectories: int) -> tuple[list[float], list[float]]:
    """Returns: Milliseconds per trajectory, one after the other (every call) and all at once (every round)."""
    runner = RewardRunner(RewardConfig(fn="sandbox:one", timeout_s=60))
    await runner.start()
    job = pair()
    await runner.score_many([job] * 100)
    single = []
    for _ in range(num_trajectories):
        started = time.perf_counter()
        await runner.score(*job)
        single.append(1e3 * (time.perf_counter() - started))
    many = []
    for _ in range(rounds):
        started = time.perf_counter()
        await runner.score_many([job] * num_trajectories)
        many.append(1e3 * (time.perf_counter() - started) / num_trajectories)
    await runner.shutdown()
    return single, many


def line(what: str, values: list[float], unit: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{what:<58} {middle:9.3f} {unit}  quartiles {low:.3f} .. {high:.3f}  n={len(values)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--checks", type=int, default=300)
    parser.add_argument("--trajectories", type=int, default=2000)
    arguments = parser.parse_args()
    sys.path.append(str(Path(__file__).parent))  # for the processes that import `sandbox:one`
    print(*provenance(), f"load before: {os.getloadavg()[0]:.1f}", sep="\n")
    for what, code, isolate in (("", CHECK, True), (" with imports", IMPORTS, True), ("", CHECK, False)):
        found, rates = asyncio.run(measure_checks(arguments.rounds, arguments.checks, code, isolate=isolate))
        print(line(f"checks{what}, isolation: {found}", rates, "1/s"))
    cold = asyncio.run(measure_cold(arguments.rounds, max(arguments.checks // 6, 1)))
    print(line("checks, a new python -I each, no isolation", cold, "1/s"))
    single, many = asyncio.run(measure_rewards(arguments.rounds, arguments.trajectories))
    print(line("reward, one after the other", single, "ms"))
    print(line("reward, all at once, per trajectory", many, "ms"))


if __name__ == "__main__":
    main()
