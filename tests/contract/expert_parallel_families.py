"""One rank that trains mixtures of every planned family for one step, with the experts where they are.

    sys.argv[1:]: RANK PORT FOLDER WORLD

Rank 0 writes by family what `train` returns, and the bytes of tokens that all ranks sent to experts.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.trainer.build import build_trainer
from penstock.trainer.config import TrainerConfig
from tests.contract.replica_families import EXAMPLES, OPTIMIZER, spec_of
from tests.contract.test_model_families import CONTEXT, model_config
from tests.contract.trainer_backend_cases import make_batch, weights_of

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss", "qwen3_5_moe_text", "qwen3_next")


class SentTokens(TorchDispatchMode):
    """Counts what all-to-all of tokens takes to other ranks.

    Attributes:
        num_bytes: So many.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if "all_to_all_single" in str(func):
            tokens, _, sizes = args[:3]
            self.num_bytes += (sum(sizes) - sizes[self._rank]) * tokens[:1].numel() * tokens.element_size()
        return func(*args, **(kwargs or {}))


def train(
    folder: Path, trainer: TrainerConfig, rank: int = 0, port: int = 0
) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]], int]:
    """Logprobs of the answers of `EXAMPLES`, each weight before and after one step on rank 0, and what was sent."""
    model = model_config(folder).model_copy(update={"dtype": "float32"})
    policy = build_trainer(spec_of(folder, model, trainer), rank, master_port=port)
    logprobs = torch.from_numpy(policy.token_logprobs(EXAMPLES))
    before, batch = weights_of(policy), [payload for seed in (1, 2) for payload in make_batch(seed, shape=model.shape)]
    with SentTokens(rank) as sent:
        policy.step(batch, 0)
    both = {name: (torch.from_numpy(before[name]), torch.from_numpy(one)) for name, one in weights_of(policy).items()}
    return logprobs, both, sent.num_bytes


def settings(world: int) -> TrainerConfig:
    """With the experts on so many ranks; of one rank, plain torch."""
    kind = {"backend": "torch"} if world == 1 else {"backend": "fsdp2", "expert_parallel": True}
    return TrainerConfig(num_ranks=world, max_tokens_per_micro_batch=CONTEXT, optimizer=OPTIMIZER, **kind)


def main() -> None:
    rank, port, folder, world = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    results = {}
    for family in FAMILIES:
        logprobs, weights, sent = train(folder / family, settings(world), rank, port)
        total = torch.tensor(sent)
        torch.distributed.all_reduce(total)
        results[family] = logprobs, weights, int(total)
    if rank == 0:
        (folder / f"experts{world}").write_bytes(pickle.dumps(results))
    torch.distributed.barrier()  # a thread of gloo that still runs at the exit aborts the process
    torch.distributed.destroy_process_group()
