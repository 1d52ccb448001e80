"""For how long a checkpoint of the trainer blocks training, beside `torch.save` of the same state to the same disk.

    python benchmarks/checkpoint_blocking.py [--rounds 6] [--folder DIR]     (6 minutes, 6 GiB of memory, 3 GiB of disk;
                                                                       writes benchmarks/results/checkpoint_blocking.md)

One rank on the CPU with plain torch and one thread: weights and AdamW's moments in float32, 12 bytes per parameter.
In turns, in one process:

- a step without a checkpoint;
- a snapshot and at once the next step, while a thread writes: blocked is the call itself and what the optimizer step
  waits for the copy (`checkpoint/copy_wait_s`). There is no rollout between them, and the batch is small, so a run
  leaves more time for the copy;
- a snapshot that is waited for at once: what blocks if the copy is made between two steps;
- `torch.save` and fsync of the same state: what blocks without any of this.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import torch
from provenance import provenance

from penstock.dataflow.ids import GroupId, TaskId, TrajectoryId
from penstock.dataflow.trajectory import GroupPayload, Trajectory
from penstock.dataflow.versions import Span
from penstock.rollout.tokenization.tokenizers import character_tokenizer
from penstock.trainer.build import build_trainer
from penstock.trainer.checkpoint import write_snapshot
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from penstock.trainer.models.tiny_policy import create_policy
from penstock.trainer.policy_trainer import PolicyTrainer
from penstock.trainer.spec import TrainerSpec
from penstock.weights.model_config import ModelConfig, ModelShape

RESULT = Path(__file__).resolve().parent / "results" / "checkpoint_blocking.md"
GIB = float(1 << 30)
SHAPE = ModelShape(
    vocab_size=512, hidden_size=768, intermediate_size=3072, num_layers=10, num_heads=12, num_kv_heads=12, head_dim=64
)
GROUP_SIZE, PROMPT_TOKENS, ANSWER_TOKENS = 4, 16, 48


def trainer_of(folder: Path) -> PolicyTrainer:
    model = ModelConfig(max_context_tokens=PROMPT_TOKENS + ANSWER_TOKENS, shape=SHAPE)
    create_policy(model, character_tokenizer(), str(folder), seed=0)
    spec = TrainerSpec(
        model_path=str(folder),
        model=model,
        trainer=TrainerConfig(backend="torch", max_tokens_per_micro_batch=4096, optimizer=OptimizerConfig(lr=1e-5)),
        algorithm=AlgorithmConfig(),
        device="cpu",
        threads=1,
        seed=0,
        temperature=1.0,
        max_new_tokens=ANSWER_TOKENS,
    )
    return build_trainer(spec)


def batch() -> list[GroupPayload]:
    """One group, half of which is right."""
    rng = np.random.default_rng(0)
    num_tokens = PROMPT_TOKENS + ANSWER_TOKENS
    members = tuple(
        Trajectory(
            trajectory_id=TrajectoryId(f"0/{index}"),
            task_id=TaskId("t"),
            token_ids=rng.integers(2, SHAPE.vocab_size, num_tokens).astype(np.int32),
            loss_mask=np.arange(num_tokens) >= PROMPT_TOKENS,
            behavior_logprobs=np.full(num_tokens, -6.0, np.float32),
            spans=(Span(0, ANSWER_TOKENS),),
            prompt="",
            response="",
            finish_reason="stop",
            reward=float(index % 2),
        )
        for index in range(GROUP_SIZE)
    )
    return [GroupPayload(GroupId(0), members)]


def measure(trainer: PolicyTrainer, folder: Path, num_rounds: int) -> tuple[dict[str, list[float]], int]:
    """Seconds by what was measured, one figure per round, and the bytes of a checkpoint."""
    payloads, seconds, num_bytes = batch(), defaultdict(list), 0
    trainer.step(payloads, 0)  # AdamW's moments exist from here on
    with ThreadPoolExecutor(1) as disk:
        for number in range(num_rounds + 1):
            found: dict[str, float] = {}
            started = time.perf_counter()
            trainer.step(payloads, 0)
            found["step"] = time.perf_counter() - started

            started = time.perf_counter()
            taken = trainer.snapshot(0)
            found["call"] = time.perf_counter() - started
            writing = disk.submit(write_snapshot, taken, folder, 0)
            step_started = time.perf_counter()
            found["wait of the optimizer step"] = trainer.step(payloads, 0).metrics["checkpoint/copy_wait_s"]
            found["step with a checkpoint"] = time.perf_counter() - step_started
            written = writing.result()
            found["written after"] = time.perf_counter() - started
            found["blocked"] = found["call"] + found["wait of the optimizer step"]
            num_bytes = written.num_bytes
            (folder / written.name).unlink()
            del taken

            started = time.perf_counter()
            between = trainer.snapshot(0)
            between.wait()
            found["copied between two steps"] = time.perf_counter() - started

            state = [(one.name, one.values) for one in trainer.backend.fragments()]
            started = time.perf_counter()
            with (folder / "state.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            found["torch.save"] = time.perf_counter() - started
            (folder / "state.pt").unlink()
            trainer.step(payloads, 0)  # releases `between`
            del between
            if number:  # the first round warms up
                for name, value in found.items():
                    seconds[name].append(value)
            print(f"round {number} of {num_rounds}: { ({name: round(value, 3) for name, value in found.items()}) }")
    return seconds, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: the temporary folder")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        trainer = trainer_of(Path(name) / "policy")
        seconds, num_bytes = measure(trainer, Path(name), arguments.rounds)
    saves = seconds["torch.save"]
    lines = [
        "# How long a checkpoint of the trainer blocks training",
        "",
        "|  | s: median (least … greatest) | of `torch.save`: median (greatest) |",
        "| --- | --- | --- |",
    ]
    rows = {
        "`torch.save` and fsync of the same state": "torch.save",
        "copied between two steps: blocked": "copied between two steps",
        "**Penstock: blocked**": "blocked",
        "of it the call": "call",
        "of it the wait of the optimizer step": "wait of the optimizer step",
        "Penstock: on disk after": "written after",
        "a step without a checkpoint": "step",
        "a step beside which a checkpoint is copied and written": "step with a checkpoint",
    }
    for title, key in rows.items():
        values = seconds[key]
        shares = [value / save for value, save in zip(values, saves, strict=True)]
        lines.append(
            f"| {title} | {median(values):.3f} ({min(values):.3f} … {max(values):.3f}) | {median(shares):.1%} "
            f"({max(shares):.1%}) |"
        )
    notes = [
        f"{num_bytes / GIB:.2f} GiB of state, {arguments.rounds} rounds in turns in one process, after one that is "
        "left out; shares are of the same round",
        f"one thread; a step of {GROUP_SIZE} sequences of {PROMPT_TOKENS + ANSWER_TOKENS} tokens, no rollout before it",
        "copying and writing share the cores with the step, and with other programs of the machine, so the step beside "
        "them is longer; a rank on a GPU computes elsewhere",
        *provenance(),
        "by: python benchmarks/checkpoint_blocking.py",
    ]
    lines += ["", *(f"- {note}" for note in notes)]
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
