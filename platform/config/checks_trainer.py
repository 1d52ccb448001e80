"""Cross-field checks of the trainer: what its backends can do, how a model is split over ranks, adapters."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.platform.config.findings import Finding, error, warning
from penstock.platform.config.schema import RunConfig
from penstock.trainer.config import TrainerConfig
from penstock.trainer.validation import combination_violations, parallel_violations


def check_trainer(config: RunConfig) -> Iterator[Finding]:
    """What the backends can do, and whether a trajectory fits a micro-batch."""
    trainer, context = config.trainer, config.model.max_context_tokens
    if trainer.backend == "torch" and (trainer.num_ranks > 1 or trainer.zero_stage > 0):
        yield error(
            f"trainer.backend=torch runs one rank that shards nothing, not num_ranks={trainer.num_ranks} with "
            f"zero_stage={trainer.zero_stage}. Use trainer.backend=deepspeed, or num_ranks=1 and zero_stage=0."
        )
    if trainer.offload_optimizer and (trainer.zero_stage == 0 or trainer.backend == "torch"):
        yield error(
            f"trainer.offload_optimizer=true needs DeepSpeed with zero_stage >= 1, not {trainer.backend} with "
            f"zero_stage={trainer.zero_stage}: only a sharded optimizer can leave the device. Use zero_stage=1.",
            "trainer.backend",
        )
    if trainer.max_group_tokens < context:
        sharing = trainer.sequence_parallel_size
        over = f" over sequence_parallel_size={sharing} ranks" if sharing > 1 else ""
        yield error(
            f"trainer.max_tokens_per_micro_batch={trainer.max_tokens_per_micro_batch} is below "
            f"model.max_context_tokens={context}{over}: a trajectory of full length could never be trained. "
            f"Use at least {-(-context // sharing)}.",
            "trainer.sequence_parallel_size",
        )
    if not all(0 <= beta < 1 for beta in trainer.optimizer.betas):
        yield error(f"trainer.optimizer.betas={list(trainer.optimizer.betas)} is out of range: each must be in [0, 1).")


def check_parallel(config: RunConfig) -> Iterator[Finding]:
    """Heads and ranks divide evenly; adapters; what needs a mask; what is compiled; what makes Ulysses slow."""
    trainer = config.trainer
    for violations in (parallel_violations, combination_violations):
        yield from (error(message, *keys) for message, keys in violations(config.model, trainer))
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


def split_models(trainer: TrainerConfig, setting: str, why: str, *keys: str) -> Iterator[Finding]:
    """Refuse tensor and sequence parallelism for something that needs whole sequences on one rank."""
    sizes = {
        "tensor_parallel_size": trainer.tensor_parallel_size,
        "sequence_parallel_size": trainer.sequence_parallel_size,
    }
    for key, size in sizes.items():
        if size > 1:
            yield error(
                f"trainer.{key}={size} with {setting}: {why}. Use 1, and ZeRO for models that are too large.", *keys
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
        "trainer.num_ranks",
        "trainer.tensor_parallel_size",
        "trainer.sequence_parallel_size",
    )
