"""The table of docs/concepts/parallelism.md: what combines with what, from the contract cases of the trainer.

python -m tools.parallelism_table
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.trainer.config import TrainerConfig
from penstock.trainer.validation import trainer_violations
from penstock.weights.model_config import ModelConfig
from tests.contract.trainer_backend_cases import CASES, LONG_CASES, LORA_OF_ATTENTION, MIXTURE, Case

MODEL = ModelConfig(max_context_tokens=32, shape=MIXTURE, attention="varlen")
SHARDINGS: dict[str, dict[str, Any]] = {
    **{f"ZeRO-{stage}": {"zero_stage": stage} for stage in range(4)},
    "FSDP2": {"backend": "fsdp2"},
}


class Feature(NamedTuple):
    """What a trainer may have beside a sharding: its settings, and whether a case has it."""

    settings: dict[str, Any]
    is_in: Callable[[Case], bool]


FEATURES = {
    "tensor parallel": Feature({"tensor_parallel_size": 2}, lambda case: case.tensor_parallel > 1),
    "sequences by Ulysses": Feature(
        {"sequence_parallel_size": 2, "sequence_parallel": "ulysses"},
        lambda case: case.sequence_parallel > 1 and not case.is_context,
    ),
    "sequences by context": Feature(
        {"sequence_parallel_size": 2, "sequence_parallel": "context"}, lambda case: case.is_context
    ),
    "copies of shards": Feature({"fsdp_copies": 2}, lambda case: case.fsdp_copies > 1),
    "mixture of experts": Feature({}, lambda case: case.has_experts),
    "experts on their ranks": Feature({"expert_parallel": True}, lambda case: case.is_expert_parallel),
    "bfloat16": Feature({}, lambda case: case.dtype == "bfloat16"),
    "adapters": Feature({"lora": LORA_OF_ATTENTION}, lambda case: case.has_adapters),
    "critic": Feature({}, lambda case: "critic" in case.updates),
    "several updates a batch": Feature({}, lambda case: "several" in case.updates),
    "streamed batches": Feature({}, lambda case: case.streamed),
    "gradient checkpointing": Feature({"gradient_checkpointing": True}, lambda case: case.gradient_checkpointing),
    "compiled layers": Feature({"compile": True}, lambda case: case.is_compiled),
    "optimizer off-loaded": Feature(
        {"offload_optimizer": True}, lambda case: case.offload_optimizer and not case.offload_parameters
    ),
    "weights and optimizer off-loaded": Feature(
        {"offload_optimizer": True, "offload_parameters": True},
        lambda case: case.offload_parameters and case.offload_optimizer,
    ),
    "moments in bfloat16": Feature(
        {"optimizer": {"lr": 1.0, "moments_dtype": "bfloat16"}}, lambda case: case.optimizer == "bfloat16 moments"
    ),
    "Muon": Feature({"optimizer": {"lr": 1.0, "muon": {}}}, lambda case: case.optimizer == "muon"),
}


def cell(sharding: dict[str, Any], feature: Feature) -> str:
    """The number of cases; without one, whether the combination is refused."""
    is_here = [
        case
        for case in CASES + LONG_CASES
        if case.backend == sharding.get("backend", "deepspeed") and case.zero_stage == sharding.get("zero_stage", 0)
    ]
    if num_cases := sum(map(feature.is_in, is_here)):
        return str(num_cases)
    settings = {"num_ranks": 4, "max_tokens_per_micro_batch": 32, "optimizer": {"lr": 1.0}}
    trainer = TrainerConfig(**settings | sharding | feature.settings)
    return "refused" if trainer_violations(MODEL, trainer) else "not run"


def table() -> str:
    """The table, in Markdown."""
    rows = [[name, *(cell(sharding, feature) for sharding in SHARDINGS.values())] for name, feature in FEATURES.items()]
    lines = [["", *SHARDINGS], ["---"] * (1 + len(SHARDINGS)), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(table())
