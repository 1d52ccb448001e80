"""Checks of tensor and sequence parallelism in the trainer, and of what shares a row."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.platform.config.findings import Finding, error, warning
from penstock.platform.config.schema import RunConfig
from penstock.trainer.config import TrainerConfig
from penstock.trainer.validation import combination_violations, parallel_violations


def check_parallel(config: RunConfig) -> Iterator[Finding]:
    """Heads and ranks divide evenly; adapters; what needs a mask; what is compiled; what makes Ulysses slow."""
    trainer = config.trainer
    for violations in (parallel_violations, combination_violations):
        yield from (error(message, *keys) for message, keys in violations(config.model, trainer))
    if trainer.sequence_parallel_size > 1 and config.model.attention == "sdpa":
        yield warning(
            f"trainer.sequence_parallel_size={trainer.sequence_parallel_size} with model.attention=sdpa: Ulysses drops "
            "attention masks, so sequences cannot be packed and every micro-batch is one sequence, however short. "
            "Use model.attention=flash_attention_2 on GPUs.",
            "trainer.sequence_parallel_size",
            "model.attention",
        )


def split_models(trainer: TrainerConfig, setting: str, why: str, *keys: str) -> Iterator[Finding]:
    """Refuse tensor and sequence parallelism for something that needs whole sequences on one rank."""
    sizes = {
        "tensor_parallel_size": trainer.tensor_parallel_size,
        "sequence_parallel_size": trainer.sequence_parallel_size,
    }
    for key, size in sizes.items():
        if size > 1:
            yield error(
                f"trainer.{key}={size} with {setting}: {why}. Use 1, and ZeRO for models that are too large.",
                f"trainer.{key}",
                *keys,
            )


def unequal_work(key: str, value: int, trainer: TrainerConfig) -> Iterator[Finding]:
    """`value` groups or examples must share out evenly over the ranks that train different ones."""
    size = trainer.data_parallel_size
    if size == 0 or value % size == 0:
        return
    below = value - value % size
    choices = f"{below} or {below + size}" if below else str(size)
    ranks = f"trainer.num_ranks={trainer.num_ranks}"
    if size != trainer.num_ranks:
        ranks = f"the data-parallel size {size} of {ranks}"
    yield error(
        f"{key}={value} is not a multiple of {ranks}: ranks would get unequal work. Use {choices}.",
        key,
        "trainer.num_ranks",
        "trainer.tensor_parallel_size",
        "trainer.sequence_parallel_size",
    )
