"""What the kernels cost and reach.

    python benchmarks/kernel_costs.py cpu     (10 min, 12 GiB of memory; writes results/kernels_cpu.md and .json)
    python benchmarks/kernel_costs.py gpu     (5 min, a GPU of 80 GB; writes results/kernels_gpu.md and .json)

`cpu`: logprobs from hidden states against log_softmax and gather. `gpu`: every kernel against plain torch,
torch.compile and, if it is installed (`pip install -e '.[cuda,bench]'`), liger-kernel, as a share of
the matrix-product rate and the copy bandwidth measured in the same run. Without a GPU it writes nothing.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from kernels_cpu import Work, cpu_table, run_cpu
from kernels_gpu import gpu_table, run_gpu
from provenance import provenance
from rich.console import Console
from rich.table import Table
from vs_trl_report import RESULTS

console = Console(highlight=False, soft_wrap=True)


def parser() -> argparse.ArgumentParser:
    parsed = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsed.add_argument("section", choices=["cpu", "gpu"])
    parsed.add_argument("--rounds", type=int, default=3, help="repetitions of the CPU section")
    parsed.add_argument("--tokens", type=int, default=Work.num_tokens, help="T of the CPU section")
    parsed.add_argument("--results", type=Path, default=RESULTS, help="folder of the tables (benchmarks/results)")
    return parsed


def main() -> None:
    arguments = parser().parse_args()
    if arguments.section == "cpu":
        results = run_cpu(Work(num_tokens=arguments.tokens), arguments.rounds, console.print)
        write(arguments.results / "kernels_cpu", results, cpu_table(results))
    elif not torch.cuda.is_available():
        console.print("not run: no GPU")
    else:
        results = run_gpu(console.print)
        write(arguments.results / "kernels_gpu", results, gpu_table(results), f"{torch.cuda.get_device_name()}; ")


Rows = tuple[list[str], list[list[str]], list[str]]
"""Header, rows and notes."""


def write(path: Path, results: dict[str, Any], table: Rows, device: str = "") -> None:
    """Print the table; write it and the raw figures to PATH.md and PATH.json."""
    header, rows, notes = table
    shown = Table(*header)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    notes = [
        *notes,
        *provenance(),
        f"{device}torch {version('torch')}, triton {version('triton')}",
    ]
    console.print("\n".join(notes))
    lines = [f"# python benchmarks/kernel_costs.py {path.name.removeprefix('kernels_')}", ""]
    lines += ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    lines += ["", *(f"- {note}" for note in notes)]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    path.with_suffix(".json").write_text(json.dumps({**results, "notes": notes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
