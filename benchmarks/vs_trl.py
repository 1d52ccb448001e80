"""Step time of the demo compared with TRL's `GRPOTrainer`: same policy, prompts, batch, lengths and learning rate.

    python benchmarks/vs_trl.py [--rounds 2] [--steps 25] [--policy DIR]

TRL gets an environment of its own (.bench/trl-venv, made once, with Penstock's pins of torch and transformers). The two
run alternately, P T P T, each on all cores; a step trains 32 groups × 8 trajectories once, in float32, without KL term
or evaluation. Values that both share are read from `experiment=arithmetic`, so they cannot drift apart.

The machine must be quiet: what others took of it is measured during each run, printed, and above 5 % of the cores there
is no valid comparison. Threads that wait for each other at every operator (TRL) lose far more to company than processes
of one thread each (Penstock), so a busy machine flatters Penstock, by an order of magnitude.

Measured is wall time from the end of one optimizer step to the end of the next: Penstock's `throughput/step_s`, and a
callback in TRL. Dropped are the first `--warmup` steps of both, and Penstock's last max_staleness + 1: generation has
ended by then, which would flatter it. Penstock runs as the demo does, less its evaluations: asynchronous, vLLM's CPU
build and the trainer in processes of their own, with console and metrics.

TRL is given its best: the number of threads and the `per_device_train_batch_size` (the rest is gradient accumulation)
that are fastest in a sweep made first, no gradient checkpointing, bfloat16 off, one generation of all 256 trajectories
per step with a KV cache, sdpa attention, no second forward (generation and update are aligned), no logging, saving or
evaluation. Tried and not faster: continuous batching and a static cache. It generates with transformers: TRL 1.16
supports vLLM up to 0.31, not the 0.32 that the demo runs on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from alone import BENCH, ROOT, make_environment, run_alone
from provenance import provenance
from rich.console import Console
from vs_trl_report import Run, figures, report

from penstock import __version__
from penstock.envs.loading import load_task_source
from penstock.platform.checks.load import compose_config
from penstock.platform.config.schema import RunConfig

PENSTOCK = Path(sys.executable).with_name("penstock")
TRL = "trl==1.16.0"
SHARED_PINS = ("torch", "transformers", "accelerate", "datasets")
SWEEP_STEPS = 8
console = Console(highlight=False, soft_wrap=True)


def trl_python() -> Path:
    """The python of TRL's environment, which is made the first time."""
    lock = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    pins = {pin.partition("==")[0]: pin for pin in lock}
    return make_environment(BENCH / "trl-venv", [*(pins[name] for name in SHARED_PINS), TRL])


def trl_spec(config: RunConfig, policy: str, num_steps: int) -> dict[str, Any]:
    """What both sides share, with the training prompts in the task source's own order."""
    tasks = BENCH / "tasks.jsonl"
    stream = islice(load_task_source(config.env, config.seed).train(), num_steps * config.dataflow.batch_groups)
    tasks.write_text("".join(json.dumps({"prompt": task.prompt, **task.fields}) + "\n" for task in stream))
    return {
        "policy": policy,
        "tasks": str(tasks),
        "seed": config.seed,
        "reward": config.reward.fn,
        "steps": num_steps,
        "threads": len(os.sched_getaffinity(0)),
        **config.dataflow.model_dump(include={"batch_groups", "group_size"}),
        **config.rollout.sampling.model_dump(include={"max_new_tokens", "temperature"}),
        **config.algorithm.loss.model_dump(include={"clip_low", "clip_high"}),
        **config.trainer.optimizer.model_dump(include={"lr", "betas", "eps", "weight_decay", "gradient_clip_norm"}),
    }


def run_trl(name: str, python: Path, spec: dict[str, Any], timeout_s: float) -> Run:
    """One run of trl_grpo.py."""
    spec_path, out_path = BENCH / f"{name}.spec.json", BENCH / f"{name}.json"
    spec_path.write_text(json.dumps(spec))
    others = run_alone(name, [python, Path(__file__).with_name("trl_grpo.py"), spec_path, out_path], timeout_s)
    return Run(**json.loads(out_path.read_text()), others_percent=others)


def run_penstock(name: str, overrides: list[str], num_steps: int, timeout_s: float) -> Run:
    """One run of the demo without its evaluations."""
    run_dir = BENCH / name
    own = [f"name={name}", f"run_dir={run_dir}", "overwrite=true", f"total_steps={num_steps}"]
    no_evaluation = ["evaluation.every_steps=0", "evaluation.num_tasks=1"]
    others = run_alone(name, [PENSTOCK, "train", *overrides, *own, *no_evaluation], timeout_s)
    lines = (json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [metrics for metrics in lines if "throughput/step_s" in metrics]
    environment = json.loads((run_dir / "environment.json").read_text())
    return Run(
        step_s=[metrics["throughput/step_s"] for metrics in steps],
        num_tokens=[metrics["throughput/trained_tokens_per_s"] * metrics["throughput/step_s"] for metrics in steps],
        rewards=[metrics["reward/mean"] for metrics in steps],
        versions={"python": environment["python"], "penstock": __version__, **environment["packages"]},
        others_percent=others,
    )


def tuned(python: Path, spec: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """TRL's fastest setting by its quickest step: trajectories of one forward-backward, then one thread or all."""
    batch, threads = spec["batch_groups"] * spec["group_size"], spec["threads"]
    seconds: dict[tuple[int, int], float] = {}

    def measure(size: int, threads: int) -> None:
        setting = {"micro_batch": size, "threads": threads, "steps": SWEEP_STEPS}
        seconds[size, threads] = min(run_trl("trl-sweep", python, spec | setting, timeout_s).step_s[2:])
        console.print(f"TRL, per_device_train_batch_size={size}, threads={threads}: {seconds[size, threads]:.3f} s")

    for share in (1, 2, 4, 8):
        measure(batch // share, threads)
    measure(min(seconds, key=lambda setting: seconds[setting])[0], 1)
    size, threads = min(seconds, key=lambda setting: seconds[setting])
    sweep = [{"micro_batch": size, "threads": threads, "step_s": step_s} for (size, threads), step_s in seconds.items()]
    return {"micro_batch": size, "threads": threads, "sweep": sweep}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side, alternating")
    parser.add_argument("--steps", type=int, default=25, help="measured steps of each run; >= 2")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each run that are dropped first")
    parser.add_argument("--policy", help="Hugging Face folder; default: the demo's warm start, made if it is not there")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and sampling")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="longest time for one run")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that what runs is ended
    started, limit_s = time.monotonic(), arguments.timeout_s
    python = trl_python()
    overrides = ["experiment=arithmetic", f"seed={arguments.seed}"]
    overrides += [f"model.path={arguments.policy}"] if arguments.policy else []
    config = compose_config(overrides)
    policy = str(config.model.path)
    if not (ROOT / policy).is_dir():
        console.print(f"making {policy} by penstock sft")
        run_alone("sft", [PENSTOCK, "sft", "experiment=arithmetic_sft", overrides[1], "overwrite=true"], limit_s)

    num_steps = arguments.warmup + arguments.steps
    spec = trl_spec(config, policy, num_steps)
    spec |= tuned(python, spec, limit_s)
    num_drain_steps = config.dataflow.max_staleness + 1
    runs: dict[str, list[Run]] = {"penstock": [], "trl": []}
    for number in range(1, arguments.rounds + 1):
        runs["penstock"].append(run_penstock(f"penstock-{number}", overrides, num_steps + num_drain_steps, limit_s))
        runs["trl"].append(run_trl(f"trl-{number}", python, spec, limit_s))
        for side, of_side in runs.items():
            of_side[-1] = of_side[-1].kept(arguments.warmup, arguments.steps)
            console.print(f"round {number}, {side}: median {median(of_side[-1].step_s):.3f} s per step")
    samples = config.dataflow.batch_groups * config.dataflow.group_size
    ours, theirs = (figures(runs[side], samples) for side in ("penstock", "trl"))
    report(
        console,
        {
            "penstock": ours,
            "trl": theirs,
            "ratio_trl_over_penstock": theirs["median_s"] / ours["median_s"],
            "provenance": provenance(),
            "shared": spec | {"tasks": config.env.factory},
            "command": ["benchmarks/vs_trl.py", *sys.argv[1:]],
            "wall_s": round(time.monotonic() - started),
            "runs": {side: [asdict(run) for run in of_side] for side, of_side in runs.items()},
        },
    )


if __name__ == "__main__":
    main()
