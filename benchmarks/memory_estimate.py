"""The planner's memory estimate of a trainer rank beside the tensors of DeepSpeed, and activations of 0.5B and 7B.

    python benchmarks/memory_estimate.py            (minutes; writes benchmarks/results/memory_estimate.md)

Real DeepSpeed on the CPU trains a model of 3.3 M parameters as rank 0 of several; AdamW and the tiles of logits take
memory as on a GPU (tests/contract/memory_of_a_rank.py). Bytes are those of all tensors that are alive at once, per
parameter of the model. Activations are those of fake tensors, which have a shape and no memory.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from pathlib import Path

from provenance import provenance

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.contract.memory_of_a_rank import SHAPE, Case, Measured, activation_bytes  # noqa: E402
from tests.contract.test_memory_estimate import (  # noqa: E402
    CASES,
    MICRO_BATCHES,
    estimated_activation_bytes,
    estimated_bytes,
)
from tests.rank_processes import run_ranks  # noqa: E402

RESULT = Path(__file__).parent / "results" / "memory_estimate.md"
GIB = 1 << 30


def measured() -> list[Measured]:
    """Of every case, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        cases, answers = Path(folder) / "cases", Path(folder) / "answers"
        cases.write_bytes(pickle.dumps(CASES))
        run_ranks("tests.contract.memory_of_a_rank", [(cases, answers)], timeout_s=3600)
        found: list[Measured] = pickle.loads(answers.read_bytes())
        return found


def row(case: Case, found: Measured) -> str:
    number, planned = SHAPE.num_parameters, estimated_bytes(case)
    kind = [f"LoRA {case.lora}"] * bool(case.lora) + ["critic"] * case.has_critic
    kind += [case.optimizer] * (case.optimizer != "adamw")
    kind += ["checkpointing"] * case.gradient_checkpointing + ["offloaded"] * case.offload_optimizer
    kind += ["weights offloaded"] * case.offload_parameters
    cells = (
        case.trainer.sharding,
        case.dtype,
        f"{case.num_ranks}",
        f"{case.tokens}",
        "GPU" if case.on_gpu else "CPU",
        ", ".join(kind) or "–",
        f"{found.resting / number:.2f}",
        f"{found.backward / number:.2f}",
        f"{found.step / number:.2f}",
        f"{planned / number:.2f}",
        f"{planned / found.peak:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    columns = (
        "stage",
        "dtype",
        "ranks",
        "tokens",
        "as on",
        "with",
        "between steps",
        "backward",
        "step",
        "estimate",
        "÷ peak",
    )
    lines = ["# Memory of a trainer rank: estimate and tensors", "", "Bytes per parameter.", ""]
    lines += [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    lines += [row(case, found) for case, found in zip(CASES, measured(), strict=True)]
    lines += ["", "Activations of one micro-batch, GiB.", ""]
    lines += ["| model | tokens | checkpointing | fake tensors | estimate | ÷ |", "|" + " --- |" * 6]
    for name, tokens, checkpoints in MICRO_BATCHES:
        file = ROOT / "conf" / "model" / "public" / f"{name}.json"
        found = activation_bytes(file, tokens, gradient_checkpointing=checkpoints)
        planned = estimated_activation_bytes(name, tokens, gradient_checkpointing=checkpoints)
        cells = (name, f"{tokens}", "yes" if checkpoints else "no", f"{found / GIB:.2f}", f"{planned / GIB:.2f}")
        lines.append(f"| {' | '.join(cells)} | {planned / found:.2f} |")
    notes = [*provenance(), "n = 1: bytes of tensors are counted", "by: python benchmarks/memory_estimate.py"]
    lines += ["", *(f"- {note}" for note in notes)]
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
