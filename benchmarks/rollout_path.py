"""Rollout through everything that a run ships compared with vLLM alone: tokens/s, and CPU seconds per 1,000 tokens.

    python benchmarks/rollout_path.py              (15 minutes on two cores; writes results/rollout_path.md and .json)
    python benchmarks/rollout_path.py --policies demo --in-flight 256 --rounds 5                          (3 minutes)
    python benchmarks/rollout_path.py --folder FOLDER --in-flight 256 --rounds 3     (another policy; on a GPU; prints)

Penstock: task queue, flow, ledger with its log, trajectories with logprobs and versions, pool and router, client,
engine actor, and the payloads of all groups in the object store. vLLM alone: one process calls `AsyncLLM.generate` for
all requests at once and takes their final outputs with logprobs, without detokenization; nothing is kept. Rewards are
not part of the comparison: here every answer gets a constant.

Both sides have the same arguments of vLLM (`engine_args`), the same prompts in groups of 8, the same sampling and stop
tokens, random weights (so answers have about `vocab_size` tokens, cut at the limit) and `max_num_seqs` running requests
out of many more. Both engines are up during all rounds, the rounds alternate, and the side that is not measured
waits for a message. The first round of each side is left out. CPU seconds are those of all processes of a side: for
Penstock also the driver and Ray's daemons. They hardly depend on what else the machine does; tokens/s do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from alone import machine_busy_s
from provenance import provenance
from vs_trl_report import RESULTS

from penstock.actors.cluster import ObjectStore
from penstock.dataflow.core import Dataflow, GroupRules
from penstock.dataflow.filters import FilterChain
from penstock.dataflow.ids import EngineId
from penstock.dataflow.ports import Score
from penstock.dataflow.sampling import SamplingParams
from penstock.dataflow.staleness import FlowLimits
from penstock.dataflow.task import Task
from penstock.dataflow.task_queue import TaskQueue, TaskStream
from penstock.dataflow.trajectory import Trajectory
from penstock.envs.loading import load_task_source
from penstock.platform.checks.load import compose_config
from penstock.platform.cluster import hardware
from penstock.platform.cluster.actor_factory import engine_spec
from penstock.platform.config.schema import RunConfig
from penstock.platform.metrics.flow_stats import FlowStats
from penstock.platform.run.flow import Flow, FlowPorts
from penstock.platform.run.ledger_log import LedgerLog
from penstock.platform.run.lifecycle import set_gc_thresholds
from penstock.platform.run.serving import Serving, rollout_sampling, serving
from penstock.rollout.engines.local_engine import EngineSpec
from penstock.rollout.engines.vllm.environment import vllm_environment
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from penstock.trainer.models.tiny_policy import create_policy

GROUP_SIZE = 8
TURNOVER = {"demo": 5, "50m": 3}
"""Requests of a round, in multiples of the requests in flight."""
FOLDER_TURNOVER = 4
SHAPES = {
    "demo": [],
    "50m": [
        f"model.shape.{key}={value}"
        for key, value in {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_layers": 13,
            "num_heads": 8,
            "num_kv_heads": 2,
            "head_dim": 64,
        }.items()
    ],
}
PENSTOCK, VLLM = "Penstock", "vLLM alone"


@dataclass(frozen=True, slots=True)
class Round:
    """What one side did in one round.

    Attributes:
        others_percent: Share of all cores that neither side had meanwhile.
    """

    num_tokens: int
    wall_s: float
    cpu_s: float
    others_percent: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s

    @property
    def cpu_s_per_1000(self) -> float:
        return 1000 * self.cpu_s / self.num_tokens


def folder_config(policy: Path, folder: Path, in_flight: int) -> RunConfig:
    """The demo's tasks with a policy in bfloat16 and answers of up to 256 tokens, on a GPU if there is one."""
    own = [f"model.path={policy}", f"run_dir={folder / 'run'}", "model.dtype=bfloat16", "model.max_context_tokens=512"]
    engine = [f"rollout.engine.max_num_seqs={in_flight}"]
    if hardware.num_nvidia_gpus():
        pools = ["+cluster.pools.gpu={device: gpu, count: 1, memory_gib: 70}", "cluster.rollout_pool=gpu"]
        engine += [*pools, "rollout.engine.kv_cache_gib=16", "rollout.sampling.max_new_tokens=256"]
    else:
        engine += ["rollout.engine.kv_cache_gib=0.5", "rollout.sampling.max_new_tokens=32"]
    return compose_config(["experiment=arithmetic", *own, *engine])


def run_config(policy: str, folder: Path, in_flight: int) -> RunConfig:
    """The demo with another policy and number of slots, and KV cache for all slots: a block has 128 tokens on CPUs."""
    own = [f"model.path={folder / policy}", f"run_dir={folder / 'run'}", "rollout.engine.kv_cache_gib=1"]
    slots = f"rollout.engine.max_num_seqs={in_flight}"
    return compose_config(["experiment=arithmetic", *own, slots, *SHAPES[policy]])


# --- vLLM alone, in a process of its own -----------------------------------------------------------------------------


def serve_alone(pipe: Connection, spec: EngineSpec) -> None:
    """Answer messages (prompts, sampling) by the number of sampled tokens, until None comes."""
    asyncio.run(_serve_alone(pipe, spec))


async def _serve_alone(pipe: Connection, spec: EngineSpec) -> None:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from penstock.rollout.config import VllmEngineConfig
    from penstock.rollout.engines.vllm.arguments import USAGE, engine_args
    from penstock.rollout.engines.vllm.engine import CacheUsage

    assert isinstance(spec.engine, VllmEngineConfig)
    # A scheduler of ours, if there is one, is part of our path.
    stock = replace(engine_args(spec, spec.engine), scheduler_cls=AsyncEngineArgs.scheduler_cls)
    llm = AsyncLLM.from_engine_args(stock, usage_context=USAGE, stat_loggers=[CacheUsage])

    async def answer(index: int, prompt: tuple[int, ...], sampling: VllmSamplingParams) -> int:
        async for output in llm.generate({"prompt_token_ids": list(prompt)}, sampling, str(index)):
            logprobs = output.outputs[0].logprobs
        assert logprobs is not None, "they were asked for"
        assert len(logprobs) == len(output.outputs[0].token_ids), "one for each token"
        return len(logprobs)

    pipe.send("ready")
    numbers = itertools.count()
    while (message := await asyncio.to_thread(pipe.recv)) is not None:
        prompts, params = message
        sampling = VllmSamplingParams(
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        pipe.send(sum(await asyncio.gather(*(answer(next(numbers), prompt, sampling) for prompt in prompts))))
    llm.shutdown()


class Alone:
    """Handle of the process with vLLM alone."""

    def __init__(self, spec: EngineSpec) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        # Not a daemon: those may not have children, and vLLM's engine core is one.
        self.process = context.Process(target=serve_alone, args=(theirs, spec))
        self.process.start()

    async def ready(self) -> None:
        await self._receive()

    async def answer(self, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> int:
        """Sample an answer to each prompt; returns the number of tokens."""
        self._pipe.send((prompts, sampling))
        return int(await self._receive())

    async def _receive(self) -> Any:
        while not self._pipe.poll():
            if not self.process.is_alive():
                raise SystemExit(f"vLLM alone ended with exit code {self.process.exitcode}")
            await asyncio.sleep(0.005)
        return self._pipe.recv()

    def close(self) -> None:
        """End the process and its engine core."""
        if not self.process.is_alive():
            return
        tree = psutil.Process(self.process.pid).children(recursive=True)
        self._pipe.send(None)
        self.process.join(15.0)
        self.process.kill()
        for child in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


# --- Penstock --------------------------------------------------------------------------------------------------------


class ConstantReward:
    """Rewards are not part of the comparison."""

    async def score(self, _task: Task, _trajectory: Trajectory) -> Score:
        return Score(1.0)


async def roll_out(policy: Serving, tasks: Sequence[Task], sampling: SamplingParams, folder: Path) -> int:
    """Sample a batch of groups, one for each task, as a run does; returns the number of sampled tokens."""
    limits = FlowLimits(batch_groups=len(tasks), max_staleness=0, total_steps=1)
    core = Dataflow(limits, GroupRules(GROUP_SIZE, GROUP_SIZE, max_retries=0))
    log = LedgerLog(folder, 0, 0)
    core.ledger.listeners = (log,)
    queue = TaskQueue([TaskStream("tasks", iter(tasks))], limits.window, GROUP_SIZE)
    ports = FlowPorts(policy.runner, ConstantReward(), ObjectStore(), sampling)
    stats = FlowStats()
    async with Flow(core, queue, FilterChain([]), ports, stats, batch_timeout_s=600.0) as flow:
        groups = await flow.next_batch()
        assert len(groups) == len(tasks), "every group became ready"
        flow.advance(1)
    log.close()
    return stats.tokens_generated


# --- Measuring -------------------------------------------------------------------------------------------------------


def cpu_s(root: psutil.Process, without: psutil.Process | None = None) -> float:
    """CPU seconds of a process and all that it has started, except the tree of `without`."""
    left_out = set() if without is None else {without, *without.children(recursive=True)}
    total = 0.0
    for process in {root, *root.children(recursive=True)} - left_out:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # one of Ray's helpers
            continue
        total += times.user + times.system
    return total


async def compare(config: RunConfig, num_requests: int, rounds: int, folder: Path) -> dict[str, list[Round]]:
    """`rounds` rounds of each side in turns, and one before that is left out."""
    found: dict[str, list[Round]] = {PENSTOCK: [], VLLM: []}
    source = load_task_source(config.env, config.seed).train()
    spec = engine_spec(config, 0)
    # Inherited by both sides.
    os.environ.update(vllm_environment(spec.device, config.cluster.threads_per_process, spec.model.dtype))
    alone = Alone(replace(spec, engine_id=EngineId("alone")))
    try:
        await alone.ready()
        async with serving(config, "sample") as policy:
            me, other = psutil.Process(), psutil.Process(alone.process.pid)
            sampling = rollout_sampling(config, policy.runner.codec)
            for number in range(-1, rounds):
                tasks = list(itertools.islice(source, num_requests // GROUP_SIZE))
                prompts = [policy.runner.codec.encode_prompt(task.prompt) for task in tasks for _ in range(GROUP_SIZE)]
                for side, measured in found.items():
                    before = cpu_s(me, other), cpu_s(other), machine_busy_s(), time.perf_counter()
                    if side == PENSTOCK:
                        num_tokens = await roll_out(policy, tasks, sampling, folder / f"ledger-{number}")
                    else:
                        num_tokens = await alone.answer(prompts, sampling)
                    wall_s = time.perf_counter() - before[3]
                    ours_s, theirs_s = cpu_s(me, other) - before[0], cpu_s(other) - before[1]
                    others_s = machine_busy_s() - before[2] - ours_s - theirs_s
                    percent = 100 * max(others_s, 0.0) / wall_s / (psutil.cpu_count() or 1)
                    one = Round(num_tokens, wall_s, ours_s if side == PENSTOCK else theirs_s, percent)
                    print(
                        f"{side}: {one.tokens_per_s:,.0f} tokens/s, {one.cpu_s_per_1000:.3f} CPU s per 1,000",
                        flush=True,
                    )
                    if number >= 0:
                        measured.append(one)
    finally:
        alone.close()
    return found


def report(results: dict[str, dict[str, list[Round]]], command: str) -> str:
    """The table, as Markdown."""
    header = ["policy, in flight", "side", "tokens/s", "least … greatest", "CPU s per 1,000 tokens", "least … greatest"]
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header))]
    busiest = 0.0
    for setting, sides in results.items():
        speeds = {side: [one.tokens_per_s for one in rounds] for side, rounds in sides.items()}
        costs = {side: [one.cpu_s_per_1000 for one in rounds] for side, rounds in sides.items()}
        for side, rounds in sides.items():
            speed, cost = speeds[side], costs[side]
            busiest = max(busiest, *(one.others_percent for one in rounds))
            figures = [f"{median(speed):,.0f}", f"{min(speed):,.0f} … {max(speed):,.0f}"]
            figures += [f"{median(cost):.3f}", f"{min(cost):.3f} … {max(cost):.3f}"]
            lines.append(f"| {setting} | {side} | {' | '.join(figures)} |")
        ratios = [ours / theirs for ours, theirs in zip(*speeds.values(), strict=True)]
        more = [ours / theirs for ours, theirs in zip(*costs.values(), strict=True)]
        figures = [f"**{median(ratios):.2f}**", f"{min(ratios):.2f} … {max(ratios):.2f}"]
        figures += [f"{median(more):.2f}", f"{min(more):.2f} … {max(more):.2f}"]
        lines.append(f"| {setting} | {PENSTOCK} ÷ {VLLM}, by round | {' | '.join(figures)} |")
    counts = {len(rounds) for sides in results.values() for rounds in sides.values()}
    notes = [
        f"n = {' or '.join(map(str, sorted(counts)))} rounds of each side, in turns; medians",
        f"other programs had up to {busiest:.0f} % of the cores in a round"
        + (": tokens/s are provisional, CPU seconds less so" if busiest > 5 else ""),
        *provenance(),
        f"by: {command}",
    ]
    return "\n".join(
        ["# Rollout through Penstock and through vLLM alone", "", *lines, "", *(f"- {one}" for one in notes)]
    )


def parser() -> argparse.ArgumentParser:
    parsed = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsed.add_argument("--policies", nargs="+", choices=SHAPES, default=list(SHAPES))
    parsed.add_argument("--in-flight", nargs="+", type=int, default=[64, 256])
    parsed.add_argument("--rounds", type=int, default=5, help="measured rounds of each side")
    parsed.add_argument("--folder", type=Path, help="of a policy to serve instead, on a GPU if there is one; no files")
    return parsed


def main() -> None:
    arguments = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that what runs is ended
    set_gc_thresholds()  # as every run does
    results: dict[str, dict[str, list[Round]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for in_flight in arguments.in_flight if arguments.folder else ():
            config = folder_config(arguments.folder, folder, in_flight)
            title = f"{config.model.shape.num_parameters / 1e6:.1f} M, {in_flight}"
            results[title] = asyncio.run(compare(config, FOLDER_TURNOVER * in_flight, arguments.rounds, folder))
        if arguments.folder:
            print(report(results, f"python benchmarks/rollout_path.py --folder {arguments.folder}"))
            for title, sides in results.items():
                found = {side: median(one.tokens_per_s for one in rounds) for side, rounds in sides.items()}
                figures = {f"tokens_per_s of {side}, {title} in flight": value for side, value in found.items()}
                print("figures", json.dumps(figures))
            return
        for policy, in_flight in itertools.product(arguments.policies, arguments.in_flight):
            config = run_config(policy, folder, in_flight)
            if not (folder / policy).exists():
                create_policy(config.model, character_tokenizer(), str(folder / policy), seed=0)
            num_requests = TURNOVER[policy] * in_flight
            title = f"{config.model.shape.num_parameters / 1e6:.1f} M, {in_flight}"
            print(title, flush=True)
            results[title] = asyncio.run(compare(config, num_requests, arguments.rounds, folder))
    options = f"--policies {' '.join(arguments.policies)} --in-flight {' '.join(map(str, arguments.in_flight))}"
    text = report(results, f"python benchmarks/rollout_path.py {options} --rounds {arguments.rounds}")
    print(text)
    rows = {
        setting: {
            side: [{name: getattr(one, name) for name in Round.__slots__} for one in rounds]
            for side, rounds in sides.items()
        }
        for setting, sides in results.items()
    }
    (RESULTS / "rollout_path.md").write_text(text + "\n")
    (RESULTS / "rollout_path.json").write_text(json.dumps({"rounds": rows, "from": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
