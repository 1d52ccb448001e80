"""Memory, time and accuracy of logprobs from hidden states on a CPU; each run is a process of its own.

Peak memory is the kernel's own figure: the resident set's high-water mark is reset before the measured part
(`/proc/self/clear_refs`), and what was resident then is taken off (inputs, libraries).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.linear_logprob import linear_logprobs

GIB = float(1 << 30)
TIMEOUT_S = 1800.0
ERROR_TOKENS, CHUNK_TOKENS = 1024, 128
"""T at which errors are measured, and how many tokens of the float64 reference are computed at once."""


@dataclass(frozen=True)
class Work:
    """One forward and backward pass; float32, one thread."""

    num_tokens: int = 4096
    vocab_size: int = 151_936
    hidden_size: int = 896


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.linear(hidden, weight).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def tiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_logprobs(hidden, weight, targets).logprobs


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"naive": naive, "penstock": tiled}


def inputs(work: Work) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states of unit variance, a head as it is initialised, targets, and a gradient per token."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(work.num_tokens, work.hidden_size, generator=generator)
    weight = torch.randn(work.vocab_size, work.hidden_size, generator=generator).mul_(0.05)
    targets = torch.randint(0, work.vocab_size, (work.num_tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, torch.randn(work.num_tokens, generator=generator)


def status_bytes(field: str) -> int:
    """One memory field of this process, e.g. `VmHWM`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measure(name: str, work: Work) -> dict[str, float]:
    """In this process: seconds, processor seconds and peak extra bytes of one forward and backward pass."""
    torch.set_num_threads(1)
    small = inputs(Work(64, 512, 64))
    VARIANTS[name](*small[:3]).backward(small[3])
    hidden, weight, targets, upstream = inputs(work)
    Path("/proc/self/clear_refs").write_text("5")
    resident = status_bytes("VmRSS")
    started, started_cpu = time.perf_counter(), time.process_time()
    VARIANTS[name](hidden, weight, targets).backward(upstream)
    return {
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - started_cpu,
        "peak_bytes": float(status_bytes("VmHWM") - resident),
    }


def errors(name: str, work: Work) -> dict[str, float]:
    """Relative errors (Frobenius norms) of both gradients against float64, summed over chunks of tokens."""
    torch.set_num_threads(1)
    work = replace(work, num_tokens=min(work.num_tokens, ERROR_TOKENS))
    hidden, weight, targets, upstream = inputs(work)
    VARIANTS[name](hidden, weight, targets).backward(upstream)
    assert hidden.grad is not None
    assert weight.grad is not None
    exact_weight = weight.detach().double().requires_grad_()
    off, norm = 0.0, 0.0
    for first in range(0, work.num_tokens, CHUNK_TOKENS):
        chunk = slice(first, first + CHUNK_TOKENS)
        exact_hidden = hidden[chunk].detach().double().requires_grad_()
        naive(exact_hidden, exact_weight, targets[chunk]).backward(upstream[chunk].double())
        assert exact_hidden.grad is not None
        off += float((hidden.grad[chunk] - exact_hidden.grad).square().sum())
        norm += float(exact_hidden.grad.square().sum())
    assert exact_weight.grad is not None
    difference = (weight.grad - exact_weight.grad).norm() / exact_weight.grad.norm()
    return {"hidden": (off / norm) ** 0.5, "weight": float(difference)}


def in_process(task: str, name: str, work: Work) -> dict[str, float]:
    """Run `measure` or `errors` in a new process."""
    arguments = json.dumps({"task": task, "name": name, **asdict(work)})
    program = [sys.executable, __file__, arguments]
    output = subprocess.run(program, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    return dict(json.loads(output.splitlines()[-1]))


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise KeyError("MemAvailable")


def run_cpu(work: Work, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All rounds of all variants, in turns, then their errors.

    Raises:
        SystemExit: If the naive version would not fit into memory.
    """
    needed = 4 * 4 * work.num_tokens * work.vocab_size
    if available_bytes() < needed:
        raise SystemExit(
            f"The naive version takes about {needed / GIB:.0f} GiB, {available_bytes() / GIB:.0f} GiB are available: "
            "it would be killed. Free memory, or pass fewer --tokens."
        )
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for round_ in range(rounds):
        for name, results in runs.items():
            results.append(in_process("measure", name, work))
            say(f"round {round_ + 1} of {rounds}, {name}: {results[-1]}")
    found = {name: in_process("errors", name, work) for name in VARIANTS}
    return {"work": asdict(work), "rounds": rounds, "runs": runs, "errors": found}


def cpu_table(results: dict[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and notes."""
    runs = results["runs"]
    rows = []
    for name, unit, scale in (("cpu_s", "s", 1.0), ("wall_s", "s", 1.0), ("peak_bytes", "GiB", GIB)):
        label = {"cpu_s": "CPU time", "wall_s": "wall time", "peak_bytes": "peak extra memory"}[name]
        values = {variant: [run[name] / scale for run in some] for variant, some in runs.items()}
        ratios = [ours / theirs for ours, theirs in zip(values["penstock"], values["naive"], strict=True)]
        cells = [f"{median(some):.2f} ({min(some):.2f} … {max(some):.2f}) {unit}" for some in values.values()]
        rows.append([label, *cells, f"{median(ratios):.3f} ({min(ratios):.3f} … {max(ratios):.3f})"])
    for name in ("hidden", "weight"):
        cells = [results["errors"][variant][name] for variant in runs]
        rows.append([f"relative error of the gradient of {name}", *(f"{cell:.1e}" for cell in cells), ""])
    work = results["work"]
    notes = [
        f"T={work['num_tokens']}, V={work['vocab_size']}, H={work['hidden_size']}, float32, forward and backward, one "
        f"thread, {results['rounds']} rounds in turns, a process each: median (least … greatest)",
        "naive: linear, log_softmax, gather. Penstock computes the entropies too. Both hold the weight's gradient, "
        f"{4 * work['vocab_size'] * work['hidden_size'] / GIB:.2f} GiB of the peak.",
        "errors: Frobenius norm of the difference from float64 over that of float64, at "
        f"T={min(work['num_tokens'], ERROR_TOKENS)}",
    ]
    return ["", *runs, "penstock ÷ naive"], rows, notes


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    function = {"measure": measure, "errors": errors}[request.pop("task")]
    print(json.dumps(function(request.pop("name"), Work(**request))))
