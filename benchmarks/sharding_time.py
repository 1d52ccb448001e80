"""What a training step takes with FSDP2, ZeRO-2 and ZeRO-3 on two ranks, side by side.

    python benchmarks/sharding_time.py [--steps 20]     (6 minutes; writes benchmarks/results/sharding_time.md)

Two processes of one thread each hold a trainer of every kind, and train the same batch with each of them in turn; the
order turns, too. A step is one forward and backward pass per micro-batch and AdamW. Seconds are those of rank 0, from
when both ranks are ready to when both are done. Policies are random, in float32: that of the demo, and one in which
products of matrices take most of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from provenance import provenance

import penstock  # noqa: F401 - before transformers, which else stumbles over a torchvision for CUDA
from penstock.dataflow.ids import GroupId, TaskId, TrajectoryId
from penstock.dataflow.trajectory import GroupPayload, Trajectory
from penstock.dataflow.versions import Span
from penstock.trainer.spec import TrainerSpec, free_port
from penstock.weights.model_config import ModelConfig, ModelShape

NUM_RANKS, NUM_WARMUP, LIMIT_S = 2, 3, 900.0
SHARDINGS: dict[str, dict[str, Any]] = {
    "FSDP2": {"backend": "fsdp2"},
    "ZeRO-2": {"zero_stage": 2},
    "ZeRO-3": {"zero_stage": 3},
}
"""ZeRO-3 last: while one of its models lives, transformers loads every model partitioned."""
VOCABULARY = 32
SIZES = {
    "demo": ({"hidden_size": 128, "num_layers": 4}, 16, 29),
    "larger": ({"hidden_size": 512, "num_layers": 8}, 1, 256),
}
"""Shape, groups of eight, and tokens of an answer with its prompt."""
RESULT = Path(__file__).parent / "results" / "sharding_time.md"


def model_of(size: str) -> ModelConfig:
    """A tied Qwen3 with the demo's vocabulary."""
    dimensions, _, num_tokens = SIZES[size]
    hidden = dimensions["hidden_size"]
    shape = ModelShape(
        vocab_size=VOCABULARY,
        intermediate_size=3 * hidden,
        num_heads=hidden // 32,
        num_kv_heads=hidden // 64,
        head_dim=32,
        tie_word_embeddings=True,
        **dimensions,
    )
    return ModelConfig(max_context_tokens=num_tokens, shape=shape, attention="varlen")


def batch_of(size: str) -> list[GroupPayload]:
    """Random answers to prompts of a quarter of the tokens, half of each group with a reward."""
    _, num_groups, num_tokens = SIZES[size]
    rng, num_prompt = np.random.default_rng(0), num_tokens // 4

    def answer(group: int, member: int) -> Trajectory:
        mask = np.arange(num_tokens) >= num_prompt
        return Trajectory(
            trajectory_id=TrajectoryId(f"{group}/{member}"),
            task_id=TaskId("t"),
            token_ids=rng.integers(2, VOCABULARY, num_tokens).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -3.4, 0.0).astype(np.float32),
            spans=(Span(0, num_tokens - num_prompt),),
            prompt="",
            response="",
            finish_reason="stop",
            reward=float(member % 2),
        )

    return [GroupPayload(GroupId(group), tuple(answer(group, one) for one in range(8))) for group in range(num_groups)]


def run_rank(rank: int, port: int, folder: Path, size: str, num_steps: int) -> None:
    """Train with every kind in turn; rank 0 writes the seconds of each step."""
    import torch

    from penstock.trainer.build import build_trainer
    from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig

    trainers = {}
    for name, sharding in SHARDINGS.items():
        trainer = TrainerConfig(
            num_ranks=NUM_RANKS, max_tokens_per_micro_batch=2048, optimizer=OptimizerConfig(lr=1e-4), **sharding
        )
        spec = TrainerSpec(
            model_path=str(folder / size),
            model=model_of(size),
            trainer=trainer,
            algorithm=AlgorithmConfig(),
            device="cpu",
            threads=1,
            seed=0,
            temperature=1.0,
            max_new_tokens=SIZES[size][2],
        )
        trainers[name] = build_trainer(spec, rank, master_port=port)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    names, batch = list(trainers), batch_of(size)
    for step in range(NUM_WARMUP + num_steps):
        for name in names[step % len(names) :] + names[: step % len(names)]:
            torch.distributed.barrier()
            start = time.perf_counter()
            trainers[name].step(batch, step)
            torch.distributed.barrier()
            if step >= NUM_WARMUP:
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        (folder / f"{size}.json").write_text(json.dumps(seconds))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure(size: str, num_steps: int) -> dict[str, list[float]]:
    """Seconds of each step by kind."""
    from penstock.rollout.tokenization.tokenizers import character_tokenizer
    from penstock.trainer.models.tiny_policy import create_policy

    with tempfile.TemporaryDirectory() as folder:
        create_policy(model_of(size), character_tokenizer(), str(Path(folder) / size), seed=0)
        command = [sys.executable, __file__, "--steps", str(num_steps), "--size", size, "--folder", folder]
        command += ["--port", str(free_port())]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(NUM_RANKS)]
        try:
            codes = [rank.wait(LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        measured: dict[str, list[float]] = json.loads((Path(folder) / f"{size}.json").read_text())
        return measured


def report(seconds: dict[str, dict[str, list[float]]]) -> str:
    """The page, with the ratio of FSDP2 to each other kind in each turn."""
    num_steps = len(seconds["demo"]["FSDP2"])
    lines = ["# Seconds of a training step with FSDP2 and with ZeRO", "", *(f"- {one}" for one in provenance())]
    lines += [f"- n = {num_steps} turns; median, and quartiles in brackets", ""]
    lines += ["| policy | FSDP2 | ZeRO-2 | ZeRO-3 | FSDP2 : ZeRO-2 | FSDP2 : ZeRO-3 |", "|---|---|---|---|---|---|"]
    for size, found in seconds.items():
        mine = found["FSDP2"]
        ratios = [[a / b for a, b in zip(mine, found[other], strict=True)] for other in ("ZeRO-2", "ZeRO-3")]
        cells = [spread(one) for one in (*found.values(), *ratios)]
        millions = model_of(size).shape.num_parameters / 1e6
        lines.append(f"| {size}, {millions:.1f} M parameters | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "```bash", "python benchmarks/sharding_time.py", "```", ""])


def spread(values: list[float]) -> str:
    low, high = np.quantile(values, (0.25, 0.75))
    return f"{median(values):.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.rank, arguments.port, arguments.folder, arguments.size, arguments.steps)
        return
    page = report({size: measure(size, arguments.steps) for size in SIZES})
    RESULT.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
