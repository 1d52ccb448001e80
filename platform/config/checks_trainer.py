"""Cross-field checks of the trainer: what its backends can do, how a model is split over ranks, adapters."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.platform.config.findings import Finding, error, warning
from penstock.platform.config.schema import RunConfig
from penstock.trainer.config import TrainerConfig
from penstock.trainer.validation import trainer_violations


def check_trainer(config: RunConfig) -> Iterator[Finding]:
    """What its backends, parallelism and adapters can do, as the trainer itself says; and what makes it slow."""
    trainer = config.trainer
    yield from map(error, trainer_violations(config.model, trainer))
    if not all(0 <= beta < 1 for beta in trainer.optimizer.betas):
        yield error(f"trainer.optimizer.betas={list(trainer.optimizer.betas)} is out of range: each must be in [0, 1).")
    if trainer.sequence_parallel_size > 1 and config.model.attention == "sdpa":
        yield warning(
            f"trainer.sequence_parallel_size={trainer.sequence_parallel_size} with model.attention=sdpa: Ulysses drops "
            "attention masks, so sequences cannot be packed and every micro-batch is one sequence, however short. "
            "Use model.attention=flash_attention_2 on GPUs."
        )


def check_no_lora(config: RunConfig) -> Iterator[Finding]:
    """A reward model is trained whole."""
    if config.trainer.lora is not None:
        yield error(
            "trainer.lora with `penstock rm`: a reward model begins with a new head, which must be trained whole. Use "
            "trainer.lora=null."
        )


def check_lora_reference(config: RunConfig) -> Iterator[Finding]:
    """The reference of adapters is the policy itself."""
    reference = config.reference
    is_own = config.trainer.lora is not None and reference.path is None and config.algorithm.needs_reference
    if is_own and (reference.pool is not None or reference.num_workers > 1):
        yield warning(
            f"reference.pool={reference.pool} and reference.num_workers={reference.num_workers} have no effect with "
            "trainer.lora and reference.path=null: the trainer itself is the reference, without its adapters.",
            "reference",
        )


def split_models(trainer: TrainerConfig, setting: str, why: str) -> Iterator[Finding]:
    """Refuse tensor and sequence parallelism for something that needs whole sequences on one rank."""
    for key in ("tensor_parallel_size", "sequence_parallel_size"):
        if (size := getattr(trainer, key)) > 1:
            yield error(f"trainer.{key}={size} with {setting}: {why}. Use 1, and ZeRO for models that are too large.")


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
        *("trainer.num_ranks", "trainer.tensor_parallel_size", "trainer.sequence_parallel_size"),
    )
