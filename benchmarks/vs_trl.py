"""Step time of the demo beside that of TRL's `GRPOTrainer`: same policy, prompts, batch, lengths and learning rate.

    python benchmarks/vs_trl.py [--rounds 2] [--steps 25] [--policy DIR]

TRL gets an environment of its own (.bench/trl-venv, made once, with Penstock's pins of torch and transformers). The
two run alternately, P T P T, alone on all cores; each step trains 32 groups × 8 trajectories once, in float32, without
KL term or evaluation. Values both share are read from `experiment=arithmetic`, so they cannot drift apart.

Measured is wall time from the end of one optimizer step to the end of the next: Penstock's `throughput/step_s` and a
callback in TRL. Dropped are the first `--warmup` steps of both, and Penstock's last max_staleness + 1: generation has
ended by then, which would flatter it. Penstock runs as the demo does, less its evaluations: asynchronous, vLLM's
CPU build and the trainer in processes of one thread each, with console and metrics.

TRL is given its best: all cores as threads, bfloat16 off (emulated on most CPUs), no gradient checkpointing, one
generation of all 256 trajectories per step with a KV cache and sdpa attention, no second forward (generation and update
are aligned), no logging, saving or evaluation, and the fastest `per_device_train_batch_size` of a sweep made first (the
rest is gradient accumulation). Tried and slower: continuous batching (several times), a static cache, eager attention.
It generates with transformers: TRL 1.16 supports vLLM up to 0.31, and starts it on GPUs.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import psutil
from rich.console import Console

from penstock import __version__
from penstock.envs.loading import load_task_source
from penstock.platform.config.schema import RunConfig

ROOT = Path(__file__).resolve().parent.parent
BENCH, RESULTS = ROOT / ".bench", ROOT / "benchmarks" / "results"
PENSTOCK = Path(sys.executable).with_name("penstock")
TRL = "trl==1.16.0"
SHARED_PINS = ("transformers", "accelerate", "datasets")
SWEEP_STEPS = 8
STOP_S = 20.0
QUIET_PERCENT = 10.0

console = Console(width=min(120, Console().width))


@dataclass(frozen=True, slots=True)
class Steps:
    """Measured steps of one side, in order.

    Attributes:
        step_s: Wall seconds of each.
        num_tokens: Response tokens trained by each.
        rewards: Mean reward of each.
    """

    step_s: list[float]
    num_tokens: list[float]
    rewards: list[float]

    def __add__(self, other: Steps) -> Steps:
        return Steps(self.step_s + other.step_s, self.num_tokens + other.num_tokens, self.rewards + other.rewards)

    def kept(self, warmup: int, count: int) -> Steps:
        """`count` steps after the first `warmup`."""
        cut = slice(warmup, warmup + count)
        if len(self.step_s) < cut.stop:
            raise SystemExit(
                f"only {len(self.step_s)} steps were recorded, {cut.stop} are needed: see {BENCH / 'logs'}"
            )
        return Steps(self.step_s[cut], self.num_tokens[cut], self.rewards[cut])

    def figures(self, samples_per_step: int) -> dict[str, float]:
        first, _, third = quantiles(self.step_s, n=4, method="inclusive")
        return {
            "n": len(self.step_s),
            "median_s": median(self.step_s),
            "first_quartile_s": first,
            "third_quartile_s": third,
            "samples_per_s": samples_per_step * len(self.step_s) / sum(self.step_s),
            "trained_tokens_per_s": sum(self.num_tokens) / sum(self.step_s),
            "mean_response_tokens": mean(self.num_tokens) / samples_per_step,
            "mean_reward": mean(self.rewards),
        }


def run_alone(name: str, command: list[str | Path], timeout_s: float) -> float:
    """Run to the end and leave no process behind. Output goes to .bench/logs. Returns how busy the cores were before, %.

    Raises:
        SystemExit: If it fails or takes longer than `timeout_s`, with the end of its output.
    """
    busy = psutil.cpu_percent(interval=2.0)
    log = BENCH / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            outcome = f"ended with code {process.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            outcome = f"took longer than --timeout-s={timeout_s:.0f}"
        finally:
            end(process)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise SystemExit(f"{name} {outcome}. The end of {log.relative_to(ROOT)}:\n{tail}")
    return busy


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process that still runs to end, then kill what is left of its tree (Ray's daemons have their own sessions)."""
    if process.poll() is not None:
        return
    tree = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in tree:
        if child.is_running():
            child.kill()
    psutil.wait_procs(tree, STOP_S)


def make_trl_environment(folder: Path) -> Path:
    """Install TRL into an environment of its own, torch first; does nothing if that is done. Returns its python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {pin.partition("==")[0]: pin for pin in project["dependencies"]}
    wanted = [pins["torch"], TRL, *(pins[name] for name in SHARED_PINS)]
    stamp, python = folder / ".packages", folder / "bin" / "python"
    if stamp.exists() and stamp.read_text().split() == wanted:
        return python
    console.print(f"installing {TRL} into {folder}: some minutes")
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [python, "-m", "pip", "-qq", "--disable-pip-version-check", "--no-input", "install"]
    pip += shlex.split(os.environ.get("PIP_ARGS", ""))
    for packages in (wanted[:1], wanted):
        subprocess.run([*pip, *packages], check=True)
    stamp.write_text("\n".join(wanted))
    return python


def trl_spec(config: RunConfig, policy: Path, num_steps: int) -> dict[str, Any]:
    """What both sides share, and the training prompts in the task source's order."""
    tasks = BENCH / "tasks.jsonl"
    stream = load_task_source(config.env, config.seed).train()
    rows = ({"prompt": task.prompt, **task.fields} for task in islice(stream, num_steps * config.dataflow.batch_groups))
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "policy": str(policy),
        "tasks": str(tasks),
        "seed": config.seed,
        "threads": os.cpu_count(),
        "batch_groups": config.dataflow.batch_groups,
        "group_size": config.dataflow.group_size,
        "max_new_tokens": config.rollout.sampling.max_new_tokens,
        "temperature": config.rollout.sampling.temperature,
        "clip_low": config.algorithm.clip_low,
        "clip_high": config.algorithm.clip_high,
        **config.trainer.optimizer.model_dump(include={"lr", "betas", "eps", "weight_decay", "gradient_clip_norm"}),
    }


def run_trl(name: str, python: Path, spec: dict[str, Any], timeout_s: float) -> tuple[Steps, dict[str, str], float]:
    """Steps of one run of TRL, its versions, and how busy the cores were before."""
    spec_path, out_path = BENCH / f"{name}.spec.json", BENCH / f"{name}.json"
    spec_path.write_text(json.dumps(spec))
    busy = run_alone(name, [python, Path(__file__).with_name("trl_grpo.py"), spec_path, out_path], timeout_s)
    out = json.loads(out_path.read_text())
    return Steps(out["step_s"], out["num_tokens"], out["rewards"]), out["versions"], busy


def run_penstock(
    name: str, overrides: list[str], num_steps: int, timeout_s: float
) -> tuple[Steps, dict[str, str], float]:
    """The same for one run of the demo."""
    run_dir = BENCH / name
    without_evaluation = ["evaluation.every_steps=0", "evaluation.num_tasks=1"]
    own = [f"name={name}", f"run_dir={run_dir}", "overwrite=true", f"total_steps={num_steps}"]
    busy = run_alone(name, [PENSTOCK, "train", *overrides, *own, *without_evaluation], timeout_s)
    lines = (json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [metrics for metrics in lines if "throughput/step_s" in metrics]
    environment = json.loads((run_dir / "environment.json").read_text())
    versions = {"python": environment["python"], "penstock": __version__} | environment["packages"]
    step_s = [metrics["throughput/step_s"] for metrics in steps]
    num_tokens = [metrics["throughput/trained_tokens_per_s"] * metrics["throughput/step_s"] for metrics in steps]
    return Steps(step_s, num_tokens, [metrics["reward/mean"] for metrics in steps]), versions, busy


def sweep(python: Path, spec: dict[str, Any], timeout_s: float) -> dict[int, float]:
    """Seconds of TRL's least disturbed step for each `per_device_train_batch_size`: whole groups that divide the batch."""
    batch = spec["batch_groups"] * spec["group_size"]
    seconds = {}
    for size in (batch, batch // 2, batch // 4, batch // 8):
        if size % spec["group_size"] == 0:
            steps, _, _ = run_trl("trl-sweep", python, spec | {"micro_batch": size, "steps": SWEEP_STEPS}, timeout_s)
            seconds[size] = min(steps.step_s[2:])
            console.print(f"sweep: TRL with per_device_train_batch_size {size}: {seconds[size]:.3f} s")
    return seconds


def warm_start(policy: Path, seed: int, timeout_s: float) -> None:
    """Make the demo's warm-started policy, as `make demo` does."""
    if not policy.is_dir():
        console.print(f"making {policy}: penstock sft")
        run_alone("sft", [PENSTOCK, "sft", "experiment=arithmetic_sft", f"seed={seed}", "overwrite=true"], timeout_s)


def tabulate(results: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Rows: what, Penstock, TRL, TRL / Penstock."""
    ours, theirs = results["figures"]["penstock"], results["figures"]["trl"]

    def row(label: str, key: str, digits: int) -> tuple[str, str, str, str]:
        return label, f"{ours[key]:,.{digits}f}", f"{theirs[key]:,.{digits}f}", f"{theirs[key] / ours[key]:.2f}"

    quartiles = (f"{side['first_quartile_s']:.3f} … {side['third_quartile_s']:.3f}" for side in (ours, theirs))
    rounds = (", ".join(f"{value:.3f}" for value in results["round_medians_s"][side]) for side in ("penstock", "trl"))
    return [
        row("step, median, s", "median_s", 3),
        ("step, inter-quartile range, s", *quartiles, ""),
        ("step, median of each round, s", *rounds, ""),
        ("steps measured", str(ours["n"]), str(theirs["n"]), ""),
        row("samples per s", "samples_per_s", 0),
        row("trained tokens per s", "trained_tokens_per_s", 0),
        row("response, mean tokens", "mean_response_tokens", 1),
        row("reward, mean over the steps", "mean_reward", 3),
    ]


def write_and_print(results: dict[str, Any]) -> None:
    """The table on the console and in vs_trl.md, everything in vs_trl.json."""
    header = ("", "Penstock", "TRL", "TRL / Penstock")
    rows, notes = tabulate(results), results["notes"]
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print("\n".join(notes), highlight=False)
    lines = ["| " + " | ".join(row) + " |" for row in (header, ("---",) * 4, *rows)]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "vs_trl.md").write_text(
        "\n".join(["# A step of the demo and of TRL's GRPOTrainer", "", *lines, "", *(f"- {note}" for note in notes)])
        + "\n"
    )
    (RESULTS / "vs_trl.json").write_text(json.dumps(results, indent=1) + "\n")
    console.print(
        f"written: {(RESULTS / 'vs_trl.md').relative_to(ROOT)}, {(RESULTS / 'vs_trl.json').relative_to(ROOT)}"
    )


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    BENCH.mkdir(exist_ok=True)
    overrides = ["experiment=arithmetic", f"seed={arguments.seed}"]
    policy = Path(arguments.policy or compose_config(overrides).model.path)
    ...
