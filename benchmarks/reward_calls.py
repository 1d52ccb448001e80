"""What a score costs the driver: its CPU time and the latency, at several numbers of scores at a time.

    python benchmarks/reward_calls.py [--scores 2000] [--rounds 5] [--parallel 1,4,16]

A `RewardClient` with one worker of a local Ray, a reward that returns 1.0, and a trajectory of 512 tokens with a task
of 200 characters. CPU time is that of the driver's process with all its threads, Ray's included. Printed are the median
over the rounds and their range.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path

import ray
from provenance import provenance
from sandbox import pair

from penstock.actors.cluster import RAY_ENVIRONMENT, Resources, start_rewards
from penstock.actors.reward.client import RewardClient
from penstock.envs.config import RewardConfig
from penstock.envs.sandbox.config import SandboxConfig


async def measure(client: RewardClient, num_scores: int, num_parallel: int) -> tuple[float, float]:
    """Returns: CPU time of the driver per score, and the time per score of one of the parallel askers; milliseconds."""
    job = pair()

    async def score() -> None:
        for _ in range(num_scores // num_parallel):
            await client.score(*job)

    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.gather(*(score() for _ in range(num_parallel)))
    spent, took = time.process_time() - cpu, time.perf_counter() - wall
    return 1e3 * spent / num_scores, 1e3 * took * num_parallel / num_scores


async def measure_all(num_scores: int, num_rounds: int, parallel: list[int]) -> None:
    config = RewardConfig(fn="sandbox:one", timeout_s=60)
    client = start_rewards(config, SandboxConfig(), [Resources()])
    await client.start(60.0)
    await measure(client, 200, 1)
    print("| scores at a time | driver CPU per score, ms | latency of a score, ms | n |", "|---|---|---|---|", sep="\n")
    for num_parallel in parallel:
        rounds = [await measure(client, num_scores, num_parallel) for _ in range(num_rounds)]
        figures = [f"{statistics.median(of):.2f} ({min(of):.2f} to {max(of):.2f})" for of in zip(*rounds, strict=True)]
        print(f"| {num_parallel} | {figures[0]} | {figures[1]} | {num_rounds} x {num_scores} |", flush=True)
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parallel", default="1,4,16")
    arguments = parser.parse_args()
    sys.path.append(str(Path(__file__).parent))  # for the processes that import `sandbox:one`
    os.environ.update(RAY_ENVIRONMENT)
    print(*provenance(), f"load before: {os.getloadavg()[0]:.1f}", sep="\n")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    asyncio.run(measure_all(arguments.scores, arguments.rounds, [int(part) for part in arguments.parallel.split(",")]))
    ray.shutdown()


if __name__ == "__main__":
    main()
