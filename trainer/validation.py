"""Checks of trainer settings that are valid alone but not together. They run before any process starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from penstock.dataflow.errors import ConfigError
from penstock.trainer.backends.sequence_parallel import ulysses_violations
from penstock.trainer.config import OptimizerConfig, TrainerConfig
from penstock.weights.model_config import ModelConfig


def trainer_violations(model: ModelConfig, trainer: TrainerConfig) -> list[str]:
    """One sentence per combination that cannot run, each beginning with its key path; empty if there is none."""
    violations = []
    sharing, longest = trainer.sequence_parallel_size, model.max_context_tokens
    if trainer.max_group_tokens < longest:
        over = f" over sequence_parallel_size={sharing} ranks" if sharing > 1 else ""
        violations.append(
            f"trainer.max_tokens_per_micro_batch={trainer.max_tokens_per_micro_batch} is below "
            f"model.max_context_tokens={longest}{over}: a trajectory of full length could never be trained. Use at "
            f"least {-(-longest // sharing)}."
        )
    violations += _of_fsdp2(trainer) if trainer.backend == "fsdp2" else _of_zero(model, trainer)
    violations += _of_experts(model, trainer) if trainer.expert_parallel else []
    violations += muon_violations("trainer.optimizer", trainer.optimizer, trainer, is_adapted=trainer.lora is not None)
    return [*violations, *_of_combinations(model, trainer), *_of_parallelism(model, trainer)]


def muon_violations(key: str, optimizer: OptimizerConfig, trainer: TrainerConfig, *, is_adapted: bool) -> Iterator[str]:
    """Check that a rank has the whole matrices that Muon updates.

    Args:
        key: Of the optimizer.
        optimizer: Of the policy, its partner or its critic.
        trainer: How it is trained.
        is_adapted: Whether adapters are trained.
    """
    if optimizer.muon is None:
        return
    instead = f"or {key}.muon=null, which is AdamW"
    if trainer.zero_stage > 0:
        yield (
            f"{key}.muon with trainer.zero_stage={trainer.zero_stage}: Muon updates whole matrices, and ZeRO leaves a "
            f"rank with stretches of them. Use trainer.zero_stage=0, {instead}."
        )
    if trainer.backend == "fsdp2":
        yield (
            f"{key}.muon with trainer.backend=fsdp2: Muon updates whole matrices, and a rank has some of their rows. "
            f"Use trainer.backend=deepspeed with zero_stage=0, {instead}."
        )
    if trainer.tensor_parallel_size > 1:
        yield (
            f"{key}.muon with trainer.tensor_parallel_size={trainer.tensor_parallel_size}: Muon updates whole "
            f"matrices, and a rank has parts of them. Use trainer.tensor_parallel_size=1, {instead}."
        )
    if is_adapted:
        yield (
            f"{key}.muon with trainer.lora: the factors of an adapter are no hidden matrices; their product is what "
            f"changes one. Use trainer.lora=null, {instead}."
        )


def _of_zero(model: ModelConfig, trainer: TrainerConfig) -> Iterator[str]:
    """Check what ZeRO, and one process without it, cannot be combined with."""
    if trainer.fsdp_copies > 1:
        yield (
            f"trainer.fsdp_copies={trainer.fsdp_copies} with trainer.backend={trainer.backend}: ZeRO shards over all "
            "ranks that hold the same part of a weight. Use fsdp_copies=1, or trainer.backend=fsdp2."
        )
    if trainer.expert_parallel:
        yield (
            f"trainer.expert_parallel=true with trainer.backend={trainer.backend}: experts stay on their ranks beside "
            "FSDP2 only. Use trainer.backend=fsdp2, or expert_parallel=false."
        )
    if trainer.offload_optimizer and trainer.zero_stage == 0:
        yield (
            "trainer.offload_optimizer=true with trainer.zero_stage=0: only a sharded optimizer can leave the device. "
            "Use zero_stage=1, 2 or 3."
        )
    if trainer.offload_parameters and trainer.zero_stage != 3:
        yield (
            f"trainer.offload_parameters=true with trainer.zero_stage={trainer.zero_stage}: only weights that are "
            "gathered layer by layer can leave the device between layers. Use zero_stage=3."
        )
    if trainer.backend == "torch":
        unsupported = {
            f"trainer.num_ranks={trainer.num_ranks}": trainer.num_ranks != 1,
            f"trainer.zero_stage={trainer.zero_stage}": trainer.zero_stage != 0,
            f"model.dtype={model.dtype}": model.dtype != "float32",
            f"trainer.deepspeed={trainer.deepspeed}": bool(trainer.deepspeed),
        }
        for setting, is_set in unsupported.items():
            if is_set:
                yield (
                    f"{setting} with trainer.backend=torch, which is one float32 process without ZeRO. "
                    "Use trainer.backend=deepspeed."
                )


def _of_fsdp2(trainer: TrainerConfig) -> Iterator[str]:
    """Check what FSDP2 cannot be combined with."""
    deepspeed = "which is torch's own sharding. Use trainer.backend=deepspeed"
    of_deepspeed = {
        "zero_stage": (0, f"{deepspeed}, or zero_stage=0: fsdp2 always shards weights, gradients and optimizer state."),
        "tensor_parallel_size": (1, f"{deepspeed} (AutoTP), or tensor_parallel_size=1."),
        "deepspeed": ({}, f"{deepspeed}, or leave them out."),
    }
    for key, (neutral, what_to_do) in of_deepspeed.items():
        if (value := getattr(trainer, key)) != neutral:
            yield f"trainer.{key}={value} with trainer.backend=fsdp2, {what_to_do}"
    if trainer.num_ranks % trainer.fsdp_copies:
        fitting = [str(count) for count in range(1, trainer.num_ranks + 1) if trainer.num_ranks % count == 0]
        yield (
            f"trainer.fsdp_copies={trainer.fsdp_copies} does not divide trainer.num_ranks={trainer.num_ranks}: every "
            f"copy of the model is sharded over equally many ranks. Use one of {', '.join(fitting)}."
        )
    if trainer.offload_optimizer != trainer.offload_parameters:
        yield (
            f"trainer.offload_parameters={_as_typed(trainer.offload_parameters)} with "
            f"offload_optimizer={_as_typed(trainer.offload_optimizer)} and trainer.backend=fsdp2: its parameters are "
            "the optimizer's master weights, so both are in one memory. Set both, or none."
        )


def _of_experts(model: ModelConfig, trainer: TrainerConfig) -> Iterator[str]:
    """Check what experts that stay on their ranks cannot do; whether the model has a plan is asked of it."""
    key, num_experts, ranks = "trainer.expert_parallel=true", model.shape.num_experts, trainer.num_shards
    if not num_experts:
        yield f"{key}: this model has no experts (model.shape.num_experts=0). Use expert_parallel=false."
    elif num_experts % ranks:
        fitting = [str(count) for count in range(1, num_experts + 1) if num_experts % count == 0]
        yield (
            f"{key}: model.shape.num_experts={num_experts} cannot be dealt out evenly to {ranks} ranks that share a "
            f"copy of the model (num_ranks={trainer.num_ranks} / fsdp_copies={trainer.fsdp_copies}). Let one of "
            f"{', '.join(fitting)} ranks share it, or use expert_parallel=false."
        )
    if trainer.lora is not None and any("experts" in target.split(".") for target in trainer.lora.targets):
        yield (
            f"{key} with adapters of experts (trainer.lora.targets={list(trainer.lora.targets)}): they are added to "
            "the weights of all experts, and a rank has some. Adapt other layers, or use expert_parallel=false."
        )


def _of_combinations(model: ModelConfig, trainer: TrainerConfig) -> Iterator[str]:
    """Check what adapters, sequence parallelism and compiled layers cannot be combined with."""
    if trainer.lora is not None and trainer.tensor_parallel_size > 1:
        yield (
            f"trainer.lora with trainer.tensor_parallel_size={trainer.tensor_parallel_size}: AutoTP splits linear "
            "layers by name, and would leave those that have an adapter whole. Use tensor_parallel_size=1 and "
            "trainer.zero_stage=3: frozen weights need neither gradients nor optimizer state."
        )
    sharing = trainer.sequence_parallel_size
    if sharing > 1 and model.attention != "varlen":
        yield (
            f"model.attention={model.attention} with trainer.sequence_parallel_size={sharing}: a stretch of a row has "
            "no attention mask, so the sequences of a row would see each other. Use model.attention=varlen."
        )
    if sharing > 1 and model.rows == "padded":
        yield (
            f"model.rows=padded with trainer.sequence_parallel_size={sharing}: ranks have stretches of one row of "
            "several sequences, and layers with a state along the sequence would lose it between stretches. Use "
            "trainer.sequence_parallel_size=1."
        )
    if trainer.tensor_parallel_size > 1 and model.head == "model" and not model.shape.tie_word_embeddings:
        yield (
            f"model.head=model with trainer.tensor_parallel_size={trainer.tensor_parallel_size}: AutoTP gives each "
            "rank a part of the vocabulary, and the model's own code expects all logits. Use "
            "trainer.tensor_parallel_size=1."
        )
    if trainer.compile and trainer.zero_stage == 3:
        yield (
            "trainer.compile=true with trainer.zero_stage=3: weights are gathered before every module inside a layer, "
            "where each compiled graph ends, so nothing is fused and start-up takes minutes. Use zero_stage=0, 1 or 2, "
            "or compile=false."
        )
    exchanges = {"tensor_parallel_size": 1, "sequence_parallel_size": 1, "expert_parallel": False}
    for key, neutral in exchanges.items():
        if trainer.compile and (value := getattr(trainer, key)) != neutral:
            yield (
                f"trainer.compile=true with trainer.{key}={_as_typed(value)}: layers that exchange data between ranks "
                f"have not been compared with uncompiled ones. Use {key}={_as_typed(neutral)} or compile=false."
            )


def _as_typed(value: object) -> str:
    """As a user writes it."""
    return str(value).lower()


def unmatched_targets(layers: Sequence[str], targets: Sequence[str]) -> list[str]:
    """One sentence per `trainer.lora.targets` that names none of a model's `layers` (the head is none)."""
    kinds = list(dict.fromkeys(layer.rpartition(".")[2] for layer in layers))
    violations = []
    for target in targets:
        if any(f".{layer}".endswith(f".{target}") for layer in layers):
            continue
        near = get_close_matches(target, [*kinds, *layers], n=2) or kinds
        why = "logprobs are computed from the head's weight directly" if target == "lm_head" else "nothing would train"
        violations.append(
            f"trainer.lora.targets: {target} names no linear layer of this model except the head: {why}. "
            f"Nearest: {', '.join(near)}."
        )
    return violations


def check_vocabulary(what: str, path: str, found: int, expected: int) -> None:
    """Check that a model that reads the policy's tokens has the same number of tokens.

    Raises:
        ConfigError: If it has another number.
    """
    if found != expected:
        raise ConfigError(
            [
                f"{what} {path}: its vocabulary has {found} tokens, the policy's (model.shape.vocab_size) {expected}: "
                "it would misread the policy's token ids. Use a model with the policy's tokenizer."
            ]
        )


def _of_parallelism(model: ModelConfig, trainer: TrainerConfig) -> Iterator[str]:
    """Check what tensor and sequence parallelism cannot do."""
    shape = model.shape
    tp, sp = trainer.tensor_parallel_size, trainer.sequence_parallel_size
    tp_key, sp_key = "trainer.tensor_parallel_size", "trainer.sequence_parallel_size"
    if tp > 1 and sp > 1:
        yield (
            f"{tp_key}={tp} with sequence_parallel_size={sp}: DeepSpeed supports the groups of AutoTP or those of "
            "sequences in a process, not both, and gradients would be summed over the wrong ranks. Set one of them to "
            "1."
        )
    elif trainer.num_ranks % (tp * sp):
        key, size = (tp_key, tp) if tp > 1 else (sp_key, sp)
        below = trainer.num_ranks - trainer.num_ranks % size
        first = below or size
        yield (
            f"{key}={size} does not divide trainer.num_ranks={trainer.num_ranks}: ranks work in groups of {size}, and "
            f"{trainer.num_ranks - below} would be left over. Use num_ranks={first} or {first + size}."
        )
    if shape.num_kv_heads % tp:
        yield (
            f"{tp_key}={tp} does not divide model.shape.num_kv_heads={shape.num_kv_heads}: a key/value head is never "
            "split, so ranks would get unequal attention, some none. Use a divisor of it."
        )
    if trainer.sequence_parallel == "ulysses" and sp > 1:
        yield from ulysses_violations(model, trainer)
    if model.dtype == "bfloat16" and tp > 1 and trainer.zero_stage == 0:
        yield (
            f"{tp_key}={tp} with trainer.zero_stage=0 in model.dtype=bfloat16: DeepSpeed's optimizer of that kind "
            "uses the norm of one rank's parts as that of the gradient, and would clip too little. Use "
            "trainer.zero_stage=1, 2 or 3."
        )
