"""Trainer settings that each are legal and together are not. Pure and light: it runs before any process starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from penstock.dataflow.errors import ConfigError
from penstock.trainer.config import TrainerConfig
from penstock.weights.model_config import ModelConfig


class Violation(NamedTuple):
    """A combination that cannot run: one sentence that begins with its key path, and the keys it comes from."""

    message: str
    keys: tuple[str, ...]


def trainer_violations(model: ModelConfig, trainer: TrainerConfig) -> list[str]:
    """One sentence per combination that cannot run, each beginning with its key path; empty if all is well."""
    violations = []
    if trainer.max_group_tokens < model.max_context_tokens:
        violations.append(
            f"trainer.max_tokens_per_micro_batch={trainer.max_tokens_per_micro_batch} is below "
            f"model.max_context_tokens={model.max_context_tokens} over {trainer.sequence_parallel_size} rank(s): a "
            "sequence is never split over micro-batches, so the longest would not fit. "
            f"Use at least {-(-model.max_context_tokens // trainer.sequence_parallel_size)}."
        )
    if trainer.offload_optimizer and trainer.zero_stage == 0:
        violations.append(
            "trainer.offload_optimizer=true has no effect with trainer.zero_stage=0. Use trainer.zero_stage=1, 2 or 3."
        )
    if trainer.backend == "torch":
        unsupported = {
            f"trainer.num_ranks={trainer.num_ranks}": trainer.num_ranks != 1,
            f"trainer.zero_stage={trainer.zero_stage}": trainer.zero_stage != 0,
            f"model.dtype={model.dtype}": model.dtype != "float32",
        }
        violations += [
            f"{setting} with trainer.backend=torch, which is one float32 process without ZeRO. "
            "Use trainer.backend=deepspeed."
            for setting, is_set in unsupported.items()
            if is_set
        ]
    combined = (*combination_violations(model, trainer), *parallel_violations(model, trainer))
    return violations + [message for message, _ in combined]


def combination_violations(model: ModelConfig, trainer: TrainerConfig) -> Iterator[Violation]:
    """What adapters, shared prompts and compiled layers cannot be trained with."""
    if trainer.lora is not None and trainer.tensor_parallel_size > 1:
        yield Violation(
            f"trainer.lora with trainer.tensor_parallel_size={trainer.tensor_parallel_size}: AutoTP splits linear "
            "layers by name, and would leave those that have an adapter whole. Use tensor_parallel_size=1 and "
            "trainer.zero_stage=3: frozen weights need neither gradients nor optimizer state.",
            ("trainer.lora", "trainer.tensor_parallel_size"),
        )
    # Answers behind one prompt need a mask: by position ids alone each would see those before it.
    if trainer.share_prompts and model.attention != "sdpa":
        yield Violation(
            f"trainer.share_prompts=true with model.attention={model.attention}: it takes no mask, and finds sequences "
            "by positions that restart at 0, so answers behind one prompt would see each other. Use "
            "model.attention=sdpa or share_prompts=false.",
            ("trainer.share_prompts", "model.attention"),
        )
    if trainer.share_prompts and trainer.sequence_parallel_size > 1:
        yield Violation(
            f"trainer.share_prompts=true with trainer.sequence_parallel_size={trainer.sequence_parallel_size}: Ulysses "
            "drops attention masks, so answers behind one prompt would see each other. Use sequence_parallel_size=1 or "
            "share_prompts=false.",
            ("trainer.share_prompts", "trainer.sequence_parallel_size"),
        )
    # Compiled layers are shown to be right under plain torch only.
    untested = {
        f"trainer.backend={trainer.backend}": trainer.backend != "torch",
        "trainer.lora": trainer.lora is not None,
        "trainer.gradient_checkpointing=true": trainer.gradient_checkpointing,
    }
    for setting, is_set in untested.items():
        if trainer.compile and is_set:
            yield Violation(
                f"trainer.compile=true with {setting}: compiled layers have been compared with uncompiled ones on "
                "trainer.backend=torch alone, without adapters or recomputed activations. Use compile=false.",
                ("trainer.compile", setting.partition("=")[0]),
            )


def unmatched_targets(layers: Sequence[str], targets: Sequence[str]) -> list[str]:
    """One sentence per `trainer.lora.targets` that names none of a model's linear `layers` (the head is none)."""
    kinds = list(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    violations = []
    for target in targets:
        if any(f".{layer}".endswith(f".{target}") for layer in layers):
            continue
        near = get_close_matches(target, [*kinds, *layers], n=2) or kinds
        why = "logprobs are computed from the head's weight itself" if target == "lm_head" else "nothing would train"
        violations.append(
            f"trainer.lora.targets: {target} names no linear layer of this model but for the head: {why}. "
            f"Nearest: {', '.join(near)}."
        )
    return violations


def check_vocabulary(what: str, path: str, found: int, expected: int) -> None:
    """A model that reads the policy's tokens has as many.

    Raises:
        ConfigError: If it has another number.
    """
    if found != expected:
        raise ConfigError(
            [
                f"{what} {path}: its vocabulary has {found} tokens, the policy's (model.shape.vocab_size) {expected}: "
                "it would take the policy's tokens for others. Use a model with the policy's tokenizer."
            ]
        )


def parallel_violations(model: ModelConfig, trainer: TrainerConfig) -> Iterator[Violation]:
    """What tensor and sequence parallelism cannot do."""
    shape = model.shape
    tp, sp = trainer.tensor_parallel_size, trainer.sequence_parallel_size
    tp_key, sp_key = "trainer.tensor_parallel_size", "trainer.sequence_parallel_size"
    if tp > 1 and sp > 1:
        yield Violation(
            f"{tp_key}={tp} with sequence_parallel_size={sp}: DeepSpeed knows either the groups of AutoTP or those of "
            "Ulysses in a process, not both, and gradients would be summed over the wrong ranks. Set one of them to 1.",
            (tp_key, sp_key),
        )
    elif trainer.num_ranks % (tp * sp):
        key, size = (tp_key, tp) if tp > 1 else (sp_key, sp)
        below = trainer.num_ranks - trainer.num_ranks % size
        first = below or size
        yield Violation(
            f"{key}={size} does not divide trainer.num_ranks={trainer.num_ranks}: ranks work in groups of {size}, and "
            f"{trainer.num_ranks - below} would be left over. Use num_ranks={first} or {first + size}.",
            (key, "trainer.num_ranks"),
        )
    if shape.num_kv_heads % tp:
        yield Violation(
            f"{tp_key}={tp} does not divide model.shape.num_kv_heads={shape.num_kv_heads}: a key/value head is never "
            "split, so ranks would get unequal attention, some none. Use a divisor of it.",
            (tp_key, "model.shape.num_kv_heads"),
        )
    if shape.num_kv_heads % sp:
        yield Violation(
            f"{sp_key}={sp} does not divide model.shape.num_kv_heads={shape.num_kv_heads}: Ulysses exchanges stretches "
            "of a sequence for whole heads. Use a divisor of it.",
            (sp_key, "model.shape.num_kv_heads"),
        )
    if model.dtype == "bfloat16" and tp > 1 and trainer.zero_stage == 0:
        yield Violation(
            f"{tp_key}={tp} with trainer.zero_stage=0 in bfloat16: DeepSpeed's optimizer of that kind takes the norm "
            "of one rank's parts for the gradient's, and would clip too little. Use trainer.zero_stage=1, 2 or 3.",
            (tp_key, "trainer.zero_stage", "model.dtype"),
        )
    if model.dtype == "bfloat16" and sp > 1 and trainer.zero_stage == 1:
        yield Violation(
            f"{sp_key}={sp} with trainer.zero_stage=1 in bfloat16: DeepSpeed's optimizer of that kind takes sequence "
            "ranks for tensor ranks and fails at the first step. Use trainer.zero_stage=2 or 3.",
            (sp_key, "trainer.zero_stage", "model.dtype"),
        )
