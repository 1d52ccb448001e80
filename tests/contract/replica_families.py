"""One of two data-parallel ranks that train a model of every family for one step, packed and without a mask.

    sys.argv[1:]: RANK PORT FOLDER

Rank 0 writes what `train` returns, by ZeRO stage and family.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch

from penstock.trainer.build import build_trainer
from penstock.trainer.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from penstock.trainer.spec import TrainerSpec
from penstock.weights.model_config import Attention, ModelConfig
from tests.contract.sequence_parallel_families import with_attention
from tests.contract.test_model_families import CONTEXT, PLAIN
from tests.contract.trainer_backend_cases import make_batch, weights_of

OPTIMIZER = OptimizerConfig(lr=1.0, eps=1.0, gradient_clip_norm=1e9).model_copy(update={"lr": 1e3})
"""ε above the gradient makes the update nearly proportional to it. The rate, which no configuration may have, makes it
large next to the rounding of weights. Nothing is clipped, so that a gradient of another length is seen."""

STAGES = (2, 3)
"""ZeRO-3 last: while one of its models lives, transformers loads every model partitioned."""

EXAMPLES = [([2, 3], [4, 5, 1]), ([5], [1]), ([7, 8, 9], [3, 6] * 20), ([4] * 5, [10, 11, 12, 13])]


def spec_of(folder: Path, model: ModelConfig, trainer: TrainerConfig) -> TrainerSpec:
    return TrainerSpec(
        model_path=str(folder),
        model=model,
        trainer=trainer,
        algorithm=AlgorithmConfig(),
        device="cpu",
        threads=1,
        seed=0,
        temperature=0.7,
        max_new_tokens=CONTEXT,
    )


def train(
    folder: Path, attention: Attention, trainer: TrainerConfig, rank: int = 0, port: int = 0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logprobs of the answers of `EXAMPLES` and the change of each weight in one step, on rank 0."""
    policy = build_trainer(spec_of(folder, with_attention(folder, attention), trainer), rank, master_port=port)
    logprobs = torch.from_numpy(policy.token_logprobs(EXAMPLES))
    before = weights_of(policy)
    policy.step([*make_batch(1), *make_batch(2)], 0)
    return logprobs, {name: torch.from_numpy(after - before[name]) for name, after in weights_of(policy).items()}


def main() -> None:
    rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    results = {}
    for stage in STAGES:
        trainer = TrainerConfig(num_ranks=2, zero_stage=stage, max_tokens_per_micro_batch=CONTEXT, optimizer=OPTIMIZER)
        for family in PLAIN:
            results[stage, family] = train(folder / family, "varlen", trainer, rank, port)
    if rank == 0:
        (folder / "replicas").write_bytes(pickle.dumps(results))
    torch.distributed.barrier()  # a thread of gloo that still runs at the exit aborts the process
    torch.distributed.destroy_process_group()
