"""One rank of sequence parallelism that scores a packed row with a model of every family.

    sys.argv[1:]: RANK PORT FOLDER WORLD ulysses|context

Rank 0 writes logprobs and gradients by family: those of its stretches and of all others.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import torch

from penstock.trainer.backends.deepspeed import register_ulysses
from penstock.trainer.batches.collate import MicroBatch, collate, sequence_share
from penstock.trainer.batches.packing import MicroBatchPlan, TrainingSequence
from penstock.trainer.config import OptimizerConfig, TrainerConfig
from penstock.trainer.models.policy_model import PolicyModel, load_policy
from penstock.weights.model_config import Attention, ModelConfig
from tests.contract.test_model_families import CONTEXT, PLAIN, VOCAB_SIZE, model_config

FAMILIES = (*PLAIN, "gpt_oss")
"""Those of plain attention, and one with sinks."""
LENGTHS = (40, 90, 25, 12, 60)
SHARING = (0, 1)
"""They begin with the same 30 tokens, which the row has once."""
TEMPERATURE = 0.7


def packed_row(attention: Attention) -> MicroBatch:
    """Five sequences in one row, two of which share a prompt, with a weight for every loss token as its advantage."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(2, VOCAB_SIZE, 30)
    sequences = []
    for index, n in enumerate(LENGTHS):
        token_ids = rng.integers(2, VOCAB_SIZE, n + 1)
        if index in SHARING:
            token_ids[:30] = prompt
        targets = np.arange(30 if index in SHARING else 3, n + 1)
        behavior, advantages = np.zeros(len(targets), np.float32), rng.normal(size=len(targets))
        sequences.append(TrainingSequence(token_ids, targets, behavior, advantages=advantages))
    shared = tuple(30 if index == SHARING[1] else 0 for index in range(len(LENGTHS)))
    plan = MicroBatchPlan((tuple(range(len(LENGTHS))),), sum(LENGTHS) - sum(shared), (shared,))
    return collate(plan, sequences, device=torch.device("cpu"), needs_mask=attention == "sdpa")


def load(folder: Path, attention: Attention) -> PolicyModel:
    return load_policy(str(folder), with_attention(folder, attention), gradient_checkpointing=False)


def with_attention(folder: Path, attention: Attention) -> ModelConfig:
    return model_config(folder).model_copy(update={"attention": attention})


def scores_and_gradient(policy: PolicyModel, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`[K]` logprobs of the loss tokens and the gradient of their weighted sum."""
    logprobs, _ = batch.inputs.call(policy, TEMPERATURE)
    (logprobs * batch.advantages).sum().backward()
    gradients = {name: one.grad for name, one in policy.named_parameters() if one.grad is not None}
    return logprobs.detach(), gradients


def main() -> None:
    rank, port, folder, world = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    way = sys.argv[5]
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    torch.set_num_threads(1)
    trainer = TrainerConfig(
        num_ranks=world,
        sequence_parallel_size=world,
        max_tokens_per_micro_batch=CONTEXT,
        optimizer=OptimizerConfig(lr=1e-3),
    )
    models = {
        family: with_attention(folder / family, "varlen") for family in FAMILIES
    }  # asked before varlen is replaced
    results = {}
    for family, model in models.items():
        policy = load_policy(str(folder / family), model, gradient_checkpointing=False)
        if way == "ulysses":
            register_ulysses(policy, model, trainer)
        group = torch.distributed.group.WORLD if way == "context" else None
        share = sequence_share(packed_row("varlen"), rank, world, group)
        logprobs, gradients = scores_and_gradient(policy, share)
        found = torch.zeros(len(LENGTHS), max(LENGTHS))
        found[share.sequence_index, share.token_index] = logprobs[: share.num_tokens]
        for one in (found, *gradients.values()):
            torch.distributed.all_reduce(one)
        results[family] = found, gradients
    if rank == 0:
        (folder / f"{way}{world}").write_bytes(pickle.dumps(results))
    torch.distributed.barrier()  # a thread of gloo that still runs at the exit aborts the process
    torch.distributed.destroy_process_group()
