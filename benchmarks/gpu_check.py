"""`make gpu-check`: what a first GPU can tell in 20 minutes, in order of information.

    python benchmarks/gpu_check.py              runs every step, writes gpu-check/report.md and report.json
    python benchmarks/gpu_check.py --dry-run    resolves every step without a GPU, and starts none

Each step is a process of its own with a time limit, and its output is gpu-check/STEP.log. A step that fails does not
stop the others. Exit code 1 if one has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from provenance import ROOT, provenance

Status = Literal["passed", "failed", "skipped"]
OUT = ROOT / "gpu-check"
BUDGET_S = 1200.0
END_S = 20.0
"""Time that a step has to end after SIGTERM, before SIGKILL."""
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", "-m", "gpu")
PENSTOCK = ("-m", "penstock.platform.cli.main")
ERROR_LINES, ERROR_WIDTH = 6, 240


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: Of the step and of its log.
        shows: What is known after it.
        words: Arguments of Python. `{out}` is the folder of the report.
        limit_s: Time limit, seconds.
        num_gpus: GPUs that it needs.
    """

    name: str
    shows: str
    words: tuple[str, ...]
    limit_s: float
    num_gpus: int = 1


STEPS = (
    Step("machine", "driver, devices, versions", ("benchmarks/gpu_probes.py", "machine", "{out}/model"), 30),
    Step(
        "kernels",
        "kernels and a reward model give what torch gives",
        (*PYTEST, "tests/gpu/test_kernels.py", "tests/gpu/test_reward_model.py"),
        100,
    ),
    Step("varlen", "varlen attention gives what sdpa gives", (*PYTEST, "tests/gpu/test_varlen_attention.py"), 40),
    Step("model", "a 0.5B model with random weights", ("benchmarks/gpu_probes.py", "model", "{out}/model"), 60),
    Step(
        "parity",
        "engine and trainer agree in bfloat16",
        ("benchmarks/gpu_probes.py", "parity", "{out}/model"),
        120,
    ),
    Step(
        "in_flight",
        "answers go on over new versions, which come through CUDA IPC",
        ("benchmarks/gpu_probes.py", "in_flight", "{out}/model"),
        100,
    ),
    Step(
        "colocated",
        "20 steps on one GPU, trainer and engine in turns",
        (
            *PENSTOCK,
            "train",
            "experiment=gsm8k_qwen_1gpu",
            "env=arithmetic",
            "reward=exact_match",
            "reward.fn=gpu_probes:share_of_even_tokens",
            "model.path={out}/model",
            "name=gpu-check",
            "run_dir={out}/run",
            "overwrite=true",
            "total_steps=20",
            "dataflow.batch_groups=8",
            "dataflow.group_size=8",
            "rollout.sampling.max_new_tokens=256",
            "evaluation.num_tasks=32",
            "weights.probe_every=5",
        ),
        240,
    ),
    Step(
        "sleep",
        "memory of an engine that sleeps and wakes",
        ("benchmarks/gpu_probes.py", "sleep", "{out}/model"),
        90,
    ),
    Step(
        "trainer",
        "tokens/s and MFU of one rank, sequences of 4,096 and 16,384 tokens",
        ("benchmarks/gpu_probes.py", "trainer", "{out}/model"),
        90,
    ),
    Step("ipc", "weights through CUDA IPC", (*PYTEST, "tests/gpu/test_device_memory.py"), 40),
    Step("nccl", "weights through NCCL", (*PYTEST, "tests/gpu/test_transfer_group.py"), 40, num_gpus=2),
    # Last, because it says how fast kernels are that were found to be right above.
    Step("speed", "kernels against torch and liger", ("benchmarks/kernel_costs.py", "gpu", "--results", "{out}"), 250),
)


@dataclass
class Outcome:
    """How a step ended.

    Attributes:
        reason: Why it failed or was skipped; the first lines of an error.
    """

    name: str
    shows: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="resolve every step, start none")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the report (gpu-check)")
    arguments = parser.parse_args()
    if arguments.dry_run:
        return print_plan(STEPS)
    outcomes = run_steps(STEPS, arguments.out.resolve(), num_gpus())
    write_report(outcomes, arguments.out)
    return int(any(outcome.status == "failed" for outcome in outcomes))


def num_gpus() -> int:
    from penstock.platform.cluster import hardware

    return hardware.num_nvidia_gpus() or 0


def run_steps(steps: Sequence[Step], out: Path, gpus: int) -> list[Outcome]:
    """Run every step that can run here."""
    out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for step in steps:
        outcome = run_step(step, out, gpus)
        outcomes.append(outcome)
        print(f"{outcome.status:<8}{outcome.name:<11}{outcome.seconds:6.1f} s  {first_line(outcome)}", flush=True)
    return outcomes


def first_line(outcome: Outcome) -> str:
    return outcome.reason.splitlines()[0] if outcome.reason else outcome.shows


def run_step(step: Step, out: Path, gpus: int) -> Outcome:
    """Run one step to its end or its time limit."""
    if reason := why_skipped(step, gpus):
        return Outcome(step.name, step.shows, "skipped", reason=reason)
    log = out / f"{step.name}.log"
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *resolved(step, out)],
            cwd=ROOT,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_session(process)
    seconds = time.monotonic() - began
    text = log.read_text(errors="replace")
    outcome = Outcome(step.name, step.shows, "passed", seconds, figures=figures_of(step, out, text))
    if code is None:
        outcome.status, outcome.reason = "failed", f"over its time limit of {step.limit_s:g} s\n{error_lines(text)}"
    elif code != 0:
        outcome.status, outcome.reason = "failed", error_lines(text) or f"exit code {code}"
    elif reason := skip_reason(text):
        outcome.status, outcome.reason = "skipped", reason
    return outcome


def resolved(step: Step, out: Path) -> list[str]:
    return [word.replace("{out}", str(out)) for word in step.words]


def environment() -> dict[str, str]:
    paths = [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return os.environ | offline | {"PYTHONPATH": os.pathsep.join(paths)}


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a step and what it has started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(END_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def why_skipped(step: Step, gpus: int) -> str:
    """Why a step cannot run here; empty if it can."""
    if gpus < step.num_gpus:
        return f"needs {step.num_gpus} GPU{'s' if step.num_gpus > 1 else ''}, there are {gpus}"
    missing = [word for word in step.words if word.startswith("tests/") and not (ROOT / word).exists()]
    return f"{missing[0]} is not in this version" if missing else ""


def skip_reason(text: str) -> str:
    """Why pytest skipped all tests; empty if one ran."""
    if re.search(r"\d+ passed", text) or not re.search(r"\d+ skipped", text):
        return ""
    return "; ".join(dict.fromkeys(re.findall(r"^SKIPPED \[\d+\] [^ ]+ (.*)$", text, re.MULTILINE)))


def error_lines(text: str) -> str:
    """The lines of a log that say what went wrong: pytest's, or the end of a traceback or of the log."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    found = [line[2:].strip() for line in lines if line.startswith("E  ")]
    if not found:
        last = [
            index for index, line in enumerate(lines) if re.match(r"(error:|\w+(\.\w+)*(Error|Exception|Exit)\b)", line)
        ]
        found = lines[last[-1] :] if last else lines[-ERROR_LINES:]
    return "\n".join(line[:ERROR_WIDTH] for line in found[:ERROR_LINES])


def figures_of(step: Step, out: Path, text: str) -> dict[str, Any]:
    """What a step has measured."""
    printed = [line.removeprefix("figures ") for line in text.splitlines() if line.startswith("figures {")]
    figures: dict[str, Any] = json.loads(printed[-1]) if printed else {}
    if counted := re.search(r"(\d+) passed", text):
        figures["tests_passed"] = int(counted[1])
    if step.name == "colocated":
        figures |= figures_of_run(out / "run" / "metrics.jsonl")
    if step.name == "speed" and (out / "kernels_gpu.json").exists():
        rows = json.loads((out / "kernels_gpu.json").read_text())["rows"]
        figures |= {
            f"{row['kernel']}, {row['name']}": f"{1e3 * median(row['seconds']):.3f} ms"
            if row["seconds"]
            else "no memory"
            for row in rows
        }
    return figures


RUN_METRICS = (
    "throughput/step_s",
    "throughput/generated_tokens_per_s",
    "weights/max_logprob_diff",
    "weights/stall_s",
    "mismatch/abs_logprob_mean",
    "loss/grad_norm",
    "memory/pss_gib",
)


def figures_of_run(path: Path) -> dict[str, Any]:
    """Steps of a run, the median of its metrics, and its rewards."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    figures: dict[str, Any] = {"steps": max((record["step"] for record in records), default=0)}
    for name in RUN_METRICS:
        values = [float(record["metrics"][name]) for record in records if name in record["metrics"]]
        if values:
            figures[name] = median(values)
    rewards = [float(record["metrics"]["reward/mean"]) for record in records if "reward/mean" in record["metrics"]]
    if rewards:
        figures["reward_first"], figures["reward_last"] = rewards[0], rewards[-1]
    return figures


def write_report(outcomes: Sequence[Outcome], out: Path) -> None:
    """Write report.json and report.md."""
    origin = [f"written: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC", *provenance()]
    report = {"origin": origin, "steps": [asdict(outcome) for outcome in outcomes]}
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    lines = ["# make gpu-check", "", *(f"- {line}" for line in origin), "", "| step | shows | result | seconds |"]
    lines += ["|---|---|---|---|"]
    lines += [f"| {one.name} | {one.shows} | {one.status} | {one.seconds:.0f} |" for one in outcomes]
    for one in outcomes:
        if one.reason or one.figures:
            lines += ["", f"## {one.name}: {one.status}", ""]
        if one.reason:
            lines += ["```text", one.reason, "```", ""]
        lines += [f"- {name}: {shown(value)}" for name, value in one.figures.items()]
    (out / "report.md").write_text("\n".join(lines) + "\n")
    counts = {status: sum(one.status == status for one in outcomes) for status in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {status}" for status, count in counts.items()) + f"; {out / 'report.md'}")


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_plan(steps: Sequence[Step]) -> int:
    """Print every step, and what would keep it from running on any machine; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        found = {step.name: list(problems(step, Path(folder))) for step in steps}
    total_s = 0.0
    for step in steps:
        total_s += step.limit_s
        print(f"{step.name:<11}{step.limit_s:4.0f} s  {step.shows}: python {' '.join(step.words)}")
        for problem in found[step.name]:
            print(f"{'':<19}{problem}")
        if reason := why_skipped(step, gpus=step.num_gpus):
            print(f"{'':<19}skipped: {reason}")
    print(f"{len(steps)} steps, at most {total_s / 60:.0f} minutes; dry run: nothing was started.")
    return int(any(found.values()) or total_s > BUDGET_S)


def problems(step: Step, out: Path) -> Iterator[str]:
    """What is wrong with a step's command: files, options and configuration keys that do not exist."""
    from penstock.dataflow.errors import ConfigError
    from penstock.platform.checks.load import compose_config

    words = resolved(step, out)
    if words[0] == "benchmarks/gpu_probes.py":
        from gpu_probes import parser

        yield from refused(parser(), words[1:])
    elif words[0] == "benchmarks/kernel_costs.py":
        from kernel_costs import parser as kernel_parser

        yield from refused(kernel_parser(), words[1:])
    elif step.words[: len(PYTEST)] == PYTEST:
        for word in step.words[len(PYTEST) :]:
            if (ROOT / word).exists() and "pytest.mark.gpu" not in (ROOT / word).read_text():
                yield f"{word} has no test that is marked `gpu`"
    elif step.words[: len(PENSTOCK)] == PENSTOCK and words[len(PENSTOCK)] == "train":
        from gpu_probes import write_model_files

        write_model_files(out / "model")
        try:
            config = compose_config(words[len(PENSTOCK) + 1 :])
        except ConfigError as error:
            yield from error.violations
            return
        module, _, function = (config.reward.fn or "").partition(":")
        if not callable(getattr(__import__(module), function, None)):
            yield f"reward.fn={config.reward.fn} is no function"
    else:
        yield f"{' '.join(words)} is no program that is known here"


def refused(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    parser.exit_on_error = False
    try:
        _, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        yield str(error)
        return
    if unknown:
        yield f"unknown arguments: {' '.join(unknown)}"


if __name__ == "__main__":
    sys.exit(main())
