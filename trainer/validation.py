"""Trainer settings that each are legal and together are not. Pure and light: it runs before any process starts."""

from __future__ import annotations

from penstock.trainer.config import TrainerConfig
from penstock.weights.model_config import ModelConfig


def trainer_violations(model: ModelConfig, trainer: TrainerConfig) -> list[str]:
    """One sentence per combination that cannot run, each beginning with its key path; empty if all is well."""
    violations = []
    if trainer.max_tokens_per_micro_batch < model.max_context_tokens:
        violations.append(
            f"trainer.max_tokens_per_micro_batch={trainer.max_tokens_per_micro_batch} is below "
            f"model.max_context_tokens={model.max_context_tokens}: a sequence is never split, so the longest would not "
            f"fit. Use at least {model.max_context_tokens}."
        )
    if trainer.offload_optimizer and trainer.zero_stage == 0:
        violations.append(
            "trainer.offload_optimizer=true has no effect with trainer.zero_stage=0. Use trainer.zero_stage=1, 2 or 3."
        )
    if trainer.backend == "torch":
        violations += _torch_violations(model, trainer)
    return violations


def _torch_violations(model: ModelConfig, trainer: TrainerConfig) -> list[str]:
    """The torch backend is one float32 process without ZeRO."""
    unsupported = {
        f"trainer.num_ranks={trainer.num_ranks}": trainer.num_ranks != 1,
        f"trainer.zero_stage={trainer.zero_stage}": trainer.zero_stage != 0,
        f"model.dtype={model.dtype}": model.dtype != "float32",
    }
    return [
        f"{setting} with trainer.backend=torch, which is one float32 process without ZeRO. "
        "Use trainer.backend=deepspeed."
        for setting, is_set in unsupported.items()
        if is_set
    ]
