"""How well sessions of slow environments overlap, and the memory of idle ones. Real processes, on this machine.

    python benchmarks/environments.py [--sessions 64] [--rounds 5] [--window-s 8] [--idle 1000]    (4 min)

Utilisation: `--sessions` sessions play episode after episode of an environment whose step takes a lognormal time (mean
0.5 s, sigma 1.25, at most 15 s), through EpisodePlayer and the processes of EpisodeHost; the policy is a script that
costs next to nothing. Each session is busy while its own tool works. The drawn latencies are counted, not measured
ones, so that all other time of a turn counts as idle:

    utilisation = Σ drawn latencies within the window ÷ (sessions × window)

Independent sessions are compared with a batch barrier (all sessions step, then wait for the slowest), alternating, with
the same latencies; in an environment whose step awaits, and in one whose step blocks.

Idle: `--idle` sessions are reset and wait for an action. PSS of the driver, the supervisor and the environment process,
and CPU time of all of them per second.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
from provenance import provenance

from penstock.dataflow.ids import TaskId, TrajectoryId
from penstock.dataflow.ports import TokenDelta
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.task import Task
from penstock.dataflow.versions import Span
from penstock.envs.config import EnvConfig, EpisodeConfig
from penstock.envs.environment import Action, Environment, Observation
from penstock.envs.tasks.generated_tasks import GeneratedTasks
from penstock.envs.workers.episode_host import EpisodeHost
from penstock.platform.metrics.memory_sampler import pss_bytes
from penstock.rollout.tokenization.tokenizers import TokenCodec, character_tokenizer
from penstock.rollout.trajectory.conversation import EpisodeBudget, PartialTurn
from penstock.rollout.trajectory.episodes import EpisodePlayer

SIGMA, MOST_MEANS = 1.25, 30.0
TURNS = 8
SETTLING_S = 1.0
MIB = float(1 << 20)

Sample = Callable[[PartialTurn], Awaitable[None]]


def latency_s(episode: int, turn: int, mean_s: float) -> float:
    """The same value in the environment and in the driver."""
    drawn = random.Random(f"{episode}/{turn}").lognormvariate(-(SIGMA**2) / 2, SIGMA)
    return mean_s * min(drawn, MOST_MEANS)


class Awaiting(Environment):
    async def step(self, action: Action) -> Observation:
        await asyncio.sleep(latency_s(self.task.fields["episode"], action.turn, self.task.fields["mean_s"]))
        return Observation("0")


class Blocking(Environment):
    def step(self, action: Action) -> Observation:
        time.sleep(latency_s(self.task.fields["episode"], action.turn, self.task.fields["mean_s"]))
        return Observation("0")


class Tasks(GeneratedTasks):
    """Where episodes come from, for the process that plays them."""

    kind: type[Environment] = Awaiting

    def draw(self, rng: random.Random) -> dict[str, object]:
        return {"prompt": str(rng.random())}

    def environment(self) -> Environment:
        return self.kind()


class BlockingTasks(Tasks):
    kind = Blocking


KINDS = {"awaits": "environments:Tasks", "blocks": "environments:BlockingTasks"}


class Sessions:
    """Sessions that play episode after episode against one host.

    Attributes:
        steps: `(start, latency)` of every step, seconds.
    """

    def __init__(self, host: EpisodeHost, mean_s: float, barrier: asyncio.Barrier | None) -> None:
        self.steps: list[tuple[float, float]] = []
        self._player = EpisodePlayer(host.open, TokenCodec(character_tokenizer()), EpisodeBudget(TURNS, 256))
        self._mean_s = mean_s
        self._barrier = barrier
        self._serial = itertools.count()

    async def play_on(self) -> None:
        while True:
            episode = next(self._serial)
            await self.play(episode, partial(self.sample, episode, itertools.count()))

    async def play(self, episode: int, sample: Sample) -> None:
        task = Task(TaskId(f"t/{episode}"), "1+1=", {"episode": episode, "mean_s": self._mean_s}, "")
        sampling = SamplingParams(4, temperature=1.0, stop_token_ids=(1,))
        await self._player.play(task, TrajectoryId(f"{episode}/0"), sampling, sample)

    async def sample(self, episode: int, turns: Iterator[int], turn: PartialTurn) -> None:
        turn.extend(TokenDelta((3, 1), (-0.5, -0.5), (Span(0, 2),), "stop"))
        if self._barrier is not None:
            await self._barrier.wait()
        self.steps.append((time.perf_counter(), latency_s(episode, next(turns), self._mean_s)))


async def measure(host: EpisodeHost, num: int, mean_s: float, window_s: float, *, barrier: bool) -> tuple[float, float]:
    """Returns: Utilisation, and turns per second, over one window."""
    sessions = Sessions(host, mean_s, asyncio.Barrier(num) if barrier else None)
    playing = [asyncio.create_task(sessions.play_on()) for _ in range(num)]
    await asyncio.sleep(SETTLING_S)
    begin = time.perf_counter()
    await asyncio.sleep(window_s)
    end = time.perf_counter()
    busy_s = sum(max(0.0, min(start + took, end) - max(start, begin)) for start, took in sessions.steps)
    num_steps = sum(start >= begin for start, _ in sessions.steps)
    for session in playing:
        session.cancel()
    ended = await asyncio.gather(*playing, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended
    return busy_s / (num * (end - begin)), num_steps / (end - begin)


async def warm_up(host: EpisodeHost) -> None:
    """Play one episode: the process has loaded the environment."""
    sessions = Sessions(host, 0.0, None)
    await sessions.play(0, partial(sessions.sample, 0, itertools.count()))


async def compare(kind: str, arguments: argparse.Namespace) -> None:
    own: list[tuple[float, float]] = []
    barrier: list[tuple[float, float]] = []
    host = make_host(kind, arguments.workers)
    run = partial(measure, host, arguments.sessions, arguments.mean_s)
    try:
        await warm_up(host)
        for _ in range(arguments.rounds):
            own.append(await run(arguments.window_s, barrier=False))
            barrier.append(await run(arguments.window_s, barrier=True))
    finally:
        await host.close()
    for what, figures in (("on their own", own), ("batch barrier", barrier)):
        print(line(f"{kind}, {what}, utilisation", [one for one, _ in figures], ""))
        print(line(f"{kind}, {what}, turns per s", [one for _, one in figures], "1/s"))
    print(line(f"{kind}, ratio of utilisations", [a / b for (a, _), (b, _) in zip(own, barrier, strict=True)], ""))


async def idle(kind: str, num: int, num_workers: int) -> None:
    """What `num` sessions hold that are reset and wait for an action."""
    host = make_host(kind, num_workers)
    sessions = Sessions(host, 0.0, None)
    everybody = asyncio.Barrier(num + 1)

    async def wait(_: PartialTurn) -> None:
        await everybody.wait()
        await asyncio.Event().wait()

    await warm_up(host)
    before = memory_mib()
    started = time.perf_counter()
    playing = [asyncio.create_task(sessions.play(episode, wait)) for episode in range(num)]
    await everybody.wait()
    opened_s = time.perf_counter() - started
    held, cpu = memory_mib(), cpu_s()
    await asyncio.sleep(3)
    cores = (cpu_s() - cpu) / 3
    threads = sum(process.num_threads() for process in tree()[1:])
    print(
        f"{f'{kind}, {num} idle sessions, PSS of all processes':<58} {sum(held):9.0f} MiB"
        f"  of driver and those below it: {rounded(before)} before, {rounded(held)} with them"
        f"; {threads} threads; opened in {opened_s:.1f} s; {cores:.3f} cores while idle"
    )
    for session in playing:
        session.cancel()
    await asyncio.gather(*playing, return_exceptions=True)
    await host.close()


def rounded(values: list[float]) -> str:
    return " + ".join(f"{value:.0f}" for value in values)


def make_host(kind: str, num_workers: int) -> EpisodeHost:
    return EpisodeHost(EnvConfig(factory=KINDS[kind], episode=EpisodeConfig(num_workers=num_workers)), 0)


def tree() -> list[psutil.Process]:
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def memory_mib() -> list[float]:
    """PSS of the driver and of each process below it."""
    return [pss_bytes(process) / MIB for process in tree()]


def cpu_s() -> float:
    return sum(sum(process.cpu_times()[:2]) for process in tree())


def line(what: str, values: list[float], unit: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{what:<58} {middle:9.3f} {unit:4} quartiles {low:.3f} .. {high:.3f}  n={len(values)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1, help="env.episode.num_workers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=8.0)
    parser.add_argument("--mean-s", type=float, default=0.5)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    arguments = parser.parse_args()
    sys.path.append(str(Path(__file__).parent))  # for the processes that import `environments:Tasks`
    print(*provenance(), f"load before: {os.getloadavg()[0]:.1f}", sep="\n")
    for kind in arguments.kinds:
        if arguments.rounds:
            asyncio.run(compare(kind, arguments))
        if arguments.idle:
            asyncio.run(idle(kind, arguments.idle, arguments.workers))
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
